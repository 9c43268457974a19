use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::*;
use crate::{
    backend::{Access, Backend, BackendError, BackendInfo},
    options::Options,
};

/// A node with scripted removals.
#[derive(Debug, Default)]
struct Scripted {
    running: Vec<&'static str>,
    results: BTreeMap<&'static str, VecDeque<Removed>>,
    asked: Vec<&'static str>,
}

impl Scripted {
    fn removes(mut self, former: &'static str, results: impl IntoIterator<Item = Removed>) -> Self {
        self.results.insert(former, results.into_iter().collect());
        self
    }
}

impl Remover for Scripted {
    fn runs(&self, backend: &'static str) -> bool {
        self.running.contains(&backend)
    }

    fn remove(&mut self, former: Former) -> Removed {
        self.asked.push(former.name());
        let results = self.results.get_mut(former.name());
        results.and_then(VecDeque::pop_front).unwrap_or_default()
    }
}

fn removed(what: &str) -> Removed {
    Removed { removed: vec![what.into()], ..Removed::default() }
}

fn failed(what: &str) -> Removed {
    Removed { failed: vec![what.into()], ..Removed::default() }
}

const PERIOD: Duration = Duration::from_secs(30);
const IPTABLES: Former = Former::Backend("iptables");

#[test]
fn nothing_is_removed_before_the_own_rules_are_in_effect() {
    let mut node = Scripted::default().removes("iptables", [removed("12 chains")]);
    let mut takes = TakeOver::new([IPTABLES, Former::KubeProxy], PERIOD);
    let now = Instant::now();
    assert_eq!(takes.advance(false, now, &mut node), []);
    assert!(node.asked.is_empty() && !takes.is_done());
    let events = takes.advance(true, now, &mut node);
    assert_eq!(events, [TakenOver::Done { former: IPTABLES, removed: vec!["12 chains".into()] }]);
    assert_eq!(node.asked, ["iptables", "kube-proxy"]);
    // Once: what comes back belongs to a program that runs.
    assert!(takes.is_done() && takes.advance(true, now + PERIOD, &mut node).is_empty());
    assert_eq!(node.asked.len(), 2);
}

#[test]
fn rules_of_a_backend_that_runs_are_left_alone() {
    let mut node = Scripted { running: vec!["iptables"], ..Scripted::default() };
    let mut takes = TakeOver::new([IPTABLES, Former::Backend("userspace")], PERIOD);
    let events = takes.advance(true, Instant::now(), &mut node);
    assert_eq!(events, [TakenOver::Beside { former: IPTABLES }]);
    assert_eq!(node.asked, ["userspace"]);
    assert!(takes.is_done());
}

#[test]
fn failures_are_retried_with_growing_pauses_and_end() {
    let part =
        Removed { removed: vec!["2 chains".into()], failed: vec!["set X: in use".into()], waits: None };
    let results = [part].into_iter().chain(std::iter::repeat_n(failed("set X: in use"), 9));
    let mut node = Scripted::default().removes("iptables", results);
    let mut takes = TakeOver::new([IPTABLES], PERIOD);
    let mut now = Instant::now();
    let events = takes.advance(true, now, &mut node);
    assert!(matches!(&events[0], TakenOver::Done { .. }), "{events:?}");
    assert!(matches!(&events[1], TakenOver::Failed { gives_up: false, .. }), "{events:?}");
    for (attempt, pause) in (2..).zip([1, 2, 4, 8]) {
        let early = now + Duration::from_millis(pause * 1_000 - 1);
        assert_eq!(takes.advance(true, early, &mut node), []);
        now += Duration::from_secs(pause);
        let events = takes.advance(true, now, &mut node);
        let expected = TakenOver::Failed {
            former: IPTABLES,
            failed: vec!["set X: in use".into()],
            gives_up: attempt == ATTEMPTS,
        };
        assert_eq!(events, [expected]);
    }
    assert!(takes.is_done());
    assert_eq!(node.asked.len(), ATTEMPTS as usize);
}

#[test]
fn connections_through_virtual_servers_are_waited_for() {
    let waits = Removed { waits: Some("3 connections".into()), ..Removed::default() };
    let mut node =
        Scripted::default().removes("kube-proxy", [waits.clone(), waits, removed("5 virtual servers")]);
    let mut takes = TakeOver::new([Former::KubeProxy], PERIOD);
    let mut now = Instant::now();
    let events = takes.advance(true, now, &mut node);
    assert_eq!(events, [TakenOver::Waits { former: Former::KubeProxy, reason: "3 connections".into() }]);
    now += WAIT;
    assert_eq!(takes.advance(true, now, &mut node), [], "it was said");
    assert_eq!(takes.advance(true, now, &mut node), []);
    assert_eq!(node.asked.len(), 2, "not before the interval is over");
    now += WAIT;
    assert!(matches!(&takes.advance(true, now, &mut node)[..], [TakenOver::Done { .. }]));
    assert!(takes.is_done());
}

