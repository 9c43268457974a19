//! What other programs change, in our tables and beside them.

use super::*;
use crate::{
    nft::strangers::strangers,
    once::{Leftovers, cleanup},
};

#[test]
fn what_somebody_else_changed_is_repaired_within_thirty_seconds() {
    in_namespace("repaired", || {
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
            let mut repaired = 0;
            for _ in 0..3 {
                let synced = stage.later(LOOK);
                repaired += synced
                    .iter()
                    .filter(|synced| synced.result.as_ref().is_ok_and(|outcome| outcome.repaired))
                    .count();
            }
            assert!(repaired > 0, "{command:?}");
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

/// P2: what was read for a check may be older than the table.
#[test]
fn p2_changes_go_on_while_a_table_is_read_for_a_check() {
    in_namespace("check", || {
        let mut stage = Stage::open();
        (0..60).for_each(|number| stage.set(number, 0, 3));
        stage.whole();
        nft(&["add", "table", "ip", "mine"]);
        stage.now += READ;
        assert!(stage.programmer.begin_checks(stage.now).contains(&Family::V4));
        let seen = kernel().read(Family::V4).unwrap();
        assert!(seen.as_ref().unwrap().is_complete());
        // Elements of every kind come, go and are replaced, of intervals too; and chains come.
        (0..15).for_each(|number| stage.set(number, 40, 5));
        (15..20).for_each(|number| stage.set(number, 0, 0));
        assert!(matches!(stage.programmer.check(Family::V4, seen.clone(), stage.now), Check::Postponed(_)));
        assert!(!stage.sync().full);
        let commits = stage.script.commits();
        assert!(stage.check(Family::V4, seen.clone()).is_none(), "no difference is drift");
        assert_eq!(stage.script.commits(), commits);
        // Drift beside such differences is found, and nothing else is done.
        nft(&["delete", "element", "ip", "keelson", "cluster-ip-ports", "{ 10.96.0.30 . tcp . 80 }"]);
        nft(&["add", "element", "ip", "keelson", "cluster-ips", "{ 192.0.2.77 }"]);
        let later = kernel().read(Family::V4).unwrap().unwrap();
        let repaired = stage.check(Family::V4, seen.map(|_| later)).expect("drift").result.unwrap();
        let expected =
            Outcome { repaired: true, transactions: 1, added: 1, deleted: 1, ..Outcome::default() };
        assert_eq!(repaired, expected);
        stage.assert_exact();
        let tally = &stage.programmer.side(Family::V4).tally;
        assert_eq!(
            (tally.full, tally.repaired, tally.failures),
            (1, 1, 0),
            "only the first sync compared everything"
        );
    });
}

/// P2: a program that commits all the time stops neither reading nor changing, and what it does is no drift.
#[test]
fn p2_reading_and_changing_go_on_beside_a_program_that_commits_all_the_time() {
    in_namespace("noisy", || {
        let mut stage = Stage::open();
        (0..10_000).for_each(|number| stage.set(number, 0, 10));
        stage.whole();
        let before = kernel().generation().unwrap();
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let noise = {
            let stop = stop.clone();
            // A thread is in the namespace of the one that starts it.
            std::thread::spawn(move || {
                let mut commits = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    nft(&["add table ip mine; add chain ip mine c; delete chain ip mine c"]);
                    commits += 1;
                }
                commits
            })
        };
        while kernel().generation().unwrap() == before {
            std::thread::yield_now();
        }
        for round in 0..3 {
            stage.now += READ;
            assert_eq!(stage.programmer.begin_checks(stage.now), Family::ALL);
            let seen = kernel().read(Family::V4).unwrap();
            assert!(seen.as_ref().unwrap().is_complete());
            stage.set(round, 50, 10);
            assert!(!stage.sync().full);
            assert!(stage.check(Family::V4, seen).is_none());
        }
        let (read, differences) =
            (kernel().read(Family::V4).unwrap(), stage.programmer.differences().unwrap());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(noise.join().unwrap() > 10);
        assert!(read.unwrap().is_complete());
        assert!(differences.iter().all(|(_, difference)| difference.is_nothing()));
        let side = stage.programmer.side(Family::V4);
        assert_eq!((side.tally.full, side.tally.repaired, side.tally.failures), (1, 0, 0));
    });
}

/// P2: checks do not keep a chain that nothing leads to.
#[test]
fn p2_a_chain_rests_on_through_checks() {
    in_namespace("rests", || {
        let mut stage = Stage::open();
        stage.set(1, 0, 70);
        stage.whole();
        stage.set(1, 0, 0);
        stage.sync();
        for _ in 0..=(crate::nft::programme::CHAIN_REST.as_secs() / READ.as_secs()) {
            nft(&["add", "table", "ip", "mine"]);
            stage.later(READ);
        }
        assert!(!nft(&["list", "chains", "ip"]).contains("chain lb-70"));
        stage.assert_exact();
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
        let found = strangers(&mut kernel()).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].1.contains("kube-proxy"), "{found:?}");
        nft(&["add", "table", "ip6", "nat"]);
        nft(&["add", "chain", "ip6", "nat", "KUBE-SERVICES"]);
        let found = strangers(&mut kernel()).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].0 == Family::V6 && found[1].1.contains("KUBE-SERVICES"), "{found:?}");
        nft(&["delete", "table", "ip6", "nat"]);
        stage.set(1, 0, 3);
        stage.whole();
        assert_eq!(theirs(), before);
        let removed = |whose| {
            let mut names = Vec::new();
            cleanup(&mut kernel(), whose, |name| names.push(name)).unwrap();
            names
        };
        assert_eq!(removed(Leftovers::Keelson), ["ip keelson", "ip6 keelson"]);
        assert_eq!(theirs(), before);
        assert_eq!(removed(Leftovers::KubeProxy), ["ip kube-proxy"]);
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
