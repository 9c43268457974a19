//! The main process of the agent's service under systemd, so that systemd starts the next agent while this one finishes
//! its calls.
//!
//! Owns: that process and both ends of its pipes. In: `--systemd-handover`; signals that systemd sends to its main
//! process. Out: `MAINPID=` with READY; SIGTERM and SIGHUP as events of the agent.
//!
//! systemd restarts a service only after its main process has ended, and systemd 252 ignores `MAINPID=` of a service
//! that is stopping. The agent therefore names the stand-in when it is ready. The stand-in ends on SIGTERM, and
//! `KillMode=process` keeps the agent running. The stand-in also ends when the agent does, and on SIGABRT of systemd's
//! watchdog ends the agent (decision 0019).

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::unix::pipe,
    signal::unix::{SignalKind, signal},
};

use super::systemd;

/// Written to the agent on SIGHUP.
const RELOAD: u8 = b'R';
/// Written to the stand-in by an agent that ends without an error.
const DONE: u8 = b'D';

/// How long an agent may take to end after SIGABRT. Shorter than systemd's `TimeoutAbortSec=`.
const ABORT: Duration = Duration::from_secs(5);

/// Flags of the hidden command.
#[derive(Debug, Args)]
pub(crate) struct StandInArgs {
    /// Process ID of the agent
    #[arg(long)]
    agent: i32,
    /// Wait until the agent exits or a signal arrives
    #[arg(long)]
    wait: bool,
}

/// The hidden command. Without `--wait` it starts itself with it and exits, so that the service manager adopts the
/// child.
pub(crate) fn run(args: &StandInArgs) -> anyhow::Result<ExitCode> {
    if !args.wait {
        itself(args.agent).arg("--wait").spawn().context("cannot start the stand-in")?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(wait(Pid::from_raw(args.agent)))
}

/// This program, even if its file was replaced.
fn itself(agent: i32) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["stand-in", "--agent", &agent.to_string()]).stderr(Stdio::null());
    command
}

async fn wait(agent: Pid) -> anyhow::Result<ExitCode> {
    let mut input = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    let mut output = pipe::Sender::from_owned_fd(io::stdout().as_fd().try_clone_to_owned()?)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut abort = signal(SignalKind::from_raw(nix::libc::SIGABRT))?;
    output.write_all(format!("{}\n", std::process::id()).as_bytes()).await?;
    loop {
        tokio::select! {
            // The agent's end of the pipe is closed: the agent has ended.
            last = input.read_u8() => return Ok(match last {
                Ok(DONE) => ExitCode::SUCCESS,
                _ => ExitCode::FAILURE,
            }),
            _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
            _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
            _ = hangup.recv() => output.write_all(&[RELOAD]).await?,
            // systemd's watchdog: the agent may be unable to read a pipe.
            _ = abort.recv() => return abort_agent(agent, &mut input).await,
        }
    }
}

/// Ends an agent that hangs. Nothing else would: `KillMode=process` leaves it running, and its sockets and its lock keep the
/// next agent from starting. One that is stopped (SIGSTOP) does not take SIGABRT. As long as its end of the pipe is open it
/// has not ended, so its ID is not reused.
async fn abort_agent(agent: Pid, input: &mut pipe::Receiver) -> anyhow::Result<ExitCode> {
    kill(agent, Signal::SIGABRT).context("cannot abort the agent")?;
    if tokio::time::timeout(ABORT, input.read_u8()).await.is_err() {
        kill(agent, Signal::SIGKILL).context("cannot kill the agent")?;
    }
    Ok(ExitCode::FAILURE)
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// It ended: the service is being stopped or restarted.
    Ended,
    Reload,
}

/// The agent's handle of the stand-in, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct StandIn {
    pid: u32,
    events: pipe::Receiver,
    hold: pipe::Sender,
}

impl StandIn {
    /// Starts a process for systemd to follow; `None` if the agent does not run under systemd.
    pub(super) async fn start_if_managed() -> Option<Self> {
        if !systemd::is_manager() {
            return None;
        }
        let started = Self::start().await;
        started
            .inspect_err(|error| {
                tracing::error!(
                    reason = format!("{error:#}"),
                    "no stand-in process; systemd starts a successor only after this agent exits"
                );
            })
            .ok()
    }

    /// Starts a stand-in and waits until it handles signals.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let (pid, input, output) = tokio::task::spawn_blocking(spawn).await??;
        let events = pipe::Receiver::from_owned_fd(output).context("cannot read from the stand-in")?;
        let hold = pipe::Sender::from_owned_fd(input).context("cannot write to the stand-in")?;
        Ok(Self { pid, events, hold })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) async fn next(&mut self) -> Event {
        match self.events.read_u8().await {
            Ok(RELOAD) => Event::Reload,
            _ => Event::Ended,
        }
    }

    /// Ends the stand-in as a process without an error.
    pub(super) fn finish(self) {
        // It may have ended already.
        let _ = self.hold.try_write(&[DONE]);
    }
}

fn spawn() -> anyhow::Result<(u32, OwnedFd, OwnedFd)> {
    let agent = i32::try_from(std::process::id()).context("the process ID is out of range")?;
    let spawned = itself(agent).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.context("cannot start the stand-in")?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let ended = child.wait().context("cannot wait for the starter of the stand-in")?;
    anyhow::ensure!(ended.success(), "the starter of the stand-in ended with {ended}");
    let mut output = output.context("the stand-in has no output")?;
    // Byte by byte: events follow the line.
    let (mut line, mut byte) = (Vec::new(), [0]);
    loop {
        io::Read::read_exact(&mut output, &mut byte).context("cannot read from the stand-in")?;
        match byte {
            [b'\n'] => break,
            [byte] => line.push(byte),
        }
    }
    let pid = String::from_utf8_lossy(&line).parse().context("the stand-in reports no process ID")?;
    Ok((pid, OwnedFd::from(input.context("the stand-in has no input")?), OwnedFd::from(output)))
}
