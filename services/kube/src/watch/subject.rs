//! What a watch is of, and what it hands over.
//!
//! Owns: [`Subject`], [`Change`], [`Selectors`] and [`show`]. In: nothing; these are what [`follow`](super::follow) is given and
//! gives.

use keelson_actor_system::cluster::ChoreHealth;
use keelson_endpoint_publisher::{Answer, Seen};
use tokio::sync::watch;

use super::events::Encoding;
use crate::bodies::escaped;

/// The name of no object, for requests that need only the version of a collection.
const NO_OBJECT: &str = "metadata.name=keelson-no-such-object";

/// A change of an object that a watch has seen; a deleted one comes with its last state.
pub(crate) type Change<T> = Seen<T, T>;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Selectors {
    /// `labelSelector`, if there is one.
    pub(crate) labels: Option<String>,
    /// `fieldSelector`, if there is one.
    pub(crate) fields: Option<String>,
}

impl Selectors {
    pub(crate) fn fields(fields: impl Into<String>) -> Self {
        Self { labels: None, fields: Some(fields.into()) }
    }

    /// The same, but for objects: none fits.
    pub(crate) fn without_objects(mut self) -> Self {
        self.fields = Some(match self.fields {
            Some(fields) => format!("{fields},{NO_OBJECT}"),
            None => NO_OBJECT.to_owned(),
        });
        self
    }

    /// As parameters of a query, escaped.
    pub(crate) fn query(&self) -> Vec<String> {
        let both = [("labelSelector", &self.labels), ("fieldSelector", &self.fields)];
        let given = both.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        given.map(|(name, value)| format!("{name}={}", escaped(value))).collect()
    }
}

/// What is being watched: one collection, narrowed by selectors, and what becomes of what is seen.
pub(crate) trait Subject: Send {
    type Encoding: Encoding;
    /// For metrics.
    const RESOURCE: &'static str;
    const ACCEPT: &'static str;
    const ACCEPT_LIST: &'static str;
    /// A server that answers 404 has none. One that answers 403, 500 or what cannot be read leaves what was known before, and
    /// that is a failure that is told and retried.
    const OPTIONAL: bool = false;
    /// So few objects that they are listed again whenever a watch was interrupted, which shows a rollback of the store
    /// as soon as the API server is back.
    const LIST_AFTER_INTERRUPTION: bool = false;

    fn path(&self) -> &'static str;
    fn selectors(&self) -> Selectors;
    /// Gives up the selector that the server does not know, and leaves objects out here from now on. False: there is none.
    fn widen(&mut self) -> bool {
        false
    }
    /// Takes what was seen; nothing more is read before the answer. An empty batch comes with a bookmark: nothing
    /// happened, and the answer says whether that is enough.
    fn tell(&mut self, changes: Vec<Change<Object<Self>>>) -> impl Future<Output = Answer> + Send;
    /// Takes the health of the watch: each time that it recovers, and each failure.
    fn health(&mut self, health: ChoreHealth) -> impl Future<Output = Answer> + Send;
}

pub(crate) type Object<S> = <<S as Subject>::Encoding as Encoding>::Object;

/// Puts `health` where others look for it.
pub(crate) fn show(to: &watch::Sender<ChoreHealth>, health: ChoreHealth) {
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
