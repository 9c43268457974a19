use std::{
    collections::VecDeque,
    net::IpAddr,
    process::Command,
    sync::{Arc, Mutex},
};

use ipnet::IpNet;
use keelson_client::localnetv1::IpSet;
use nix::errno::Errno;

use super::*;
use crate::{
    addresses::NodePortAddresses,
    model::{Endpoint, PortName, Protocol},
    nft::{
        kernel::{Found, Generation, Netlink},
        strangers::strangers,
    },
    once::{Leftovers, cleanup},
    options::DetectLocal,
    testing::in_namespace,
};

/// The kernel, behind somebody who loses or refuses transactions when told to.
struct Flaky {
    kernel: Netlink,
    script: Script,
}

/// What becomes of the next commits, and how many there were.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<(VecDeque<Fault>, usize)>>);

#[derive(Clone, Copy)]
enum Fault {
    /// The kernel refuses, and has nothing of it.
    Refused(Errno),
    /// The kernel has not what is needed.
    Unsupported,
    /// The kernel has it, and nobody hears of that.
    Lost,
    /// All is well.
    None,
}

impl Script {
    fn next(&self, faults: &[Fault]) {
        self.0.lock().unwrap().0.extend(faults);
    }

    fn commits(&self) -> usize {
        self.0.lock().unwrap().1
    }
}

impl Tables for Flaky {
    fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError> {
        let fault = {
            let mut script = self.script.0.lock().unwrap();
            script.1 += 1;
            script.0.pop_front().unwrap_or(Fault::None)
        };
        match fault {
            Fault::Refused(errno) => Err(KernelError::Transaction { family, changes: changes.len(), errno }),
            Fault::Unsupported => {
                Err(KernelError::Unsupported { feature: "numgen".to_owned(), errno: Errno::ENOENT })
            }
            Fault::Lost => {
                self.kernel.commit(family, changes)?;
                Err(KernelError::Undecided { family, changes: changes.len() })
            }
            Fault::None => self.kernel.commit(family, changes),
        }
    }

    fn read(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        self.kernel.read(family)
    }

    fn generation(&mut self) -> Result<Generation, KernelError> {
        self.kernel.generation()
    }

    fn tables(&mut self) -> Result<Vec<(Family, String)>, KernelError> {
        self.kernel.tables()
    }

    fn has_chain(&mut self, family: Family, table: &str, chain: &str) -> Result<bool, KernelError> {
        self.kernel.has_chain(family, table, chain)
    }

    fn delete_table(&mut self, family: Family, name: &str) -> Result<(), KernelError> {
        self.kernel.delete_table(family, name)
    }
}

fn options() -> Options {
    Options {
        bind_address: Vec::new(),
        detect_local: DetectLocal::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]),
        masquerade_all: false,
        masquerade_bit: 14,
        node_port_addresses: NodePortAddresses::Primary,
        sync_period: Duration::from_secs(30),
    }
}

fn node() -> NodeInfo {
    NodeInfo {
        i_ps: Some(IpSet { v4: vec!["192.0.2.1".into()], v6: vec!["2001:db8::1".into()] }),
        service_cid_rs: vec!["10.96.0.0/12".into()],
        ..NodeInfo::default()
    }
}

/// A Service `ns/sN` at 10.96.x.y:80 with so many endpoints, of its own and beginning at `from`.
fn ports(number: u16, from: u16, count: u16) -> [Vec<ServicePort>; 2] {
    let [high, low] = number.to_be_bytes();
    let endpoint = |index: u16| {
        let [a, b] = (from + index).to_be_bytes();
        Endpoint { ip: IpAddr::from([10, 244 + high % 8, a, b]), port: 8080 }
    };
    let name = PortName { service: name(number), port: "http".into(), protocol: Protocol::Tcp };
    let port = ServicePort {
        name,
        port: 80,
        cluster_ip: IpAddr::from([10, 96, high, low]),
        external_ips: Vec::new(),
        load_balancer_ips: vec![IpAddr::from([198, 51, high, low])],
        node_port: 0,
        internal_local: false,
        external_local: false,
        affinity_seconds: if number.is_multiple_of(7) { 60 } else { 0 },
        source_ranges: if number.is_multiple_of(5) {
            vec!["203.0.113.0/25".parse::<IpNet>().unwrap()]
        } else {
            Vec::new()
        },
        has_any: count > 0,
        cluster: (0..count).map(endpoint).collect(),
        local: Vec::new(),
        on_node: Vec::new(),
        serving: Vec::new(),
    };
    [vec![port], Vec::new()]
}

