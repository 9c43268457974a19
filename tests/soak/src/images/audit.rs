//! Owns: checks of what the registries sent. In: the records of their proxies, which neither agent nor runtime can
//! influence. Out: violations of the limit, and layers that were sent twice.
//!
//! The limit: a pull is in flight while the layers of its repository are being sent. The pulls of a killed process
//! continue until its runtime notices, so requests that are older than a death count until the death. Overlaps that a
//! runtime needs to end a pull that its caller left are short; only longer ones are violations.
//!
//! No byte is fetched twice: containerd writes 1 MiB at a time and continues with the content on its disk, so each
//! interruption of a layer may cost [`PART`] bytes, and nothing else may cost any. An interruption is a request that
//! was cut, or one that was completed just before its pull ended: the registry has sent the last bytes by then, but the
//! runtime has not stored them. Not checked are layers that were being fetched while the image disk was full, because
//! containerd drops what it cannot store, and those of an agent that was killed while its state disk was broken,
//! because the next one cannot tell which content it held. CRI-O has other rules: [`crio`].

mod crio;

use crate::images::supply::{Layer, Supply};
use crate::images::test_env::TestEnv;
use crate::timeline::{Broken, Timeline, Unsuccessful, Window};
use keelson_harness::containerd::Kind as Runtime;
use keelson_harness::images::BlobDigest;
use keelson_harness::registry_proxy::{Kind, Outcome, Seen};
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Bytes that one interruption may cost: the part that containerd has not written (1 MiB), and the contents of buffers (together
/// 2.1 MiB were seen).
const PART: u64 = 5 << 19;

/// Longer than any runtime takes to end a cancelled pull on a busy machine.
const MAX_OVERLAP: Duration = Duration::from_secs(3);

/// A pull that outlives the death of its agent or runtime by more than this is not counted against the limit by anyone.
const MAX_PULL_AFTER_KILL: Duration = Duration::from_secs(10);

/// Longer than a runtime takes to store the end of a layer on a busy machine.
const STORING: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sent {
    pub(crate) requests: usize,
    pub(crate) layer_bytes: u64,
    pub(crate) layers: usize,
    /// Requests for layers that were interrupted.
    pub(crate) interruptions: u64,
    /// Bytes sent beyond the size of the layers, for layers that are checked.
    pub(crate) repeated_bytes: u64,
    /// Layers that were being fetched while a disk was broken, which are not checked.
    pub(crate) layers_not_judged: usize,
    pub(crate) most_pulls_at_once: usize,
    /// Times over the limit that were short enough.
    pub(crate) brief_overlaps: usize,
    pub(crate) longest_overlap_seconds: f64,
    #[serde(skip)]
    pub(crate) sent_twice: Vec<SentTwice>,
}

/// A layer of which too many bytes were sent.
#[derive(Clone, Debug)]
pub(crate) struct SentTwice {
    pub(crate) repo: String,
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}

pub(crate) fn check(env: &TestEnv, timeline: &Timeline, supply: &Supply, limit: usize) -> Sent {
    let seen: Vec<Seen> = env.sources.iter().flat_map(|source| source.proxy.records().all()).collect();
    let windows = timeline.windows();
    let mut sent = Sent { requests: seen.len(), ..Sent::default() };
    check_limit(&seen, &windows, timeline, limit, &mut sent);
    let broken = Ends { windows: &windows, unsuccessful: &timeline.all_unsuccessful() };
    match env.kind {
        Runtime::Debian16 | Runtime::V2 => check_bytes(&seen, &broken, timeline, &supply.layers(), &mut sent),
        Runtime::Crio => crio::check_requests(&seen, &broken, timeline, &supply.layers(), &mut sent),
    }
    sent
}

fn check_limit(seen: &[Seen], windows: &[Window], timeline: &Timeline, limit: usize, sent: &mut Sent) {
    let kills: Vec<_> = windows
        .iter()
        .filter(|window| matches!(window.what, Broken::AgentKilled | Broken::Runtime))
        .map(|window| window.from)
        .collect();
    let (most, overlaps) = over_limit(seen, &kills, limit, Instant::now());
    sent.most_pulls_at_once = most;
    for overlap in overlaps {
        let time = overlap.to.saturating_duration_since(overlap.from);
        sent.longest_overlap_seconds = sent.longest_overlap_seconds.max(time.as_secs_f64());
        if time <= MAX_OVERLAP {
            sent.brief_overlaps += 1;
            continue;
        }
        let at = timeline.seconds(overlap.from);
        let what = format!("after {at:.1} s for {time:.1?}: {:?}", overlap.repos);
        timeline.violation("the limit holds", &what);
    }
}

#[derive(Debug, PartialEq)]
struct Overlap {
    from: Instant,
    to: Instant,
    repos: BTreeSet<String>,
}

fn is_layer(seen: &&Seen) -> bool {
    seen.method == http::Method::GET && seen.kind == Kind::Layer
}

/// The maximum number of concurrent pulls, and the times with more than `limit`.
fn over_limit(seen: &[Seen], kills: &[Instant], limit: usize, now: Instant) -> (usize, Vec<Overlap>) {
    let mut moments: Vec<(Instant, bool, &str)> = Vec::new();
    for get in seen.iter().filter(is_layer) {
        let Some(repo) = get.repo.as_deref() else { continue };
        let end = get.finished.unwrap_or(now);
        let kill = kills
            .iter()
            .find(|kill| get.started < **kill && **kill < end && end <= **kill + MAX_PULL_AFTER_KILL);
        moments.push((get.started, true, repo));
        moments.push((kill.copied().unwrap_or(end), false, repo));
    }
    // An end sorts before a beginning at the same moment.
    moments.sort();
    let (mut open, mut most) = (HashMap::<&str, usize>::new(), 0);
    let (mut overlaps, mut current) = (Vec::new(), None::<Overlap>);
    for (at, begins, repo) in moments {
        let count = open.entry(repo).or_default();
        if begins {
            *count += 1;
        } else {
            *count -= 1;
            if *count == 0 {
                open.remove(repo);
            }
        }
        most = most.max(open.len());
        if open.len() > limit {
            let overlap = current.get_or_insert_with(|| Overlap { from: at, to: at, repos: BTreeSet::new() });
            overlap.repos.extend(open.keys().map(|repo| (*repo).to_owned()));
        } else if let Some(mut overlap) = current.take() {
            overlap.to = at;
            overlaps.push(overlap);
        }
    }
    (most, overlaps)
}

struct Ends<'a> {
    windows: &'a [Window],
    unsuccessful: &'a [Unsuccessful],
}

