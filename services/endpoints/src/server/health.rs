//! `grpc.health.v1` of the Endpoints API.
//!
//! Owns: keeping it up to date. In: the feed, and whether a client follows. Out: SERVING once there is a state, stale
//! or not, for the server as a whole and for each service. If Services are watched on demand, it is also SERVING until
//! the first call: a client that waits for SERVING before it calls would otherwise wait for ever.

use keelson_endpoint_publisher::EndpointsFeed;
use keelson_serve::grpc::GrpcHealth;
use tokio::sync::watch;

use super::ClientHints;

/// Reports each change, until the feed ends.
pub(super) async fn follow(
    health: &GrpcHealth,
    mut feed: EndpointsFeed,
    mut hints: watch::Receiver<ClientHints>,
    on_demand: bool,
) {
    let mut reported = None;
    loop {
        let has_state = feed.published.borrow_and_update().is_some();
        let serving = has_state || (on_demand && !hints.borrow_and_update().has_followed);
        if reported.replace(serving) != Some(serving) {
            health.set(serving).await;
        }
        let changed = tokio::select! {
            changed = feed.published.changed() => changed,
            changed = hints.wait_for(|hints| hints.has_followed), if on_demand && !has_state && serving => {
                changed.map(drop)
            }
        };
        if changed.is_err() {
            return health.set(false).await;
        }
    }
}
