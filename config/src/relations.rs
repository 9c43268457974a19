//! What settings demand of each other.

mod proxy;

use std::collections::BTreeSet;

use crate::error::{Fault, Problem};
use crate::gates::Gate;
use crate::origin::Origin;
use crate::settings::{GATES_SECTION, Settings};
use crate::values::{EndpointsSource, Enforce, ListenSpec, Role, SocketSpec};

/// A demand that is not met: the settings it is about, and the sentence for people.
struct Violation {
    keys: &'static [&'static str],
    message: String,
}

/// The sentence of the first demand that is not met.
pub(crate) fn first_violation(settings: &Settings) -> Option<String> {
    violations(settings).into_iter().next().map(|v| v.message)
}

/// Each unmet demand as a problem at the place that ranks highest among the settings it is about. Demands on
/// settings in `wrong` are passed over: their value is not known, and that has been reported.
pub(crate) fn check(
    settings: &Settings,
    origin: &dyn Fn(&str) -> Origin,
    wrong: &BTreeSet<String>,
) -> Vec<Problem> {
    // A group of gates may decide any gate, so one wrong gate leaves all of them unknown.
    let gate = |key: &str| key.starts_with(GATES_SECTION);
    let wrong_gate = wrong.iter().any(|key| gate(key));
    let unknown = |key: &str| wrong.contains(key) || (wrong_gate && gate(key));
    let sound = |v: &Violation| !v.keys.iter().any(|key| unknown(key));
    violations(settings).into_iter().filter(sound).map(|v| problem(v, origin)).collect()
}

fn problem(violation: Violation, origin: &dyn Fn(&str) -> Origin) -> Problem {
    let mut keys: Vec<(String, Origin)> =
        violation.keys.iter().map(|key| ((*key).to_owned(), origin(key))).collect();
    keys.sort_by(|(_, a), (_, b)| b.sort_key().cmp(&a.sort_key()));
    let (key, place) = keys.remove(0);
    Problem { place, key: Some(key), fault: Fault::Relation { message: violation.message, others: keys } }
}

fn violations(settings: &Settings) -> Vec<Violation> {
    let mut found = pulls(settings);
    found.extend(http(settings));
    found.extend(sockets(settings));
    found.extend(kube(settings));
    found.extend(node(settings));
    found.extend(endpoints(settings));
    found.extend(proxy::violations(settings));
    found
}

/// Which ways to the API server are set.
fn ways(settings: &Settings) -> [bool; 4] {
    let kube = &settings.kube;
    let bootstrap = kube.bootstrap_kubeconfig.is_some();
    [kube.kubeconfig.is_some(), bootstrap, kube.in_cluster, !kube.server.is_empty()]
}

/// One way to the API server, and all that it needs.
fn kube(settings: &Settings) -> Vec<Violation> {
    let kube = &settings.kube;
    let mut found = Vec::new();
    if ways(settings).into_iter().filter(|way| *way).count() > 1 {
        found.push(Violation {
            keys: &["kube.kubeconfig", "kube.bootstrap_kubeconfig", "kube.in_cluster", "kube.server"],
            message:
                "kubeconfig, bootstrap_kubeconfig, in_cluster and server are mutually exclusive; set one of \
                 them"
                    .into(),
        });
    }
    if kube.bootstrap_kubeconfig.is_some() && settings.node.role != Role::Node {
        found.push(Violation {
            keys: &["kube.bootstrap_kubeconfig", "node.role"],
            message: "bootstrap_kubeconfig requires role = \"node\", because the certificate has the \
                      identity of the node; with role = \"companion\" use the kubelet's certificate or a \
                      token bound to the node"
                .into(),
        });
    }
    if !kube.context.is_empty() && kube.kubeconfig.is_none() {
        found.push(Violation {
            keys: &["kube.context", "kube.kubeconfig"],
            message: "context requires kubeconfig; set kubeconfig, or leave context empty".into(),
        });
    }
    if kube.client_certificate.is_some() != kube.client_key.is_some() {
        found.push(Violation {
            keys: &["kube.client_certificate", "kube.client_key"],
            message: "client_certificate and client_key require each other; set both or none".into(),
        });
    }
    let single = kube.certificate_authority.is_some()
        || kube.token_file.is_some()
        || kube.client_certificate.is_some();
    if single && kube.server.is_empty() {
        found.push(Violation {
            keys: &[
                "kube.server",
                "kube.certificate_authority",
                "kube.token_file",
                "kube.client_certificate",
            ],
            message:
                "certificate_authority, token_file and client_certificate require server; set server, or \
                 none of them"
                    .into(),
        });
    }
    if !kube.server.is_empty() && kube.token_file.is_none() && kube.client_certificate.is_none() {
        found.push(Violation {
            keys: &["kube.server", "kube.token_file", "kube.client_certificate"],
            message: "server requires credentials; set token_file, or client_certificate and client_key"
                .into(),
        });
    }
    found
}

fn node(settings: &Settings) -> Vec<Violation> {
    let node = &settings.node;
    let mut found = Vec::new();
    if node.lease_duration.subsec_nanos() != 0 {
        found.push(Violation {
            keys: &["node.lease_duration"],
            message: "lease_duration must be whole seconds (leaseDurationSeconds), such as \"40s\"".into(),
        });
    }
    if node.node_status_report_frequency < node.node_status_update_frequency {
        found.push(Violation {
            keys: &["node.node_status_report_frequency", "node.node_status_update_frequency"],
            message: "node_status_report_frequency must not be less than node_status_update_frequency".into(),
        });
    }
    found
}