fn check_bytes(
    seen: &[Seen],
    ends: &Ends<'_>,
    timeline: &Timeline,
    layers: &HashMap<BlobDigest, Layer>,
    sent: &mut Sent,
) {
    let mut gets: HashMap<&BlobDigest, Vec<&Seen>> = HashMap::new();
    // The body of a refusal (401, 503) is no part of the layer.
    let is_refusal = |get: &Seen| get.status.is_some_and(|status| !(200..300).contains(&status));
    for get in seen.iter().filter(|seen| seen.method == http::Method::GET && !is_refusal(seen)) {
        if let Some(digest) = get.digest.as_ref().filter(|digest| layers.contains_key(digest)) {
            gets.entry(digest).or_default().push(get);
        }
    }
    sent.layers = gets.len();
    for (digest, gets) in gets {
        let Some(layer) = layers.get(digest) else { continue };
        let bytes: u64 = gets.iter().map(|get| get.bytes).sum();
        let interrupted = ends.interruptions(&gets);
        sent.layer_bytes += bytes;
        sent.interruptions += interrupted;
        if ends.lost_by_a_disk(&gets) {
            sent.layers_not_judged += 1;
            continue;
        }
        sent.repeated_bytes += bytes.saturating_sub(layer.size);
        if bytes > layer.size + interrupted * PART {
            let requests: Vec<_> = gets.iter().map(|get| describe_request(get, timeline)).collect();
            let what = format!(
                "{digest} of {} ({} bytes) was sent {:.2} times: {}",
                layer.repo,
                layer.size,
                bytes as f64 / layer.size as f64,
                requests.join("; ")
            );
            timeline.violation("nothing is fetched twice", &what);
            sent.sent_twice.extend(time_of(&gets).map(|(from, to)| SentTwice {
                repo: layer.repo.clone(),
                from,
                to,
            }));
        }
    }
}

/// Time that the journal may lag behind after its disk was broken: it is written again 5 s after a failed write, and an
/// agent that is killed before that does not know its pulls.
const JOURNAL_LAGS: Duration = Duration::from_secs(10);

/// A pull that fails for lack of space may end after there is space again, and the agent then drops what all others have fetched.
const FAILS_LATE: Duration = Duration::from_secs(5);

