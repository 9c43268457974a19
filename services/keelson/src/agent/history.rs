//! The last hour of the agent, for its page.
//!
//! In: the lists of pulls and the state of the endpoints, as the debug API shows them. Out: samples of [`SERIES`].

use keelson_debug::AgentView;
use keelson_proto::debug as pb;
use keelson_serve::history::{Kind, Series, Unit};

pub(super) const SERIES: &[Series] = &[
    Series { name: "queued", title: "Queued pulls", unit: Unit::Count, kind: Kind::Gauge },
    Series { name: "running", title: "Running pulls", unit: Unit::Count, kind: Kind::Gauge },
    Series { name: "download", title: "Download", unit: Unit::BytesPerSecond, kind: Kind::Gauge },
    Series { name: "revisions", title: "Endpoint revisions in 10 s", unit: Unit::Count, kind: Kind::Counter },
];

/// The values of a sample. An actor that does not answer leaves a gap.
pub(super) async fn read(view: impl AgentView) -> Vec<Option<f64>> {
    let (pulls, endpoints) = tokio::join!(view.pulls(0), view.endpoints("", 0));
    let pulls = pulls.ok();
    let of = |value: fn(&pb::PullList) -> f64| pulls.as_ref().map(value);
    vec![
        of(|pulls| f64::from(pulls.queued)),
        of(|pulls| f64::from(pulls.running)),
        of(bytes_per_second),
        endpoints.ok().map(|state| state.revisions as f64),
    ]
}

fn bytes_per_second(pulls: &pb::PullList) -> f64 {
    let progress = pulls.pulls.iter().filter_map(|pull| pull.progress.as_ref());
    // Not `sum`, which makes -0 of nothing.
    progress.fold(0.0, |sum, progress| sum + progress.bytes_per_second as f64)
}