fn name(number: u16) -> ServiceName {
    ServiceName::new("ns", &format!("s{number}"))
}

struct Stage {
    programmer: Programmer,
    script: Script,
    now: Instant,
}

impl Stage {
    /// A programmer over what the kernel has.
    fn open() -> Self {
        let script = Script::default();
        let tables = Flaky { kernel: Netlink::open().unwrap(), script: script.clone() };
        let mut programmer = Programmer::open(Box::new(tables), options()).unwrap();
        let now = Instant::now();
        programmer.node(node(), now);
        programmer.addresses(&["192.0.2.1".parse().unwrap()], now);
        Self { programmer, script, now }
    }

    fn set(&mut self, number: u16, from: u16, count: u16) {
        self.programmer.set(&name(number), ports(number, from, count), self.now);
    }

    fn whole(&mut self) -> Vec<Synced> {
        self.programmer.whole(self.now);
        self.programmer.sync(self.now)
    }

    fn sync(&mut self) -> Outcome {
        let all = self.programmer.sync(self.now);
        let of_v4 = all.into_iter().find(|synced| synced.family == Family::V4).expect("IPv4 was synced");
        of_v4.result.unwrap()
    }

    fn later(&mut self, by: Duration) -> Vec<Synced> {
        self.now += by;
        self.programmer.tick(self.now)
    }

    /// What the kernel has is what is planned, chains and rules as well.
    fn assert_exact(&mut self) {
        for (family, difference) in self.programmer.differences().unwrap() {
            assert!(difference.is_nothing(), "{family}: {difference:?}");
        }
    }
}

fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().expect("the program nft (package nftables)");
    assert!(output.status.success(), "nft {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_kernel_is_asked_for_everything_before_anything_stays() {
    in_namespace("rehearsal", || {
        let stage = Stage::open();
        assert_eq!(stage.script.commits(), 2, "one rehearsal for each family");
        assert_eq!(nft(&["list", "tables"]), "", "nothing of them stays");
    });
}

#[test]
fn a_kernel_that_lacks_something_is_told_of_and_gets_nothing() {
    in_namespace("unsupported", || {
        let script = Script::default();
        // All is well in IPv4.
        script.next(&[Fault::None, Fault::Unsupported]);
        let tables = Flaky { kernel: Netlink::open().unwrap(), script };
        let error = Programmer::open(Box::new(tables), options()).unwrap_err();
        assert_eq!(error.kind(), crate::nft::kernel::Kind::Fatal);
        assert!(error.to_string().contains("this kernel has no numgen"), "{error}");
        assert_eq!(nft(&["list", "tables"]), "");
    });
}

#[test]
fn case_16_there_are_no_rules_until_the_state_is_whole() {
    in_namespace("whole", || {
        let mut stage = Stage::open();
        stage.set(1, 0, 3);
        assert!(stage.programmer.sync(stage.now).is_empty());
        assert!(stage.later(LOOK * 2).is_empty());
        assert_eq!(nft(&["list", "tables"]), "");
        assert_eq!(stage.whole().len(), 2);
        assert!(nft(&["list", "map", "ip", "keelson", "cluster-ip-ports"]).contains("10.96.0.1 . tcp . 80"));
        stage.assert_exact();
    });
}

