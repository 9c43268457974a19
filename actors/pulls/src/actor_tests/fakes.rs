//! Scripted neighbours that record their calls.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::{
    file_system::{FileSystem, FileSystemReader},
    reports::{RUNTIME_READY, RuntimeCondition, RuntimeImage},
    test_support::FakeStore,
};
use keelson_proto::Code;
use keelson_storage::{StateStore as _, Table};
use tokio::{sync::Notify, time::Instant};

use crate::{
    request::PullCall,
    runtime::{
        Capabilities, FailureKind, Ingest, Outcome, ProbeFailure, Progress, PullReading, PullReply, Readings,
        Runtime, RuntimeError, RuntimeInfo, RuntimePull,
    },
};

pub(super) const SOCKET: &str = "unix:///run/fake.sock";

#[derive(Debug, Clone, Copy)]
pub(super) enum ScriptedPull {
    Succeed(Duration),
    Fail(Duration, Code, &'static str),
    Lose(Duration, &'static str),
    Hang,
}

#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) down: Option<String>,
    pub(super) capabilities: Capabilities,
    pub(super) present: HashSet<String>,
    /// By image, one per attempt; afterwards, and for others, a success after a second.
    pub(super) pulls: HashMap<String, VecDeque<ScriptedPull>>,
    pub(super) instant: bool,
    pub(super) progress: HashMap<String, Progress>,
    pub(super) drop_takes: Duration,
    /// Failing methods, among those for the node status.
    pub(super) broken: HashSet<&'static str>,
    pub(super) report_takes: Duration,
    pub(super) images: Vec<RuntimeImage>,
    /// Others hold 1000 bytes.
    pub(super) lease_bytes: HashMap<String, u64>,
    /// `None` hangs.
    pub(super) image_fs: Option<FileSystem>,
    pub(super) log: Vec<String>,
    pub(super) probes: Vec<Instant>,
    pub(super) readings: Vec<Instant>,
    pub(super) running: usize,
    pub(super) most_running: usize,
}

type Watcher = Box<dyn Fn(&RuntimePull) + Send>;

pub(super) struct FakeRuntime {
    script: Mutex<Script>,
    /// Called at the start of every pull.
    pub(super) watcher: Mutex<Option<Watcher>>,
    pub(super) closed: Arc<Notify>,
    me: std::sync::Weak<FakeRuntime>,
}

impl FakeRuntime {
    pub(super) fn new() -> Arc<Self> {
        let capabilities =
            Capabilities { leases: true, content: true, ignores_namespace: true, ..Capabilities::default() };
        let script = Mutex::new(Script { capabilities, ..Script::default() });
        Arc::new_cyclic(|me| Self {
            script,
            watcher: Mutex::default(),
            closed: Arc::default(),
            me: me.clone(),
        })
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().expect("unharmed")
    }

    pub(super) fn set_pulls(&self, image: &str, what: impl IntoIterator<Item = ScriptedPull>) {
        self.script().pulls.entry(image.into()).or_default().extend(what);
    }

    pub(super) fn log(&self) -> Vec<String> {
        self.script().log.clone()
    }

    pub(super) fn logged(&self, what: &str) -> usize {
        self.script().log.iter().filter(|line| *line == what).count()
    }

    fn note(&self, line: String) {
        self.script().log.push(line);
    }

    fn error(&self, reason: &str) -> RuntimeError {
        RuntimeError { endpoint: SOCKET.into(), reason: reason.into() }
    }

    fn report<T: Send + 'static>(
        &self,
        method: &'static str,
        of: impl FnOnce(&Script) -> T,
    ) -> BoxFuture<'static, Result<T, RuntimeError>> {
        self.note(method.to_owned());
        let script = self.script();
        let answer = if script.broken.contains(method) { Err(self.error(method)) } else { Ok(of(&script)) };
        let takes = script.report_takes;
        async move {
            tokio::time::sleep(takes).await;
            answer
        }
        .boxed()
    }
}

/// Records that a pull was dropped before its end.
struct Call {
    of: Arc<FakeRuntime>,
    image: String,
    ended: bool,
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut script = self.of.script();
        script.running -= 1;
        if !self.ended {
            script.log.push(format!("cancelled {}", self.image));
        }
    }
}

impl FileSystemReader for FakeRuntime {
    fn file_system(&self, path: PathBuf) -> BoxFuture<'static, Result<FileSystem, String>> {
        self.note(format!("read {}", path.display()));
        let image_fs = self.script().image_fs;
        async move {
            match image_fs {
                Some(image_fs) => Ok(image_fs),
                None => std::future::pending().await,
            }
        }
        .boxed()
    }
}

impl Runtime for FakeRuntime {
    fn endpoint(&self) -> &str {
        SOCKET
    }

