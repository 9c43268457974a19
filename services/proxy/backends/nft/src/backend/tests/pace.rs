//! P14: commits of a burst.

use super::*;

#[test]
fn p14_a_burst_is_batched_and_a_single_change_commits_at_once() {
    in_namespace(|| {
        let period = Duration::from_secs(1);
        let mut stage = Stage::with(Options { min_sync_period: period, ..options() });
        (0..20).for_each(|number| stage.set(number, 0, 2));
        assert_eq!(stage.begin().len(), 2);
        let after_start = stage.script.commits();
        // A hundred changes a second for ten seconds; the transactions take some of the time.
        let mut deferred = 0;
        for change in 0_u16..1_000 {
            stage.set(change % 20, 1 + change, 2);
            stage.sync_loop.sync(stage.now);
            deferred += usize::from(stage.sync_loop.due().is_some());
            assert_eq!(stage.sync_loop.due().is_some(), !stage.sync_loop.is_current(), "change {change}");
            stage.now += period / 100;
        }
        let commits = stage.script.commits() - after_start;
        assert!((15..=20).contains(&commits), "{commits} commits");
        assert!(deferred > 900, "{deferred} changes waited");
        // Pending changes are committed when due, as the newest state.
        let due = stage.sync_loop.due().unwrap();
        stage.now = due;
        assert!(stage.sync_loop.sync(due).iter().any(|synced| synced.family == Family::V4));
        assert!(stage.sync_loop.is_current() && stage.sync_loop.due().is_none());
        stage.assert_exact();
        // After a quiet time the first change does not wait.
        stage.now += period * 20;
        stage.set(3, 7, 2);
        assert_eq!(stage.sync().transactions, 1);
    });
}

/// P14: a tick that deletes chains must not lose changes that wait for the pace.
#[test]
fn p14_deferred_changes_survive_a_tick() {
    in_namespace(|| {
        let mut stage = Stage::with(Options { min_sync_period: Duration::from_secs(3600), ..options() });
        stage.set(1, 0, 40);
        stage.begin();
        stage.set(1, 0, 5);
        stage.sync();
        stage.now += UNUSED_CHAIN_TTL;
        for change in 0..30 {
            stage.set(1, change, 5);
            stage.sync_loop.sync(stage.now);
        }
        assert!(stage.sync_loop.due().is_some());
        stage.sync_loop.tick(stage.now);
        let due = stage.sync_loop.due().expect("the changes still wait");
        stage.now = due;
        stage.sync_loop.sync(due);
        assert!(stage.sync_loop.is_current());
        stage.assert_exact();
    });
}
