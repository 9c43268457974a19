//! Clients that violate the protocol, or send nothing, on the socket that others depend on.

use crate::common::{idle, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::images::TINY;
use keelson_harness::node::Node;
use keelson_harness::process::{Process, Program};
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::{PATIENCE, Seeded, until};
use rand::{Rng as _, RngExt as _};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

/// The first bytes of an HTTP/2 client.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
const IDLE: usize = 3000;

/// Sends bytes and reads until the other side closes the connection, or `patience` is over.
async fn exchange_bytes(agent: &Agent, bytes: &[u8], patience: Duration) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(agent.socket()).await?;
    // It may close the connection during the write.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(patience, stream.read_to_end(&mut answer)).await;
    Ok(answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn noise_http_1_and_broken_frames_disturb_no_caller() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 2, TINY).await?;
    let hold = node.proxy.rule(Match::layers(), Fault::Hang);
    let mut agent = node.agent(&Settings::limit(1)).await?;
    let cri = agent.cri().await?;
    let held = start_pull(&cri, Pull::new(&node.name(&images[0])));
    let mut random = Seeded::new()?;
    let soon = Duration::from_millis(50);
    for _ in 0..200 {
        let mut bytes = vec![0; random.rng().random_range(0..3000)];
        random.rng().fill_bytes(&mut bytes);
        // Half of them begin correctly and then send random frames.
        if random.rng().random_ratio(1, 2) {
            bytes.splice(0..0, [PREFACE, SETTINGS].concat());
        }
        if random.rng().random_ratio(1, 4) {
            let frame = [0, 0, 8, random.rng().random_range(0..12), 0xff, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8];
            bytes.splice(0..0, [PREFACE, SETTINGS, &frame].concat());
        }
        exchange_bytes(&agent, &bytes, soon).await?;
        ensure!(agent.ended()?.is_none(), "it ended");
    }
    let answer = exchange_bytes(&agent, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", PATIENCE).await?;
    ensure!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    // A frame with a length of 16 MiB and no payload; a header block that never ends.
    let huge = [PREFACE, SETTINGS, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    exchange_bytes(&agent, &huge, soon).await?;
    let headers = [PREFACE, SETTINGS, &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82]].concat();
    exchange_bytes(&agent, &headers, soon).await?;

    cri.version().await.context("the connection that was there before")?;
    agent.cri().await?.version().await.context("a new connection")?;
    ensure!(!held.is_finished());
    node.proxy.remove(hold);
    held.await??;
    agent.cri().await?.pull_image(&node.name(&images[1])).await?;
    idle(&agent).await
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_calls_hold_no_slot() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 3, TINY).await?;
    let agent = node.agent(&Settings::limit(1).set("pulls.cancel_grace", "0s")).await?;
    let hold = node.proxy.rule(Match::layers(), Fault::Hang);
    // A client that takes the only slot and disappears without closing, like a killed kubelet.
    let cri = Cri::connect(&agent.socket()).await?;
    let call = start_pull(&cri, Pull::new(&node.name(&images[0])));
    until("the slot is taken", || !node.proxy.records().active_repos().is_empty()).await?;
    drop(cri);
    call.abort();
    until("the pull without callers is stopped", || node.proxy.records().active_repos().is_empty()).await?;
    idle(&agent).await?;
    node.proxy.remove(hold);

    // Headers of a PullImage whose body never comes: literal headers without indexing or Huffman coding.
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/runtime.v1.ImageService/PullImage"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len())?);
            block.extend_from_slice(text.as_bytes());
        }
    }
    let mut streams = Vec::new();
    for n in 0..50 {
        let mut stream = UnixStream::connect(agent.socket()).await?;
        let head = [0, 0, u8::try_from(block.len())?, 1, 4, 0, 0, 0, 1];
        stream.write_all(&[PREFACE, SETTINGS, &head, &block].concat()).await?;
        // Some announce more data, some send a message shorter than its length prefix.
        if n % 2 == 0 {
            stream.write_all(&[0, 0, 5, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0]).await?;
        }
        if n % 3 == 0 {
            stream.shutdown().await?;
        }
        streams.push(stream);
    }
    agent.cri().await?.pull_image(&node.name(&images[1])).await?;
    drop(streams);
    agent.cri().await?.pull_image(&node.name(&images[2])).await?;
    idle(&agent).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_survives_thousands_of_idle_connections_and_no_free_descriptors() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 3, TINY).await?;
    let agent = node.agent(&Settings::new()).await?;
    let pid = agent.pid().context("it runs")?;
    let cri = agent.cri().await?;
    let mut idle_ones = Vec::new();
    for n in 0..IDLE {
        let mut stream = UnixStream::connect(agent.socket()).await?;
        // Half of them begin correctly and then are silent.
        if n % 2 == 0 {
            stream.write_all(&[PREFACE, SETTINGS].concat()).await?;
        }
        idle_ones.push(stream);
    }
    // This one has its connection to the runtime already; those without one are held until descriptors are free.
    cri.version().await?;
    cri.pull_image(&node.name(&images[0])).await?;
    agent.cri().await?.version().await.context("a new connection among thousands")?;
    let silent = keelson_harness::process::resident_kib(pid)?;
    eprintln!("{:.1} MiB resident with {IDLE} idle connections", silent as f64 / 1024.0);
    drop(idle_ones);

    // Now as many as the agent may have, and some more.
    let limited = Program {
        name: "prlimit".to_owned(),
        path: "/usr/bin/prlimit".into(),
        args: vec!["--pid".to_owned(), pid.to_string(), "--nofile=128:128".to_owned()],
        env: Vec::new(),
        log: node.scratch.path().join("prlimit.log"),
    };
    let mut prlimit: Process = limited.start()?;
    ensure!(prlimit.wait(PATIENCE).await?.success(), "{}", prlimit.log_tail());
    let mut too_many = Vec::new();
    for _ in 0..300 {
        let mut stream = UnixStream::connect(agent.socket()).await?;
        stream.write_all(&[PREFACE, SETTINGS].concat()).await?;
        too_many.push(stream);
    }
    crate::common::logged(&agent, 0, "cannot accept").await?;
    cri.version().await.context("who was there before is still served")?;
    drop(too_many);
    Cri::ready(&agent.socket()).await.context("new connections are taken again")?;
    agent.cri().await?.pull_image(&node.name(&images[1])).await?;
    cri.pull_image(&node.name(&images[2])).await?;
    agent.http_get("/livez").await?.success()?;
    idle(&agent).await
}
