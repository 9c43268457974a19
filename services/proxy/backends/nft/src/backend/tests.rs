use std::{
    collections::VecDeque,
    net::IpAddr,
    ops::Range,
    process::Command,
    sync::{Arc, Mutex},
};

use ipnet::IpNet;

use keelson_client::{NodeInfo, localnetv1::IpSet};
use keelson_proxy::{
    model::Endpoint,
    options::DetectLocal,
    sync::{CHECK_INTERVAL, Checked, FIRST_PAUSE, READ_INTERVAL, SyncLoop, Synced},
};
use nix::errno::Errno;

use super::*;
use crate::{
    kernel::Netlink,
    table::UNUSED_CHAIN_TTL,
    testing::{self, in_namespace},
};

mod checks;
mod failures;
mod offload;
mod pace;
mod scale;
mod single_stack;
mod untracked;

/// The kernel behind a layer that loses or rejects transactions as scripted.
struct Flaky {
    kernel: Netlink,
    script: Script,
}

/// Results of the next commits, and the number of commits so far.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<(VecDeque<Fault>, usize)>>);

#[derive(Clone, Copy)]
enum Fault {
    Refused(Errno),
    Unsupported,
    /// The transaction is committed, but its acknowledgement is lost.
    Lost,
    None,
    /// The structure of the table cannot be read; commits succeed.
    Unread,
}

impl Script {
    fn next(&self, faults: &[Fault]) {
        self.0.lock().unwrap().0.extend(faults);
    }

    fn commits(&self) -> usize {
        self.0.lock().unwrap().1
    }
}

impl NfTables for Flaky {
    fn netlink(&mut self) -> &mut Netlink {
        &mut self.kernel
    }

    fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError> {
        let fault = {
            let mut script = self.script.0.lock().unwrap();
            script.1 += 1;
            let due = script.0.front().filter(|fault| !matches!(fault, Fault::Unread)).copied();
            due.and_then(|_| script.0.pop_front()).unwrap_or(Fault::None)
        };
        match fault {
            Fault::Refused(errno) => Err(KernelError::Transaction { family, changes: changes.len(), errno }),
            Fault::Unsupported => {
                Err(KernelError::Unsupported { feature: "numgen".to_owned(), errno: Errno::ENOENT })
            }
            Fault::Lost => {
                self.kernel.commit(family, changes)?;
                Err(KernelError::AnswerLost { family, changes: changes.len() })
            }
            Fault::None | Fault::Unread => self.kernel.commit(family, changes),
        }
    }

    fn read_structure(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        let fault = self.script.0.lock().unwrap().0.pop_front_if(|fault| matches!(fault, Fault::Unread));
        match fault {
            Some(_) => Err(KernelError::AnswerLost { family, changes: 0 }),
            None => self.kernel.read_structure(family),
        }
    }
}

fn options() -> Options {
    testing::options(&["10.244.0.0/16"])
}

fn node() -> NodeInfo {
    NodeInfo {
        i_ps: Some(IpSet { v4: vec!["192.0.2.1".into()], v6: vec!["2001:db8::1".into()] }),
        service_cid_rs: vec!["10.96.0.0/12".into()],
        ..NodeInfo::default()
    }
}

/// A Service `ns/sN` at 10.96.x.y:80 with `count` endpoints of its own, beginning at `from`.
fn ports(number: u16, from: u16, count: u16) -> [Vec<ServicePort>; 2] {
    let [high, low] = number.to_be_bytes();
    let endpoint = |index: u16| {
        let [a, b] = (from + index).to_be_bytes();
        Endpoint { ip: IpAddr::from([10, 244 + high % 8, a, b]), port: 8080 }
    };
    let port = ServicePort {
        load_balancer_ips: vec![IpAddr::from([198, 51, high, low])],
        affinity_seconds: if number.is_multiple_of(7) { 60 } else { 0 },
        source_ranges: if number.is_multiple_of(5) {
            vec!["203.0.113.0/25".parse::<IpNet>().unwrap()]
        } else {
            Vec::new()
        },
        has_any: count > 0,
        cluster: (0..count).map(endpoint).collect(),
        ..testing::service_port(&name(number), "http", IpAddr::from([10, 96, high, low]), 80)
    };
    [vec![port], Vec::new()]
}

