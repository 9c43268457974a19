//! Requests of the StatusReporter to the other actors.
//!
//! Owns: its sources as adapters to the RuntimeClient and the PullCoordinator, which do not know it. In: calls from
//! the StatusReporter. Out: messages to the two, and their answers.

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::{
    inspect::Mailbox,
    reports::{PullsView, RuntimeReport},
};
use keelson_heartbeats::status::{PullsSource, RuntimeSource};
use keelson_pulls::{
    coordinator::{PullCoordinator, PullEvent, PullsFlow},
    runtime::{Health, ReportRuntime, RuntimeClient},
};
use tokio::sync::watch;

/// The RuntimeClient and the results of its probes.
pub(super) struct RuntimeReports {
    pub(super) client: Mailbox<RuntimeClient>,
    pub(super) health: watch::Receiver<Health>,
}

impl RuntimeSource for RuntimeReports {
    fn report(&self) -> BoxFuture<'static, Result<RuntimeReport, String>> {
        let client = self.client.clone();
        async move {
            match client.ask(ReportRuntime {}).await {
                Ok(report) => report.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        }
        .boxed()
    }

    fn down_reason(&self) -> Option<String> {
        match &*self.health.borrow() {
            Health::Down { reason, .. } => Some(reason.clone()),
            Health::Up { .. } | Health::Unknown => None,
        }
    }

    fn changed(&self) -> BoxFuture<'static, bool> {
        let mut health = self.health.clone();
        let before = std::mem::discriminant(&*health.borrow_and_update());
        async move { health.wait_for(|health| std::mem::discriminant(health) != before).await.is_ok() }
            .boxed()
    }
}

pub(super) struct PullReports(pub(super) Mailbox<PullCoordinator>);

impl PullsSource for PullReports {
    fn pulls_view(&self) -> BoxFuture<'static, Result<PullsView, String>> {
        let coordinator = self.0.clone();
        async move { coordinator.ask(PullsFlow {}).await.map_err(|error| error.to_string()) }.boxed()
    }

    fn disk_pressure(&self, is_true: bool) {
        self.0.deliver(PullEvent::DiskPressure(is_true));
    }
}
