//! Owns: many nodes that watch and renew with client-go, in one process (`tests/peers/reflectors`).
//! In: a kubeconfig per node. Out: the nodes that have synced, and that have seen a marker: a Service with an
//! EndpointSlice whose name begins with `marker-`.

use anyhow::{Context as _, Result};
use keelson_harness::peers;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

/// Ends with this value.
#[derive(Debug)]
pub struct Reflectors {
    child: Child,
    /// Closed to end it.
    _stdin: ChildStdin,
    seen: Arc<Mutex<Sightings>>,
}

/// When each node saw a marker, in Unix milliseconds. The empty name stands for its first sync.
type Sightings = HashMap<String, HashMap<usize, u64>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    node: usize,
    name: String,
    unix_ms: u64,
}

impl Reflectors {
    /// Starts `nodes` nodes with the name prefix `prefix`; `kubeconfigs` has `kubeconfig-N` for each.
    pub fn start(kubeconfigs: &Path, nodes: usize, prefix: &str) -> Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(peers::reflectors()?);
        command.arg("--kubeconfig").arg(kubeconfigs.join("kubeconfig-%d"));
        command.args(["--nodes", &nodes.to_string(), "--prefix", prefix, "--stderrthreshold", "FATAL"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot run reflectors")?;
        let stdin = child.stdin.take().context("reflectors has no standard input")?;
        let stdout = child.stdout.take().context("reflectors has no standard output")?;
        let seen = Arc::<Mutex<Sightings>>::default();
        let notes = seen.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stdout).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(Line { node, name, unix_ms }) = serde_json::from_str(&line) {
                    let mut seen = notes.lock().unwrap_or_else(PoisonError::into_inner);
                    seen.entry(name).or_default().entry(node).or_insert(unix_ms);
                }
            }
        });
        Ok(Self { child, _stdin: stdin, seen })
    }

    /// When each node saw this marker, in Unix milliseconds. With an empty name: when it had synced first.
    pub fn seen(&self, name: &str) -> HashMap<usize, u64> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned().unwrap_or_default()
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }
}
