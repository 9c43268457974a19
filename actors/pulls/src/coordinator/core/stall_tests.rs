//! Stalls and the limit on the time of a pull (I3).

use std::time::Duration;

use super::{
    EndReason, Policy, PullEnd, PullEvent, Refusal,
    testing::{Bench, image, limit, lost, reading, seconds},
};
use crate::{
    request::PullId,
    runtime::{Download, Phase, Progress},
};

const STALL: Duration = Duration::from_secs(60);

fn watched() -> Policy {
    Policy { stall_timeout: Some(STALL), ..limit(1) }
}

fn downloads(download: Download, bytes: u64) -> Progress {
    Progress { download, ..reading(Phase::Downloading, bytes) }
}

/// Reads the pull once per second.
fn read_for(bench: &mut Bench, pull: PullId, time: Duration, progress: Progress) {
    for _ in 0..time.as_secs() {
        bench.pass(seconds(1));
        if bench.core.pulls.contains_key(&pull) {
            bench.progress(pull, progress);
        }
    }
}

/// I3.
#[test]
fn only_a_download_that_does_not_grow_is_a_stall() {
    let unpacks = reading(Phase::Unpacking, 1000);
    let cases = [
        ("idle", downloads(Download::Idle, 5), true),
        ("resolving, and nothing to wait for", reading_of(Phase::Resolving, Download::Idle), true),
        ("waiting for the runtime or another pull", downloads(Download::Waiting, 5), false),
        ("resolving, waiting", reading_of(Phase::Resolving, Download::Waiting), false),
        (
            "between two steps, or layers that the runtime has discarded",
            downloads(Download::Unknown, 5),
            false,
        ),
        ("unpacking", unpacks, false),
    ];
    for (name, progress, stalls) in cases {
        let mut bench = Bench::up(watched());
        let (caller, pull) = bench.request(image("r/a"));
        read_for(&mut bench, pull, 2 * STALL, progress);
        assert_eq!(!bench.waits(caller), stalls, "{name}");
    }
}

fn reading_of(phase: Phase, download: Download) -> Progress {
    Progress { download, ..reading(phase, 0) }
}

/// I3: the time of a stall excludes earlier waiting.
#[test]
fn a_stall_counts_from_the_last_progress_or_wait() {
    for before in [Download::Waiting, Download::Unknown, Download::Moving] {
        let mut bench = Bench::up(watched());
        let (caller, pull) = bench.request(image("r/a"));
        read_for(&mut bench, pull, 10 * STALL, downloads(before, 5));
        read_for(&mut bench, pull, STALL - seconds(1), downloads(Download::Idle, 5));
        assert!(bench.waits(caller), "{before:?}");
        read_for(&mut bench, pull, seconds(1), downloads(Download::Idle, 5));
        let text = bench.refusal(caller).to_string();
        assert!(text.contains("retained for the next attempt"), "{text}");
        assert_eq!(bench.journal.leases.len(), 1);
        assert_eq!(bench.finished(), [PullEnd::Failed(text)]);
    }
}

#[test]
fn a_stall_counts_from_the_last_byte() {
    let mut bench = Bench::up(watched());
    let (caller, pull) = bench.request(image("r/a"));
    for byte in 0..10 {
        bench.pass(seconds(50));
        bench.progress(pull, reading(Phase::Downloading, byte));
    }
    bench.pass(seconds(59));
    bench.progress(pull, reading(Phase::Downloading, 9));
    assert!(bench.waits(caller));
    bench.pass(seconds(1));
    bench.progress(pull, reading(Phase::Downloading, 9));
    assert!(matches!(bench.refusal(caller), Refusal::Stalled { idle: STALL, .. }));
}

/// I3.
#[test]
fn without_readings_nothing_stalls() {
    for read_before in [false, true] {
        let mut bench = Bench::up(watched());
        let caller = bench.ask(image("r/a"));
        if read_before {
            bench.progress(bench.pull(caller), reading(Phase::Downloading, 5));
        }
        bench.pass(seconds(3600));
        assert!(bench.waits(caller), "{read_before}");
    }
}

#[test]
fn the_stall_timeout_changes_live() {
    let mut bench = Bench::up(Policy { stall_timeout: None, ..limit(1) });
    let (caller, pull) = bench.request(image("r/a"));
    read_for(&mut bench, pull, seconds(300), reading(Phase::Downloading, 5));
    assert!(bench.waits(caller));
    bench.event(PullEvent::Configure(Box::new(watched())));
    read_for(&mut bench, pull, seconds(1), reading(Phase::Downloading, 5));
    assert!(matches!(bench.refusal(caller), Refusal::Stalled { .. }));
}

/// I3: a hung unpack, and a runtime without readings, end with `max_pull_time`.
#[test]
fn a_pull_ends_when_its_time_is_over() {
    let policy = || Policy { max_pull_time: Some(seconds(600)), ..watched() };
    for (phase, words) in [(None, "while pulling"), (Some(Phase::Unpacking), "while unpacking")] {
        let mut bench = Bench::up(policy());
        let (queued_behind, caller) = {
            let caller = bench.ask(image("r/a"));
            bench.pass(seconds(500));
            (bench.ask(image("r/b")), caller)
        };
        let pull = bench.pull(caller);
        if let Some(phase) = phase {
            bench.progress(pull, reading(phase, 1000));
        }
        let refusal = bench.refused_after(caller, 100);
        assert_eq!(refusal.code(), keelson_proto::Code::DeadlineExceeded);
        let text = refusal.to_string();
        assert!(text.contains("pulls.max_pull_time") && text.contains(words), "{text}");
        assert_eq!(bench.cancels, [(pull, 1)]);
        let why = bench.core.finished.front().map(|finished| finished.why);
        assert_eq!(why, Some(EndReason { result: "failed", reason: "PullTimeExceeded" }));
        bench.pass(seconds(599));
        assert!(bench.waits(queued_behind), "the time in the queue does not count");
    }
}

#[test]
fn the_time_of_a_pull_is_not_limited_by_default_and_changes_live() {
    let mut bench = Bench::up(limit(1));
    let caller = bench.ask(image("r/a"));
    bench.pass(seconds(100_000));
    assert!(bench.waits(caller));
    let policy = Policy { max_pull_time: Some(seconds(200_000)), ..limit(1) };
    bench.event(PullEvent::Configure(Box::new(policy)));
    bench.pass(seconds(99_999));
    assert!(bench.waits(caller));
    bench.pass(seconds(1));
    assert!(matches!(bench.refusal(caller), Refusal::PullTime { .. }));
}

#[test]
fn each_attempt_has_its_own_time() {
    let mut bench = Bench::up(Policy { max_pull_time: Some(seconds(100)), ..limit(1) });
    let caller = bench.ask(image("r/a"));
    bench.pass(seconds(99));
    bench.finish(bench.pull(caller), lost("EOF"));
    bench.pass(seconds(50));
    bench.runtime_up();
    let refusal = bench.refused_after(caller, 100);
    assert!(matches!(refusal, Refusal::PullTime { .. }));
}
