//! `grpc.health.v1` says what `/readyz` says.
//!
//! Owns: keeping the two alike. In: whether those who are looked at are ready. Out: SERVING or NOT_SERVING, for the server
//! as a whole and for each service of its own.

use std::{convert::Infallible, future::Future, time::Duration};

use tonic_health::{ServingStatus, server::HealthReporter};

/// Readiness can change without anything else changing, so it is also asked for now and then.
const EVERY: Duration = Duration::from_secs(1);

/// Asks once and reports.
pub(super) async fn report<R, F>(reporter: &HealthReporter, services: &[&'static str], ready: &R)
where
    R: Fn() -> F,
    F: Future<Output = bool>,
{
    let status = if ready().await { ServingStatus::Serving } else { ServingStatus::NotServing };
    set(reporter, services, status).await;
}

/// Reports whenever something may have changed, for ever.
pub(super) async fn follow<R, F>(
    reporter: &HealthReporter,
    services: &[&'static str],
    ready: &R,
) -> Infallible
where
    R: Fn() -> F,
    F: Future<Output = bool>,
{
    loop {
        tokio::time::sleep(EVERY).await;
        report(reporter, services, ready).await;
    }
}

/// The server is about to stop.
pub(super) async fn stopping(reporter: &HealthReporter, services: &[&'static str]) {
    set(reporter, services, ServingStatus::NotServing).await;
}

async fn set(reporter: &HealthReporter, services: &[&'static str], status: ServingStatus) {
    reporter.set_service_status("", status).await;
    for service in services {
        reporter.set_service_status(*service, status).await;
    }
}
