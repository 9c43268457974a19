//! Owns: clients in Python with code generated only from the protocol (`tests/clients/next.proto`). In: a target. Out:
//! their output, line by line.

use crate::common::LONG;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_harness::peers;
use keelson_harness::scratch::Scratch;
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// Debian's Python: another one does not see Debian's packages.
const PYTHON: &str = "/usr/bin/python3";

pub(crate) struct Generated(PathBuf);

impl Generated {
    pub(crate) async fn generate(scratch: &Scratch) -> Result<Self> {
        let folder = scratch.dir("generated")?;
        let plugin = peers::system("grpc_python_plugin", "protobuf-compiler-grpc")?;
        let output = Command::new(peers::system("protoc", "protobuf-compiler")?)
            .arg(format!("--plugin=protoc-gen-grpc={}", plugin.display()))
            .arg(format!("--proto_path={}", sources().display()))
            .arg(format!("--python_out={}", folder.display()))
            .arg(format!("--grpc_out={}", folder.display()))
            .arg("next.proto")
            .output()
            .await
            .context("cannot run protoc")?;
        ensure!(output.status.success(), "protoc: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Self(folder))
    }

    /// Starts a client. Its standard error goes to a file beside the generated code.
    pub(crate) fn client(&self, name: &str, target: &str, args: &[&str]) -> Result<Python> {
        let log = self.0.join(format!("{name}.log"));
        let mut child = Command::new(PYTHON)
            .arg(sources().join("next.py"))
            .args(["--target", target])
            .args(args)
            .env("PYTHONPATH", &self.0)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).context("cannot make a log")?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {PYTHON}: install the Debian package python3-grpcio"))?;
        let lines = BufReader::new(child.stdout.take().context("it has an output")?).lines();
        Ok(Python { name: name.to_owned(), lines, log, errors: Vec::new(), child })
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// Killed on drop.
pub(crate) struct Python {
    pub(crate) name: String,
    lines: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
    errors: Vec<(String, String)>,
    child: Child,
}

impl Python {
    /// The next state; errors before it are kept.
    pub(crate) async fn state(&mut self) -> Result<State> {
        let waited = tokio::time::timeout(LONG, async {
            loop {
                let event = self.event().await?;
                let text = |of: &str| event[of].as_str().unwrap_or_default().to_owned();
                match event["event"].as_str() {
                    Some("state") => return State::of(&event),
                    Some("error") => self.errors.push((text("code"), text("details"))),
                    _ => bail!("{event}"),
                }
            }
        });
        let waited = waited.await.context("no state came").and_then(|state| state);
        waited.with_context(|| format!("{}, after the errors {:?}", self.name, self.errors))
    }

    /// Code and details of the errors since the last call.
    pub(crate) fn errors(&mut self) -> Vec<(String, String)> {
        std::mem::take(&mut self.errors)
    }

    async fn event(&mut self) -> Result<Value> {
        match self.lines.next_line().await? {
            Some(line) => serde_json::from_str(&line).with_context(|| format!("no JSON: {line}")),
            None => bail!("it ended: {}", fs::read_to_string(&self.log).unwrap_or_default()),
        }
    }

    /// Waits until it exits, which must be with code 0.
    pub(crate) async fn ended(mut self) -> Result<()> {
        let status = tokio::time::timeout(LONG, self.child.wait()).await.context("it does not end")??;
        ensure!(status.success(), "{status}: {}", fs::read_to_string(&self.log).unwrap_or_default());
        Ok(())
    }
}

/// A complete state as such a client sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) instance_id: u64,
    pub(crate) rev: u64,
    /// `RequiredEndpointConditions` of the response.
    pub(crate) required: Value,
    /// In the order in which they came.
    pub(crate) services: Vec<Value>,
}

impl State {
    fn of(event: &Value) -> Result<Self> {
        // 64-bit numbers are text in the JSON of protobuf.
        let number = |name: &str| -> Result<u64> {
            event["Next"][name]
                .as_str()
                .with_context(|| format!("no {name}: {event}"))?
                .parse()
                .context("no number")
        };
        Ok(Self {
            instance_id: number("InstanceID")?,
            rev: number("Rev")?,
            required: event["Next"]["RequiredEndpointConditions"].clone(),
            services: event["Services"].as_array().context("no Services")?.clone(),
        })
    }

    /// Addresses of a Service's endpoints, in the order in which they came.
    pub(crate) fn addresses(&self, service: &str) -> Option<Vec<&str>> {
        let service = self.services.iter().find(|known| known["Name"] == service)?;
        let endpoints = service["Endpoints"].as_array()?.iter();
        let ips = endpoints.flat_map(|endpoint| ["V4", "V6"].map(|family| &endpoint["IPs"][family]));
        Some(ips.filter_map(Value::as_array).flatten().filter_map(Value::as_str).collect())
    }
}
