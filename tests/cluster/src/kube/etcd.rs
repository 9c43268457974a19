//! Owns: an etcd of the test with one member. In: nothing. Out: its endpoint, its metrics, control of its process.

use anyhow::{Context as _, Result, bail};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{free_port, http_get, metric};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tonic::transport::Endpoint;

/// Killed on drop.
#[derive(Debug)]
pub struct Etcd {
    endpoint: String,
    data: PathBuf,
    /// Name and address of the only member, as in `--initial-cluster`.
    member: String,
    daemon: Daemon,
    restorer: PathBuf,
}

const MEMBER: &str = "test";

const PUTS: usize = 256;

/// From etcd's `rpc.proto`.
#[derive(Clone, PartialEq, prost::Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutResponse {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writes {
    pub puts: u64,
    /// Size of the keys and values put, in bytes.
    pub put_bytes: u64,
}

impl Etcd {
    /// Starts one below `scratch` and waits until it is healthy. `streaming_lists` selects an etcd that supports them.
    pub async fn start(scratch: &Scratch, streaming_lists: bool) -> Result<Self> {
        let (client, peer) = (free_port()?, free_port()?);
        let folder = scratch.dir(&format!("etcd-{client}"))?;
        let endpoint = format!("http://127.0.0.1:{client}");
        let between = format!("http://127.0.0.1:{peer}");
        let (data, member) = (folder.join("data"), format!("{MEMBER}={between}"));
        let (path, restorer) = peers::etcd(streaming_lists)?;
        let mut args: Vec<String> = [
            ("--name", MEMBER.to_owned()),
            ("--data-dir", data.display().to_string()),
            ("--listen-client-urls", endpoint.clone()),
            ("--advertise-client-urls", endpoint.clone()),
            ("--listen-peer-urls", between.clone()),
            ("--initial-advertise-peer-urls", between.clone()),
            ("--initial-cluster", member.clone()),
            ("--log-level", "warn".to_owned()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        // Newer versions can skip fsync, which a test does not need.
        let help = Command::new(&path).arg("--help").output().context("cannot run etcd --help")?;
        if [help.stdout, help.stderr].iter().any(|text| String::from_utf8_lossy(text).contains("no-fsync")) {
            args.push("--unsafe-no-fsync".to_owned());
        }
        let program =
            Program { name: "etcd".to_owned(), path, args, env: Vec::new(), log: folder.join("etcd.log") };
        let mut etcd = Self { endpoint, data, member, daemon: Daemon::new(program), restorer };
        etcd.start_again().await?;
        Ok(etcd)
    }

    /// One that another process has started and stops.
    pub(super) fn outside(endpoint: &str) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            data: PathBuf::new(),
            member: String::new(),
            daemon: Daemon::new(Program::outside("etcd")),
            restorer: PathBuf::new(),
        }
    }

    /// Puts many keys at the same time, which is far faster than creating each object through an API server. Not in
    /// transactions: an API server expects that no two objects have the same version.
    pub async fn put_all(&self, pairs: impl Iterator<Item = (String, Vec<u8>)>) -> Result<()> {
        let channel = Endpoint::from_shared(self.endpoint.clone())?.connect().await.context("no etcd")?;
        let client = tonic::client::Grpc::new(channel);
        let puts = pairs.map(|(key, value)| {
            let mut client = client.clone();
            async move {
                client.ready().await.context("etcd is not ready")?;
                let codec = tonic_prost::ProstCodec::<PutRequest, PutResponse>::default();
                let path = http::uri::PathAndQuery::from_static("/etcdserverpb.KV/Put");
                let request = tonic::Request::new(PutRequest { key: key.into_bytes(), value });
                client.unary(request, path, codec).await.map(drop).context("etcd does not put a key")
            }
        });
        stream::iter(puts).buffer_unordered(PUTS).try_collect().await
    }