#[test]
fn case_56_no_change_is_no_operation_and_one_endpoint_is_a_few() {
    in_namespace("few", || {
        let mut stage = Stage::open();
        for number in 0..200 {
            stage.set(number, 0, 10);
        }
        stage.whole();
        let commits = stage.script.commits();
        stage.set(11, 0, 10);
        let nothing = stage.sync();
        assert!(nothing.is_nothing() && nothing.transactions == 0, "{nothing:?}");
        assert_eq!(stage.script.commits(), commits);

        stage.set(11, 0, 9);
        let one = stage.sync();
        // Its slot, how many there are for traffic from inside, and how many for traffic from outside; and a chain for nine.
        assert_eq!((one.transactions, one.added, one.deleted, one.structure), (1, 2, 3, 1), "{one:?}");
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
    in_namespace("chains", || {
        let chains = || nft(&["list", "chains", "ip"]).matches("chain ").count();
        let mut stage = Stage::open();
        // Ten, among which is every count with affinity and without.
        (0..9).chain([14]).for_each(|number| stage.set(number, 0, 1 + number % 3));
        stage.whole();
        let few = chains();
        (0..10_000).for_each(|number| stage.set(number, 0, 1 + number % 3));
        let many = stage.sync();
        assert!(many.added > 50_000, "{many:?}");
        assert_eq!(chains(), few);
        assert_eq!(stage.programmer.side(Family::V4).programme.chains(), few);
        stage.assert_exact();
    });
}

#[test]
fn a_large_load_is_several_transactions_and_exact() {
    in_namespace("large", || {
        let mut stage = Stage::open();
        (0..3_000).for_each(|number| stage.set(number, 0, 1 + number % 3));
        let outcome = stage.whole().remove(0).result.unwrap();
        let elements: usize = SetName::ALL
            .iter()
            .map(|&set| stage.programmer.side(Family::V4).programme.plan().counts().elements(set))
            .sum();
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
    in_namespace("restart", || {
        let mut stage = Stage::open();
        (0..50).for_each(|number| stage.set(number, 0, 4));
        stage.whole();
        // Removals make places that a fresh start would fill otherwise.
        stage.set(3, 1, 3);
        stage.set(14, 2, 2);
        stage.sync();
        let before = nft(&["list", "ruleset"]);
        drop(stage);

        let mut again = Stage::open();
        assert_eq!(again.script.commits(), 0, "nothing is rehearsed beside rules that are in use");
        (0..50).filter(|number| ![3, 14].contains(number)).for_each(|number| again.set(number, 0, 4));
        again.set(3, 1, 3);
        again.set(14, 2, 2);
        let outcomes: Vec<Outcome> = again.whole().into_iter().map(|synced| synced.result.unwrap()).collect();
        assert!(
            outcomes.iter().all(|outcome| outcome.full && outcome.is_nothing() && !outcome.mended),
            "{outcomes:?}"
        );
        assert_eq!(nft(&["list", "ruleset"]), before);

        let mut third = Stage::open();
        (0..49).filter(|number| ![3, 14].contains(number)).for_each(|number| third.set(number, 0, 4));
        third.set(3, 1, 3);
        third.set(14, 2, 2);
        let outcome = third.whole().remove(0).result.unwrap();
        // Service 49 has affinity: a number in two maps and V, four places with an endpoint each, W, and its address.
        assert_eq!((outcome.added, outcome.structure), (0, 0), "{outcome:?}");
        assert_eq!(outcome.deleted, 13, "{outcome:?}");
        third.assert_exact();
    });
}

#[test]
fn case_58_endpoints_that_come_back_find_their_chain() {
    in_namespace("emptied", || {
        let mut stage = Stage::open();
        stage.set(1, 0, 5);
        stage.whole();
        stage.set(1, 0, 0);
        stage.sync();
        stage.set(1, 0, 5);
        assert_eq!(stage.sync().structure, 0, "the chain was still there");
        stage.assert_exact();
        // A chain that nobody needs rests for a minute.
        stage.set(1, 0, 0);
        stage.sync();
        stage.later(LOOK);
        assert!(nft(&["list", "chains", "ip"]).contains("chain lb-5"));
        stage.later(crate::nft::programme::CHAIN_REST);
        assert!(!nft(&["list", "chains", "ip"]).contains("chain lb-5"));
        stage.assert_exact();
        assert!(stage.later(LOOK).iter().all(|synced| synced.result.as_ref().is_ok_and(Outcome::is_nothing)));
    });
}

#[test]
fn what_passes_is_tried_again_at_once() {
    in_namespace("passing", || {
        let mut stage = Stage::open();
        stage.set(1, 0, 5);
        stage.whole();
        for errno in [Errno::ENOBUFS, Errno::EAGAIN, Errno::EINTR] {
            stage.script.next(&[Fault::Refused(errno), Fault::Refused(errno)]);
            stage.set(1, errno as u16, 5);
            let outcome = stage.sync();
            assert!(!outcome.full && outcome.transactions == 1, "{errno}: {outcome:?}");
            stage.assert_exact();
        }
    });
}

#[test]
fn what_is_not_as_we_think_is_compared_at_once() {
    in_namespace("resync", || {
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set(number, 0, 5));
        stage.whole();
        for (step, fault) in [Fault::Refused(Errno::EEXIST), Fault::Refused(Errno::ENOENT), Fault::Lost]
            .into_iter()
            .enumerate()
        {
            stage.script.next(&[fault]);
            stage.set(1, 100 * (1 + step as u16), 5);
            let outcome = stage.sync();
            assert!(outcome.full, "{outcome:?}");
            stage.assert_exact();
        }
    });
}

#[test]
fn case_59_a_failure_is_tried_again_as_a_full_sync() {
    in_namespace("failure", || {
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set(number, 0, 5));
        stage.whole();
        stage.script.next(&[Fault::Refused(Errno::ENOSPC), Fault::Refused(Errno::ENOMEM)]);
        stage.set(1, 100, 5);
        let failed = stage.programmer.sync(stage.now);
        assert!(failed[0].result.is_err() && failed[0].family == Family::V4, "{failed:?}");
        assert!(failed[1].result.is_ok(), "the other family goes on: {failed:?}");
        let side = stage.programmer.side(Family::V4);
        assert_eq!(side.failure.as_ref().unwrap().times, 1);
        assert!(side.pending.is_some());
        // Not before its time, whatever else comes.
        stage.set(2, 100, 5);
        assert!(stage.programmer.sync(stage.now).iter().all(|synced| synced.family == Family::V6));
        let second = stage.later(FIRST_PAUSE);
        assert!(second.iter().any(|synced| synced.result.is_err()));
        let third = stage.later(FIRST_PAUSE * 2);
        let outcome =
            third.iter().find(|synced| synced.family == Family::V4).unwrap().result.as_ref().unwrap();
        assert!(outcome.full, "{outcome:?}");
        let side = stage.programmer.side(Family::V4);
        assert!(side.failure.is_none() && side.pending.is_none() && side.tally.failures == 2);
        stage.assert_exact();
    });
}

#[test]
fn what_somebody_else_changed_is_mended_within_thirty_seconds() {
    in_namespace("mended", || {
        let mut stage = Stage::open();
        (0..60).for_each(|number| stage.set(number, 0, 3));
        stage.whole();
        for command in [
            &["delete", "element", "ip", "keelson", "cluster-ip-ports", "{ 10.96.0.9 . tcp . 80 }"][..],
            &["add", "element", "ip", "keelson", "cluster-ips", "{ 192.0.2.77 }"],
            &["flush", "chain", "ip", "keelson", "services"],
            &["insert", "rule", "ip", "keelson", "services", "drop"],
            &["flush", "map", "ip", "keelson", "slots"],
            &["add", "chain", "ip", "keelson", "mine"],
            &["add", "set", "ip", "keelson", "mine", "{ type ipv4_addr; }"],
            &["delete", "table", "ip", "keelson"],
            &["flush", "ruleset"],
        ] {
            nft(command);
            let mut mended = 0;
            for _ in 0..3 {
                let synced = stage.later(LOOK);
                mended += synced
                    .iter()
                    .filter(|synced| synced.result.as_ref().is_ok_and(|outcome| outcome.mended))
                    .count();
            }
            assert!(mended > 0, "{command:?}");
            stage.assert_exact();
        }
        // Ours alone: nothing to read.
        stage.set(1, 50, 3);
        stage.sync();
        let quiet = stage.later(LOOK);
        assert!(
            quiet.iter().all(|synced| !matches!(&synced.result, Ok(outcome) if outcome.full)),
            "{quiet:?}"
        );
    });
}

#[test]
fn tables_of_others_are_never_touched() {
    in_namespace("others", || {
        nft(&["add", "table", "ip", "mine"]);
        nft(&["add", "chain", "ip", "mine", "c", "{ type nat hook prerouting priority dstnat; }"]);
        nft(&["add", "table", "ip", "kube-proxy"]);
        let theirs = || nft(&["list", "table", "ip", "mine"]) + &nft(&["list", "table", "ip", "kube-proxy"]);
        let before = theirs();
        let mut stage = Stage::open();
        let found = strangers(stage.programmer.tables()).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].1.contains("kube-proxy"), "{found:?}");
        nft(&["add", "table", "ip6", "nat"]);
        nft(&["add", "chain", "ip6", "nat", "KUBE-SERVICES"]);
        let found = strangers(stage.programmer.tables()).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].0 == Family::V6 && found[1].1.contains("KUBE-SERVICES"), "{found:?}");
        nft(&["delete", "table", "ip6", "nat"]);
        stage.set(1, 0, 3);
        stage.whole();
        assert_eq!(theirs(), before);
        let removed = cleanup(stage.programmer.tables(), Leftovers::Keelson).unwrap();
        assert_eq!(removed, ["ip keelson", "ip6 keelson"]);
        assert_eq!(theirs(), before);
        assert_eq!(cleanup(stage.programmer.tables(), Leftovers::KubeProxy).unwrap(), ["ip kube-proxy"]);
        assert_eq!(nft(&["list", "tables"]), "table ip mine\n");
    });
}

