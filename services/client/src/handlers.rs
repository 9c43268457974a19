//! The handlers of a consumer.
//!
//! Owns: [`Handlers`], what a consumer of endpoints has to be. Out: nothing; the calls come from
//! [`crate::Client::run`] and [`crate::DiffStore`].

use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};

use crate::{BoxError, Position, ServiceName};

/// A consumer of endpoints, such as a dataplane backend.
///
/// What leads from one state to the next comes together: [`node`](Self::node), then every
/// [`delete`](Self::delete), then every [`set`](Self::set), each at most once a Service and in the order of the names, and
/// then [`sync`](Self::sync), whereupon the state is whole. States in between may be missed, changes never. Deletes come
/// first, so that an address that moves from one Service to another is free when it is set.
///
/// All of it is called from the task that runs the client. What takes longer than some seconds belongs into
/// `tokio::task::spawn_blocking`, or the connection cannot answer the server meanwhile.
pub trait Handlers: Send {
    /// The Services that are held from an earlier run, asked once, at the start. Those of them that are gone are deleted
    /// when the first whole state comes. None, unless the consumer keeps state of its own (in the kernel, on disk); that is
    /// worth it also for one that does not resume, and starts beside what an earlier run left.
    fn held(&mut self) -> Vec<ServiceName> {
        Vec::new()
    }

    /// The node is known, or has changed. Servers that speak only the oldest form of the API never say.
    fn node(&mut self, node: NodeInfo) {
        let _ = node;
    }

    /// This Service is gone. After an error of [`sync`](Self::sync) it may come again for one that is gone already.
    fn delete(&mut self, name: &ServiceName);

    /// This Service is new or has changed. After an error of [`sync`](Self::sync) it comes again for every Service.
    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints);

    /// The state is whole: the time to act on it. It comes also when only the position has changed, such as when a state
    /// becomes stale.
    ///
    /// An error says that the state is not in effect. It is then asked for anew and offered again whole after
    /// [`crate::Options::error_delay`]: the node, every Service as a set, and as deletes all that was in the state before
    /// or in the failed one and is no more. So a consumer may apply what it has again, in full, without remembering
    /// how far it came.
    fn sync(&mut self, position: &Position) -> impl Future<Output = Result<(), BoxError>> + Send;
}

impl<H: Handlers> Handlers for &mut H {
    fn held(&mut self) -> Vec<ServiceName> {
        H::held(self)
    }

    fn node(&mut self, node: NodeInfo) {
        H::node(self, node);
    }

    fn delete(&mut self, name: &ServiceName) {
        H::delete(self, name);
    }

    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        H::set(self, name, service);
    }

    fn sync(&mut self, position: &Position) -> impl Future<Output = Result<(), BoxError>> + Send {
        H::sync(self, position)
    }
}
