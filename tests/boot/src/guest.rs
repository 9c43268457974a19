//! The QEMU guest agent, by which commands run in the VM.
//!
//! Owns: its socket. In: scripts for bash. Out: [`Output`]. The guest agent ends with the guest and comes back with it, so every
//! command connects anew, and first makes sure that an answer is the answer to its own request (`guest-sync`).

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

/// How long the guest agent of a running system may take to answer: the VM is emulated.
const ANSWER: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) socket: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) code: i64,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Guest {
    /// Whether the guest agent answers within `timeout`.
    pub(crate) fn is_up(&self, timeout: Duration) -> bool {
        Session::open(&self.socket, timeout).is_ok()
    }

    /// Runs a script of bash to its end, for at most `timeout`.
    pub(crate) fn bash(&self, script: &str, timeout: Duration) -> Result<Output> {
        let mut session = Session::open(&self.socket, ANSWER)?;
        let argument = ["-c", script];
        let started = session
            .call("guest-exec", &json!({"path": "/bin/bash", "arg": argument, "capture-output": true}))?;
        let pid = started["pid"].as_i64().context("guest-exec answered without a process ID")?;
        let deadline = Instant::now() + timeout;
        loop {
            let status = session.call("guest-exec-status", &json!({"pid": pid}))?;
            if status["exited"] == true {
                return Ok(Output {
                    // Ended by a signal: as a shell has it.
                    code: status["exitcode"]
                        .as_i64()
                        .unwrap_or_else(|| 128 + status["signal"].as_i64().unwrap_or(0)),
                    stdout: text(&status["out-data"])?,
                    stderr: text(&status["err-data"])?,
                });
            }
            ensure!(Instant::now() < deadline, "did not end within {timeout:?}: {script}");
            thread::sleep(POLL);
        }
    }

    /// Starts a script and does not wait.
    pub(crate) fn start(&self, script: &str) -> Result<()> {
        let mut session = Session::open(&self.socket, ANSWER)?;
        session.call("guest-exec", &json!({"path": "/bin/bash", "arg": ["-c", script]}))?;
        Ok(())
    }
}

fn text(encoded: &Value) -> Result<String> {
    let bytes = STANDARD.decode(encoded.as_str().unwrap_or_default())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[derive(Debug)]
struct Session {
    stream: BufReader<UnixStream>,
}

impl Session {
    fn open(socket: &PathBuf, timeout: Duration) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(timeout))?;
        let mut session = Self { stream: BufReader::new(stream) };
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        session.send(&json!({"execute": "guest-sync", "arguments": {"id": id}}))?;
        let deadline = Instant::now() + timeout;
        while session.receive()?["return"] != id {
            ensure!(Instant::now() < deadline, "the guest agent answers other requests only");
        }
        Ok(session)
    }

    fn call(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.send(&json!({"execute": command, "arguments": arguments}))?;
        let mut answer = self.receive()?;
        if let Some(error) = answer.get("error") {
            bail!("{command}: {error}");
        }
        Ok(answer["return"].take())
    }

    fn send(&mut self, request: &Value) -> Result<()> {
        writeln!(self.stream.get_mut(), "{request}").context("the guest agent does not take requests")
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        let length = self.stream.read_line(&mut line).context("the guest agent does not answer")?;
        ensure!(length > 0, "the guest agent is gone");
        serde_json::from_str(&line).with_context(|| format!("the guest agent sent {line:?}"))
    }
}
