//! `grpc.health.v1` says what `/readyz` says.
//!
//! Owns: keeping the two alike. In: the view's readiness. Out: SERVING or NOT_SERVING, for the server
//! as a whole and for each service of its own.

use std::{convert::Infallible, time::Duration};

use tonic_health::{ServingStatus, server::HealthReporter};

use super::SERVICES;
use crate::{AgentView, view::within};

/// Readiness can change without pulls or actors changing, so it is also asked for now and then.
const EVERY: Duration = Duration::from_secs(1);

/// Asks once and reports.
pub(super) async fn report<V: AgentView>(reporter: &HealthReporter, view: &V) {
    let ready = within(view.readyz()).await.is_ok_and(|checks| checks.iter().all(|check| check.ok));
    set(reporter, if ready { ServingStatus::Serving } else { ServingStatus::NotServing }).await;
}

/// Reports whenever something may have changed, for ever.
pub(super) async fn follow<V: AgentView>(reporter: &HealthReporter, view: &V) -> Infallible {
    loop {
        tokio::time::sleep(EVERY).await;
        report(reporter, view).await;
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
