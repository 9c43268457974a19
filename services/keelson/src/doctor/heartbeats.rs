//! Checks of the API server: credentials, permissions, and the name of the node.
//!
//! In: facts. Out: checks.

use keelson_config::Role;
use keelson_kube::{Credential, CredentialKind, Validity};

use super::{
    Check, Facts, Part,
    facts::{Cluster, NodeAnswer},
};

const CREDENTIALS: &str = "credentials";
const NODE: &str = "node name";
const PERMISSIONS: &str = "permissions";

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(cluster) = &facts.cluster else {
        return vec![Check::skipped("api server", "no API server is configured (section [kube])")];
    };
    let mut checks = credentials(facts, cluster);
    checks.push(server(cluster));
    checks.extend(service_address(cluster));
    checks.extend(names(facts, cluster));
    checks.extend(rights(cluster, Part::Heartbeats));
    checks.extend(role(facts));
    checks
}

fn credentials(facts: &Facts, cluster: &Cluster) -> Vec<Check> {
    let mut checks = Vec::new();
    if let Some(error) = &cluster.error {
        checks.push(Check::failed(CREDENTIALS, error.clone(), "see section [kube] of the settings"));
    }
    for credential in &cluster.credentials {
        checks.push(credential_check(facts, credential));
    }
    // Each names the command that repairs it.
    checks.extend(cluster.warnings.iter().map(|warning| Check::warning(CREDENTIALS, warning.clone(), "")));
    if checks.is_empty() {
        checks.push(Check::skipped(CREDENTIALS, "none that can be read: a plugin provides them"));
    }
    checks
}

fn credential_check(facts: &Facts, credential: &Credential) -> Check {
    let node = &facts.settings.agent.node_name;
    let label = credential.label();
    let user = match credential.user.as_str() {
        "" => String::new(),
        user => format!(" of {user}"),
    };
    let what = format!("{label}{user}");
    if let Some(other) = credential.user.strip_prefix("system:node:").filter(|other| other != node) {
        return Check::failed(
            CREDENTIALS,
            format!("{label} is that of the node {other}, and this agent is {node}"),
            "set agent.node_name to the node's name, or use the credentials of this node",
        );
    }
    match &credential.bound_node {
        Some(other) if other != node => {
            return Check::failed(
                CREDENTIALS,
                format!("{what} is bound to the node {other}, and this agent is {node}"),
                format!("create a token with --bound-object-kind Node --bound-object-name {node}"),
            );
        }
        None if credential.kind == CredentialKind::Token
            && credential.user.starts_with("system:serviceaccount:") =>
        {
            return Check::warning(
                CREDENTIALS,
                format!("{what} is bound to no node: the policy of companion.yaml lets it write nothing"),
                format!("create a token with --bound-object-kind Node --bound-object-name {node}"),
            );
        }
        _ => {}
    }
    match credential.validity(facts.now) {
        Validity::Expired { since } => {
            Check::failed(CREDENTIALS, format!("{what} expired {} ago", span(since)), "renew it")
        }
        Validity::Expiring { left } => Check::warning(
            CREDENTIALS,
            format!("{what} expires in {} and has not been renewed", span(left)),
            "renew it",
        ),
        Validity::Healthy { left } => Check::ok(CREDENTIALS, format!("{what}, valid for {}", span(left))),
        Validity::Unknown => Check::ok(CREDENTIALS, format!("{what}, without a readable end")),
    }
}