#[test]
fn a_set_of_another_make_means_a_new_table_in_one_transaction() {
    in_namespace("rebuild", || {
        nft(&["add", "table", "ip", "keelson"]);
        nft(&["add", "map", "ip", "keelson", "slots", "{ type ipv4_addr : ipv4_addr; }"]);
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set(number, 0, 3));
        let outcome = stage.whole().remove(0).result.unwrap();
        assert_eq!(outcome.transactions, 1, "{outcome:?}");
        stage.assert_exact();
    });
}

#[test]
fn settings_that_change_rules_change_rules_alone() {
    in_namespace("settings", || {
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set(number, 0, 3));
        stage.whole();
        // From now on at all addresses: the rules are others, and one address goes from its set.
        stage.programmer.node(NodeInfo { i_ps: None, ..node() }, stage.now);
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
fn pod_networks_that_are_not_known_yet_are_waited_for() {
    in_namespace("podcidr", || {
        let tables = Flaky { kernel: Netlink::open().unwrap(), script: Script::default() };
        let options = Options { detect_local: DetectLocal::NodeCidr, ..options() };
        let mut programmer = Programmer::open(Box::new(tables), options).unwrap();
        let now = Instant::now();
        programmer.node(node(), now);
        programmer.set(&name(1), ports(1, 0, 2), now);
        programmer.whole(now);
        assert!(programmer.waits_for_pod_cidrs());
        assert!(programmer.sync(now).is_empty());
        programmer.node(NodeInfo { pod_cid_rs: vec!["10.244.3.0/24".into()], ..node() }, now);
        assert!(!programmer.waits_for_pod_cidrs());
        assert_eq!(programmer.sync(now).len(), 2);
        assert!(nft(&["list", "chain", "ip", "keelson", "internal"]).contains("ip saddr != 10.244.3.0/24"));
    });
}