impl Ends<'_> {
    /// How often the fetch of a layer was cut, as the registry or the runtime saw it. The last request cannot have
    /// been.
    fn interruptions(&self, gets: &[&Seen]) -> u64 {
        let cut = |get: &&&Seen| get.outcome != Outcome::Complete || self.ended_storing(get);
        let cut = gets.iter().filter(cut).count();
        let resumed = gets.iter().filter(|get| get.range_start.is_some_and(|start| start > 0)).count();
        cut.max(resumed).min(gets.len().saturating_sub(1)) as u64
    }

    /// Whether something may have ended the pull before the runtime had stored what was sent.
    fn ended_storing(&self, get: &Seen) -> bool {
        let from = get.started;
        let to = get.finished.unwrap_or(from) + STORING;
        let tag = get.repo.as_ref().map(|repo| format!("/{repo}:"));
        let of_image = |image: &str| tag.as_ref().is_some_and(|tag| image.contains(tag));
        self.unsuccessful.iter().any(|end| from <= end.at && end.at <= to && of_image(&end.image))
            // Layers of one pull end with the first that fails, and the results of a kubelet's pulls are not known.
            || self.overlaps(&[Broken::AgentKilled, Broken::Runtime, Broken::Registry], from, to).next().is_some()
    }

    /// Whether the fetched bytes may have been lost with a disk.
    fn lost_by_a_disk(&self, gets: &[&Seen]) -> bool {
        let Some((from, to)) = time_of(gets) else { return false };
        let since = from.checked_sub(FAILS_LATE).unwrap_or(from);
        self.overlaps(&[Broken::ImageDisk], since, to).next().is_some()
            || self.overlaps(&[Broken::AgentKilled], from, to).any(|killed| {
                let since = killed.from.checked_sub(JOURNAL_LAGS).unwrap_or(killed.from);
                self.overlaps(&[Broken::StateDisk], since, killed.from).next().is_some()
            })
    }

    fn overlaps(&self, what: &[Broken], from: Instant, to: Instant) -> impl Iterator<Item = &Window> {
        self.windows.iter().filter(move |window| {
            what.contains(&window.what) && window.from <= to && window.to.is_none_or(|end| end >= from)
        })
    }
}

fn time_of(gets: &[&Seen]) -> Option<(Instant, Instant)> {
    let from = gets.iter().map(|get| get.started).min()?;
    let to = gets.iter().map(|get| get.finished.unwrap_or(get.started)).max()?;
    Some((from, to))
}

