//! The object of a watch, and what it hands over.
//!
//! Owns: [`Subject`], [`Change`], [`Selectors`] and [`show`]. In: nothing. Out: input and output of
//! [`follow`](super::follow).

use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{Ack, ObjectEvent};
use tokio::sync::watch;

use super::events::Encoding;
use crate::bodies::escaped;

/// Matches no object, for requests that need only the version of a collection.
const NO_OBJECT: &str = "metadata.name=keelson-no-such-object";

/// A change of an object that a watch has seen; a deleted one has its last state.
pub(crate) type Change<T> = ObjectEvent<T, T>;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Selectors {
    pub(crate) labels: Option<String>,
    pub(crate) fields: Option<String>,
}

impl Selectors {
    pub(crate) fn fields(fields: impl Into<String>) -> Self {
        Self { labels: None, fields: Some(fields.into()) }
    }

    /// The same selectors, but no object matches.
    pub(crate) fn without_objects(mut self) -> Self {
        self.fields = Some(match self.fields {
            Some(fields) => format!("{fields},{NO_OBJECT}"),
            None => NO_OBJECT.to_owned(),
        });
        self
    }

    /// As escaped query parameters.
    pub(crate) fn query(&self) -> Vec<String> {
        let both = [("labelSelector", &self.labels), ("fieldSelector", &self.fields)];
        let given = both.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        given.map(|(name, value)| format!("{name}={}", escaped(value))).collect()
    }
}

/// A collection, narrowed by selectors, and the receiver of its changes.
pub(crate) trait Subject: Send {
    type Encoding: Encoding;
    /// For metrics.
    const RESOURCE: &'static str;
    const ACCEPT: &'static str;
    const ACCEPT_LIST: &'static str;
    /// A server that answers 404 has none. For 403, 500 or an invalid answer, the known objects are kept, and the
    /// failure is reported and retried.
    const OPTIONAL: bool = false;
    /// There are so few objects that they are listed again whenever a watch was interrupted, which reveals a rollback
    /// of the store as soon as the API server is back.
    const LIST_AFTER_INTERRUPTION: bool = false;

    fn path(&self) -> &'static str;
    fn selectors(&self) -> Selectors;
    /// Drops the selector that the server does not support, and filters objects here from now on. False: there is none.
    fn widen(&mut self) -> bool {
        false
    }
    /// Receives changes; nothing more is read before the answer. An empty batch comes with a bookmark: nothing
    /// happened, and the answer says whether that is enough.
    fn deliver(&mut self, changes: Vec<Change<Object<Self>>>) -> impl Future<Output = Ack> + Send;
    /// Receives the health of the watch: each recovery, and each failure.
    fn health(&mut self, health: JobHealth) -> impl Future<Output = Ack> + Send;
}

pub(crate) type Object<S> = <<S as Subject>::Encoding as Encoding>::Object;

/// Publishes `health`.
pub(crate) fn publish_health(to: &watch::Sender<JobHealth>, health: JobHealth) {
    to.send_if_modified(|shown| {
        let changed = *shown != health;
        *shown = health;
        changed
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_become_a_query() {
        assert_eq!(Selectors::default().query(), Vec::<String>::new());
        let both = Selectors { labels: Some("!a".into()), fields: Some("b!=c".into()) };
        assert_eq!(both.query(), ["labelSelector=%21a", "fieldSelector=b%21%3Dc"]);
        assert_eq!(both.without_objects().fields.unwrap(), format!("b!=c,{NO_OBJECT}"));
        assert_eq!(Selectors::default().without_objects().fields.unwrap(), NO_OBJECT);
    }
}
