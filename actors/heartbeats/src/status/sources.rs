//! Sources of the status beside the host.
//!
//! Owns: the traits [`RuntimeSource`] and [`PullsSource`], which the agent implements on its actors. In: calls from the
//! StatusReporter. Out: reports of the container runtime and the image pulls.

use futures_util::future::BoxFuture;
use keelson_actor_system::reports::{PullsView, RuntimeReport};

pub trait RuntimeSource: Send + Sync + 'static {
    /// An error is a sentence that names the socket.
    fn report(&self) -> BoxFuture<'static, Result<RuntimeReport, String>>;

    /// Why the runtime is down; `None` while it is up, and until the first probe.
    fn down_reason(&self) -> Option<String>;

    /// Ends when the runtime has come up or gone down since this call. `false`: it is no longer watched.
    fn changed(&self) -> BoxFuture<'static, bool>;
}

pub trait PullsSource: Send + Sync + 'static {
    /// An error is a sentence.
    fn pulls_view(&self) -> BoxFuture<'static, Result<PullsView, String>>;

    /// The node condition DiskPressure was computed: while it is True, no content of unfinished pulls is retained.
    fn disk_pressure(&self, is_true: bool);
}
