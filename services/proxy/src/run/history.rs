//! The last hour of a proxy, for its page.
//!
//! In: the metrics, and the revision that is in effect. Out: samples of [`SERIES`].

use std::sync::Arc;

use keelson_serve::history::{History, Kind, Series, Unit};

use super::shared::Shared;

const SERIES: &[Series] = &[
    // The longest one since the sample before; none without a sync.
    Series { name: "sync_longest", title: "Longest sync", unit: Unit::Microseconds, kind: Kind::Gauge },
    Series { name: "syncs", title: "Syncs in 10 s", unit: Unit::Count, kind: Kind::Counter },
    Series { name: "revisions", title: "Revisions in 10 s", unit: Unit::Count, kind: Kind::Gauge },
    Series { name: "changes", title: "Changes received in 10 s", unit: Unit::Count, kind: Kind::Counter },
];

/// A history that is sampled until the runtime ends.
pub(super) fn start(shared: Arc<Shared>) -> History {
    let history = History::new(SERIES);
    let sampled = history.clone();
    tokio::spawn(async move {
        let mut before = None;
        sampled
            .sample(|| {
                let activity = shared.metrics.take_activity();
                let now = {
                    let status = shared.status();
                    (status.applied.instance_id, status.applied.rev)
                };
                let revisions = revisions(before.replace(now), now);
                std::future::ready(vec![
                    activity.longest_sync_us,
                    Some(activity.syncs),
                    revisions,
                    Some(activity.changes),
                ])
            })
            .await;
    });
    history
}

/// The number of revisions from one (instance ID, revision) to another; those of two instances cannot be compared.
fn revisions(before: Option<(u64, u64)>, now: (u64, u64)) -> Option<f64> {
    let (instance_id, rev) = before?;
    (instance_id == now.0).then(|| now.1.saturating_sub(rev) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_count_within_an_instance() {
        for (before, now, expected) in [
            (None, (1, 5), None),
            (Some((1, 5)), (1, 5), Some(0.0)),
            (Some((1, 5)), (1, 9), Some(4.0)),
            (Some((1, 9)), (2, 3), None),
        ] {
            assert_eq!(revisions(before, now), expected, "{before:?} {now:?}");
        }
    }
}
