//! Flows between pods that conntrack does not see, with the backend ebpf.

use crate::common::{LONG, TestEnv, ensure_contains, eventually_slow};
use crate::ebpf::pins;
use crate::model::{Service, pool};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::net::plan::{BRIDGE, LOCALS, NODE, NODE_NETWORKS, local};
use keelson_cluster::net::{Family, KeelsonProxyOptions, NetClient, Outcome, Transport};
use keelson_harness::peers;
use keelson_harness::util::PATIENCE;
use std::fs;
use std::net::{IpAddr, SocketAddr};

const TRANSPORTS: [Transport; 2] = [Transport::Tcp, Transport::Udp];

/// One of each family, with endpoints here and on the other node.
fn services() -> Vec<Service> {
    let service = |(number, family)| {
        let mut service = Service::new(number, family, &pool(family, 8080)[1..5]);
        service.transports = TRANSPORTS.to_vec();
        service
    };
    (10..).zip(Family::ALL).map(service).collect()
}

fn untracked(env: &TestEnv) -> KeelsonProxyOptions {
    env.options.clone().set("proxy.ebpf_untracked_pods", true)
}

/// With the program at the devices of pods as well.
fn handed_over(env: &TestEnv) -> KeelsonProxyOptions {
    untracked(env).set("proxy.ebpf_pod_devices", "veth-*")
}

async fn started(
    services: &[Service],
    options: impl FnOnce(&TestEnv) -> KeelsonProxyOptions,
) -> Result<TestEnv> {
    let mut env = TestEnv::at_sockets()?;
    env.options = options(&env);
    env.proxy.configure(&env.options)?;
    env.start(services).await?;
    wait_until_untracked(&env).await?;
    Ok(env)
}

async fn wait_until_untracked(env: &TestEnv) -> Result<()> {
    eventually_slow("flows between pods are not tracked", || async {
        let state = env.state().await?.to_string();
        for family in ["IPv4", "IPv6"] {
            let begun = format!("conntrack {family}: TCP and UDP between pods in ");
            let text = state.split(&begun).nth(1).with_context(|| state.clone())?;
            ensure!(text.split('"').next().is_some_and(|line| line.ends_with(" are not tracked")), "{state}");
        }
        Ok(())
    })
    .await
    .with_context(|| env.logs())
}

/// The entries of conntrack in which this address occurs.
fn tracked(env: &TestEnv, ip: IpAddr) -> Result<Vec<String>> {
    let family = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
    let listed = env.node().command(&peers::system("conntrack", "conntrack")?, &["-L", "-f", family])?;
    let word = format!("={ip} ");
    Ok(listed.lines().filter(|line| line.contains(&word)).map(str::to_owned).collect())
}

/// The source address that an endpoint saw.
async fn asks(env: &TestEnv, to: SocketAddr, transport: Transport, valid: &[SocketAddr]) -> Result<IpAddr> {
    asks_from(&env.world.pod(), to, transport, valid).await
}

async fn asks_from(
    client: &NetClient,
    to: SocketAddr,
    transport: Transport,
    valid: &[SocketAddr],
) -> Result<IpAddr> {
    match client.ask(to, transport, PATIENCE).await? {
        Outcome::Answered { by, source } if valid.contains(&by) => Ok(source),
        other => bail!("{to} by {transport:?}: {other:?}"),
    }
}