    fn probe(&self) -> BoxFuture<'static, Result<RuntimeInfo, ProbeFailure>> {
        let mut script = self.script();
        script.probes.push(Instant::now());
        let info =
            RuntimeInfo { name: "fake".into(), version: "v1".into(), capabilities: script.capabilities };
        let result = script.down.clone().map_or(Ok(info), |reason| {
            Err(ProbeFailure { error: self.error(&reason), kind: FailureKind::Gone })
        });
        async move { result }.boxed()
    }

    fn pull(&self, pull: RuntimePull) -> BoxFuture<'static, Outcome> {
        if let Some(watcher) = &*self.watcher.lock().expect("unharmed") {
            watcher(&pull);
        }
        let image = pull.call.image.to_string();
        let does = {
            let mut script = self.script();
            script.log.push(format!("pull {image}"));
            script.running += 1;
            script.most_running = script.most_running.max(script.running);
            let instant = script.instant;
            let next = script.pulls.get_mut(&image).and_then(VecDeque::pop_front);
            next.unwrap_or(ScriptedPull::Succeed(if instant {
                Duration::ZERO
            } else {
                Duration::from_secs(1)
            }))
        };
        let mut call = Call { of: self.me.upgrade().expect("alive"), image, ended: false };
        async move {
            let (after, outcome) = match does {
                ScriptedPull::Hang => std::future::pending().await,
                ScriptedPull::Succeed(after) => {
                    let reply = PullReply { result: Ok(vec![1].into()), metadata: Vec::new() };
                    (after, Outcome::Answered(Arc::new(reply)))
                }
                ScriptedPull::Fail(after, code, text) => {
                    (after, Outcome::Answered(Arc::new(PullReply::status(code, text))))
                }
                ScriptedPull::Lose(after, text) => {
                    (after, Outcome::Lost(Arc::new(PullReply::status(Code::Unavailable, text))))
                }
            };
            if !after.is_zero() {
                tokio::time::sleep(after).await;
            }
            call.ended = true;
            call.of.script().present.insert(call.image.clone());
            outcome
        }
        .boxed()
    }

    fn image_size(&self, call: Arc<PullCall>) -> BoxFuture<'static, Result<Option<u64>, RuntimeError>> {
        let present = self.script().present.contains(&*call.image);
        async move { Ok(present.then_some(1000)) }.boxed()
    }

    fn status(&self) -> BoxFuture<'static, Result<Vec<RuntimeCondition>, RuntimeError>> {
        let ready = RuntimeCondition { kind: RUNTIME_READY.into(), ok: true, ..Default::default() };
        self.report("status", |_| vec![ready])
    }

    fn images(&self) -> BoxFuture<'static, Result<Vec<RuntimeImage>, RuntimeError>> {
        self.report("list images", |script| script.images.clone())
    }

    fn image_fs(&self) -> BoxFuture<'static, Result<Option<PathBuf>, RuntimeError>> {
        self.report("image fs", |_| Some("/var/lib/fake".into()))
    }

    fn connection_closed(&self) -> BoxFuture<'static, ()> {
        let closed = self.closed.clone();
        async move { closed.notified().await }.boxed()
    }

    /// Each pull with progress downloads one blob, named after its lease.
    fn progress(&self, leases: Vec<String>) -> BoxFuture<'static, Result<Readings, RuntimeError>> {
        let mut script = self.script();
        script.readings.push(Instant::now());
        let mut readings = Readings::default();
        for lease in leases {
            let progress = script.progress.get(&lease).or_else(|| script.progress.get("*")).copied();
            let Some(progress) = progress else { continue };
            let reference = format!("layer-{lease}");
            let ingest = Ingest { offset: progress.bytes_done, started_unix_ms: i64::MAX };
            readings.ingests.insert(reference.clone(), ingest);
            let reading = PullReading { progress, has_manifest: true, refs: vec![reference] };
            readings.pulls.insert(lease, reading);
        }
        async move { Ok(readings) }.boxed()
    }

    fn drop_lease(&self, lease: String, _: bool) -> BoxFuture<'static, Result<(), RuntimeError>> {
        let me = self.me.upgrade().expect("alive");
        let (takes, fails) = {
            let script = self.script();
            (script.drop_takes, script.broken.contains("drop_lease"))
        };
        async move {
            tokio::time::sleep(takes).await;
            if fails {
                return Err(me.error("no answer within 10s"));
            }
            me.note(format!(
                "dropped {}",
                if lease.starts_with("keelson-owner-") { "a lease of ours" } else { &lease }
            ));
            Ok(())
        }
        .boxed()
    }

    fn lease_bytes(&self, lease: String) -> BoxFuture<'static, Result<u64, RuntimeError>> {
        let bytes = self.script().lease_bytes.get(&lease).copied().unwrap_or(1000);
        async move { Ok(bytes) }.boxed()
    }

    fn renew_leases(&self, leases: Vec<String>) -> BoxFuture<'static, Result<(), RuntimeError>> {
        self.note(format!("renew {}", leases.len()));
        async move { Ok(()) }.boxed()
    }

    fn reap_leases(&self, keep: BTreeSet<String>) -> BoxFuture<'static, Result<Vec<String>, RuntimeError>> {
        self.note(format!("reap all but {}", keep.len()));
        async move { Ok(vec!["orphan".to_owned()]) }.boxed()
    }

    fn leave_leases(&self) {
        self.note("leases left".to_owned());
    }
}

/// Image, and whether it is running.
pub(super) fn records(store: &FakeStore) -> Vec<(String, bool)> {
    let records = store.contents().scan(Table::Pulls).expect("the memory reads");
    let decode = |(_, value): (Vec<u8>, Vec<u8>)| {
        let record: serde_json::Value = serde_json::from_slice(&value).expect("JSON");
        (record["image"].as_str().expect("a name").to_owned(), record["state"] == "running")
    };
    records.into_iter().map(decode).collect()
}
