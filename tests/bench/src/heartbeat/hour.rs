//! Writes of heartbeats to etcd per hour with default settings.
//!
//! Owns: the count. In: the environment of [`heartbeat`](super), where kubelet, agent and companion run at the same
//! time and report at their real intervals; `KEELSON_BENCH_HOUR` (60 minutes). Out: a table.

use std::time::Duration;

use anyhow::{Context as _, Result};
use keelson_cluster::kube::{Journal, Put};

use super::{COMPANION, SETTLE, TestEnv, megabytes};

/// Weight of a put.
type Size = fn(&Put) -> usize;

pub(in super::super) async fn hour() -> Result<()> {
    let minutes = super::super::number("KEELSON_BENCH_HOUR", 60)?;
    let env = TestEnv::new(None).await?;
    let way = env.cluster.tcp_proxy().await?;
    let kubelet = env.kubelet(&way).await?;
    let identity = env.cluster.node(&env.scratch, "b").await?;
    let node = env.agent(identity, &way, "b", "node").await?;
    env.cluster.admin.await_condition("b", "Ready", "True").await?;
    env.cluster.admin.apply(COMPANION).await?;
    let identity = env.cluster.companion(&env.scratch, "keelson-agent", "a").await?;
    let companion = env.agent(identity, &way, "a", "companion").await?;
    tokio::time::sleep(SETTLE).await;
    let begin = jiff::Timestamp::now();
    let journal = Journal::start(&env.scratch, &env.cluster.etcd).await?;
    tokio::time::sleep(Duration::from_secs(60 * u64::try_from(minutes)?)).await;
    let puts = journal.puts()?;
    let user = "system:serviceaccount:kube-system:keelson-agent";
    let writes = |event: &keelson_cluster::kube::AuditEvent| event.user == user && event.is_write();
    let written = env.cluster.api.audit(|event| event.received >= begin && writes(event))?.len();

    println!(
        "| {minutes} minutes by default settings | kubelet | agent, role `node` | ratio | agent, `companion` |"
    );
    println!("|---|---|---|---|---|");
    let row = |what: &str, [kubelet, agent]: [usize; 2], companion: &str| {
        println!("| {what} | {kubelet} | {agent} | {:.2} | {companion} |", agent as f64 / kubelet as f64);
    };
    let both = |of: &dyn Fn(&str) -> usize| [of("a"), of("b")];
    let sum = |size: Size, key: &str| -> usize { puts.iter().filter(|put| put.key == key).map(size).sum() };
    let lease = |node: &str| format!("/registry/leases/kube-node-lease/{node}");
    let status = |node: &str| format!("/registry/minions/{node}");
    let one: Size = |_| 1;
    let bytes: Size = |put| put.bytes;
    row("renewals", both(&|node| sum(one, &lease(node))), "");
    row("writes of the Node", both(&|node| sum(one, &status(node))), &written.to_string());
    row("bytes of renewals in etcd", both(&|node| sum(bytes, &lease(node))), "");
    row("bytes of the Node in etcd", both(&|node| sum(bytes, &status(node))), "");
    let all = |node: &str| sum(bytes, &lease(node)) + sum(bytes, &status(node));
    row("**bytes in etcd**", both(&all), "");
    let memory = |pid: Option<u32>| megabytes(pid.context("it runs")?);
    println!(
        "| memory at the end (VmRSS) | {:.1} MB | {:.1} MB | | {:.1} MB |",
        memory(kubelet.pid())?,
        memory(node.pid())?,
        memory(companion.pid())?
    );
    Ok(())
}