fn endpoints(settings: &Settings) -> Vec<Violation> {
    let endpoints = &settings.endpoints;
    let mut found = Vec::new();
    if endpoints.source == EndpointsSource::Files && endpoints.manifests.is_none() {
        found.push(Violation {
            keys: &["endpoints.source", "endpoints.manifests"],
            message: "source = \"files\" requires a directory; set manifests, or source = \"off\"".into(),
        });
    }
    if endpoints.source == EndpointsSource::Kube && !ways(settings).contains(&true) {
        found.push(Violation {
            keys: &[
                "endpoints.source",
                "kube.kubeconfig",
                "kube.bootstrap_kubeconfig",
                "kube.in_cluster",
                "kube.server",
            ],
            message: "source = \"kube\" requires an API server; set one in [kube], or source = \"off\""
                .into(),
        });
    }
    let remote = endpoints.listen.iter().find(|spec| match spec {
        ListenSpec::Unix(_) => false,
        ListenSpec::Tcp(address) => !address.ip().to_canonical().is_loopback(),
    });
    if let Some(remote) = remote.filter(|_| !endpoints.allow_remote) {
        found.push(Violation {
            keys: &["endpoints.listen", "endpoints.allow_remote"],
            message: format!(
                "{remote} is not a loopback address, and any client that can reach it could read all \
                 Services; use 127.0.0.1 or [::1], or set allow_remote = true"
            ),
        });
    }
    let mut seen = BTreeSet::new();
    let free_port = |spec: &ListenSpec| matches!(spec, ListenSpec::Tcp(address) if address.port() == 0);
    let twice = endpoints.listen.iter().find(|spec| !free_port(spec) && !seen.insert(spec.to_string()));
    if let Some(spec) = twice {
        found.push(Violation {
            keys: &["endpoints.listen"],
            message: format!("{spec} is duplicated; list each address once"),
        });
    }
    found
}

fn pulls(settings: &Settings) -> Vec<Violation> {
    let mut found = Vec::new();
    let pulls = &settings.pulls;
    let gates = &settings.feature_gates;
    let max = pulls.max_parallel_image_pulls;
    if pulls.serialize_image_pulls && max > 1 {
        found.push(Violation {
            keys: &["pulls.serialize_image_pulls", "pulls.max_parallel_image_pulls"],
            message: format!(
                "serialize_image_pulls = true allows one pull at a time and max_parallel_image_pulls = {max} \
                 allows {max}; set serialize_image_pulls = false, or max_parallel_image_pulls to 0 or 1"
            ),
        });
    }
    if pulls.per_registry_max_parallel_image_pulls > 0 && !gates.enabled(Gate::PerRegistryPullLimit) {
        found.push(Violation {
            keys: &["pulls.per_registry_max_parallel_image_pulls", "feature_gates.PerRegistryPullLimit"],
            message:
                "per_registry_max_parallel_image_pulls requires the feature gate PerRegistryPullLimit; set \
                 the gate to true, or the limit to 0"
                    .into(),
        });
    }
    if pulls.enforce == Enforce::Runtime && !gates.enabled(Gate::PullOption) {
        found.push(Violation {
            keys: &["pulls.enforce", "feature_gates.PullOption"],
            message: "enforce = \"runtime\" requires the feature gate PullOption; set the gate to true, or \
                      enforce = \"agent\""
                .into(),
        });
    }
    found
}

fn http(settings: &Settings) -> Option<Violation> {
    let addr = settings.debug.http?;
    let loopback = addr.ip().to_canonical().is_loopback();
    (!loopback && !settings.debug.http_allow_remote).then(|| Violation {
        keys: &["debug.http", "debug.http_allow_remote"],
        message: format!(
            "{addr} is not a loopback address, and any client that can reach it could read the agent's \
             state; use 127.0.0.1 or [::1], or set http_allow_remote = true"
        ),
    })
}

/// Two sockets at one path would replace each other, and a front whose runtime is itself would call itself.
fn sockets(settings: &Settings) -> Vec<Violation> {
    let (listen, runtime, debug) =
        (&settings.cri.listen, &settings.cri.runtime_endpoint, &settings.debug.listen);
    let pairs: [(_, _, &'static [&'static str]); 3] = [
        (listen, runtime, &["cri.listen", "cri.runtime_endpoint"]),
        (listen, debug, &["cri.listen", "debug.listen"]),
        (runtime, debug, &["cri.runtime_endpoint", "debug.listen"]),
    ];
    let others: [(_, &'static [&'static str]); 3] = [
        (listen, &["cri.listen", "endpoints.listen"]),
        (runtime, &["cri.runtime_endpoint", "endpoints.listen"]),
        (debug, &["debug.listen", "endpoints.listen"]),
    ];
    let is = |socket: &SocketSpec| ListenSpec::Unix(socket.clone());
    let taken = others.into_iter().filter(|(socket, _)| settings.endpoints.listen.contains(&is(socket)));
    pairs
        .into_iter()
        .filter(|(a, b, _)| a == b)
        .map(|(socket, _, keys)| (socket, keys))
        .chain(taken)
        .map(|(socket, keys)| Violation {
            keys,
            message: format!("{} are both {socket}; use a different socket for each", keys.join(" and ")),
        })
        .collect()
}