fn span(seconds: i64) -> String {
    match seconds {
        ..3_600 => format!("{} min", seconds / 60),
        3_600..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

fn server(cluster: &Cluster) -> Check {
    const NAME: &str = "api server";
    match &cluster.node {
        NodeAnswer::NotAsked => {
            Check::skipped(NAME, format!("{}: not asked without credentials", cluster.server))
        }
        NodeAnswer::Failed(error) => Check::failed(NAME, error.clone(), "see section [kube] of the settings"),
        NodeAnswer::Found { .. } | NodeAnswer::Absent | NodeAnswer::Refused(_) => {
            Check::ok(NAME, format!("{} answers", cluster.server))
        }
    }
}

/// O12: an address of a Service needs the proxy, which needs the agent.
fn service_address(cluster: &Cluster) -> Option<Check> {
    let host = cluster.server.split_once("://").map_or(cluster.server.as_str(), |(_, rest)| rest);
    let host = host.split('/').next().unwrap_or_default();
    let ip =
        host.parse::<std::net::SocketAddr>().map(|address| address.ip()).or_else(|_| host.parse()).ok()?;
    let subnet = cluster.kubeadm.service_subnet.as_ref()?;
    let is_inside =
        |network: &str| network.trim().parse::<ipnet::IpNet>().is_ok_and(|network| network.contains(&ip));
    subnet.split(',').any(is_inside).then(|| {
        Check::failed(
            "api server",
            format!("{ip} is the address of a Service: after a boot it is reached only when a proxy runs, and keelson proxy needs the agent"),
            "set kube.server to an address of the control plane",
        )
    })
}

/// Node name rules of the kubelet: its `--hostname-override`, or the host name in lower case.
fn names(facts: &Facts, cluster: &Cluster) -> Vec<Check> {
    let name = &facts.settings.agent.node_name;
    let mut checks = Vec::new();
    checks.extend(match &cluster.node {
        NodeAnswer::Found { .. } => Some(Check::ok(NODE, format!("Node {name} exists"))),
        NodeAnswer::Absent if facts.settings.node.role == Role::Node => Some(Check::ok(
            NODE,
            format!("Node {name} does not exist; the agent registers it (node.register_node)"),
        )),
        NodeAnswer::Absent => Some(Check::failed(
            NODE,
            format!("Node {name} does not exist"),
            "set agent.node_name to the name that `kubectl get nodes` shows",
        )),
        NodeAnswer::Refused(error) => Some(Check::failed(
            NODE,
            error.clone(),
            "apply packaging/kustomize/companion/companion.yaml, or use the node's own credentials",
        )),
        NodeAnswer::NotAsked | NodeAnswer::Failed(_) => None,
    });
    if facts.kubelet.exists() {
        let overridden = facts.kubelet.other("hostname-override", "");
        let of_kubelet =
            overridden.clone().unwrap_or_else(|| facts.hostname.trim().to_owned()).to_lowercase();
        let from = if overridden.is_some() { "--hostname-override" } else { "the host name" };
        if of_kubelet != *name {
            checks.push(Check::failed(
                NODE,
                format!("the kubelet is the node {of_kubelet} ({from}), and this agent {name}"),
                format!("set agent.node_name = \"{of_kubelet}\""),
            ));
        }
    }
    checks
}

/// Permissions of a part: one check for all that are granted, one for each that is not.
pub(super) fn rights(cluster: &Cluster, part: Part) -> Vec<Check> {
    let of_part: Vec<_> = cluster.rights.iter().filter(|right| right.part == part).collect();
    let mut checks: Vec<Check> = of_part
        .iter()
        .filter_map(|right| {
            let why = right.allowed.as_ref().err()?;
            let why = if why.is_empty() { String::new() } else { format!(": {why}") };
            let base = match part {
                Part::Endpoints => "node (certificate of the node) or companion (token)",
                _ => "companion, and companion-lease for a Lease",
            };
            let action = format!("kubectl apply -k packaging/kustomize/{base}");
            Some(Check::failed(PERMISSIONS, format!("may not {}{why}", right.what), action))
        })
        .collect();
    let granted = of_part.len() - checks.len();
    if granted > 0 {
        let what: Vec<&str> =
            of_part.iter().filter(|right| right.allowed.is_ok()).map(|right| right.what.as_str()).collect();
        checks.insert(0, Check::ok(PERMISSIONS, format!("may {}", what.join(", "))));
    }
    checks
}

fn role(facts: &Facts) -> Option<Check> {
    let runs = facts.kubelet.process.as_ref().filter(|_| facts.settings.node.role == Role::Node)?;
    Some(Check::failed(
        "role",
        format!(
            "node.role is \"node\", and a kubelet runs (process {}): both report the same Node",
            runs.pid
        ),
        "set node.role = \"companion\", or stop the kubelet",
    ))
}

#[cfg(test)]
#[path = "heartbeats_tests.rs"]
mod tests;
