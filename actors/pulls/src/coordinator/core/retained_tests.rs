//! Retained content (I1): what is retained, how much of it, and when it is released.

use keelson_actor_system::file_system::FileSystem;
use keelson_proto::Code;

use super::{
    Effect, FailureClass, Policy, PullEvent, ReleaseReason,
    testing::{Bench, fails, image, lost, ok, percent_free, reading, seconds},
};
use crate::{
    request::PullId,
    runtime::Phase,
    runtime::{RuntimeCommand, RuntimeEvent},
};

const CUT: &str = "failed to copy: read tcp: connection reset by peer";
const FULL: &str = "failed to copy: write /var/lib/c/ingest/data: no space left on device";

fn policy() -> Policy {
    Policy { limit: 0, runtime_retries: 0, stall_timeout: None, ..Policy::default() }
}

fn fail(bench: &mut Bench, name: &str, bytes: u64, code: Code, text: &str) {
    let pull = begin(bench, name, bytes);
    bench.finish(pull, fails(code, text));
}

fn begin(bench: &mut Bench, name: &str, bytes: u64) -> PullId {
    let (_, pull) = bench.request(image(name));
    if bytes > 0 {
        bench.progress(pull, reading(Phase::Downloading, bytes));
    }
    pull
}

fn reasons(bench: &Bench) -> Vec<ReleaseReason> {
    bench.released.iter().map(|release| release.reason).collect()
}

fn retained(bench: &Bench) -> (usize, u64) {
    (bench.core.kept_leases(), bench.core.retained_bytes())
}

/// The answer to the newest retention.
fn measured(bench: &mut Bench, bytes: Option<u64>) {
    let newest = bench.core.kept.iter().max_by_key(|(_, kept)| kept.until);
    let (lease, until) = newest.map(|(lease, kept)| (lease.clone(), kept.until)).expect("retained");
    bench.event(RuntimeEvent::LeaseMeasured { lease, until, bytes });
}

fn measures(bench: &Bench) -> usize {
    bench
        .last
        .iter()
        .filter(|effect| matches!(effect, Effect::Runtime(RuntimeCommand::MeasureLease { .. })))
        .count()
}

fn checks_space(bench: &Bench) -> bool {
    bench.last.iter().any(|effect| matches!(effect, Effect::Runtime(RuntimeCommand::CheckImageFs)))
}

/// I1.
#[test]
fn only_content_that_a_retry_can_use_is_retained() {
    use FailureClass as F;
    let cases = [
        (Code::Unknown, CUT, None),
        (Code::Unknown, "unexpected status code http://r/v2: 503 Service Unavailable", None),
        (Code::Unknown, "unexpected status from GET request to http://r/v2: 429 Too Many Requests", None),
        (Code::Unavailable, "the runtime is gone", None),
        (Code::Unknown, FULL, Some(F::NoSpace)),
        (
            Code::FailedPrecondition,
            "unexpected commit digest sha256:1, expected sha256:2",
            Some(F::BadContent),
        ),
        (Code::Unknown, "failed to extract layer sha256:1: archive/tar: invalid tar header", Some(F::Unpack)),
        (Code::Unknown, "pull access denied: insufficient_scope: authorization failed", Some(F::Denied)),
        (Code::NotFound, "r/a:1: not found", Some(F::NotFound)),
        (Code::InvalidArgument, "invalid reference format", Some(F::Invalid)),
        (Code::Unknown, "a text of a later version", Some(F::Unknown)),
    ];
    for (code, text, released) in cases {
        let mut bench = Bench::up(policy());
        fail(&mut bench, "r/a", 700, code, text);
        let kept = released.is_none();
        assert_eq!(retained(&bench), if kept { (1, 700) } else { (0, 0) }, "{text}");
        assert_eq!(
            (bench.journal.leases.len(), bench.dropped.len()),
            (usize::from(kept), usize::from(!kept))
        );
        assert_eq!(reasons(&bench), released.map(ReleaseReason::Failure).into_iter().collect::<Vec<_>>());
        assert_eq!((measures(&bench), checks_space(&bench)), (usize::from(kept), kept), "{text}");
        let needed = released == Some(F::NoSpace);
        assert_eq!(bench.collections, u32::from(needed), "collected at once where space is needed: {text}");
    }
}