fn name(number: u16) -> ServiceName {
    ServiceName::new("ns", &format!("s{number}"))
}

/// A sync loop and an observer over the kernel, behind `tables`.
fn open<T: NfTables + 'static>(
    tables: impl Fn(Netlink) -> T + Send + 'static,
    options: Options,
) -> Result<(SyncLoop, Box<dyn Observer>), KernelError> {
    let connect = move || Ok(Box::new(tables(Netlink::open()?)) as Box<dyn NfTables>);
    let backend = NftBackend::open(connect, &options, Access::Program)?;
    let observer = backend.observer().unwrap();
    let local = [IpAddr::from([192, 0, 2, 1])].into_iter().collect();
    Ok((SyncLoop::new(Box::new(backend), options, &local), observer))
}

fn open_flaky(script: &Script, options: Options) -> Result<(SyncLoop, Box<dyn Observer>), KernelError> {
    let script = script.clone();
    open(move |kernel| Flaky { kernel, script: script.clone() }, options)
}

/// What a full sync would change, except the interfaces of the flowtable.
fn differences(sync_loop: &mut SyncLoop) -> Vec<String> {
    let mut lines = sync_loop.changes().unwrap();
    lines.retain(|line| !line.contains(" to flowtable ") && !line.contains(" from flowtable "));
    lines
}

struct Stage {
    sync_loop: SyncLoop,
    observer: Box<dyn Observer>,
    script: Script,
    now: Instant,
}

impl Stage {
    /// A sync loop over the existing kernel state.
    fn open() -> Self {
        Self::with(options())
    }

    fn with(options: Options) -> Self {
        let script = Script::default();
        Self::new(open_flaky(&script, options).unwrap(), script)
    }

    fn new((mut sync_loop, observer): (SyncLoop, Box<dyn Observer>), script: Script) -> Self {
        let now = Instant::now();
        sync_loop.set_node(node(), now);
        Self { sync_loop, observer, script, now }
    }

    /// With Services of these numbers programmed, each with `count` endpoints.
    fn programmed(numbers: Range<u16>, count: u16) -> Self {
        let mut stage = Self::open();
        numbers.for_each(|number| stage.set(number, 0, count));
        stage.begin();
        stage
    }

    fn set(&mut self, number: u16, from: u16, count: u16) {
        self.sync_loop.set(&name(number), ports(number, from, count), self.now);
    }

    fn begin(&mut self) -> Vec<Synced> {
        self.sync_loop.begin(self.now);
        self.sync_loop.sync(self.now)
    }

    fn sync(&mut self) -> Outcome {
        let all = self.sync_loop.sync(self.now);
        let of_v4 = all.into_iter().find(|synced| synced.family == Family::V4).expect("IPv4 was synced");
        of_v4.result.unwrap()
    }

    fn later(&mut self, by: Duration) -> Vec<Synced> {
        self.now += by;
        let mut all = self.sync_loop.tick(self.now);
        for family in self.sync_loop.begin_checks(self.now) {
            self.observer.read(family).unwrap();
            all.extend(self.check(family));
        }
        all
    }

    fn check(&mut self, family: Family) -> Option<Synced> {
        match self.sync_loop.check(family, self.now) {
            Checked::Postponed => panic!("nothing waits"),
            Checked::Clean => None,
            Checked::Repaired(synced) => Some(synced),
        }
    }

    fn offload(&self, family: Family) -> Option<String> {
        let prefix = format!("flowtable {family}: ");
        let features = self.sync_loop.backend().features();
        features.iter().find_map(|line| line.strip_prefix(&prefix).map(str::to_owned))
    }

    /// Asserts that the kernel has the wanted state, chains and rules included.
    fn assert_exact(&mut self) {
        assert_eq!(differences(&mut self.sync_loop), [""; 0]);
    }
}

fn kernel() -> Netlink {
    Netlink::open().unwrap()
}

fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().expect("the program nft (package nftables)");
    assert!(output.status.success(), "nft {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn features_are_probed_before_any_change() {
    in_namespace(|| {
        let stage = Stage::open();
        assert_eq!(stage.script.commits(), 2, "one rehearsal for each family");
        assert_eq!(nft(&["list", "tables"]), "", "nothing of them stays");
    });
}

