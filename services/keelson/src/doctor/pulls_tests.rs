use std::sync::Arc;

use keelson_config::Settings;

use super::{
    super::{
        Outcome,
        testing::{facts, runtime as answers_as, settings, socket},
    },
    *,
};
use crate::kubelet::{
    CONFIG, Kubelet, Process,
    testing::{kubelet as kubelet_of, source},
};

const OURS: &str = "imageServiceEndpoint: unix:///run/keelson/cri.sock\n";
const ATTACHED: &str =
    "imageServiceEndpoint: unix:///run/keelson/cri.sock\nserializeImagePulls: false\nregistryPullQPS: 0\n";

fn config(text: &str) -> Kubelet {
    kubelet_of(vec![source(Kind::Config, CONFIG, text)])
}

fn with_agent() -> Facts {
    Facts { cri: socket("/run/keelson/cri.sock", answers_as("containerd")), ..facts() }
}

fn no_limit() -> Arc<Settings> {
    settings(|settings| settings.pulls.max_parallel_image_pulls = 0)
}

fn outcome(checks: &[Check], name: &str) -> Option<Outcome> {
    checks.iter().find(|check| check.name == name).map(|check| check.outcome)
}

/// O1: a node must not lose its limit.
#[test]
fn o1_limits() {
    let saved = |text: &str| {
        let mut kubelet = config(ATTACHED);
        kubelet.sources[0].saved = Some(text.to_owned());
        kubelet
    };
    for (settings, running, kubelet, expected) in [
        (settings(|_| ()), None, Kubelet::default(), Outcome::Ok),
        (settings(|_| ()), None, config(ATTACHED), Outcome::Ok),
        (no_limit(), None, Kubelet::default(), Outcome::Warning),
        (no_limit(), None, config(""), Outcome::Warning),
        (no_limit(), None, config(ATTACHED), Outcome::Failed),
        // Put in by hand, with the kubelet's own queue.
        (no_limit(), None, config(OURS), Outcome::Warning),
        // Set at runtime.
        (no_limit(), Some(4), config(ATTACHED), Outcome::Ok),
        (settings(|_| ()), Some(0), config(ATTACHED), Outcome::Failed),
        (
            settings(|settings| settings.pulls.serialize_image_pulls = true),
            None,
            config(ATTACHED),
            Outcome::Ok,
        ),
        // Three, where the kubelet had an explicit limit of two.
        (
            settings(|_| ()),
            None,
            config("serializeImagePulls: false\nmaxParallelImagePulls: 2\n"),
            Outcome::Warning,
        ),
        (
            settings(|_| ()),
            None,
            saved("serializeImagePulls: false\nmaxParallelImagePulls: 2\n"),
            Outcome::Warning,
        ),
        (
            settings(|_| ()),
            None,
            saved("serializeImagePulls: false\nmaxParallelImagePulls: 3\n"),
            Outcome::Ok,
        ),
        (settings(|_| ()), None, saved(""), Outcome::Ok),
    ] {
        let facts = Facts { settings, running_limit: running, kubelet, ..with_agent() };
        let check = limit(&facts);
        assert_eq!(check.outcome, expected, "{check:?} {:?}", facts.kubelet.sources);
    }
}

#[test]
fn o1_attach_needs_an_agent_that_answers_and_a_limit() {
    let failed = |facts: &Facts| -> Vec<&'static str> {
        let checks = before_attach(facts);
        checks.iter().filter(|check| check.outcome == Outcome::Failed).map(|check| check.name).collect()
    };
    assert_eq!(failed(&with_agent()), [""; 0]);
    assert_eq!(failed(&facts()), ["cri socket"], "no agent runs");
    assert_eq!(failed(&Facts { settings: no_limit(), ..with_agent() }), [LIMIT]);
    assert_eq!(failed(&Facts { running_limit: Some(0), ..with_agent() }), [LIMIT]);
    assert_eq!(failed(&Facts { settings: no_limit(), running_limit: Some(2), ..with_agent() }), [""; 0]);
    let silent = Answer::Silent("no process is listening".into());
    let facts = Facts { cri: socket("/c", silent.clone()), runtime: socket("/r", silent), ..with_agent() };
    assert_eq!(failed(&facts), ["runtime", "cri socket"]);
}