const DENIED: &str = "pull access denied: insufficient_scope: authorization failed";

/// I1: a caller with wrong credentials neither releases the content that others have fetched nor extends its retention.
#[test]
fn a_denied_pull_leaves_retained_content_to_permitted_pulls() {
    let mut bench = Bench::up(Policy { progress_retention: seconds(100), ..policy() });
    fail(&mut bench, "r/a", 700, Code::Unknown, CUT);
    bench.pass(seconds(60));
    let wrong = bench.ask(image("r/a").auth("wrong"));
    bench.finish(bench.pull(wrong), fails(Code::Unknown, DENIED));
    assert_eq!((bench.core.kept_leases(), bench.released.len(), bench.dropped.len()), (1, 0, 0));
    bench.pass(seconds(39));
    assert_eq!(bench.core.kept_leases(), 1);
    bench.pass(seconds(2));
    assert_eq!((bench.core.kept_leases(), reasons(&bench)), (0, vec![ReleaseReason::Expired]));
}

/// I1.
#[test]
fn a_denied_pull_retains_for_one_that_failed_beside_it() {
    let mut bench = Bench::up(policy());
    let good = bench.ask(image("r/a").auth("good"));
    let wrong = bench.ask(image("r/a").auth("wrong"));
    let (good, wrong) = (bench.pull(good), bench.pull(wrong));
    bench.finish(good, fails(Code::Unknown, CUT));
    assert_eq!(bench.core.kept_leases(), 0, "the lease is still in use");
    bench.finish(wrong, fails(Code::Unknown, DENIED));
    assert_eq!((bench.core.kept_leases(), bench.released.len()), (1, 0));
    let again = bench.ask(image("r/a").auth("good"));
    bench.finish(bench.pull(again), ok());
    assert_eq!((bench.core.kept_leases(), bench.dropped.len()), (0, 1));
}

/// I1: as above for a pull that was running when the agent was killed, whose place is taken by a caller with wrong
/// credentials.
#[test]
fn a_denied_pull_retains_what_was_fetched_before_a_kill() {
    let mut bench = Bench::up(policy());
    let good = bench.ask(image("r/a").auth("good"));
    bench.progress(bench.pull(good), reading(Phase::Downloading, 700));
    let mut bench = bench.restart(policy());
    let wrong = bench.ask(image("r/a").auth("wrong"));
    assert_eq!(bench.pull(wrong), PullId(1), "the place of the killed one");
    bench.finish(bench.pull(wrong), fails(Code::Unknown, DENIED));
    assert_eq!((bench.core.kept_leases(), bench.released.len(), bench.dropped.len()), (1, 0, 0));
}

#[test]
fn a_stall_a_cancel_and_a_lost_runtime_retain() {
    let mut bench = Bench::up(Policy { stall_timeout: Some(seconds(60)), ..policy() });
    let pull = begin(&mut bench, "r/stalls", 10);
    bench.pass(seconds(60));
    bench.progress(pull, reading(Phase::Downloading, 10));
    let caller = bench.ask(image("r/left"));
    bench.leave(caller);
    bench.pass(seconds(10));
    let pull = begin(&mut bench, "r/lost", 30);
    bench.finish(pull, lost("EOF"));
    assert_eq!((retained(&bench), bench.released.len()), ((3, 40), 0));
}

/// I1.
#[test]
fn the_budget_releases_the_oldest_first() {
    let mut bench = Bench::up(Policy { retained_bytes_max: 1000, ..policy() });
    for (name, bytes) in [("r/1", 400), ("r/2", 300), ("r/3", 200)] {
        fail(&mut bench, name, bytes, Code::Unknown, CUT);
        bench.pass(seconds(1));
    }
    assert_eq!((retained(&bench), bench.released.len()), ((3, 900), 0));
    fail(&mut bench, "r/4", 600, Code::Unknown, CUT);
    let released: Vec<_> = bench.released.iter().map(|release| (&*release.image, release.bytes)).collect();
    assert_eq!(released, [("docker.io/r/1:latest", Some(400)), ("docker.io/r/2:latest", Some(300))]);
    assert_eq!((retained(&bench), reasons(&bench)), ((2, 800), vec![ReleaseReason::Budget; 2]));
    fail(&mut bench, "r/5", 0, Code::Unknown, CUT);
    assert_eq!(retained(&bench), (3, 800), "its size is not known yet");
    measured(&mut bench, Some(1001));
    assert_eq!(retained(&bench), (2, 800), "content larger than the budget releases no other");
}

