//! Owns: image pulls like a kubelet's. In: the images. Out: each is pulled through the agent's socket, and retried with
//! back-off after an error or a lost connection.

use crate::folder::Folder;
use crate::stage::Stage;
use anyhow::{Context as _, Result, anyhow};
use keelson_harness::cri::{Cri, Pull};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The kubelet starts at 10 s and ends at 300 s, which is too long for a demonstration.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(8);

/// Running pulls. Cancelled on drop.
pub(crate) struct Pulls {
    _tasks: JoinSet<()>,
    done: watch::Receiver<usize>,
    count: usize,
    started: Instant,
}

impl Pulls {
    pub(crate) fn start(stage: &Stage, folder: &Folder) -> Result<Self> {
        let log = folder.path().join("pulls.log");
        let log = Arc::new(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?);
        let (count, done) = watch::channel(0);
        let count = Arc::new(count);
        let mut tasks = JoinSet::new();
        for (n, image) in stage.images.iter().enumerate() {
            let caller = Caller { socket: stage.agent.socket(), log: log.clone() };
            let name = image.at(stage.proxy.address());
            let count = count.clone();
            tasks.spawn(async move {
                caller.pull(&name, n + 1).await;
                count.send_modify(|count| *count += 1);
            });
        }
        Ok(Self { _tasks: tasks, done, count: stage.images.len(), started: Instant::now() })
    }

    /// Waits until every image is pulled, and returns the elapsed time.
    pub(crate) async fn all(&self) -> Duration {
        let mut done = self.done.clone();
        // The sender lives in the tasks, so it is gone only when all have ended.
        let _ = done.wait_for(|done| *done == self.count).await;
        self.started.elapsed()
    }
}

struct Caller {
    socket: PathBuf,
    log: Arc<File>,
}

impl Caller {
    async fn pull(&self, image: &str, n: usize) {
        let pull = Pull::new(image).pod(&format!("app-{n}"), &format!("uid-{n}"));
        let mut wait = FIRST_WAIT;
        loop {
            match attempt(&self.socket, &pull).await {
                Ok(reference) => return self.note(&format!("{image}: {reference}")),
                Err(error) => self.note(&format!("{image}: {error:#}; retrying in {wait:?}")),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// Writes to a file: the terminal belongs to the progress display.
    fn note(&self, line: &str) {
        if let Err(error) = writeln!(&*self.log, "{line}") {
            eprintln!("cannot write the log of pulls: {error}");
        }
    }
}

async fn attempt(socket: &Path, pull: &Pull) -> Result<String> {
    let answer = Cri::connect(socket).await?.pull(pull).await;
    answer.map_err(|status| anyhow!("{:?}: {}", status.code(), status.message()))
}
