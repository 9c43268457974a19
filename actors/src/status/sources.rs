//! What a status is made of, beside the host.
//!
//! Owns: the traits [`RuntimeSource`] and [`PullsSource`], and [`EndpointsView`].
//! In: calls from the StatusReporter. Out: views of the RuntimeClient, of the PullCoordinator and of the service
//! endpoints.

use futures_util::{FutureExt as _, future::BoxFuture};

use crate::{
    inspect::Mailbox,
    pulls::{DiskPressure, FlowView, PullCoordinator, PullsFlow},
    runtime::{ReportRuntime, RuntimeClient, RuntimeReport},
};

/// Who says how the container runtime is.
pub trait RuntimeSource: Send + Sync + 'static {
    /// What it says now; an error is a sentence that names the socket.
    fn report(&self) -> BoxFuture<'static, Result<RuntimeReport, String>>;
}

impl RuntimeSource for Mailbox<RuntimeClient> {
    fn report(&self) -> BoxFuture<'static, Result<RuntimeReport, String>> {
        let client = self.clone();
        async move {
            match client.ask(ReportRuntime {}).await {
                Ok(report) => report.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        }
        .boxed()
    }
}

/// Who says how image pulls fare.
pub trait PullsSource: Send + Sync + 'static {
    /// How they fare now; an error is a sentence.
    fn flow(&self) -> BoxFuture<'static, Result<FlowView, String>>;

    /// The node condition DiskPressure was worked out: nothing is retained of unfinished pulls while it is True.
    fn disk_pressure(&self, is_true: bool);
}

impl PullsSource for Mailbox<PullCoordinator> {
    fn flow(&self) -> BoxFuture<'static, Result<FlowView, String>> {
        let coordinator = self.clone();
        async move { coordinator.ask(PullsFlow {}).await.map_err(|error| error.to_string()) }.boxed()
    }

    fn disk_pressure(&self, is_true: bool) {
        self.deliver(DiskPressure { is_true });
    }
}

/// How the service endpoints on this node fare.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum EndpointsView {
    /// The chore does not run.
    #[default]
    Off,
    /// It runs and has not said anything yet: what the Node says of it stays.
    Starting,
    /// Nobody follows them, so that nothing is asked of their source.
    NotWatched,
    /// They are those of the API server.
    Current,
    /// They are those that were last heard of.
    Stale {
        /// Why, in a sentence that does not change while nothing changes.
        reason: String,
    },
}