/// A backend whose virtual servers have connections.
#[derive(Debug, Default)]
struct Virtual {
    connections: AtomicUsize,
    lacks_translation: bool,
    /// It can let another backend decide about new connections.
    works: AtomicBool,
    calls: Mutex<Vec<&'static str>>,
}

impl Driver for Virtual {
    fn info(&self) -> BackendInfo {
        BackendInfo { name: "virtual", proxy_mode: "virtual", requirements: "", has_chains: true }
    }
    fn open(&self, _: &Options, _: Access) -> Result<Box<dyn Backend>, BackendError> {
        Err(BackendError::new(&"not opened", true))
    }
    fn keeps_translation(&self) -> bool {
        !self.lacks_translation
    }
    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        Ok(vec!["4 chains".into()])
    }
    fn preserve_translation(&self, family: Family) -> Result<(), BackendError> {
        self.calls.lock().unwrap().push(match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        });
        Err(BackendError::new(&"a failure does not keep rules", false))
    }
    fn virtual_connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
    fn release_new_connections(
        &self,
        _: &dyn Driver,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        removed("2 chains".into());
        self.calls.lock().unwrap().push("release");
        match self.works.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(BackendError::new(&"a failure does not end the wait", false)),
        }
    }
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::Keelson {
            self.calls.lock().unwrap().push("remove");
            removed("5 virtual servers".into());
        }
        Ok(())
    }
}

/// The kernel asks rules in the table mangle before those of the backend that has taken over.
#[test]
fn rules_for_new_connections_are_removed_while_established_ones_are_waited_for() {
    let former: &'static Virtual = Box::leak(Box::default());
    let own: &'static Virtual = Box::leak(Box::default());
    let places = Places::default();
    let mut remover = NodeRemover { own, all: vec![former], places, has_kube_proxy: false };
    former.connections.store(2, Ordering::Relaxed);
    let done = remover.remove(Former::Backend("virtual"));
    let waits = "2 connections through virtual servers would be lost";
    assert_eq!((done.waits.as_deref(), &done.removed[..], &done.failed[..]), (Some(waits), &[][..], &[][..]));
    assert_eq!(*former.calls.lock().unwrap(), ["release"]);
    former.connections.store(0, Ordering::Relaxed);
    assert_eq!(remover.remove(Former::Backend("virtual")), removed("5 virtual servers"));
    assert_eq!(*former.calls.lock().unwrap(), ["release", "remove"]);
    assert!(own.calls.lock().unwrap().is_empty());
}

/// Sockets get no connection for which a virtual server is asked first.
#[test]
fn a_backend_without_rules_takes_over_new_connections_or_fails() {
    let former: &'static Virtual = Box::leak(Box::default());
    let own: &'static Virtual =
        Box::leak(Box::new(Virtual { lacks_translation: true, ..Virtual::default() }));
    let places = Places::default();
    let mut remover = NodeRemover { own, all: vec![former], places, has_kube_proxy: false };
    former.connections.store(1, Ordering::Relaxed);
    let done = remover.remove(Former::Backend("virtual"));
    let failed = "rules for new connections: a failure does not end the wait";
    assert_eq!((done.waits, &done.failed[..]), (None, &[failed.to_owned()][..]));
    assert_eq!(*former.calls.lock().unwrap(), ["IPv4", "IPv6", "release"]);
    former.works.store(true, Ordering::Relaxed);
    let done = remover.remove(Former::Backend("virtual"));
    assert_eq!(done.waits.as_deref(), Some("1 connections through virtual servers would be lost"));
    former.connections.store(0, Ordering::Relaxed);
    assert_eq!(remover.remove(Former::Backend("virtual")), removed("5 virtual servers"));
}

#[test]
fn the_kernel_goes_on_translating_for_a_backend_that_has_no_rules() {
    for (lacks_translation, calls) in [(true, &["IPv4", "IPv6", "remove"][..]), (false, &["remove"][..])] {
        let former: &'static Virtual = Box::leak(Box::default());
        let own: &'static Virtual = Box::leak(Box::new(Virtual { lacks_translation, ..Virtual::default() }));
        let places = Places::default();
        let mut remover = NodeRemover { own, all: vec![former], places, has_kube_proxy: false };
        assert_eq!(remover.remove(Former::Backend("virtual")), removed("5 virtual servers"));
        assert_eq!(*former.calls.lock().unwrap(), calls);
    }
}
