//! What a status is made of, beside the host.
//!
//! Owns: the traits [`RuntimeSource`] and [`PullsSource`], which the agent implements on the actors that know. In: calls
//! from the StatusReporter. Out: what the container runtime and the image pulls report.

use futures_util::future::BoxFuture;
use keelson_actor_system::reports::{FlowView, RuntimeReport};

/// Who says how the container runtime is.
pub trait RuntimeSource: Send + Sync + 'static {
    /// What it says now; an error is a sentence that names the socket.
    fn report(&self) -> BoxFuture<'static, Result<RuntimeReport, String>>;

    /// Why the runtime does not serve; `None` while it serves, and until it has been asked once.
    fn down_reason(&self) -> Option<String>;

    /// Ends when the runtime has come or gone since this call. `false`: it is not watched any more.
    fn changed(&self) -> BoxFuture<'static, bool>;
}

/// Who says how image pulls fare.
pub trait PullsSource: Send + Sync + 'static {
    /// How they fare now; an error is a sentence.
    fn flow(&self) -> BoxFuture<'static, Result<FlowView, String>>;

    /// The node condition DiskPressure was computed: nothing is retained of unfinished pulls while it is True.
    fn disk_pressure(&self, is_true: bool);
}
