//! Owns: attribution of bytes on the wire to heartbeats. In: what passed a proxy, and when; the audit log. Out:
//! [`Cost`]s.
//!
//! TLS hides the contents, so bytes are attributed by their time: the line is nearly always silent, and what passes
//! between two silences is a *burst*. A burst in which the API server received exactly one request is that request with
//! its response, the overhead of TLS and HTTP/2, and the effects of the write (the event of the node's own watch). The
//! median excludes those that include a bookmark of a watch.

use jiff::{SignedDuration, Timestamp};
use keelson_cluster::kube::{AuditEvent, Chunk};

use super::super::quantile;

const SILENCE: SignedDuration = SignedDuration::from_millis(300);
/// Maximum distance of a burst's edge from the API server's time of the request.
const SLACK: SignedDuration = SignedDuration::from_millis(50);

/// Cost of one request of a kind on the wire.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    pub(super) request: usize,
    pub(super) response: usize,
    /// Number of requests of which it is the median.
    pub(super) of: usize,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    first: Timestamp,
    last: Timestamp,
    up: usize,
    down: usize,
}

fn bursts(chunks: &[Chunk]) -> Vec<Burst> {
    let mut sorted = chunks.to_vec();
    sorted.sort_by_key(|chunk| chunk.at);
    let mut bursts: Vec<Burst> = Vec::new();
    for chunk in sorted {
        let fresh = Burst { first: chunk.at, last: chunk.at, up: 0, down: 0 };
        if bursts.last().is_none_or(|burst| chunk.at.duration_since(burst.last) > SILENCE) {
            bursts.push(fresh);
        }
        if let Some(burst) = bursts.last_mut() {
            burst.last = chunk.at;
            *(if chunk.to_server { &mut burst.up } else { &mut burst.down }) += chunk.bytes;
        }
    }
    bursts
}

/// Cost of the requests that match `of_kind`, from the bursts that hold nothing else. `events` are all requests of the
/// client.
pub(super) fn cost(chunks: &[Chunk], events: &[AuditEvent], of_kind: impl Fn(&AuditEvent) -> bool) -> Cost {
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for burst in bursts(chunks) {
        let within = |event: &&AuditEvent| {
            burst.first - SLACK <= event.received && event.received <= burst.last + SLACK
        };
        let mut inside = events.iter().filter(within);
        if let (Some(only), None) = (inside.next(), inside.next())
            && of_kind(only)
        {
            up.push(burst.up);
            down.push(burst.down);
        }
    }
    up.sort_unstable();
    down.sort_unstable();
    let median = |sorted: &[usize]| quantile(sorted, 0.5).unwrap_or_default();
    Cost { request: median(&up), response: median(&down), of: up.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_millisecond(ms).unwrap()
    }

    fn event(ms: i64, verb: &str) -> AuditEvent {
        AuditEvent {
            stage: "ResponseComplete".to_owned(),
            user: String::new(),
            user_agent: String::new(),
            verb: verb.to_owned(),
            uri: String::new(),
            resource: String::new(),
            subresource: String::new(),
            namespace: String::new(),
            name: String::new(),
            code: Some(200),
            received: at(ms),
            ended: at(ms + 5),
            body: None,
            annotations: Default::default(),
        }
    }

    #[test]
    fn only_bursts_with_one_request_count_and_the_median_ignores_outliers() {
        let burst = |ms, up, down| {
            [
                Chunk { at: at(ms), to_server: true, bytes: up },
                Chunk { at: at(ms + 10), to_server: false, bytes: down },
            ]
        };
        let chunks: Vec<Chunk> =
            [burst(0, 100, 10), burst(10_000, 100, 10), burst(20_000, 100, 900), burst(30_000, 700, 80)]
                .concat();
        let events = [
            event(1, "patch"),
            event(10_001, "patch"),
            event(20_001, "patch"),
            event(30_001, "patch"),
            event(30_005, "get"),
        ];
        let cost = cost(&chunks, &events, |event| event.verb == "patch");
        assert_eq!((cost.request, cost.response, cost.of), (100, 10, 3));
    }
}
