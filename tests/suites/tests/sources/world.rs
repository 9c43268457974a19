//! Owns: a case's requirements of the place in which objects are. In: manifests. Out: a running source of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
pub(crate) use keelson_harness::suite::run;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::sink::{Collector, SinkState};

/// A number that no other test has.
pub(crate) fn number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A running source. Stopped on drop.
pub(crate) struct Running(pub(crate) JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A place with objects, and a source of them.
pub(crate) trait World: Sized {
    /// Maximum number of objects in one event.
    const LARGEST_BATCH: usize;

    /// A place of the test, with only objects that the test has put there.
    async fn make() -> Result<Self>;

    /// Its unique number: used in cluster IPs (`10.96.NUMBER.0`), and in names.
    fn number(&self) -> usize;

    async fn put(&self, object: &Value) -> Result<()>;

    async fn put_all(&self, objects: &[Value]) -> Result<()> {
        for object in objects {
            self.put(object).await?;
        }
        Ok(())
    }

    async fn delete(&self, object: &Value) -> Result<()>;

    fn start(&self, sink: &Arc<Collector>) -> Running;

    fn namespace(&self) -> String {
        format!("sources-{}", self.number())
    }

    fn node(&self) -> String {
        format!("node-{}", self.number())
    }

    fn ip(&self, n: u8) -> String {
        format!("10.96.{}.{n}", self.number())
    }
}

pub(crate) async fn eventually_in_sink(
    sink: &Collector,
    what: &str,
    check: impl Fn(&SinkState) -> Result<()>,
) -> Result<()> {
    eventually(PATIENCE, what, || {
        let outcome = check(&sink.state());
        async {
            if outcome.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            outcome
        }
    })
    .await?;
    sink.check_guarantees()
}
