//! Owns: the output on the terminal. In: the stage and the pulls. Out: paths and addresses, progress (`keelson pulls
//! --watch`), and a message when the agent exits or is back.

use crate::folder::Folder;
use crate::pulls::Pulls;
use crate::stage::{IMAGES, LIMIT, Stage};
use anyhow::Result;
use keelson_harness::process::attached;
use keelson_harness::util::http_get;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of starts of a progress display that fails.
const TRIES: u32 = 5;

/// Shows everything until the caller drops the future; with `once` it returns when all images are pulled.
pub(crate) async fn until_stopped(
    stage: &mut Stage,
    pulls: &Pulls,
    folder: &Folder,
    once: bool,
) -> Result<()> {
    introduce(stage, folder);
    let mut progress = Progress::new(stage);
    let mut there = false;
    loop {
        tokio::select! {
            took = pulls.all(), if !there => {
                there = true;
                progress.stop().await;
                conclude(stage, took, once);
                if once {
                    return Ok(());
                }
            }
            () = lost(stage, &mut progress, there) => {
                progress.stop().await;
                println!("\nThe agent exited. Start it again with\n\n    {}\n", command(stage));
                until_back(stage).await;
                let pid = stage.agent_pid().map_or("unknown".to_owned(), |pid| pid.to_string());
                println!("The agent is running again, pid {pid}.\n");
            }
        }
    }
}

fn introduce(stage: &mut Stage, folder: &Folder) {
    let run = folder.path().display();
    let pid = stage.agent_pid().map_or("unknown".to_owned(), |pid| pid.to_string());
    println!(
        "\n{IMAGES} images are pulled through the agent into containerd, {LIMIT} at a time.\n\n\
         \x20   debug page    {url}/\n\
         \x20   CRI socket    {run}/cri.sock        (debug: {run}/debug.sock)\n\
         \x20   containerd    {run}/containerd/containerd.sock\n\
         \x20   settings      {run}/keelson.toml\n\
         \x20   state         {run}/state\n\
         \x20   logs          {run}/keelson.log, containerd/containerd.log, registry/registry.log, pulls.log\n\
         \x20   agent         pid {pid}\n\n\
         Kill the agent during the pulls, from another terminal:\n\n\
         \x20   kill -9 $(cat {run}/state/keelson.pid)\n\n\
         and start it again:\n\n\
         \x20   {command}\n\n\
         The Services and EndpointSlices are in {run}/manifests; change a file and watch the result:\n\n\
         \x20   {keelson} watch --target {target}\n\
         \x20   {keelson} endpoints explain default/shop --socket unix://{run}/debug.sock\n\n\
         Run the service proxy in a separate network namespace:\n\n\
         \x20   ip netns add keelson-try\n\
         \x20   ip netns exec keelson-try {keelson} proxy --backend nft --target {target} --set proxy.listen=unix://{run}/proxy.sock &\n\
         \x20   {keelson} proxy explain 10.96.10.1:80 --socket unix://{run}/proxy.sock\n\n\
         When the agent is killed, queue places and the fetched layers, complete or partial, are kept. Ctrl-C \
         stops everything.\n",
        url = stage.agent.url(),
        command = command(stage),
        keelson = stage.agent.program().display(),
        target = stage.agent.endpoints_target(),
    );
}

fn conclude(stage: &Stage, took: Duration, once: bool) {
    let records = stage.proxy.records();
    let wanted: u64 = stage.images.iter().map(|image| image.size()).sum();
    let layers = stage.images.iter().flat_map(|image| &image.layers);
    let sent: u64 = layers.map(|layer| records.bytes_sent(&layer.digest)).sum();
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "\nAll {IMAGES} images are pulled after {:.0} s. Their layers have {:.1} MiB, the registry sent \
         {:.1} MiB, for at most {} images at a time.",
        took.as_secs_f64(),
        mib(wanted),
        mib(sent),
        records.max_concurrent_repos(),
    );
    if !once {
        println!("The debug page and the sockets are served until Ctrl-C.");
    }
}

fn command(stage: &Stage) -> String {
    format!("{} agent --config {}", stage.agent.program().display(), stage.agent.config().display())
}

/// Keeps the progress display running while the agent runs, and returns when the agent has exited.
async fn lost(stage: &mut Stage, progress: &mut Progress, there: bool) {
    let first = stage.agent_pid();
    // Another pid means that it was restarted between two checks.
    while first.is_some() && stage.agent_pid() == first {
        if !there {
            progress.keep();
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn until_back(stage: &mut Stage) {
    let url = format!("{}/readyz", stage.agent.url());
    loop {
        let ready = http_get(&url).await.is_ok_and(|answer| answer.status.is_success());
        if ready && stage.agent_pid().is_some() {
            return;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

struct Progress {
    program: PathBuf,
    args: Vec<String>,
    child: Option<Child>,
    failures: u32,
}

impl Progress {
    fn new(stage: &Stage) -> Self {
        let config = stage.agent.config().display().to_string();
        let args = ["pulls", "--watch", "--config"].map(str::to_owned);
        Self {
            program: Path::to_owned(stage.agent.program()),
            args: args.into_iter().chain([config]).collect(),
            child: None,
            failures: 0,
        }
    }

    fn keep(&mut self) {
        if let Some(child) = &mut self.child {
            match child.try_wait() {
                Ok(None) => return,
                Ok(Some(status)) if status.success() => return,
                _ => self.failures += 1,
            }
        }
        self.child = None;
        if self.failures < TRIES {
            match attached(&self.program, &self.args) {
                Ok(child) => self.child = Some(child),
                Err(error) => {
                    self.failures += 1;
                    eprintln!("cannot show progress: {error:#}");
                }
            }
        }
    }

    /// Ends it with SIGINT, so that it restores the terminal.
    async fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        self.failures = 0;
        if let Ok(pid) = i32::try_from(child.id()) {
            // It may have exited by itself.
            let _ = kill(Pid::from_raw(pid), Signal::SIGINT);
        }
        for _ in 0..20 {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Ctrl-C has reached it too; an error means that it has exited.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