#[test]
fn a_missing_kernel_feature_is_reported_and_nothing_is_programmed() {
    in_namespace(|| {
        let script = Script::default();
        script.next(&[Fault::Unsupported, Fault::Unsupported]);
        let error = open_flaky(&script, options()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Fatal);
        assert!(error.to_string().contains("the kernel does not support numgen"), "{error}");
        assert_eq!(nft(&["list", "tables"]), "");
    });
}

#[test]
fn case_16_no_rules_before_a_full_state() {
    in_namespace(|| {
        let mut stage = Stage::open();
        stage.set(1, 0, 3);
        assert!(stage.sync_loop.sync(stage.now).is_empty());
        assert!(stage.later(CHECK_INTERVAL * 2).is_empty());
        assert_eq!(nft(&["list", "tables"]), "");
        assert_eq!(stage.begin().len(), 2);
        assert!(nft(&["list", "map", "ip", "keelson", "cluster-ip-ports"]).contains("10.96.0.1 . tcp . 80"));
        stage.assert_exact();
    });
}

#[test]
fn case_56_no_change_is_no_operation_and_one_endpoint_is_a_few() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..200, 10);
        let commits = stage.script.commits();
        stage.set(11, 0, 10);
        let nothing = stage.sync();
        assert!(nothing.is_nothing() && nothing.transactions == 0, "{nothing:?}");
        assert_eq!(stage.script.commits(), commits);

        stage.set(11, 0, 9);
        let one = stage.sync();
        // Its slot, the values of its two frontends, and an element of `counts`: no other service port has nine
        // endpoints. The chain is a prepared one.
        assert_eq!((one.transactions, one.added, one.deleted, one.structure), (1, 3, 3, 0), "{one:?}");
        stage.set(12, 1, 10);
        let other = stage.sync();
        assert_eq!(
            (other.transactions, other.added, other.deleted, other.structure),
            (1, 1, 1, 0),
            "{other:?}"
        );
        stage.assert_exact();
    });
}

#[test]
fn the_number_of_chains_depends_on_counts_alone() {
    in_namespace(|| {
        let chains = || nft(&["list", "chains", "ip"]).matches("chain ").count();
        let mut stage = Stage::open();
        // Every count without affinity, and with affinity in each of the eight maps.
        (0..600).for_each(|number| stage.set(number, 0, 1 + number % 3));
        stage.begin();
        let few = chains();
        (0..10_000).for_each(|number| stage.set(number, 0, 1 + number % 3));
        let many = stage.sync();
        assert!(many.added > 50_000, "{many:?}");
        assert_eq!(chains(), few);
        assert_eq!(stage.sync_loop.backend().details(Family::V4).chains, few);
        stage.assert_exact();
    });
}

#[test]
fn a_large_load_is_several_transactions_and_exact() {
    in_namespace(|| {
        let mut stage = Stage::open();
        (0..3_000).for_each(|number| stage.set(number, 0, 1 + number % 3));
        let outcome = stage.begin().remove(0).result.unwrap();
        let elements = stage.sync_loop.backend().counts(Family::V4).elements;
        assert!(outcome.transactions > 1 && outcome.added == elements, "{outcome:?} of {elements}");
        stage.assert_exact();
        (0..3_000).for_each(|number| stage.set(number, 7, 1 + number % 2));
        let outcome = stage.sync();
        assert!(outcome.transactions > 1 && !outcome.full, "{outcome:?}");
        stage.assert_exact();
    });
}

#[test]
fn case_57_a_restart_changes_only_what_has_changed() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..50, 4);
        // Removals leave holes that a fresh start would fill.
        stage.set(3, 1, 3);
        stage.set(14, 2, 2);
        stage.sync();
        let before = nft(&["list", "ruleset"]);
        drop(stage);

        let mut again = Stage::open();
        assert_eq!(again.script.commits(), 0, "no probe runs while rules are in use");
        (0..50).filter(|number| ![3, 14].contains(number)).for_each(|number| again.set(number, 0, 4));
        again.set(3, 1, 3);
        again.set(14, 2, 2);
        let outcomes: Vec<Outcome> = again.begin().into_iter().map(|synced| synced.result.unwrap()).collect();
        assert!(
            outcomes.iter().all(|outcome| outcome.full && outcome.is_nothing() && !outcome.repaired),
            "{outcomes:?}"
        );
        assert_eq!(nft(&["list", "ruleset"]), before);

        let mut third = Stage::open();
        (0..49).filter(|number| ![3, 14].contains(number)).for_each(|number| third.set(number, 0, 4));
        third.set(3, 1, 3);
        third.set(14, 2, 2);
        let outcome = third.begin().remove(0).result.unwrap();
        // Service 49 has affinity: a number in two maps and V, four slots with an endpoint each, W, and its address.
        assert_eq!((outcome.added, outcome.structure), (0, 0), "{outcome:?}");
        assert_eq!(outcome.deleted, 13, "{outcome:?}");
        third.assert_exact();
    });
}

