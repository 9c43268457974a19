//! Owns: a folder of manifests. In: objects. Out: a file for each, and the source that reads them.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use keelson_endpoints::files::{FilesParts, FilesSource};
use keelson_harness::scratch::Scratch;
use serde_json::Value;

use crate::truth::Collector;
use crate::world::{Running, World, number};

pub(crate) struct InFolder {
    folder: PathBuf,
    number: usize,
    _scratch: Scratch,
}

impl InFolder {
    fn file(&self, object: &Value) -> PathBuf {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        self.folder.join(format!("{}-{}.json", text("/kind"), text("/metadata/name")))
    }
}

impl World for InFolder {
    const LARGEST_BATCH: usize = 502;

    async fn make() -> Result<Self> {
        let scratch = Scratch::new()?;
        let folder = scratch.dir("manifests")?;
        Ok(Self { folder, number: number(), _scratch: scratch })
    }

    fn number(&self) -> usize {
        self.number
    }

    async fn put(&self, object: &Value) -> Result<()> {
        let file = self.file(object);
        let draft = self.folder.join(".draft");
        fs::write(&draft, object.to_string()).with_context(|| format!("cannot write {}", draft.display()))?;
        fs::rename(&draft, &file).with_context(|| format!("cannot make {}", file.display()))
    }

    async fn delete(&self, object: &Value) -> Result<()> {
        let file = self.file(object);
        fs::remove_file(&file).with_context(|| format!("cannot delete {}", file.display()))
    }

    fn start(&self, sink: &Arc<Collector>) -> Running {
        let parts = FilesParts::new(self.folder.clone(), self.node(), Arc::clone(sink) as Arc<_>);
        Running(tokio::spawn(FilesSource::new(parts).run()))
    }
}
