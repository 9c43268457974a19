//! I3: which pulls may wait for the runtime and which hang.

use super::{super::types::PullReading, *};
use Download::{Idle, Moving, Unknown, Waiting};

#[derive(Debug, Clone)]
enum TestReading {
    /// Its lease is not known.
    Nothing,
    /// Its manifest is not known yet.
    Resolves,
    /// The missing blobs that are being downloaded.
    Has(&'static [&'static str]),
}
use TestReading::{Has, Nothing, Resolves};

/// Pulls started one after the other, and a clock.
#[derive(Default)]
struct Bench {
    tracker: DownloadTracker,
    now: Duration,
    running: Vec<RunningPull>,
    ingests: BTreeMap<String, Ingest>,
}

impl Bench {
    fn new(pulls: u64) -> Self {
        let running = (0..pulls).map(|pull| RunningPull {
            key: (PullId(pull), 1),
            lease: format!("lease-{pull}"),
            started_unix_ms: 1000,
        });
        Self { running: running.collect(), ..Self::default() }
    }

    fn left_behind(mut self, reference: &str, offset: u64) -> Self {
        self.ingests.insert(reference.into(), Ingest { offset, started_unix_ms: 10 });
        self
    }

    /// Reads after one more second, with these bytes; ingests that are not named stay as they are.
    fn read(&mut self, bytes: &[(&str, u64)], says: &[TestReading]) -> Vec<Download> {
        self.now += Duration::from_secs(1);
        for (reference, offset) in bytes {
            let ingest = self.ingests.entry((*reference).to_owned());
            ingest.or_insert(Ingest { offset: 0, started_unix_ms: 2000 }).offset = *offset;
        }
        let mut readings = Readings { ingests: self.ingests.clone(), ..Readings::default() };
        for (pull, says) in self.running.iter().zip(says) {
            let (has_manifest, refs) = match says {
                Nothing => continue,
                Resolves => (false, Vec::new()),
                Has(refs) => (true, refs.iter().map(|one| (*one).to_owned()).collect()),
            };
            let reading = PullReading { has_manifest, refs, ..PullReading::default() };
            readings.pulls.insert(pull.lease.clone(), reading);
        }
        self.tracker.observe(&self.running, &readings, self.now)
    }

    /// The answer that stays the same from the second of these readings on.
    #[track_caller]
    fn stays(&mut self, says: &[TestReading]) -> Vec<Download> {
        self.read(&[], says);
        let first = self.read(&[], says);
        for _ in 0..100 {
            assert_eq!(self.read(&[], says), first);
        }
        first
    }

    fn complete(&mut self, reference: &str) {
        self.ingests.remove(reference);
    }
}

