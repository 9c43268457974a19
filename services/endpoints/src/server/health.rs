//! `grpc.health.v1` of the Endpoints API.
//!
//! Owns: keeping it true. In: the feed. Out: SERVING once there is a state to serve, stale or not, for the server as a
//! whole and for both services.

use keelson_actors::endpoints::EndpointsFeed;
use tonic_health::{ServingStatus, server::HealthReporter};

use super::SERVICES;

/// Reports whenever it changes, until the feed ends.
pub(super) async fn follow(reporter: &HealthReporter, mut feed: EndpointsFeed) {
    loop {
        let serving = feed.published.borrow_and_update().is_some();
        set(reporter, if serving { ServingStatus::Serving } else { ServingStatus::NotServing }).await;
        if feed.published.wait_for(|state| state.is_some() != serving).await.is_err() {
            return stopping(reporter).await;
        }
    }
}

/// The server is about to stop.
pub(super) async fn stopping(reporter: &HealthReporter) {
    set(reporter, ServingStatus::NotServing).await;
}

async fn set(reporter: &HealthReporter, status: ServingStatus) {
    reporter.set_service_status("", status).await;
    for service in SERVICES {
        reporter.set_service_status(service, status).await;
    }
}
