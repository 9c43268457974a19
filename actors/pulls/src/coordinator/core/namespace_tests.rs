//! I2: requests of different namespaces share a pull only if the runtime is known to ignore the namespace.

use keelson_proto::Code;

use super::{
    Policy,
    testing::{Ask, Bench, CONTAINERD, CRIO, fails, image, limit, ok},
};
use crate::runtime::{Capabilities, RuntimeEvent};

fn ask(namespace: &str) -> Ask {
    image("r/a").pod(&format!("pod-of-{namespace}")).namespace(namespace)
}

/// `None`: the runtime has not answered yet.
fn bench(runtime: Option<Capabilities>, policy: Policy) -> Bench {
    let mut bench = Bench::new(policy);
    if let Some(capabilities) = runtime {
        bench.event(RuntimeEvent::RuntimeChanged(Ok(capabilities)));
    }
    bench
}

/// I2. Number of pulls, by runtime, for the requests of two namespaces and one without a pod.
#[test]
fn namespaces_share_only_where_the_runtime_ignores_them() {
    let unknown = Capabilities { leases: true, content: true, ..Capabilities::default() };
    for (name, runtime, expected) in [
        ("containerd", Some(CONTAINERD), 1),
        ("CRI-O", Some(CRIO), 3),
        ("unknown, with leases", Some(unknown), 3),
        ("not known yet", None, 3),
    ] {
        let mut bench = bench(runtime, limit(5));
        let callers = [ask("a"), ask("b"), ask("a"), image("r/a"), ask("b")].map(|ask| bench.ask(ask));
        let pulls = callers.map(|caller| bench.pull(caller));
        assert_eq!(bench.core.pulls.len(), expected, "{name}");
        assert_eq!((pulls[0], pulls[1]), (pulls[2], pulls[4]), "{name}: one namespace is one pull");
    }
}

/// I2: an anonymous pull in a namespace that the runtime refuses does not succeed with that of another.
#[test]
fn a_refused_namespace_is_refused_while_another_pulls() {
    let mut bench = bench(Some(CRIO), limit(5));
    let (good, bad) = (bench.ask(ask("a")), bench.ask(ask("b")));
    assert_eq!(bench.starts.len(), 2, "the runtime decides about each");
    bench.finish(bench.pull(bad), fails(Code::Unknown, "SignatureValidationFailed: rejected by policy"));
    assert_eq!(bench.status(bad).message, "SignatureValidationFailed: rejected by policy");
    bench.succeed(good);
}

/// I2.
#[test]
fn equal_credentials_of_two_namespaces_are_two_pulls() {
    let mut bench = bench(Some(CRIO), limit(5));
    let (one, other) = (bench.ask(ask("a").auth("pw")), bench.ask(ask("b").auth("pw")));
    assert_ne!(bench.pull(one), bench.pull(other));
}

/// I2: a request from a runtime outage is keyed as the strictest runtime needs it, and shared with later ones as soon
/// as the runtime is known to ignore namespaces.
#[test]
fn requests_before_the_first_runtime_answer_are_not_merged() {
    let mut bench = bench(None, limit(1));
    let (first, second) = (bench.ask(ask("a")), bench.ask(ask("b")));
    assert_ne!(bench.pull(first), bench.pull(second));
    bench.runtime_up();
    let third = bench.ask(ask("c"));
    assert_eq!(bench.pull(third), bench.pull(first), "the first of them is the one to join");
    bench.finish(bench.pull(first), ok());
    assert!(bench.succeeded(first) && bench.succeeded(third) && bench.waits(second));
    bench.succeed(second);
}

/// I2: what is known of a runtime holds during an outage, until another runtime returns.
#[test]
fn the_restarted_runtime_decides_whether_namespaces_matter() {
    let mut bench = bench(Some(CONTAINERD), limit(5));
    bench.runtime_down("gone");
    let (first, second) = (bench.ask(ask("a")), bench.ask(ask("b")));
    assert_eq!(bench.pull(first), bench.pull(second));
    bench.event(RuntimeEvent::RuntimeChanged(Ok(CRIO)));
    let third = bench.ask(ask("b"));
    assert_ne!(bench.pull(third), bench.pull(first));
}

/// I2.
#[test]
fn a_resumed_pull_is_joined_by_its_own_namespace_only() {
    let mut bench = bench(Some(CRIO), limit(5));
    bench.ask(ask("a"));
    bench = bench.kill(limit(5));
    let (stranger, owner) = (bench.ask(ask("b")), bench.ask(ask("a")));
    assert_ne!(bench.pull(stranger), bench.pull(owner));
    assert_eq!(bench.core.pulls.len(), 2);
}

/// I2.
#[test]
fn a_held_place_is_for_its_own_namespace() {
    for (runtime, expected) in [(CRIO, 2), (CONTAINERD, 1)] {
        let mut bench = bench(Some(runtime), limit(5));
        bench.ask(ask("a").auth("pw"));
        bench = bench.kill(limit(5));
        bench.event(RuntimeEvent::RuntimeChanged(Ok(runtime)));
        bench.ask(ask("b").auth("pw"));
        assert_eq!(bench.core.pulls.len(), expected, "{runtime:?}");
    }
}
