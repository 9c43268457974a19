//! `grpc.health.v1`.
//!
//! Owns: the health of a server as a whole and of each of its services, which is the same. In: whether it serves. Out:
//! SERVING or NOT_SERVING.

use std::{convert::Infallible, fmt, future::Future, time::Duration};

use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

/// Polling interval of readiness, which can change without an event.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub struct GrpcHealth {
    reporter: HealthReporter,
    services: &'static [&'static str],
}

impl fmt::Debug for GrpcHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcHealth").field("services", &self.services).finish_non_exhaustive()
    }
}

impl GrpcHealth {
    /// `services`: full names.
    #[must_use]
    pub fn new(services: &'static [&'static str]) -> Self {
        Self { reporter: HealthReporter::new(), services }
    }

    pub async fn set(&self, is_serving: bool) {
        let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.reporter.set_service_status("", status).await;
        for service in self.services {
            self.reporter.set_service_status(*service, status).await;
        }
    }

    /// Reports the result of `is_ready` once a second.
    pub async fn follow<F: Future<Output = bool>>(&self, is_ready: impl Fn() -> F) -> Infallible {
        loop {
            tokio::time::sleep(EVERY).await;
            self.set(is_ready().await).await;
        }
    }

    pub(super) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