#[test]
fn sockets_and_who_may_open_them() {
    let open = |mut socket: Socket| {
        socket.file.as_mut().expect("a file").mode = 0o666;
        socket
    };
    let listens = Answer::Listens;
    for (cri, expected) in [
        (facts().cri, Outcome::Skipped),
        (with_agent().cri, Outcome::Ok),
        (open(with_agent().cri), Outcome::Failed),
        (socket("/c", listens), Outcome::Warning),
        (socket("/c", Answer::Silent("refused".into())), Outcome::Failed),
    ] {
        let check = own_socket(&Facts { cri, ..facts() });
        assert_eq!(check.outcome, expected, "{check:?}");
    }
    for (socket, expected) in [
        (facts().runtime, Outcome::Ok),
        (super::super::testing::absent("/r"), Outcome::Failed),
        (socket("/r", Answer::Silent("refused".into())), Outcome::Failed),
        (socket("/r", Answer::Listens), Outcome::Failed),
    ] {
        assert_eq!(runtime(&Facts { runtime: socket, ..facts() }).outcome, expected);
    }
}

#[test]
fn the_kubelet_configuration() {
    let check = |kubelet: Kubelet| {
        let checks = kubelet_checks(kubelet);
        checks.iter().map(|check| (check.name, check.outcome)).collect::<Vec<_>>()
    };
    assert_eq!(check(Kubelet::default()), [(KUBELET, Outcome::Skipped)]);
    assert_eq!(check(config("")), [(KUBELET, Outcome::Skipped)]);
    assert_eq!(check(config(ATTACHED)), [(KUBELET, Outcome::Ok)]);
    let queue = ("kubelet queue", Outcome::Warning);
    assert_eq!(check(config(OURS)), [(KUBELET, Outcome::Ok), queue, queue]);
    assert_eq!(
        check(config(&format!("{ATTACHED}maxParallelImagePulls: 2\n"))),
        [(KUBELET, Outcome::Ok), queue]
    );
    // O2: taken out by hand, without the other keys.
    assert_eq!(
        check(config("serializeImagePulls: false\nregistryPullQPS: 0\n")),
        [(KUBELET, Outcome::Warning)]
    );
    // O6: rewritten.
    let mut rewritten = config("serializeImagePulls: true\n");
    rewritten.sources[0].saved = Some(String::new());
    assert_eq!(check(rewritten), [(KUBELET, Outcome::Failed)]);
    let all = "containerRuntimeEndpoint: unix:///run/keelson/cri.sock\n";
    let endpoint = "kubelet runtime endpoint";
    assert_eq!(check(config(all)), [(KUBELET, Outcome::Ok), (endpoint, Outcome::Warning)]);
}

fn kubelet_checks(kubelet: Kubelet) -> Vec<Check> {
    super::kubelet(&Facts { kubelet, ..with_agent() })
}

/// O7: the kubelet looks for CRI-O in the name of the socket.
#[test]
fn o7_cri_o_behind_the_agent() {
    let facts = Facts {
        runtime: socket("/run/crio/crio.sock", answers_as("cri-o")),
        kubelet: config("containerRuntimeEndpoint: unix:///run/keelson/cri.sock\n"),
        ..with_agent()
    };
    assert_eq!(outcome(&checks(&facts), "kubelet runtime endpoint"), Some(Outcome::Failed));
}

/// O7: a flag counts more than the file.
#[test]
fn o7_a_running_kubelet_with_other_flags() {
    let mut kubelet = config(ATTACHED);
    let mut with_flag = |flag: Option<&str>| {
        let arguments = [Some("kubelet"), flag].into_iter().flatten().map(str::to_owned).collect();
        kubelet.process = Some(Process { pid: 7, arguments });
        outcome(&kubelet_checks(kubelet.clone()), "kubelet flags")
    };
    assert_eq!(with_flag(None), None);
    assert_eq!(with_flag(Some("--image-service-endpoint=unix:///run/keelson/cri.sock")), None);
    assert_eq!(with_flag(Some("--image-service-endpoint=unix:///run/other.sock")), Some(Outcome::Warning));
    assert_eq!(with_flag(Some("--serialize-image-pulls=true")), Some(Outcome::Warning));
}

#[test]
fn o6_a_configuration_file_of_kubeadm() {
    let flags = source(Kind::Flags, "/var/lib/kubelet/kubeadm-flags.env", "");
    let mut node = kubelet_of(vec![source(Kind::Config, CONFIG, ATTACHED), flags]);
    let kubeadm = |kubelet: &Kubelet, patches: &[&str]| {
        let patches = patches.iter().map(Into::into).collect();
        let checks = super::kubelet(&Facts { kubelet: kubelet.clone(), patches, ..with_agent() });
        outcome(&checks, "kubeadm")
    };
    assert_eq!(kubeadm(&node, &[]), Some(Outcome::Warning));
    assert_eq!(kubeadm(&node, &["/etc/kubernetes/patches/kubeletconfiguration0.yaml"]), Some(Outcome::Ok));
    node.sources[0].text.clear();
    node.sources.insert(1, source(Kind::DropIn, "/etc/kubernetes/kubelet.conf.d/20-keelson.conf", ATTACHED));
    assert_eq!(kubeadm(&node, &[]), None, "kubeadm does not write there");
}
