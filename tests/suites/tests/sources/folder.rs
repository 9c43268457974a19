//! Owns: a folder of manifests. In: objects. Out: a file for each, and the source that reads them.

use std::sync::Arc;

use anyhow::Result;
use keelson_cluster::manifests::ManifestFolder;
use keelson_endpoints::files::{FilesParts, FilesSource};
use keelson_harness::scratch::Scratch;
use serde_json::Value;

use crate::sink::Collector;
use crate::world::{Running, World, number};

pub(crate) struct InFolder {
    folder: ManifestFolder,
    number: usize,
    _scratch: Scratch,
}

impl InFolder {
    fn file(object: &Value) -> String {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        format!("{}-{}.json", text("/kind"), text("/metadata/name"))
    }
}

impl World for InFolder {
    const LARGEST_BATCH: usize = 502;

    async fn make() -> Result<Self> {
        let scratch = Scratch::new()?;
        let folder = ManifestFolder::new(scratch.dir("manifests")?);
        Ok(Self { folder, number: number(), _scratch: scratch })
    }

    fn number(&self) -> usize {
        self.number
    }

    async fn put(&self, object: &Value) -> Result<()> {
        self.folder.write(&Self::file(object), &object.to_string())
    }

    async fn delete(&self, object: &Value) -> Result<()> {
        self.folder.remove(&Self::file(object))
    }

    fn start(&self, sink: &Arc<Collector>) -> Running {
        let parts = FilesParts::new(self.folder.path().to_owned(), self.node(), Arc::clone(sink) as Arc<_>);
        Running(tokio::spawn(FilesSource::new(parts).run()))
    }
}