/// Each service port often enough to reach endpoints here and on the other node.
async fn ask_all(env: &TestEnv, services: &[Service], expected: impl Fn(IpAddr) -> bool) -> Result<()> {
    for service in services {
        for transport in TRANSPORTS {
            for _ in 0..12 {
                let source = asks(env, service.at(), transport, &service.endpoints).await?;
                ensure!(expected(source), "{transport:?} to {}: the source is {source}", service.at());
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_pods_to_services_are_not_tracked() -> Result<()> {
    let services = services();
    let mut env = started(&services, untracked).await?;
    let pod = env.world.pod();
    for killed in [false, true] {
        if killed {
            env.proxy.kill9()?;
        }
        ask_all(&env, &services, |source| source == pod.ip(Family::of(source))).await?;
        for family in Family::ALL {
            let entries = tracked(&env, pod.ip(family))?;
            ensure!(entries.is_empty(), "{entries:#?}");
        }
    }
    env.proxy.start_again(env.world.node()).await?;
    wait_until_untracked(&env).await?;
    env.wait_for_exact_services(&services).await?;
    // What goes elsewhere is tracked; without it, this test would see nothing in any case.
    let outside = env.world.client().ip(Family::V4);
    let _ = pod.ask(SocketAddr::new(outside, 9), Transport::Udp, PATIENCE).await?;
    ensure!(!tracked(&env, pod.ip(Family::V4))?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_translated_between_pods_is_masqueraded_and_answered() -> Result<()> {
    let services = services();
    let mut env = started(&services, untracked).await?;
    translated_connections_are_answered(&mut env, &services).await
}

async fn translated_connections_are_answered(env: &mut TestEnv, services: &[Service]) -> Result<()> {
    let is_node = |source| [BRIDGE, NODE].into_iter().any(|address| address.of(Family::of(source)) == source);
    // As the plugin of a hostPort does.
    let chain =
        "add table ip hostport; add chain ip hostport to { type nat hook prerouting priority dstnat; }";
    env.node().nft(&[chain])?;
    let endpoint = local(1).at(Family::V4, 8080);
    for (protocol, transport) in [("tcp", Transport::Tcp), ("udp", Transport::Udp)] {
        let node = NODE.of(Family::V4);
        let rule =
            format!("add rule ip hostport to ip daddr {node} {protocol} dport 9000 dnat to {endpoint}");
        env.node().nft(&[&rule])?;
        let source = asks(env, NODE.at(Family::V4, 9000), transport, &[endpoint]).await?;
        ensure!(is_node(source), "{transport:?}: the source is {source}");
    }
    // Sockets that no program has seen: their packets are translated.
    env.proxy.kill9()?;
    for folder in pins(env)?.into_iter().filter(|path| path.display().to_string().contains("/links-")) {
        fs::read_dir(&folder)?.try_for_each(|pin| fs::remove_file(pin?.path()))?;
    }
    eventually_slow("the programs are detached", || async {
        let source = asks(env, services[0].at(), Transport::Tcp, &services[0].endpoints).await?;
        ensure!(is_node(source), "the source is {source}");
        Ok(())
    })
    .await?;
    ask_all(env, services, is_node).await
}

/// Packets that the program at the devices of pods has handed over; `None`: it is not attached at all of them yet.
async fn handed(env: &TestEnv) -> Result<Option<u64>> {
    let state = env.state().await?.to_string();
    if !state.contains(&format!("pod devices: program at {} devices", LOCALS + 1)) {
        return Ok(None);
    }
    count(&state, "packets handed over,").map(Some)
}

/// The number before these words.
fn count(state: &str, what: &str) -> Result<u64> {
    let (text, _) =
        state.split_once(&format!(" {what}")).with_context(|| format!("no {what:?} in {state}"))?;
    let number = text.rsplit(' ').next().unwrap_or_default();
    number.parse().with_context(|| format!("{number:?} in {state}"))
}

async fn wait_until_handed_over(env: &TestEnv) -> Result<u64> {
    eventually_slow("the program is at all devices of pods", || async {
        handed(env).await?.context("not yet")
    })
    .await
    .with_context(|| env.logs())
}

/// A restart, a kill, and a setting that is taken back.
#[tokio::test(flavor = "multi_thread")]
async fn packets_between_pods_of_the_node_are_handed_over() -> Result<()> {
    let services = services();
    let mut env = started(&services, handed_over).await?;
    let pod = env.world.pod().clone();
    let is_pod = |source| source == pod.ip(Family::of(source));
    let mut before = wait_until_handed_over(&env).await?;
    for killed in [false, true] {
        if killed {
            env.proxy.kill9()?;
        }
        ask_all(&env, &services, is_pod).await?;
        if killed {
            env.proxy.start_again(env.world.node()).await?;
        }
        let after = wait_until_handed_over(&env).await?;
        // A fourth of the 48 connections and exchanges are with endpoints of the node.
        ensure!(after > before + 20, "killed {killed}: {before} packets, then {after}");
        before = after;
    }
    for options in [untracked(&env), env.options.clone().set("proxy.ebpf_untracked_pods", false)] {
        ensure!(env.proxy.terminate().await?.success());
        env.proxy.configure(&options.set("proxy.ebpf_pod_devices", ""))?;
        env.proxy.start_again(env.world.node()).await?;
        env.wait_for_exact_services(&services).await?;
        ensure!(!pins(&env)?.iter().any(|path| path.display().to_string().contains("pods-")));
        ask_all(&env, &services, is_pod).await?;
    }
    Ok(())
}

/// With direct return: a kill and a restart under a connection.
#[tokio::test(flavor = "multi_thread")]
async fn packets_of_outside_clients_are_handed_over() -> Result<()> {
    let services: Vec<Service> = (20..)
        .zip(Family::ALL)
        .map(|(number, family)| {
            let mut service = Service::new(number, family, &[local(1).at(family, 8080)]);
            service.transports = TRANSPORTS.to_vec();
            service.expose();
            service
        })
        .collect();
    let direct = |env: &TestEnv| {
        handed_over(env)
            .set("proxy.ebpf_direct_return_devices", "eth0")
            .set("proxy.ebpf_direct_return_nodes", NODE_NETWORKS.join(","))
    };
    let mut env = started(&services, direct).await?;
    wait_until_handed_over(&env).await?;
    let client = env.world.client();
    let at = |service: &Service| -> Result<SocketAddr> {
        Ok(NODE.at(service.family, service.node_port.context("it has a node port")?))
    };
    // By its replies the pod is known to the next client.
    asks_from(&client, at(&services[0])?, Transport::Tcp, &services[0].endpoints).await?;
    let mut flow = client.open(at(&services[0])?, Transport::Tcp)?;
    let mut before = [0, 0];
    for killed in [false, true] {
        if killed {
            env.proxy.kill9()?;
        }
        for service in &services {
            for transport in TRANSPORTS.into_iter().cycle().take(24) {
                let source = asks_from(&client, at(service)?, transport, &service.endpoints).await?;
                ensure!(source == client.ip(service.family), "{transport:?}: the source is {source}");
            }
        }
        let answer = flow.ask(PATIENCE).await?;
        ensure!(matches!(answer, Outcome::Answered { .. }), "killed {killed}: {answer:?}");
        if killed {
            env.proxy.start_again(env.world.node()).await?;
        }
        wait_until_handed_over(&env).await?;
        let state = env.state().await?.to_string();
        let after = [
            count(&state, "packets handed over to the devices of endpoints")?,
            count(&state, "replies of direct return handed over")?,
        ];
        // 24 connections of TCP and as many exchanges of UDP.
        ensure!(
            after.iter().zip(before).all(|(after, before)| *after > before + 72),
            "{before:?}, {after:?}"
        );
        before = after;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn translated_connections_are_answered_where_packets_are_handed_over() -> Result<()> {
    let services = services();
    let mut env = started(&services, handed_over).await?;
    wait_until_handed_over(&env).await?;
    translated_connections_are_answered(&mut env, &services).await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_were_translated_before_outlive_the_setting() -> Result<()> {
    let services = services();
    let mut env = TestEnv::at_sockets()?;
    env.proxy.configure(&env.options.clone().set("proxy.backend", "nft"))?;
    env.start(&services).await?;
    let (pod, service) = (env.world.pod(), &services[0]);
    let mut flow = pod.open(service.at(), Transport::Tcp)?;
    let first = flow.ask(PATIENCE).await?;
    ensure!(matches!(first, Outcome::Answered { source, .. } if source == pod.ip(Family::V4)), "{first:?}");
    ensure!(env.proxy.terminate().await?.success());
    env.options = untracked(&env);
    env.proxy.configure(&env.options)?;
    env.proxy.start_again(env.world.node()).await?;
    let waits = "10.244.0.0/16 are still tracked: flows that were translated before have to end first: 1";
    eventually_slow("it waits for the connection", || async {
        ensure_contains(&env.state().await?.to_string(), &[waits])
    })
    .await
    .with_context(|| env.logs())?;
    ensure!(flow.ask(PATIENCE).await? == first);
    drop(flow);
    // Conntrack remembers a connection for two minutes after its end.
    let own = pod.ip(Family::V4).to_string();
    env.node().command(&peers::system("conntrack", "conntrack")?, &["-D", "-s", &own])?;
    tokio::time::timeout(LONG, wait_until_untracked(&env)).await??;
    ask_all(&env, &services, |source| source == pod.ip(Family::of(source))).await
}