    /// `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Starts it with its data after [`Etcd::kill9`] or [`Etcd::terminate`], and waits until it is healthy.
    pub async fn start_again(&mut self) -> Result<()> {
        let url = format!("{}/health", self.endpoint);
        self.daemon.start(|| healthy(&url)).await
    }

    pub async fn metric(&self, name: &str) -> Result<f64> {
        let text = http_get(&format!("{}/metrics", self.endpoint)).await?.success()?.text();
        metric(&text, name)?.with_context(|| format!("this etcd has no metric {name}"))
    }

    pub async fn writes(&self) -> Result<Writes> {
        Ok(Writes {
            puts: self.metric("etcd_mvcc_put_total").await? as u64,
            put_bytes: self.metric("etcd_debugging_mvcc_total_put_size_in_bytes").await? as u64,
        })
    }

    /// Bytes of its file that are in use.
    pub async fn db_bytes(&self) -> Result<u64> {
        Ok(self.metric("etcd_mvcc_db_total_size_in_use_in_bytes").await? as u64)
    }

    /// Size of its file in bytes: space that compaction frees stays in it until [`Etcd::defragment`].
    pub async fn file_bytes(&self) -> Result<u64> {
        Ok(self.metric("etcd_mvcc_db_total_size_in_bytes").await? as u64)
    }

    pub async fn revision(&self) -> Result<i64> {
        let text = self.etcdctl(&["get", "--write-out=json", "nothing-is-called-so"]).await?;
        let answer: Value = serde_json::from_str(&text).context("etcdctl's answer is no JSON")?;
        answer["header"]["revision"].as_i64().with_context(|| format!("no revision in {text}"))
    }

    /// Removes old revisions of all keys, as an API server does every five minutes.
    pub async fn compact(&self) -> Result<()> {
        let revision = self.revision().await?.to_string();
        self.etcdctl(&["compaction", "--physical=true", &revision]).await.map(drop)
    }

    /// Writes a snapshot of all data to `file`.
    pub async fn save(&self, file: &Path) -> Result<()> {
        self.etcdctl(&["snapshot", "save", &file.display().to_string()]).await.map(drop)
    }

    /// Replaces its data by a snapshot from [`Etcd::save`], as in disaster recovery. It must be stopped; start it with
    /// [`Etcd::start_again`].
    pub async fn restore(&mut self, file: &Path) -> Result<()> {
        if self.pid().is_some() {
            bail!("etcd runs");
        }
        fs::remove_dir_all(&self.data).context("cannot remove etcd's data")?;
        let (_, address) = self.member.split_once('=').context("a member has an address")?;
        let output = tokio::process::Command::new(&self.restorer)
            .env("ETCDCTL_API", "3")
            .args(["snapshot", "restore"])
            .arg(file)
            .arg("--data-dir")
            .arg(&self.data)
            .args(["--name", MEMBER, "--initial-cluster", &self.member])
            .args(["--initial-advertise-peer-urls", address])
            .kill_on_drop(true)
            .output()
            .await
            .with_context(|| format!("cannot run {}", self.restorer.display()))?;
        if !output.status.success() {
            bail!("the snapshot is not restored: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    /// Releases freed space of its file.
    pub async fn defragment(&self) -> Result<()> {
        self.etcdctl(&["defrag"]).await.map(drop)
    }

    pub async fn etcdctl(&self, args: &[&str]) -> Result<String> {
        let output = tokio::process::Command::new(etcdctl()?)
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={}", self.endpoint))
            .args(args)
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run etcdctl")?;
        if !output.status.success() {
            bail!("etcdctl {args:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        String::from_utf8(output.stdout).context("etcdctl prints text")
    }
}

daemon_life!(Etcd);

async fn healthy(url: &str) -> Result<()> {
    let answer = http_get(url).await?.success()?;
    let health: Value = serde_json::from_slice(&answer.body).context("/health is no JSON")?;
    if health["health"] != "true" {
        bail!("etcd reports {}", answer.text());
    }
    Ok(())
}

pub(super) fn etcdctl() -> Result<PathBuf> {
    peers::system("etcdctl", "etcd-client")
}
