//! `grpc.health.v1` of the Endpoints API.
//!
//! Owns: keeping it true. In: the feed. Out: SERVING once there is a state to serve, stale or not, for the server as a
//! whole and for each service.

use keelson_actors::endpoints::EndpointsFeed;
use tonic_health::{ServingStatus, server::HealthReporter};

/// Reports whenever it changes, until the feed ends.
pub(super) async fn follow(reporter: &HealthReporter, services: &[&str], mut feed: EndpointsFeed) {
    loop {
        let serving = feed.published.borrow_and_update().is_some();
        set(reporter, services, if serving { ServingStatus::Serving } else { ServingStatus::NotServing })
            .await;
        if feed.published.wait_for(|state| state.is_some() != serving).await.is_err() {
            return stopping(reporter, services).await;
        }
    }
}

/// The server is about to stop.
pub(super) async fn stopping(reporter: &HealthReporter, services: &[&str]) {
    set(reporter, services, ServingStatus::NotServing).await;
}

async fn set(reporter: &HealthReporter, services: &[&str], status: ServingStatus) {
    reporter.set_service_status("", status).await;
    for service in services {
        reporter.set_service_status(*service, status).await;
    }
}
