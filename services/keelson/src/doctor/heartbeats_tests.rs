use std::path::PathBuf;

use super::{
    super::{
        Outcome,
        facts::{Kubeadm, Right},
        testing::{facts, settings},
    },
    *,
};
use crate::kubelet::{CONFIG, Kind, Process, testing};

const DAY: i64 = 86_400;

fn credential(
    kind: CredentialKind,
    user: &str,
    bound_node: Option<&str>,
    not_after: Option<i64>,
) -> Credential {
    Credential {
        kind,
        file: Some(PathBuf::from("/f")),
        user: user.into(),
        bound_node: bound_node.map(ToOwned::to_owned),
        not_before: not_after.map(|end| end - 100 * DAY),
        not_after,
    }
}

/// O10, E4: whose credentials, bound to what, and until when.
#[test]
fn o10_credentials() {
    let (certificate, token) = (CredentialKind::ClientCertificate, CredentialKind::Token);
    let account = "system:serviceaccount:kube-system:keelson-agent";
    for (credential, outcome, part) in [
        (credential(certificate, "system:node:n1", None, Some(50 * DAY)), Outcome::Ok, "valid for 50 d"),
        (credential(certificate, "system:node:n1", None, Some(5 * DAY)), Outcome::Warning, "expires in 5 d"),
        (credential(certificate, "system:node:n1", None, Some(-DAY)), Outcome::Failed, "expired 24 h ago"),
        (credential(certificate, "system:node:n2", None, Some(50 * DAY)), Outcome::Failed, "of the node n2"),
        (credential(certificate, "", None, None), Outcome::Ok, "without a readable end"),
        (credential(token, account, Some("n1"), Some(50 * DAY)), Outcome::Ok, "valid for 50 d"),
        (credential(token, account, Some("n2"), Some(50 * DAY)), Outcome::Failed, "bound to the node n2"),
        (credential(token, account, None, Some(50 * DAY)), Outcome::Warning, "bound to no node"),
        (credential(token, "someone", None, None), Outcome::Ok, "without a readable end"),
    ] {
        let check = credential_check(&facts(), &credential);
        assert_eq!(check.outcome, outcome, "{check:?}");
        assert!(check.found.contains(part), "{check:?}");
    }
}

fn outcomes(facts: &Facts, name: &str) -> Vec<Outcome> {
    checks(facts).iter().filter(|check| check.name == name).map(|check| check.outcome).collect()
}

fn with(cluster: Cluster) -> Facts {
    Facts { cluster: Some(cluster), ..facts() }
}

fn found() -> Cluster {
    Cluster {
        server: "https://10.0.0.1:6443".into(),
        node: NodeAnswer::Found { pod_cidrs: Vec::new() },
        ..Cluster::default()
    }
}

#[test]
fn the_api_server() {
    assert_eq!(outcomes(&facts(), "api server"), [Outcome::Skipped]);
    assert_eq!(outcomes(&with(found()), "api server"), [Outcome::Ok]);
    let refused = Cluster { node: NodeAnswer::Failed("no answer".into()), ..found() };
    assert_eq!(outcomes(&with(refused), "api server"), [Outcome::Failed]);
    let broken = Cluster { error: Some("cannot read /f".into()), node: NodeAnswer::NotAsked, ..found() };
    let facts = with(broken);
    assert_eq!(outcomes(&facts, CREDENTIALS), [Outcome::Failed]);
    assert_eq!(outcomes(&facts, "api server"), [Outcome::Skipped]);
    let readable = Cluster { warnings: vec!["others can read /f".into()], ..found() };
    assert_eq!(outcomes(&with(readable), CREDENTIALS), [Outcome::Warning]);
}

/// O12: circular after a boot.
#[test]
fn o12_the_address_of_a_service() {
    for (server, is_service) in [
        ("https://10.96.0.1:443", true),
        ("https://10.96.0.1", true),
        ("https://[fd00::1]:443/x", true),
        ("https://10.0.0.1:6443", false),
        ("https://api.example:6443", false),
        ("kubeconfig /etc/kubernetes/kubelet.conf", false),
    ] {
        let kubeadm = Kubeadm { service_subnet: Some("10.96.0.0/12, fd00::/108".into()), pod_subnet: None };
        let cluster = Cluster { server: server.into(), kubeadm, ..found() };
        assert_eq!(service_address(&cluster).is_some(), is_service, "{server}");
    }
}

/// Node name rules: the kubelet's name is the host name in lower case, or `--hostname-override`.
#[test]
fn names_of_the_node() {
    let mut facts = with(found());
    assert_eq!(outcomes(&facts, NODE), [Outcome::Ok]);
    facts.kubelet = testing::kubelet(vec![testing::source(Kind::Config, CONFIG, "")]);
    assert_eq!(outcomes(&facts, NODE), [Outcome::Ok], "the host name is N1");
    facts.hostname = "n2.example".into();
    assert_eq!(outcomes(&facts, NODE), [Outcome::Ok, Outcome::Failed]);
    let flags = "KUBELET_EXTRA_ARGS=--hostname-override=n1\n";
    facts.kubelet.sources.push(testing::source(Kind::Flags, "/f", flags));
    assert_eq!(outcomes(&facts, NODE), [Outcome::Ok]);
    facts.cluster = Some(Cluster { node: NodeAnswer::Absent, ..found() });
    assert_eq!(outcomes(&facts, NODE), [Outcome::Failed]);
    facts.settings = settings(|settings| settings.node.role = Role::Node);
    assert_eq!(outcomes(&facts, NODE), [Outcome::Ok]);
    facts.cluster = Some(Cluster { node: NodeAnswer::Refused("403".into()), ..found() });
    assert_eq!(outcomes(&facts, NODE), [Outcome::Failed]);
}

#[test]
fn permissions_are_listed_and_each_missing_one_is_named() {
    let right = |what: &str, allowed| Right { part: Part::Heartbeats, what: what.into(), allowed };
    let all = vec![right("get nodes", Ok(())), right("patch nodes/status", Ok(()))];
    assert_eq!(outcomes(&with(Cluster { rights: all, ..found() }), PERMISSIONS), [Outcome::Ok]);
    let some = vec![right("get nodes", Ok(())), right("patch nodes/status", Err("no RBAC".into()))];
    let facts = with(Cluster { rights: some, ..found() });
    assert_eq!(outcomes(&facts, PERMISSIONS), [Outcome::Ok, Outcome::Failed]);
    let missing = checks(&facts).into_iter().find(|check| check.outcome == Outcome::Failed).expect("one");
    assert_eq!(missing.found, "may not patch nodes/status: no RBAC");
}

#[test]
fn a_kubelet_beside_the_role_node() {
    let mut facts = Facts { settings: settings(|settings| settings.node.role = Role::Node), ..with(found()) };
    assert_eq!(outcomes(&facts, "role"), []);
    facts.kubelet.process = Some(Process { pid: 7, arguments: vec!["kubelet".into()] });
    assert_eq!(outcomes(&facts, "role"), [Outcome::Failed]);
}
