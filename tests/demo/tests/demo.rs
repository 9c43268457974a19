//! `make run` from beginning to end, without a terminal: the agent is killed during pulls and restarted with the
//! printed command, every image is pulled, and nothing is left.

use anyhow::{Context as _, Result, ensure};
use keelson_harness::process::{Program, is_program, runs};
use keelson_harness::scratch::{Scratch, mounts_below};
use keelson_harness::util::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Nine images at eight seconds each, three at a time, on a machine that may be busy.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

#[tokio::test(flavor = "multi_thread")]
async fn every_image_is_pulled_despite_a_kill_and_nothing_is_left() -> Result<()> {
    let scratch = Scratch::new()?;
    let run = scratch.path().join("run");
    let log = scratch.path().join("demo.log");
    let printed = || fs::read_to_string(&log).unwrap_or_default();
    // It works in the current folder.
    let script = "cd \"$1\" && exec \"$2\"";
    let demo = Program {
        name: "keelson-demo".to_owned(),
        path: PathBuf::from("/bin/sh"),
        args: ["-c", script, "sh", path(scratch.path())?, env!("CARGO_BIN_EXE_keelson-demo")]
            .map(str::to_owned)
            .to_vec(),
        env: vec![("KEELSON_DEMO_ONCE".to_owned(), "1".to_owned())],
        log: log.clone(),
    };
    let mut demo = demo.start()?;

    until("the demo printed how to kill the agent", || printed().contains("kill -9 ")).await?;
    let first = agent_pid(&run)?;
    until("the runtime is downloading", || ingests(&run) > 0).await?;
    kill9(first)?;
    until("the demonstration sees the agent go", || printed().contains("The agent exited")).await?;
    let command = printed().lines().rfind(|line| line.contains(" agent --config ")).map(str::to_owned);
    let command = command.context("no command was printed")?;
    let mut words = command.split_whitespace().map(str::to_owned);
    let again = Program {
        name: "keelson agent, started by the reader".to_owned(),
        path: PathBuf::from(words.next().context("the command is empty")?),
        args: words.collect(),
        env: Vec::new(),
        log: scratch.path().join("again.log"),
    };
    let mut again = again.start()?;
    until("the demonstration sees the agent return", || printed().contains("The agent is running again"))
        .await?;
    let second = agent_pid(&run)?;
    ensure!(second == again.pid(), "the pid file names {second}, the agent is {}", again.pid());

    let status = demo.wait(RUN_TIMEOUT).await?;
    ensure!(status.success(), "{status}:\n{}", printed());
    ensure!(printed().contains("All 9 images are pulled"), "{}", printed());
    let status = again.wait(RUN_TIMEOUT).await?;
    ensure!(status.success(), "the agent that the reader started ended with {status}");

    ensure!(!runs(first), "the first agent runs again");
    ensure!(mounts_below(&run).is_empty(), "{:?}", mounts_below(&run));
    let left: Vec<_> = fs::read_dir(&run)?.flatten().map(|entry| entry.file_name()).collect();
    ensure!(left == ["logs"], "{left:?}");
    Ok(())
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("the test folder has a plain name")
}

fn agent_pid(run: &Path) -> Result<u32> {
    let file = run.join("state/keelson.pid");
    let pid = fs::read_to_string(&file).with_context(|| format!("no {}", file.display()))?;
    let pid = pid.trim().parse().with_context(|| format!("{pid:?} is no pid"))?;
    ensure!(is_program(pid, "keelson"), "process {pid} is no keelson");
    Ok(pid)
}

fn ingests(run: &Path) -> usize {
    fs::read_dir(run.join("containerd/root/io.containerd.content.v1.content/ingest"))
        .map_or(0, Iterator::count)
}

fn kill9(pid: u32) -> Result<()> {
    let pid = nix::unistd::Pid::from_raw(pid.try_into()?);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).context("cannot kill the agent")
}
