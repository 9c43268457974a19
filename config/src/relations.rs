//! What settings require of each other.

mod proxy;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;

use crate::error::{Fault, Problem};
use crate::gates::Gate;
use crate::origin::Origin;
use crate::settings::{GATES_SECTION, Settings};
use crate::values::{EndpointsSource, Enforce, ListenSpec, Role, SocketSpec};

struct Violation {
    keys: Vec<&'static str>,
    message: String,
}

#[derive(Default)]
struct Violations(Vec<Violation>);

impl Violations {
    fn add(&mut self, keys: &[&'static str], message: impl Into<String>) {
        self.0.push(Violation { keys: keys.to_vec(), message: message.into() });
    }

    fn add_if(&mut self, is_violated: bool, keys: &[&'static str], message: &str) {
        if is_violated {
            self.add(keys, message);
        }
    }

    /// `address` is listened on, and the second key allows addresses that other machines can reach.
    fn add_remote(&mut self, keys: [&'static str; 2], address: Option<impl Display>, content: &str) {
        if let Some(address) = address {
            let (_, permission) = keys[1].split_once('.').unwrap_or_default();
            let message = format!(
                "{address} is not a loopback address, and any client that can reach it could read {content}; \
                 use 127.0.0.1 or [::1], or set {permission} = true"
            );
            self.add(&keys, message);
        }
    }
}

fn is_remote(address: &SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

pub(crate) fn first_violation(settings: &Settings) -> Option<String> {
    violations(settings).into_iter().next().map(|violation| violation.message)
}

/// Reports each violation at the place of highest precedence among its settings. Requirements on settings in `wrong`
/// are skipped: their value is unknown, and that was reported.
pub(crate) fn check(
    settings: &Settings,
    origin: &dyn Fn(&str) -> Origin,
    wrong: &BTreeSet<String>,
) -> Vec<Problem> {
    // A group may decide any gate, so one wrong gate makes all of them unknown.
    let gate = |key: &str| key.starts_with(GATES_SECTION);
    let wrong_gate = wrong.iter().any(|key| gate(key));
    let unknown = |key: &str| wrong.contains(key) || (wrong_gate && gate(key));
    let sound = |violation: &Violation| !violation.keys.iter().any(|key| unknown(key));
    violations(settings).into_iter().filter(sound).map(|violation| problem(violation, origin)).collect()
}

fn problem(violation: Violation, origin: &dyn Fn(&str) -> Origin) -> Problem {
    let mut keys: Vec<(String, Origin)> =
        violation.keys.iter().map(|key| ((*key).to_owned(), origin(key))).collect();
    keys.sort_by(|(_, a), (_, b)| b.sort_key().cmp(&a.sort_key()));
    let (key, place) = keys.remove(0);
    Problem { place, key: Some(key), fault: Fault::Relation { message: violation.message, others: keys } }
}

fn violations(settings: &Settings) -> Vec<Violation> {
    let mut found = Violations::default();
    pulls(settings, &mut found);
    let debug = &settings.debug;
    let http = debug.http.filter(is_remote).filter(|_| !debug.http_allow_remote);
    found.add_remote(["debug.http", "debug.http_allow_remote"], http, "the agent's state");
    sockets(settings, &mut found);
    kube(settings, &mut found);
    node(settings, &mut found);
    endpoints(settings, &mut found);
    proxy::check(settings, &mut found);
    found.0
}

/// Number of configured ways to the API server.
fn ways(settings: &Settings) -> usize {
    let kube = &settings.kube;
    let bootstrap = kube.bootstrap_kubeconfig.is_some();
    let ways = [kube.kubeconfig.is_some(), bootstrap, kube.in_cluster, !kube.server.is_empty()];
    ways.into_iter().filter(|way| *way).count()
}

fn kube(settings: &Settings, found: &mut Violations) {
    let kube = &settings.kube;
    found.add_if(
        ways(settings) > 1,
        &["kube.kubeconfig", "kube.bootstrap_kubeconfig", "kube.in_cluster", "kube.server"],
        "kubeconfig, bootstrap_kubeconfig, in_cluster and server are mutually exclusive; set one of them",
    );
    found.add_if(
        kube.bootstrap_kubeconfig.is_some() && settings.node.role != Role::Node,
        &["kube.bootstrap_kubeconfig", "node.role"],
        "bootstrap_kubeconfig requires role = \"node\", because the certificate has the identity of the node; \
         with role = \"companion\" use the kubelet's certificate or a token bound to the node",
    );
    found.add_if(
        !kube.context.is_empty() && kube.kubeconfig.is_none(),
        &["kube.context", "kube.kubeconfig"],
        "context requires kubeconfig; set kubeconfig, or leave context empty",
    );
    found.add_if(
        kube.client_certificate.is_some() != kube.client_key.is_some(),
        &["kube.client_certificate", "kube.client_key"],
        "client_certificate and client_key require each other; set both or none",
    );
    let explicit = [&kube.certificate_authority, &kube.token_file, &kube.client_certificate];
    found.add_if(
        explicit.iter().any(|file| file.is_some()) && kube.server.is_empty(),
        &["kube.server", "kube.certificate_authority", "kube.token_file", "kube.client_certificate"],
        "certificate_authority, token_file and client_certificate require server; set server, or none of them",
    );
    found.add_if(
        !kube.server.is_empty() && kube.token_file.is_none() && kube.client_certificate.is_none(),
        &["kube.server", "kube.token_file", "kube.client_certificate"],
        "server requires credentials; set token_file, or client_certificate and client_key",
    );
}

fn node(settings: &Settings, found: &mut Violations) {
    let node = &settings.node;
    found.add_if(
        node.lease_duration.subsec_nanos() != 0,
        &["node.lease_duration"],
        "lease_duration must be whole seconds (leaseDurationSeconds), such as \"40s\"",
    );
    found.add_if(
        node.node_status_report_frequency < node.node_status_update_frequency,
        &["node.node_status_report_frequency", "node.node_status_update_frequency"],
        "node_status_report_frequency must not be less than node_status_update_frequency",
    );
}

fn endpoints(settings: &Settings, found: &mut Violations) {
    let endpoints = &settings.endpoints;
    found.add_if(
        endpoints.source == EndpointsSource::Files && endpoints.manifests.is_none(),
        &["endpoints.source", "endpoints.manifests"],
        "source = \"files\" requires a directory; set manifests, or source = \"off\"",
    );
    found.add_if(
        endpoints.source == EndpointsSource::Kube && ways(settings) == 0,
        &[
            "endpoints.source",
            "kube.kubeconfig",
            "kube.bootstrap_kubeconfig",
            "kube.in_cluster",
            "kube.server",
        ],
        "source = \"kube\" requires an API server; set one in [kube], or source = \"off\"",
    );
    let is_remote_tcp = |spec: &&ListenSpec| matches!(spec, ListenSpec::Tcp(address) if is_remote(address));
    let remote = endpoints.listen.iter().find(is_remote_tcp).filter(|_| !endpoints.allow_remote);
    found.add_remote(["endpoints.listen", "endpoints.allow_remote"], remote, "all Services");
    let mut seen = BTreeSet::new();
    let free_port = |spec: &ListenSpec| matches!(spec, ListenSpec::Tcp(address) if address.port() == 0);
    let twice = endpoints.listen.iter().find(|spec| !free_port(spec) && !seen.insert(spec.to_string()));
    if let Some(spec) = twice {
        found.add(&["endpoints.listen"], format!("{spec} is duplicated; list each address once"));
    }
}

fn pulls(settings: &Settings, found: &mut Violations) {
    let (pulls, gates) = (&settings.pulls, &settings.feature_gates);
    let max = pulls.max_parallel_image_pulls;
    found.add_if(
        pulls.serialize_image_pulls && max > 1,
        &["pulls.serialize_image_pulls", "pulls.max_parallel_image_pulls"],
        &format!(
            "serialize_image_pulls = true allows one pull at a time and max_parallel_image_pulls = {max} \
             allows {max}; set serialize_image_pulls = false, or max_parallel_image_pulls to 0 or 1"
        ),
    );
    found.add_if(
        pulls.per_registry_max_parallel_image_pulls > 0 && !gates.enabled(Gate::PerRegistryPullLimit),
        &["pulls.per_registry_max_parallel_image_pulls", "feature_gates.PerRegistryPullLimit"],
        "per_registry_max_parallel_image_pulls requires the feature gate PerRegistryPullLimit; set the gate to \
         true, or the limit to 0",
    );
    found.add_if(
        pulls.enforce == Enforce::Runtime && !gates.enabled(Gate::PullOption),
        &["pulls.enforce", "feature_gates.PullOption"],
        "enforce = \"runtime\" requires the feature gate PullOption; set the gate to true, or enforce = \
         \"agent\"",
    );
}

/// Two sockets at one path would replace each other, and an agent that is its own runtime would call itself.
fn sockets(settings: &Settings, found: &mut Violations) {
    let sockets: [(&str, &SocketSpec); 4] = [
        ("proxy.listen", &settings.proxy.listen),
        ("cri.listen", &settings.cri.listen),
        ("cri.runtime_endpoint", &settings.cri.runtime_endpoint),
        ("debug.listen", &settings.debug.listen),
    ];
    for (index, (key, socket)) in sockets.into_iter().enumerate() {
        let later = sockets[index + 1..].iter().filter(|(_, other)| *other == socket).map(|(key, _)| *key);
        let is_served = settings.endpoints.listen.contains(&ListenSpec::Unix(socket.clone()));
        for other in later.chain(is_served.then_some("endpoints.listen")) {
            let message = format!("{key} and {other} are both {socket}; use a different socket for each");
            found.add(&[key, other], message);
        }
    }
}