#[test]
fn nothing_is_retained_with_a_budget_of_0() {
    let mut bench = Bench::up(Policy { retained_bytes_max: 0, ..policy() });
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    assert_eq!((retained(&bench), bench.dropped.len(), bench.released.len()), ((0, 0), 1, 0));
}

/// I1.
#[test]
fn an_empty_lease_is_released_once_it_is_measured() {
    let mut bench = Bench::up(policy());
    fail(&mut bench, "r/a", 0, Code::Unknown, CUT);
    let lease = bench.core.kept.keys().next().cloned().expect("retained");
    measured(&mut bench, None);
    assert_eq!(retained(&bench), (1, 0), "the runtime could not say");
    bench.pass(seconds(10));
    assert_eq!(measures(&bench), 1, "read again");
    measured(&mut bench, Some(0));
    assert_eq!((bench.dropped.clone(), reasons(&bench)), (vec![lease], vec![ReleaseReason::Empty]));
    assert_eq!((bench.journal.leases.len(), bench.core.next_tick()), (0, None));
}

#[test]
fn measurements_from_before_a_pull_used_the_lease_are_ignored() {
    let mut bench = Bench::up(policy());
    fail(&mut bench, "r/a", 0, Code::Unknown, CUT);
    let of_first = bench.core.kept.iter().next().map(|(lease, kept)| (lease.clone(), kept.until));
    let (lease, until) = of_first.expect("retained");
    let late = || RuntimeEvent::LeaseMeasured { lease: lease.clone(), until, bytes: Some(0) };
    bench.pass(seconds(1));
    let pull = begin(&mut bench, "r/a", 10);
    bench.event(late());
    assert!(bench.dropped.is_empty(), "a pull runs in it");
    bench.finish(pull, fails(Code::Unknown, CUT));
    bench.event(late());
    assert_eq!(retained(&bench), (1, 10), "it is retained again, with what that pull has fetched");
    let pull = begin(&mut bench, "r/a", 10);
    bench.finish(pull, ok());
    assert_eq!(bench.dropped, [lease]);
}

/// I1: before the kubelet's image garbage collection needs it.
#[test]
fn low_space_releases_everything_and_retains_nothing() {
    let bytes = percent_free;
    let inodes = |free| FileSystem { inodes_free: free, ..percent_free(100) };
    let uncounted = FileSystem { inodes: 0, inodes_free: 0, ..percent_free(100) };
    for (image_fs, low) in [
        (Some(bytes(20)), false),
        (Some(bytes(19)), true),
        (Some(bytes(0)), true),
        (Some(inodes(20)), false),
        (Some(inodes(19)), true),
        (Some(uncounted), false),
        (None, false),
    ] {
        let mut bench = Bench::up(policy());
        fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
        let running = begin(&mut bench, "r/b", 10);
        bench.event(RuntimeEvent::ImageFsRead(image_fs));
        let left = usize::from(!low);
        assert_eq!((bench.core.kept_leases(), bench.dropped.len()), (left, 1 - left), "{image_fs:?}");
        bench.finish(running, fails(Code::Unknown, CUT));
        assert_eq!((bench.core.kept_leases(), bench.dropped.len()), (2 * left, 2 - 2 * left), "{image_fs:?}");
        assert!(reasons(&bench).iter().all(|reason| *reason == ReleaseReason::LowSpace));
        assert_eq!(bench.collections, if low { 2 } else { 0 });
    }
}

/// I1: more often than the kubelet while anything is retained, so that the agent notices first that a disk fills up
/// quickly.
#[test]
fn free_space_is_read_while_content_is_retained_or_space_is_low() {
    let mut bench = Bench::up(policy());
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    for _ in 0..3 {
        bench.pass(seconds(2));
        assert!(checks_space(&bench));
    }
    bench.event(RuntimeEvent::ImageFsRead(Some(percent_free(5))));
    bench.pass(seconds(10));
    assert!(checks_space(&bench), "so that the next end of a pull knows");
    bench.event(RuntimeEvent::ImageFsRead(Some(percent_free(50))));
    assert_eq!(bench.core.next_tick(), None, "nothing is retained");
    let mut bench = Bench::up(Policy { retain_min_free_percent: 0, ..policy() });
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    bench.pass(seconds(10));
    assert!(!checks_space(&bench), "switched off");
}

