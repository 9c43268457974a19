//! Owns: checks of repeated layers for CRI-O, which has neither leases nor a content API. In: the same records. Out:
//! layers that an image requested again without a reason.
//!
//! CRI-O keeps nothing of a pull that ends early, not even complete layers, and fetches a layer that two images share
//! once for each. So bytes prove nothing. The invariant is that no pull ends without a reason: between two requests of
//! one image for one layer, one of its callers saw a pull fail or left, the agent was killed, or runtime, registry or
//! image disk was broken. A planned restart of the agent and a broken state disk are no reason.

use super::{Ends, Layer, Sent, describe_request, is_layer};
use crate::timeline::{Broken, Timeline};
use keelson_harness::images::BlobDigest;
use keelson_harness::registry_proxy::Seen;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A pull whose callers have left continues for this long, `pulls.cancel_grace` and a little more, and may begin
/// another layer meanwhile.
const GRACE: Duration = Duration::from_secs(4);

/// What ends all pulls.
const REASONS: [Broken; 4] = [Broken::AgentKilled, Broken::Runtime, Broken::Registry, Broken::ImageDisk];

pub(super) fn check_requests(
    seen: &[Seen],
    ends: &Ends<'_>,
    timeline: &Timeline,
    layers: &HashMap<BlobDigest, Layer>,
    sent: &mut Sent,
) {
    let mut gets: HashMap<(&BlobDigest, &str), Vec<&Seen>> = HashMap::new();
    for get in seen.iter().filter(is_layer) {
        let is_refusal = get.status.is_some_and(|status| !(200..300).contains(&status));
        let (Some(digest), Some(repo)) = (&get.digest, &get.repo) else { continue };
        if !is_refusal && layers.contains_key(digest) {
            gets.entry((digest, repo)).or_default().push(get);
        }
    }
    sent.layers = gets.len();
    for ((digest, repo), mut gets) in gets {
        gets.sort_by_key(|get| get.started);
        let bytes: u64 = gets.iter().map(|get| get.bytes).sum();
        sent.layer_bytes += bytes;
        sent.repeated_bytes += bytes.saturating_sub(layers.get(digest).map_or(0, |layer| layer.size));
        for pair in gets.windows(2) {
            sent.interruptions += 1;
            if !ends.has_reason(repo, pair[0].started, pair[1].started) {
                let requests: Vec<_> = gets.iter().map(|get| describe_request(get, timeline)).collect();
                let what = format!("{digest} was asked for again: {}", requests.join("; "));
                timeline.violation("nothing is fetched again without a reason", &what);
            }
        }
    }
}

impl Ends<'_> {
    fn has_reason(&self, repo: &str, from: Instant, to: Instant) -> bool {
        let tag = format!("/{repo}:");
        let ended = |end: &crate::timeline::Unsuccessful| {
            from <= end.at + GRACE && end.at <= to && end.image.contains(&tag)
        };
        self.unsuccessful.iter().any(ended) || self.overlaps(&REASONS, from, to).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Unsuccessful, Window};

    #[test]
    fn a_reason_is_between_the_requests_and_of_the_same_image() {
        let base = Instant::now();
        let at = |seconds| base + Duration::from_secs(seconds);
        let windows = [(Broken::AgentRestarted, 1, 9), (Broken::StateDisk, 1, 9), (Broken::Registry, 4, 5)];
        let windows = windows.map(|(what, from, to)| Window { what, from: at(from), to: Some(at(to)) });
        let unsuccessful = [Unsuccessful { image: "registry:5000/apps/one:v1".to_owned(), at: at(20) }];
        let ends = Ends { windows: &windows, unsuccessful: &unsuccessful };
        assert!(ends.has_reason("apps/two", at(3), at(6)), "the registry was broken");
        assert!(!ends.has_reason("apps/two", at(6), at(9)), "a restart is no reason");
        assert!(ends.has_reason("apps/one", at(18), at(22)), "a pull of the image failed");
        assert!(!ends.has_reason("apps/two", at(18), at(22)), "a pull of another image failed");
        assert!(
            ends.has_reason("apps/one", at(23), at(30)),
            "the caller may have left before the first request"
        );
        assert!(!ends.has_reason("apps/one", at(25), at(30)), "the pull of that caller had ended");
    }
}
