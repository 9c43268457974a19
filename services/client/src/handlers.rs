//! The handlers of a consumer.
//!
//! Owns: [`Handlers`], the trait of a consumer of endpoints. Out: nothing; the calls come from
//! [`crate::Client::run`] and [`crate::DiffStore`].

use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};

use crate::{BoxError, Position, ServiceName};

/// A consumer of endpoints, such as a dataplane backend.
///
/// The changes between two states are delivered together: [`node`](Self::node), then every [`delete`](Self::delete),
/// then every [`set`](Self::set), each at most once per Service and in the order of the names, and then
/// [`sync`](Self::sync), which completes the state. Intermediate states may be skipped, changes never. Deletes come
/// first, so that an address that moves from one Service to another is free when it is set.
///
/// `S` is what the consumer needs of a Service: the message, or what it makes of it. Those of a large state are made on a thread of
/// their own.
///
/// All methods are called from the task that runs the client. Work of more than a few seconds belongs in
/// `tokio::task::spawn_blocking`; otherwise the connection cannot answer the server meanwhile.
pub trait Handlers<S = ServiceEndpoints>: Send
where
    S: From<ServiceEndpoints> + Send,
{
    /// The Services that are held from an earlier run; called once at the start. Those that no longer exist are deleted
    /// with the first full state. Empty, unless the consumer keeps state of its own (in the kernel, on disk). Worth
    /// implementing also for a consumer that does not resume but starts beside what an earlier run left.
    fn held(&mut self) -> Vec<ServiceName> {
        Vec::new()
    }

    /// The node is known, or has changed. Servers with only the oldest form of the API never send it.
    fn node(&mut self, node: NodeInfo) {
        let _ = node;
    }

    /// This Service was deleted. After an error of [`sync`](Self::sync) it may be called again for a deleted Service.
    fn delete(&mut self, name: &ServiceName);

    /// This Service is new or has changed. After an error of [`sync`](Self::sync) it is called again for every Service, and
    /// so it is if the rest of the first state could not be decoded.
    fn set(&mut self, name: &ServiceName, service: S);

    /// The state is complete: apply it. Also called when only the position has changed, such as when a state becomes
    /// stale.
    ///
    /// An error means that the state is not in effect. It is then requested again and offered in full after
    /// [`crate::Options::error_delay`]: the node, every Service as a set, and as deletes all Services of the state
    /// before or the failed one that no longer exist. So a consumer may apply everything again without remembering how
    /// far it came.
    fn sync(&mut self, position: &Position) -> impl Future<Output = Result<(), BoxError>> + Send;
}

impl<S: From<ServiceEndpoints> + Send, H: Handlers<S>> Handlers<S> for &mut H {
    fn held(&mut self) -> Vec<ServiceName> {
        H::held(self)
    }

    fn node(&mut self, node: NodeInfo) {
        H::node(self, node);
    }

    fn delete(&mut self, name: &ServiceName) {
        H::delete(self, name);
    }

    fn set(&mut self, name: &ServiceName, service: S) {
        H::set(self, name, service);
    }

    fn sync(&mut self, position: &Position) -> impl Future<Output = Result<(), BoxError>> + Send {
        H::sync(self, position)
    }
}
