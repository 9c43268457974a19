//! Changes by other programs, in our tables and in theirs.

use super::*;
use crate::driver::remove_tables;
use keelson_proxy::backend::RuleOwner;

#[test]
fn drift_is_repaired_within_30_seconds() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..60, 3);
        for command in [
            &["delete", "element", "ip", "keelson", "cluster-ip-ports", "{ 10.96.0.9 . tcp . 80 }"][..],
            &["add", "element", "ip", "keelson", "cluster-ips", "{ 192.0.2.77 }"],
            &["flush", "chain", "ip", "keelson", "services"],
            &["insert", "rule", "ip", "keelson", "services", "drop"],
            &["flush", "map", "ip", "keelson", "slots"],
            &["add", "chain", "ip", "keelson", "mine"],
            &["add", "set", "ip", "keelson", "mine", "{ type ipv4_addr; }"],
            &["delete", "table", "ip", "keelson"],
            &["delete table ip keelson; add table ip keelson"],
            &["flush", "ruleset"],
        ] {
            nft(command);
            let mut repaired = 0;
            for _ in 0..3 {
                let synced = stage.later(CHECK_INTERVAL);
                repaired += synced
                    .iter()
                    .filter(|synced| synced.result.as_ref().is_ok_and(|outcome| outcome.repaired))
                    .count();
            }
            assert!(repaired > 0, "{command:?}");
            stage.assert_exact();
        }
        // Only our own commits: nothing to read.
        stage.set(1, 50, 3);
        stage.sync();
        let quiet = stage.later(CHECK_INTERVAL);
        assert!(
            quiet.iter().all(|synced| !matches!(&synced.result, Ok(outcome) if outcome.full)),
            "{quiet:?}"
        );
    });
}

/// What was read for a check may be older than the table.
#[test]
fn p2_changes_continue_while_a_check_reads_the_table() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..60, 3);
        nft(&["add", "table", "ip", "mine"]);
        stage.now += READ_INTERVAL;
        assert!(stage.sync_loop.begin_checks(stage.now).contains(&Family::V4));
        assert!(kernel().read(Family::V4).unwrap().unwrap().is_complete());
        stage.observer.read(Family::V4).unwrap();
        // Elements of every kind are added, deleted and replaced, intervals too; and chains are added.
        (0..15).for_each(|number| stage.set(number, 40, 5));
        (15..20).for_each(|number| stage.set(number, 0, 0));
        assert!(matches!(stage.sync_loop.check(Family::V4, stage.now), Checked::Postponed));
        assert!(!stage.sync().full);
        let commits = stage.script.commits();
        assert!(stage.check(Family::V4).is_none(), "no difference is drift");
        assert_eq!(stage.script.commits(), commits);
        // Drift among such differences is found, and nothing else is changed.
        nft(&["delete", "element", "ip", "keelson", "cluster-ip-ports", "{ 10.96.0.30 . tcp . 80 }"]);
        nft(&["add", "element", "ip", "keelson", "cluster-ips", "{ 192.0.2.77 }"]);
        stage.observer.read(Family::V4).unwrap();
        let repaired = stage.check(Family::V4).expect("drift").result.unwrap();
        let expected =
            Outcome { repaired: true, transactions: 1, added: 1, deleted: 1, ..Outcome::default() };
        assert_eq!(repaired, expected);
        stage.assert_exact();
        let tally = &stage.sync_loop.family(Family::V4).totals;
        assert_eq!(
            (tally.full, tally.repaired, tally.failures),
            (1, 1, 0),
            "only the first sync compared everything"
        );
    });
}

#[test]
fn p2_reads_and_changes_continue_while_a_program_commits_all_the_time() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..10_000, 10);
        let before = kernel().generation().unwrap();
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let noise = {
            let stop = stop.clone();
            // A new thread is in the namespace of its parent.
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
            stage.now += READ_INTERVAL;
            assert_eq!(stage.sync_loop.begin_checks(stage.now), Family::ALL);
            assert!(kernel().read(Family::V4).unwrap().unwrap().is_complete());
            stage.observer.read(Family::V4).unwrap();
            stage.set(round, 50, 10);
            assert!(!stage.sync().full);
            assert!(stage.check(Family::V4).is_none());
        }
        let (read, differences) = (kernel().read(Family::V4).unwrap(), differences(&mut stage.sync_loop));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(noise.join().unwrap() > 10);
        assert!(read.unwrap().is_complete());
        assert_eq!(differences, [""; 0]);
        let status = stage.sync_loop.family(Family::V4);
        assert_eq!((status.totals.full, status.totals.repaired, status.totals.failures), (1, 0, 0));
    });
}

