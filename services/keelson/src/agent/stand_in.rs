//! A process that ends in the agent's place, so that systemd starts the next agent while this one finishes its calls.
//!
//! Owns: that process. In: SIGTERM of an agent that systemd runs with `--systemd-handover`. Out: `MAINPID=` of a child
//! that systemd has adopted, and then its end. systemd starts a service again only when the main process has ended; with
//! `KillMode=process` it leaves the former one alone (decision 0019).

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{ChildStdin, Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use sd_notify::NotifyState;
use tokio::{io::AsyncReadExt as _, net::UnixStream};

/// How long systemd may take to read what it was told.
const BARRIER: Duration = Duration::from_secs(2);

/// Flags of the hidden command.
#[derive(Debug, Args)]
pub(crate) struct StandInArgs {
    /// Wait for the end of standard input.
    #[arg(long)]
    wait: bool,
}

/// The hidden command. Without `--wait` it starts itself with it, prints that process's id, and ends, so that the child
/// becomes one of the service manager's.
///
/// # Errors
/// The child cannot be started.
pub(crate) fn run(args: &StandInArgs) -> anyhow::Result<ExitCode> {
    if args.wait {
        // An error ends it just as well.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        return Ok(ExitCode::SUCCESS);
    }
    let child = itself().arg("--wait").stdout(Stdio::null()).spawn().context("cannot start the stand-in")?;
    crate::cli::print(&format!("{}\n", child.id()))?;
    Ok(ExitCode::SUCCESS)
}

/// This program, though its file may have been replaced by then.
fn itself() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("stand-in").stderr(Stdio::null());
    command
}

/// Makes a stand-in the service's main process and ends it. The agent is not systemd's main process afterwards.
///
/// # Errors
/// The stand-in cannot be started, or systemd cannot be told.
pub(super) async fn take_the_end() -> anyhow::Result<()> {
    let (pid, hold) = tokio::task::spawn_blocking(start).await??;
    sd_notify::notify(&[NotifyState::MainPid(pid)]).context("systemd cannot be told of the stand-in")?;
    barrier().await?;
    tracing::info!(pid, "systemd follows a stand-in, which ends now");
    drop(hold);
    Ok(())
}

/// Starts the stand-in; it lives until the second value is dropped.
fn start() -> anyhow::Result<(u32, ChildStdin)> {
    let spawned = itself().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.context("cannot start the stand-in")?;
    let (hold, output) = (child.stdin.take(), child.stdout.take());
    let mut line = String::new();
    BufReader::new(output.context("the stand-in has no output")?).read_line(&mut line)?;
    let ended = child.wait()?;
    anyhow::ensure!(ended.success(), "the stand-in ended with {ended}");
    let pid = line.trim().parse().context("the stand-in tells no process id")?;
    Ok((pid, hold.context("the stand-in has no input")?))
}

/// Waits until systemd has read everything before (`BARRIER=1`): it closes the descriptor then.
async fn barrier() -> anyhow::Result<()> {
    let (mut near, far) = UnixStream::pair()?;
    let sent =
        sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[std::os::fd::AsFd::as_fd(&far)]);
    sent.context("systemd cannot be told of the stand-in")?;
    drop(far);
    // The end of the stream, or the end of patience with a service manager that knows no barriers.
    let _ = tokio::time::timeout(BARRIER, near.read_to_end(&mut Vec::new())).await;
    Ok(())
}
