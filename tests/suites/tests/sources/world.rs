//! Owns: what a case needs of the place in which objects are. In: manifests. Out: a source of them, under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
pub(crate) use keelson_harness::suite::run;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::truth::{Collector, Truth};

/// A number that no other test has.
pub(crate) fn number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A source under way. It ends on drop.
pub(crate) struct Running(pub(crate) JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A place in which objects are, and a source of them.
pub(crate) trait World: Sized {
    /// The most that may come in one event.
    const LARGEST_BATCH: usize;

    /// A place of the test's own, with nothing in it that the test has not put there.
    async fn make() -> Result<Self>;

    /// Which number is its own: of cluster IPs (`10.96.NUMBER.0`), and of names.
    fn number(&self) -> usize;

    /// Puts an object, new or changed.
    async fn put(&self, object: &Value) -> Result<()>;

    /// Puts several.
    async fn put_all(&self, objects: &[Value]) -> Result<()> {
        for object in objects {
            self.put(object).await?;
        }
        Ok(())
    }

    /// Deletes an object that is there.
    async fn delete(&self, object: &Value) -> Result<()>;

    /// Starts a source.
    fn start(&self, sink: &Arc<Collector>) -> Running;

    /// The namespace of the test.
    fn namespace(&self) -> String {
        format!("sources-{}", self.number())
    }

    /// The name of the test's Node.
    fn node(&self) -> String {
        format!("node-{}", self.number())
    }

    /// A cluster IP of the test.
    fn ip(&self, n: u8) -> String {
        format!("10.96.{}.{n}", self.number())
    }
}

/// Waits until it is so.
pub(crate) async fn so(sink: &Collector, what: &str, check: impl Fn(&Truth) -> Result<()>) -> Result<()> {
    eventually(PATIENCE, what, || {
        let outcome = check(&sink.truth());
        async {
            if outcome.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            outcome
        }
    })
    .await?;
    sink.kept()
}