#[test]
fn case_58_returning_endpoints_reuse_their_chain() {
    in_namespace(|| {
        let mut stage = Stage::programmed(1..2, 70);
        stage.set(1, 0, 0);
        stage.sync();
        stage.set(1, 0, 70);
        assert_eq!(stage.sync().structure, 0, "the chain was still there");
        stage.assert_exact();
        // An unused chain is kept for [`UNUSED_CHAIN_TTL`].
        stage.set(1, 0, 0);
        stage.sync();
        stage.later(CHECK_INTERVAL);
        assert!(nft(&["list", "chains", "ip"]).contains("chain lb-70"));
        stage.later(UNUSED_CHAIN_TTL);
        assert!(!nft(&["list", "chains", "ip"]).contains("chain lb-70"));
        stage.assert_exact();
        assert!(
            stage
                .later(CHECK_INTERVAL)
                .iter()
                .all(|synced| synced.result.as_ref().is_ok_and(Outcome::is_nothing))
        );
    });
}

#[test]
fn changed_settings_change_rules_only() {
    in_namespace(|| {
        let mut stage = Stage::with(Options { detect_local: DetectLocal::NodeCidr, ..options() });
        let pods = |cidr: &str| NodeInfo { pod_cid_rs: vec![cidr.into()], ..node() };
        stage.sync_loop.set_node(pods("10.244.3.0/24"), stage.now);
        (0..20).for_each(|number| stage.set(number, 0, 3));
        stage.begin();
        // P4: a node without an address serves node ports nowhere, which is one element less. The rules for pods
        // change.
        stage.sync_loop.set_node(NodeInfo { i_ps: None, ..pods("10.244.4.0/24") }, stage.now);
        let outcome = stage.sync();
        assert!(
            outcome.full && outcome.added == 0 && outcome.deleted == 1 && outcome.structure > 0,
            "{outcome:?}"
        );
        assert_eq!(outcome.transactions, 1, "{outcome:?}");
        stage.assert_exact();
    });
}

#[test]
fn p13_external_ips_are_served_only_if_allowed() {
    in_namespace(|| {
        for allowed in [true, false] {
            let mut stage = Stage::with(Options { allow_external_ips: allowed, ..options() });
            let external = || {
                let mut all = ports(1, 0, 2);
                all[0][0].external_ips = vec!["198.51.100.77".parse().unwrap()];
                all
            };
            stage.sync_loop.set(&name(1), external(), stage.now);
            stage.begin();
            let ports = nft(&["list", "map", "ip", "keelson", "external-ports"]);
            assert_eq!(ports.contains("198.51.100.77"), allowed, "{ports}");
            assert!(ports.contains("198.51.0.1"), "load-balancer addresses are served: {ports}");
            stage.assert_exact();
        }
    });
}

#[test]
fn sync_waits_for_pod_cidrs() {
    in_namespace(|| {
        let options = Options { detect_local: DetectLocal::NodeCidr, ..options() };
        let (mut sync_loop, _) = open_flaky(&Script::default(), options).unwrap();
        let now = Instant::now();
        sync_loop.set_node(node(), now);
        sync_loop.set(&name(1), ports(1, 0, 2), now);
        sync_loop.begin(now);
        assert!(sync_loop.waits_for_pod_cidrs());
        assert!(sync_loop.sync(now).is_empty());
        sync_loop.set_node(NodeInfo { pod_cid_rs: vec!["10.244.3.0/24".into()], ..node() }, now);
        assert!(!sync_loop.waits_for_pod_cidrs());
        assert_eq!(sync_loop.sync(now).len(), 2);
        assert!(nft(&["list", "chain", "ip", "keelson", "internal"]).contains("ip saddr != 10.244.3.0/24"));
    });
}