fn describe_request(get: &Seen, timeline: &Timeline) -> String {
    let seconds = |at| timeline.seconds(at);
    let until = get.finished.map(|at| format!("{:.2}", seconds(at))).unwrap_or_default();
    let from = get.range_start.unwrap_or(0);
    format!(
        "{:.2} to {until} s: {} bytes from {from}, {:?} {:?} by {:?}",
        seconds(get.started),
        get.bytes,
        get.status,
        get.outcome,
        get.repo
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(base: Instant, seconds: u64) -> Instant {
        base + Duration::from_secs(seconds)
    }

    fn get(base: Instant, repo: &str, from: u64, to: u64, bytes: u64, outcome: Outcome) -> Seen {
        Seen {
            method: http::Method::GET,
            path: String::new(),
            kind: Kind::Layer,
            repo: Some(repo.to_owned()),
            digest: Some(BlobDigest("sha256:one".to_owned())),
            authorization: None,
            range_start: None,
            status: Some(200),
            bytes,
            started: at(base, from),
            finished: Some(at(base, to)),
            outcome,
        }
    }

    #[test]
    fn concurrent_repositories_are_counted_and_a_kill_ends_older_requests() {
        let base = Instant::now();
        let layer = |repo, from, to| get(base, repo, from, to, 1, Outcome::Complete);
        let seen = [layer("a", 0, 10), layer("a", 1, 9), layer("b", 2, 10), layer("c", 5, 8)];
        let now = at(base, 100);
        assert_eq!(over_limit(&seen, &[], 3, now), (3, Vec::new()), "two layers of one image are one pull");
        let (most, overlaps) = over_limit(&seen, &[], 2, now);
        let repos = ["a", "b", "c"].map(str::to_owned).into();
        assert_eq!((most, overlaps), (3, vec![Overlap { from: at(base, 5), to: at(base, 8), repos }]));
        let (most, overlaps) = over_limit(&seen, &[at(base, 4)], 2, now);
        assert_eq!((most, overlaps), (2, Vec::new()), "a and b ended with the process at 4");
        let late = [layer("a", 0, 40), layer("b", 2, 40), layer("c", 5, 40)];
        let (most, overlaps) = over_limit(&late, &[at(base, 4)], 2, now);
        assert_eq!((most, overlaps.len()), (3, 1), "they outlived the death for too long");
    }

    fn violations(seen: &[Seen], windows: &[Window], size: u64) -> (usize, Sent) {
        judged(seen, &Ends { windows, unsuccessful: &[] }, size)
    }

    fn judged(seen: &[Seen], ends: &Ends<'_>, size: u64) -> (usize, Sent) {
        let folder = tempfile::tempdir().unwrap();
        let timeline = Timeline::create(folder.path(), 1).unwrap();
        let layer = Layer { repo: "a".to_owned(), size };
        let layers = HashMap::from([(BlobDigest("sha256:one".to_owned()), layer)]);
        let mut sent = Sent::default();
        check_bytes(seen, ends, &timeline, &layers, &mut sent);
        (timeline.violations(), sent)
    }

    #[test]
    fn a_layer_is_sent_once_plus_a_part_per_interruption() {
        let base = Instant::now();
        let size = 10 << 20;
        let complete = get(base, "a", 0, 1, size, Outcome::Complete);
        let half = get(base, "a", 0, 1, size / 2, Outcome::Aborted);
        let rest = get(base, "a", 2, 3, size / 2 + (1 << 20), Outcome::Complete);
        assert_eq!(violations(std::slice::from_ref(&complete), &[], size).0, 0);
        assert_eq!(violations(&[half.clone(), rest], &[], size).0, 0, "the pull resumed");
        assert_eq!(violations(&[half, complete.clone()], &[], size).0, 1, "it began again");
        let refused = Seen { status: Some(401), ..get(base, "a", 0, 1, 159, Outcome::Complete) };
        assert_eq!(violations(&[refused, complete.clone()], &[], size).0, 0);
        let twice = [complete.clone(), complete];
        assert_eq!(violations(&twice, &[], size).0, 1, "nothing was interrupted");
        let full = Window { what: Broken::ImageDisk, from: at(base, 0), to: None };
        let (full, sent) = violations(&twice, &[full], size);
        assert_eq!((full, sent.layers_not_judged), (0, 1), "the disk was full");
        let began_at = |seconds| get(base, "a", seconds, seconds + 1, size, Outcome::Complete);
        let until_10 = || Window { what: Broken::ImageDisk, from: at(base, 0), to: Some(at(base, 10)) };
        let after = |seconds| violations(&[began_at(seconds), began_at(seconds + 2)], &[until_10()], size).0;
        assert_eq!([after(14), after(16)], [0, 1], "a pull may fail late for lack of space");
    }
    #[test]
    fn a_pull_that_ends_after_its_layer_was_sent_costs_one_part() {
        let base = Instant::now();
        let size = 1 << 20;
        let sent_at = |from, to| get(base, "a", from, to, size, Outcome::Complete);
        let twice = [sent_at(10, 11), sent_at(15, 16)];
        let ended = |image: &str, seconds| {
            let unsuccessful = [Unsuccessful { image: image.to_owned(), at: at(base, seconds) }];
            judged(&twice, &Ends { windows: &[], unsuccessful: &unsuccessful }, size).0
        };
        assert_eq!(ended("127.0.0.1:1/a:v1", 12), 0, "before the runtime had stored it");
        assert_eq!(ended("127.0.0.1:1/a:v1", 14), 1, "long after");
        assert_eq!(ended("127.0.0.1:1/other/a2:v1", 12), 1, "another image");
        let window = |what, from, to| Window { what, from: at(base, from), to: Some(at(base, to)) };
        assert_eq!(violations(&twice, &[window(Broken::Runtime, 12, 13)], size).0, 0);
        assert_eq!(violations(&twice, &[window(Broken::AgentRestarted, 12, 13)], size).0, 1, "is no end");
        let large = 10 << 20;
        let twice = [10, 15].map(|from| get(base, "a", from, from + 1, large, Outcome::Complete));
        assert_eq!(violations(&twice, &[window(Broken::Runtime, 12, 13)], large).0, 1, "more than a part");
    }

    #[test]
    fn a_broken_state_disk_loses_layers_only_with_the_agent() {
        let base = Instant::now();
        let size = 10 << 20;
        let twice = [10, 15].map(|from| get(base, "a", from, from + 1, size, Outcome::Complete));
        let window = |what, from, to| Window { what, from: at(base, from), to: Some(at(base, to)) };
        let disk = window(Broken::StateDisk, 2, 6);
        assert_eq!(violations(&twice, &[disk], size).0, 1);
        assert_eq!(violations(&twice, &[disk, window(Broken::AgentKilled, 12, 13)], size).0, 0);
        assert_eq!(violations(&twice, &[disk, window(Broken::AgentRestarted, 12, 13)], size).0, 1);
        assert_eq!(violations(&twice, &[disk, window(Broken::AgentKilled, 30, 31)], size).0, 1, "too late");
    }
}
