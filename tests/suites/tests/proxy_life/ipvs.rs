//! The life of a proxy with the backend ipvs, in a virtual machine whose kernel has IPVS. The agent reads manifests.

use crate::any_backend::{Backend, changes, drift, kills, started, upgrade};
use crate::backends::{change_over, services, takes_over};
use crate::common::{TestEnv, ensure_contains, eventually_slow};
use crate::kube_proxy::start_cluster;
use crate::kube_proxy_ipvs::long_connections;
use crate::model::Service;
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::OUTSIDE;
use keelson_cluster::net::{Family, Transport};
use keelson_harness::peers;
use keelson_harness::scratch::Scratch;
use keelson_harness::suite::run;
use std::path::Path;
use std::process::Command;

const IPVS: Backend = &[("proxy.backend", "ipvs")];

/// Every ignored test of this module and of `kube_proxy_ipvs` in a virtual machine. The control plane of the latter is outside.
#[test]
fn in_the_vm() -> Result<()> {
    if std::env::var_os("NEXTEST_RUN_ID").is_none() {
        return Ok(());
    }
    let (_scratch, cluster) = run(async {
        let scratch = Scratch::new()?;
        let cluster = start_cluster(&scratch).await?;
        Ok((scratch, cluster))
    })?;
    let mut vm = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm/run.sh"));
    vm.env("KEELSON_VM_MEMORY", "2500").env("KEELSON_VM_TIMEOUT", "2400");
    vm.args(["env", "KEELSON_TEST_PATIENCE=2", &format!("{OUTSIDE}={}", cluster.description("10.0.2.2"))]);
    vm.args(std::env::var("KEELSON_PEERS").map(|peers| format!("KEELSON_PEERS={peers}")));
    vm.arg(std::env::current_exe()?);
    vm.args(["--ignored", "--color", "never", "--test-threads", "1"]);
    let only = std::env::var("KEELSON_TEST_ONLY").unwrap_or_else(|_| "ipvs::".to_owned());
    vm.args(only.split_whitespace());
    let ended = vm.status().context("cannot start tests/vm/run.sh")?;
    ensure!(ended.success(), "the tests in the virtual machine ended with {ended}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn kills_leave_the_servers_of_a_fresh_start() -> Result<()> {
    kills(IPVS, 12).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn connections_continue_under_changes() -> Result<()> {
    changes(IPVS, 20).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn what_another_version_leaves_is_replaced() -> Result<()> {
    let older = [
        ("ip", "iproute2", "address add 10.96.77.77/32 dev keelson-ipvs0"),
        ("iptables", "iptables", "-w 5 -t nat -N KEELSON-OLD"),
        ("iptables", "iptables", "-w 5 -t nat -D POSTROUTING -j KEELSON-POSTROUTING"),
        ("ipset", "ipset", "create KEELSON-4-OLD hash:ip"),
    ];
    upgrade(IPVS, &older).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn what_another_program_removes_is_repaired() -> Result<()> {
    let removals = [
        ("ipvsadm", "ipvsadm", "--clear"),
        ("ip", "iproute2", "address flush dev keelson-ipvs0"),
        ("ip", "iproute2", "link delete keelson-ipvs0"),
        ("iptables", "iptables", "-w 5 -t nat -F"),
        ("ipset", "ipset", "flush"),
    ];
    drift(IPVS, &removals).await
}

/// From nft and iptables to ipvs, with connections that stay open, and from ipvs, which serves its connections until they end:
/// with new ones only.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn connections_continue_when_the_backend_changes() -> Result<()> {
    let services = services();
    let mut env = started(&[("proxy.backend", "nft")], &services).await?;
    let mut former = "nft";
    for next in ["ipvs", "nft", "ipvs", "iptables", "ipvs"] {
        let what = format!("from {former} to {next}");
        let traffic = if former == "ipvs" {
            Traffic::connections(&env.world, &services)?
        } else {
            Traffic::start(&env.world, &services)?
        };
        traffic.wait_for_answers().await.with_context(|| what.clone())?;
        // Both have chains of the same names: they are replaced, and not removed later.
        let changed = if (former, next) == ("iptables", "ipvs") {
            replace(&mut env).await
        } else {
            change_over(&mut env, next, former).await
        };
        changed.with_context(|| what.clone())?;
        traffic.wait_for_answers().await.with_context(|| what.clone())?;
        traffic.finish().await.context(what)?;
        former = next;
    }
    let ipvsadm = peers::system("ipvsadm", "ipvsadm")?;
    let world = env.world.clone();
    let servers = || world.node().command(&ipvsadm, &["--list", "--numeric"]);
    ensure!(servers()?.contains("TCP "), "{}", servers()?);
    env.proxy.terminate().await?;
    env.cleanup(&[]).await?;
    ensure!(!servers()?.contains("TCP "), "{}", servers()?);
    Ok(())
}

/// Rules that ipvs has for new connections would be asked before those of the next backend, for as long as one connection
/// through a virtual server is established.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn rules_for_new_connections_do_not_wait_for_established_ones() -> Result<()> {
    let services = services();
    let mut env = started(IPVS, &services).await?;
    let world = env.world.clone();
    let mangle = || {
        let save = peers::system("iptables-save", "iptables")?;
        world.node().command(&save, &["-t", "mangle"])
    };
    let mut flows = Traffic::none(&env.world)?;
    let service = services.first().context("a Service")?;
    flows.open_flow(world.pod(), service.at(), Transport::Tcp, service.endpoints.clone());
    flows.wait_for_answers().await?;
    for next in ["nft", "ipvs", "iptables"] {
        ensure!(mangle()?.contains("KEELSON-") == (next != "ipvs"), "{}", mangle()?);
        ensure!(env.proxy.terminate().await?.success());
        env.proxy.configure(&env.options.clone().set("proxy.backend", next))?;
        env.proxy.start_again(world.node()).await?;
        env.synced().await?;
        if next == "ipvs" {
            flows.wait_for_answers().await.context("back to ipvs")?;
            continue;
        }
        eventually_slow("the take-over waits", || async {
            ensure_contains(&env.events().await?.join("\n"), &["rules of ipvs are removed later: "])?;
            let rules = mangle()?;
            ensure!(!rules.contains("KEELSON-"), "{rules}");
            Ok(())
        })
        .await
        .with_context(|| env.logs())?;
        let state = env.state().await?;
        ensure!(!state["take_overs"].to_string().contains("removed"), "{state}");
        flows.wait_for_answers().await.context(next)?;
    }
    flows.finish().await.map(drop)
}

/// Virtual servers receive packets before any socket: they keep their connections, and leave new ones to the sockets.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs IPVS: in_the_vm runs it in a virtual machine"]
async fn connections_continue_when_sockets_take_over() -> Result<()> {
    let mut services = services();
    // Clients with session affinity, and a choice by hash.
    services[1].affinity = Some(600);
    let mut env = started(&[("proxy.backend", "ipvs"), ("proxy.ipvs_scheduler", "sh")], &services).await?;
    let world = env.world.clone();
    let established = long_connections(&env, &services).await?;
    let short = Traffic::connections(&env.world, &services)?;
    short.wait_for_answers().await?;
    ensure!(env.proxy.terminate().await?.success());
    env.proxy.configure(&env.options.clone().set("proxy.backend", "userspace"))?;
    env.proxy.start_again(world.node()).await?;
    let serves_by_sockets = || {
        let ipvsadm = peers::system("ipvsadm", "ipvsadm")?;
        let listed = world.node().command(&ipvsadm, &["--list", "--numeric"])?;
        let is_socket = |service: &Service| listed.contains(&format!("  -> {} ", service.at()));
        let chooses = |service: &Service| listed.contains(&format!("TCP  {} rr", service.at()));
        ensure!(services.iter().all(|service| is_socket(service) && chooses(service)), "{listed}");
        Ok(())
    };
    eventually_slow("the take-over waits", || async {
        ensure_contains(&env.events().await?.join("\n"), &["rules of ipvs are removed later: "])?;
        serves_by_sockets()
    })
    .await
    .with_context(|| env.logs())?;
    established.wait_for_answers().await.context("established connections")?;
    let later = long_connections(&env, &services).await.context("while the take-over waits")?;
    established.finish().await.context("established connections")?;
    takes_over(&env, "userspace", "ipvs").await?;
    later.wait_for_answers().await.context("connections of the time of the take-over")?;
    later.finish().await.context("connections of the time of the take-over")?;
    short.finish().await.context("new connections")?;
    lets_interfaces_go()
}

/// IPVS may hold an interface that is deleted, for minutes.
pub(crate) fn lets_interfaces_go() -> Result<()> {
    let log = Command::new("dmesg").output().context("dmesg")?;
    ensure!(log.status.success(), "{log:?}");
    let log = String::from_utf8_lossy(&log.stdout);
    ensure!(!log.contains("unregister_netdevice"), "{log}");
    Ok(())
}

async fn replace(env: &mut TestEnv) -> Result<()> {
    ensure!(env.proxy.terminate().await?.success());
    env.proxy.configure(&env.options.clone().set("proxy.backend", "ipvs"))?;
    env.proxy.start_again(env.world.node()).await?;
    eventually_slow("the backend has taken over", || async {
        let known = env.state().await?["take_overs"].to_string();
        for family in Family::ALL {
            ensure_contains(
                &known,
                &[&format!("ipvs took over from iptables: replaced its chains of {}", family.as_str())],
            )?;
        }
        Ok(())
    })
    .await
    .with_context(|| env.logs())?;
    env.synced().await.map(drop)
}