#[test]
fn p2_checks_do_not_reset_the_age_of_unused_chains() {
    in_namespace(|| {
        let mut stage = Stage::programmed(1..2, 70);
        stage.set(1, 0, 0);
        stage.sync();
        for _ in 0..=(UNUSED_CHAIN_TTL.as_secs() / READ_INTERVAL.as_secs()) {
            nft(&["add", "table", "ip", "mine"]);
            stage.later(READ_INTERVAL);
        }
        assert!(!nft(&["list", "chains", "ip"]).contains("chain lb-70"));
        stage.assert_exact();
    });
}

#[test]
fn unused_chains_that_another_program_changed_are_repaired_before_they_are_used_again() {
    in_namespace(|| {
        // Service 7 has affinity.
        let mut stage = Stage::programmed(6..8, 70);
        let chains_of_70 = || {
            let listed = nft(&["list", "chains", "ip"]);
            let names =
                listed.lines().filter_map(|line| line.trim().strip_prefix("chain ")?.strip_suffix(" {"));
            names.filter(|name| name.contains("70")).map(str::to_owned).collect::<Vec<_>>()
        };
        let rules =
            || chains_of_70().iter().map(|name| nft(&["list", "chain", "ip", "keelson", name])).collect();
        let before: Vec<String> = rules();
        assert!(before.len() >= 4, "{before:?}");
        (6..8).for_each(|number| stage.set(number, 0, 0));
        stage.sync();
        chains_of_70().iter().for_each(|name| drop(nft(&["flush", "chain", "ip", "keelson", name])));
        let companion = chains_of_70().into_iter().find(|name| name.starts_with("affinity-new")).unwrap();
        nft(&["delete", "chain", "ip", "keelson", &companion]);
        let synced = stage.later(READ_INTERVAL);
        assert!(synced.iter().any(|synced| synced.result.as_ref().is_ok_and(|outcome| outcome.repaired)));
        assert_eq!(rules(), before);
        stage.assert_exact();
    });
}

#[test]
fn foreign_tables_are_never_changed() {
    in_namespace(|| {
        nft(&["add", "table", "ip", "mine"]);
        nft(&["add", "chain", "ip", "mine", "c", "{ type nat hook prerouting priority dstnat; }"]);
        nft(&["add", "table", "ip", "kube-proxy"]);
        let theirs = || nft(&["list", "table", "ip", "mine"]) + &nft(&["list", "table", "ip", "kube-proxy"]);
        let before = theirs();
        let mut stage = Stage::open();
        let found = kube_proxy::found(&mut kernel()).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].1.contains("kube-proxy"), "{found:?}");
        nft(&["add", "table", "ip6", "nat"]);
        nft(&["add", "chain", "ip6", "nat", "KUBE-SERVICES"]);
        let found = kube_proxy::found(&mut kernel()).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].0 == Family::V6 && found[1].1.contains("KUBE-SERVICES"), "{found:?}");
        nft(&["delete", "table", "ip6", "nat"]);
        stage.set(1, 0, 3);
        stage.begin();
        assert_eq!(theirs(), before);
        let removed = |owner| {
            let mut names = Vec::new();
            remove_tables(&mut kernel(), owner, &mut |name| names.push(name)).unwrap();
            names
        };
        assert_eq!(removed(RuleOwner::Keelson), ["table ip keelson", "table ip6 keelson"]);
        assert_eq!(theirs(), before);
        assert_eq!(removed(RuleOwner::KubeProxy), ["table ip kube-proxy"]);
        assert_eq!(nft(&["list", "tables"]), "table ip mine\n");
    });
}

#[test]
fn a_set_of_another_type_recreates_the_table_in_one_transaction() {
    in_namespace(|| {
        nft(&["add", "table", "ip", "keelson"]);
        nft(&["add", "map", "ip", "keelson", "slots", "{ type ipv4_addr : ipv4_addr; }"]);
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set(number, 0, 3));
        let outcome = stage.begin().remove(0).result.unwrap();
        assert_eq!(outcome.transactions, 1, "{outcome:?}");
        stage.assert_exact();
    });
}