#[test]
fn a_single_pull_waits_for_no_other() {
    type Case = (&'static str, &'static [(&'static str, u64)], TestReading, Download);
    let cases: [Case; 7] = [
        ("no reading", &[], Nothing, Unknown),
        ("the registry does not say what the tag is", &[], Resolves, Idle),
        ("it does not send the manifest", &[("manifest-sha256:m", 0)], Resolves, Idle),
        ("no byte of a layer", &[("layer-sha256:a", 0)], Has(&["layer-sha256:a"]), Idle),
        ("the bytes stop", &[("layer-sha256:a", 5)], Has(&["layer-sha256:a"]), Idle),
        ("no byte of the config", &[("config-sha256:c", 0)], Has(&["config-sha256:c"]), Idle),
        ("it unpacks, or its layers are there or discarded", &[], Has(&[]), Unknown),
    ];
    for (name, bytes, says, expected) in cases {
        let mut bench = Bench::new(1);
        let says = [says];
        bench.read(bytes, &says);
        assert_eq!(bench.stays(&says), [expected], "{name}");
    }
}

#[test]
fn a_blob_that_grows_or_appears_is_movement() {
    let mut bench = Bench::new(1);
    let says = [Has(&["layer-sha256:a"])];
    assert_eq!(bench.read(&[("layer-sha256:a", 0)], &says), [Moving]);
    for offset in 1..5 {
        assert_eq!(bench.read(&[("layer-sha256:a", offset)], &says), [Moving]);
    }
    assert_eq!(bench.read(&[], &says), [Idle]);
}

/// I3: six pulls at containerd's limit of three downloads.
#[test]
fn pulls_waiting_for_the_runtime_limit_are_not_stalled() {
    let mut bench = Bench::new(3);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:b"]), Has(&["layer-sha256:c"])];
    bench.read(&[("layer-sha256:a", 0), ("layer-sha256:b", 0), ("layer-sha256:c", 0)], &says);
    // The order among pulls that asked together is unknown.
    for offset in 1..100 {
        assert_eq!(bench.read(&[("layer-sha256:b", offset)], &says), [Waiting, Moving, Waiting]);
    }
    // Even if the served one hangs: it is known to hold a download, the others are not.
    assert_eq!(bench.stays(&says), [Waiting, Idle, Waiting]);
    // It is cancelled, and no other is served: now the first must hold a download.
    bench.running.remove(1);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:c"])];
    for _ in 0..60 {
        bench.read(&[], &says);
    }
    assert_eq!(bench.stays(&says), [Idle, Waiting]);
}

#[test]
fn progress_of_a_later_pull_shows_that_an_earlier_one_is_stalled() {
    let mut bench = Bench::new(2);
    bench.read(&[("layer-sha256:a", 0)], &[Has(&["layer-sha256:a"])]);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:b"])];
    // At the same time: it may have asked before.
    bench.read(&[("layer-sha256:b", 0)], &says);
    assert_eq!(bench.read(&[("layer-sha256:b", 1)], &says), [Waiting, Moving]);
    bench.complete("layer-sha256:b");
    bench.read(&[], &says[..1]);
    bench.read(&[("layer-sha256:d", 0)], &[Has(&["layer-sha256:a"]), Has(&["layer-sha256:d"])]);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:d"])];
    assert_eq!(bench.read(&[("layer-sha256:d", 1)], &says), [Idle, Moving]);
    // That is remembered when the proof is gone, and others are present.
    bench.complete("layer-sha256:d");
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:e"])];
    bench.read(&[("layer-sha256:e", 0)], &says);
    bench.read(&[("layer-sha256:e", 1)], &says);
    assert_eq!(bench.read(&[("layer-sha256:e", 2)], &says), [Idle, Moving]);
}

#[test]
fn a_stopped_download_is_stalled_unless_another_may_have_its_slot() {
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:b"])];
    let mut bench = Bench::new(2);
    bench.read(&[("layer-sha256:a", 0), ("layer-sha256:b", 0)], &says);
    bench.read(&[("layer-sha256:a", 1), ("layer-sha256:b", 1)], &says);
    assert_eq!(bench.read(&[("layer-sha256:b", 2)], &says), [Idle, Moving], "both were at work");

    let mut bench = Bench::new(2);
    bench.read(&[("layer-sha256:a", 0), ("layer-sha256:b", 0)], &says);
    bench.read(&[("layer-sha256:a", 1)], &says);
    bench.read(&[("layer-sha256:b", 1)], &says);
    // The connection of a may have closed: then it is behind b now.
    assert_eq!(bench.read(&[("layer-sha256:b", 2)], &says), [Waiting, Moving]);
    bench.complete("layer-sha256:b");
    assert_eq!(bench.stays(&[Has(&["layer-sha256:a"]), Has(&[])]), [Idle, Unknown]);
}

#[test]
fn a_shared_blob_is_stalled_for_the_older_pull_only() {
    let mut bench = Bench::new(2);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:a"])];
    assert_eq!(bench.read(&[("layer-sha256:a", 0)], &says), [Moving, Moving]);
    assert_eq!(bench.read(&[("layer-sha256:a", 1)], &says), [Moving, Moving]);
    assert_eq!(bench.stays(&says), [Idle, Waiting]);
    // The older one is cancelled: the other takes the download over.
    bench.running.remove(0);
    assert_eq!(bench.read(&[], &says[1..]), [Moving]);
    assert_eq!(bench.stays(&says[1..]), [Idle]);
}

#[test]
fn ingests_of_earlier_pulls_are_not_downloads() {
    let mut bench = Bench::new(1).left_behind("layer-sha256:z", 7).left_behind("manifest-sha256:z", 0);
    bench.read(&[("layer-sha256:a", 0)], &[Has(&["layer-sha256:a"])]);
    assert_eq!(bench.stays(&[Has(&["layer-sha256:a"])]), [Idle]);
    let mut bench = Bench::new(1).left_behind("layer-sha256:z", 7).left_behind("manifest-sha256:z", 0);
    assert_eq!(bench.stays(&[Resolves]), [Idle]);
}

#[test]
fn a_foreign_ingest_counts_while_it_grows() {
    let mut bench = Bench::new(1);
    let says = [Has(&["layer-sha256:a"])];
    bench.read(&[("layer-sha256:a", 0), ("layer-sha256:foreign", 0)], &says);
    for offset in 1..100 {
        assert_eq!(bench.read(&[("layer-sha256:foreign", offset)], &says), [Waiting]);
    }
    for _ in 0..60 {
        bench.read(&[], &says);
    }
    assert_eq!(bench.read(&[], &says), [Idle]);
}

/// I3: a pull that resumes what an earlier one left, and has to wait for the runtime's limit.
#[test]
fn a_blob_that_is_taken_up_again_is_read_before_it_asks() {
    let mut bench = Bench::new(2).left_behind("layer-sha256:a", 7);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:b"])];
    bench.read(&[("layer-sha256:b", 0)], &says);
    bench.read(&[("layer-sha256:b", 1)], &says);
    for n in 0..100_u64 {
        // Pulls arrive one after the other and are served.
        let later = format!("layer-sha256:{n}");
        bench.read(&[(&later, 0), ("layer-sha256:b", n + 2)], &says);
        assert_eq!(bench.read(&[(&later, 1), ("layer-sha256:b", n + 3)], &says)[0], Waiting);
        bench.complete(&later);
    }
    bench.complete("layer-sha256:b");
    assert_eq!(bench.stays(&[Has(&["layer-sha256:a"]), Has(&[])]), [Idle, Unknown]);
    assert_eq!(bench.read(&[("layer-sha256:a", 8)], &says[..1])[0], Moving);
}

#[test]
fn a_download_that_began_before_the_first_reading_of_its_pull_has_grown() {
    let mut bench = Bench::new(2);
    let says = [Nothing, Has(&["layer-sha256:b"])];
    bench.read(&[("layer-sha256:a", 5), ("layer-sha256:b", 0)], &says);
    bench.read(&[("layer-sha256:b", 1)], &says);
    let says = [Has(&["layer-sha256:a"]), Has(&["layer-sha256:b"])];
    bench.read(&[("layer-sha256:b", 2)], &says);
    assert_eq!(bench.stays(&says), [Waiting, Idle]);
    bench.complete("layer-sha256:b");
    assert_eq!(bench.stays(&[Has(&["layer-sha256:a"]), Nothing]), [Idle, Unknown]);
}

#[test]
fn a_pull_that_resolves_may_wait_with_its_manifest() {
    let mut bench = Bench::new(2);
    bench.read(&[("layer-sha256:a", 0)], &[Has(&["layer-sha256:a"]), Resolves]);
    let says = [Has(&["layer-sha256:a"]), Resolves];
    bench.read(&[("layer-sha256:a", 1), ("manifest-sha256:m", 0)], &says);
    for offset in 2..50 {
        assert_eq!(bench.read(&[("layer-sha256:a", offset)], &says), [Moving, Waiting]);
    }
    bench.complete("layer-sha256:a");
    assert_eq!(bench.stays(&[Has(&[]), Resolves]), [Unknown, Idle]);

    // Two that resolve: the hanging manifest may belong to either.
    let mut bench = Bench::new(2);
    bench.read(&[("manifest-sha256:m", 0)], &[Resolves, Resolves]);
    assert_eq!(bench.stays(&[Resolves, Resolves]), [Idle, Waiting]);
    // No manifest is requested: both wait for their registry only.
    let mut bench = Bench::new(2);
    assert_eq!(bench.stays(&[Resolves, Resolves]), [Idle, Idle]);
}