/// I1.
#[test]
fn disk_pressure_releases_everything_and_retains_nothing() {
    let mut bench = Bench::up(policy());
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    let running = begin(&mut bench, "r/b", 10);
    bench.event(PullEvent::DiskPressure(true));
    assert_eq!((bench.core.kept_leases(), bench.dropped.len()), (0, 1));
    bench.finish(running, fails(Code::Unknown, CUT));
    assert_eq!((reasons(&bench), bench.collections), (vec![ReleaseReason::DiskPressure; 2], 2));
    bench.event(PullEvent::DiskPressure(false));
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    assert_eq!(bench.core.kept_leases(), 1);
}

/// I1.
#[test]
fn a_pull_that_fails_for_lack_of_space_releases_everything() {
    let mut bench = Bench::up(policy());
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    fail(&mut bench, "r/b", 10, Code::Unknown, CUT);
    fail(&mut bench, "r/c", 10, Code::Unknown, FULL);
    assert_eq!((retained(&bench), bench.dropped.len()), ((0, 0), 3));
    assert_eq!(reasons(&bench), [ReleaseReason::Failure(FailureClass::NoSpace); 3]);
    assert_eq!(bench.collections, 3);
}

#[test]
fn new_settings_apply_to_retained_content() {
    for (change, reason) in [
        (Policy { keep_progress: false, ..policy() }, Some(ReleaseReason::Disabled)),
        (Policy { retained_bytes_max: 0, ..policy() }, Some(ReleaseReason::Disabled)),
        (Policy { retained_bytes_max: 9, ..policy() }, Some(ReleaseReason::Budget)),
        (Policy { retained_bytes_max: 10, ..policy() }, None),
        (Policy { retain_min_free_percent: 51, ..policy() }, Some(ReleaseReason::LowSpace)),
        (Policy { retain_min_free_percent: 50, ..policy() }, None),
    ] {
        let mut bench = Bench::up(policy());
        fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
        bench.event(RuntimeEvent::ImageFsRead(Some(percent_free(50))));
        bench.event(PullEvent::Configure(Box::new(change.clone())));
        assert_eq!(reasons(&bench), reason.into_iter().collect::<Vec<_>>(), "{change:?}");
    }
}

#[test]
fn a_restart_measures_retained_content_and_applies_new_settings() {
    let mut bench = Bench::up(policy());
    fail(&mut bench, "r/a", 10, Code::Unknown, CUT);
    let mut bench = bench.kill(policy());
    assert_eq!(retained(&bench), (1, 0));
    bench.runtime_up();
    assert_eq!((measures(&bench), checks_space(&bench)), (1, true));
    let bench = bench.kill(Policy { keep_progress: false, ..policy() });
    assert_eq!((retained(&bench), bench.journal.leases.len(), bench.dropped.len()), ((0, 0), 0, 1));
}

/// I1: the expiry in the runtime is short, and renewed while the bytes are wanted.
#[test]
fn leases_in_use_and_retained_ones_are_renewed() {
    let mut bench = Bench::up(policy());
    let renewed = |bench: &Bench| {
        bench.last.iter().find_map(|effect| match effect {
            Effect::Runtime(RuntimeCommand::RenewLeases(leases)) => Some(leases.len()),
            _ => None,
        })
    };
    let running = begin(&mut bench, "r/a", 10);
    bench.pass(seconds(600));
    assert_eq!(renewed(&bench), Some(1));
    fail(&mut bench, "r/b", 10, Code::Unknown, CUT);
    bench.pass(seconds(600));
    assert_eq!(renewed(&bench), Some(2));
    bench.finish(running, ok());
    bench.pass(seconds(600));
    assert_eq!(renewed(&bench), Some(1));
    bench.runtime_down("away");
    bench.pass(seconds(600));
    assert_eq!(renewed(&bench), None, "no runtime");
}
