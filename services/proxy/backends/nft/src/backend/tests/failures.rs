//! Transactions that the kernel rejects.

use super::*;
use crate::table::MAINTENANCE_RETRY;

#[test]
fn transient_errors_are_retried_at_once() {
    in_namespace(|| {
        let mut stage = Stage::programmed(1..2, 5);
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
fn unexpected_errors_start_a_full_sync_at_once() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..20, 5);
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
fn case_59_a_failure_is_retried_as_a_full_sync() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..20, 5);
        stage.script.next(&[Fault::Refused(Errno::ENOSPC), Fault::Refused(Errno::ENOMEM)]);
        stage.set(1, 100, 5);
        let failed = stage.sync_loop.sync(stage.now);
        assert!(failed[0].result.is_err() && failed[0].family == Family::V4, "{failed:?}");
        assert!(failed[1].result.is_ok(), "the other family continues: {failed:?}");
        let status = stage.sync_loop.family(Family::V4);
        assert_eq!(status.failure.as_ref().unwrap().times, 1);
        assert!(status.pending.is_some());
        // Not before the retry is due, whatever else changes.
        stage.set(2, 100, 5);
        assert!(stage.sync_loop.sync(stage.now).iter().all(|synced| synced.family == Family::V6));
        let second = stage.later(FIRST_PAUSE);
        assert!(second.iter().any(|synced| synced.result.is_err()));
        let third = stage.later(FIRST_PAUSE * 2);
        let outcome =
            third.iter().find(|synced| synced.family == Family::V4).unwrap().result.as_ref().unwrap();
        assert!(outcome.full, "{outcome:?}");
        let status = stage.sync_loop.family(Family::V4);
        assert!(status.failure.is_none() && status.pending.is_none() && status.totals.failures == 2);
        stage.assert_exact();
    });
}

/// P2: a failed read for a check is no failed sync, and is retried.
#[test]
fn p2_a_check_that_cannot_read_the_table_delays_no_change() {
    in_namespace(|| {
        let mut stage = Stage::programmed(0..20, 5);
        nft(&["delete", "element", "ip", "keelson", "cluster-ip-ports", "{ 10.96.0.9 . tcp . 80 }"]);
        stage.script.next(&[Fault::Unread]);
        assert!(stage.later(READ_INTERVAL).iter().all(|synced| synced.family != Family::V4));
        let status = stage.sync_loop.family(Family::V4);
        assert!(status.failure.is_none() && status.totals.failures == 0, "{status:?}");
        assert_eq!(status.unchecked.as_ref().map(|unchecked| unchecked.times), Some(1));
        stage.set(1, 100, 5);
        assert!(!stage.sync().full);
        let repaired = stage.later(READ_INTERVAL);
        assert!(repaired.iter().any(|synced| synced.result.as_ref().is_ok_and(|outcome| outcome.repaired)));
        assert!(stage.sync_loop.family(Family::V4).unchecked.is_none());
        stage.assert_exact();
    });
}

/// P21: only drift counts as repaired.
#[test]
fn p21_a_retry_of_our_own_changes_repairs_nothing() {
    in_namespace(|| {
        let mut stage = Stage::programmed(1..2, 5);
        stage.script.next(&[Fault::Refused(Errno::ENOSPC)]);
        stage.set(1, 100, 5);
        assert!(stage.sync_loop.sync(stage.now).iter().any(|synced| synced.result.is_err()));
        let retried = stage.later(FIRST_PAUSE);
        let outcome = retried.iter().find(|synced| synced.family == Family::V4).unwrap().result.as_ref();
        assert!(outcome.is_ok_and(|outcome| outcome.full && !outcome.repaired), "{retried:?}");
        assert_eq!(stage.sync_loop.family(Family::V4).totals.repaired, 0);
    });
}

/// A chain that the kernel refuses to delete is reported as a failure and followed by one full sync, not by one per
/// second.
#[test]
fn refused_chain_deletions_are_reported_and_checks_continue() {
    in_namespace(|| {
        let mut stage = Stage::programmed(1..2, 40);
        stage.set(1, 0, 5);
        stage.sync();
        stage.script.next(&[Fault::Refused(Errno::ENOSPC)]);
        let failed = stage.later(UNUSED_CHAIN_TTL);
        assert!(failed.iter().any(|synced| synced.result.is_err()), "{failed:?}");
        let full = |stage: &Stage| stage.sync_loop.family(Family::V4).totals.full;
        let before = full(&stage);
        stage.later(FIRST_PAUSE);
        assert_eq!(full(&stage), before + 1);
        (0..60).for_each(|_| drop(stage.later(FIRST_PAUSE)));
        assert_eq!(full(&stage), before + 1, "it is left alone for a while");
        assert!(stage.sync_loop.is_current());
        stage.later(MAINTENANCE_RETRY);
        stage.assert_exact();
    });
}
