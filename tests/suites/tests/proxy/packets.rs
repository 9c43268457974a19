//! Packets that are no usual ones: fragments, ICMP errors about translated packets, paths with a smaller MTU, and malformed ones.
//!
//! Endpoints are servers of the case in a pod of the node, which send back what they receive.

use crate::common::{Case, Setup, answer_time};
use crate::expect::{Target, Want, kept, masked};
use crate::objects::{Ep, on_node, port};
use crate::subject::{Subject, is_at_sockets, is_ipvs, transports};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::plan::{CLIENT, NODE};
use keelson_cluster::net::{Dual, Family, NetClient, Transport};
use keelson_harness::util::{PATIENCE, Seeded, eventually, patience};
use rand::RngExt as _;
use serde_json::json;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

const PYTHON: &str = "/usr/bin/python3";
const SENDER: &str = include_str!("../../clients/packets.py");
/// Bytes of datagrams: one fragment, just one, two, many. The MTU of all links is 1500.
const SIZES: [usize; 5] = [1_000, 1_452, 1_473, 4_000, 30_000];
/// An answer of which one packet was lost does not come.
const TRY: Duration = Duration::from_millis(500);
/// The MTU of the routes to and from narrow addresses; IPv6 has 1280 at least.
const NARROW: u16 = 1300;
const TRANSFER: usize = 300_000;
const MALFORMED: usize = 4_000;

/// A pod of the node that sends back what it receives, on a port of the case.
struct Echo {
    port: u16,
    endpoint: Ep,
    _tasks: JoinSet<()>,
}

impl Echo {
    /// At the address of pod 1 of the node, or at another one of it.
    fn start(case: &Case, at: Option<Dual>) -> Result<Self> {
        let port = 20_000 + u16::from(case.number());
        let endpoint = on_node(case, 1);
        let endpoint = match at {
            Some(at) => endpoint.moved_to(at),
            None => endpoint,
        };
        let mut tasks = JoinSet::new();
        let place = case.world().local(1)?;
        for family in Family::ALL {
            let at = endpoint.at.at(family, port);
            tasks.spawn(echo_datagrams(place.namespace().udp(at)?));
            tasks.spawn(echo_streams(place.namespace().tcp_listener(at)?));
        }
        Ok(Self { port, endpoint, _tasks: tasks })
    }

    /// A Service of TCP and UDP with a node port and a load-balancer address.
    async fn serve(&self, case: &Case) -> Result<()> {
        let ports = |number: u16| [port("http", number, Transport::Tcp), port("dns", number, Transport::Udp)];
        let mut own = ports(80);
        for port in &mut own {
            port["nodePort"] = json!(case.node_port(1));
        }
        case.make("svc", 1, &json!({"ports": own})).await?;
        case.slices_of("svc", "a", &ports(self.port), std::slice::from_ref(&self.endpoint)).await?;
        case.synced().await
    }
}

async fn echo_datagrams(socket: UdpSocket) {
    let mut buffer = vec![0; 65_536];
    loop {
        // An error is the result of an earlier response, whose client is gone.
        if let Ok((length, from)) = socket.recv_from(&mut buffer).await {
            let _ = socket.send_to(&buffer[..length], from).await;
        }
    }
}

async fn echo_streams(listener: tokio::net::TcpListener) {
    let mut open = JoinSet::new();
    loop {
        while open.try_join_next().is_some() {}
        if let Ok((mut stream, _)) = listener.accept().await {
            open.spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    }
}

/// Clients and the frontends that they ask: from outside and from the node.
fn ways(case: &Case) -> [(NetClient, Target); 4] {
    [
        (case.client(), case.np(1)),
        (case.client(), case.w(1)),
        (case.pod(), case.v(1)),
        (case.host(), case.v(1)),
    ]
}

/// Those for datagrams that are larger than the MTU. IPVS loses those of the node, and by IPv6 those of pods behind the bridge
/// (docs/proxy.md).
fn ways_of_large(case: &Case, family: Family) -> Vec<(NetClient, Target)> {
    let [node_port, balancer, pod, host] = ways(case);
    match (is_ipvs(), family) {
        (true, Family::V4) => vec![node_port, balancer, pod],
        (true, Family::V6) => vec![node_port, balancer],
        (false, _) => vec![node_port, balancer, pod, host],
    }
}

fn content(length: usize) -> Vec<u8> {
    (0..251_u8).cycle().take(length).collect()
}

/// Waits until a datagram of this content comes from the address.
async fn receives(socket: &UdpSocket, wanted: &[u8], from: SocketAddr) -> Result<()> {
    let mut buffer = vec![0; 65_536];
    let (length, source) = tokio::time::timeout(TRY * patience(), socket.recv_from(&mut buffer))
        .await
        .context("no answer")??;
    ensure!(source == from, "{source} answers");
    ensure!(buffer[..length] == *wanted, "{length} bytes that are others than the {} sent", wanted.len());
    Ok(())
}

/// A datagram is sent back, perhaps after some that were lost.
async fn is_sent_back(client: &NetClient, to: SocketAddr, length: usize) -> Result<()> {
    let socket = client.namespace().udp(SocketAddr::new(client.ip(Family::of(to.ip())), 0))?;
    let wanted = content(length);
    eventually(PATIENCE, &format!("{length} bytes to {to} come back"), || async {
        socket.send_to(&wanted, to).await?;
        receives(&socket, &wanted, to).await
    })
    .await
    .with_context(|| format!("from {}", client.ip(Family::of(to.ip()))))
}

/// Runs packets.py where the client is.
async fn send(client: &NetClient, args: &[String]) -> Result<String> {
    let (client, args) = (client.clone(), args.to_vec());
    let sent = tokio::task::spawn_blocking(move || {
        let all: Vec<&str> = ["-c", SENDER].into_iter().chain(args.iter().map(String::as_str)).collect();
        client.namespace().command(Path::new(PYTHON), &all)
    });
    sent.await?
}

fn text(at: SocketAddr) -> String {
    format!("{}|{}", at.ip(), at.port())
}

#[test]
fn fragments_reach_endpoints_and_come_back() -> Result<()> {
    Case::run(165, Setup::Plain, async |case| {
        let echo = Echo::start(&case, None)?;
        echo.serve(&case).await?;
        for family in Family::ALL {
            for (client, target) in ways_of_large(&case, family) {
                for length in SIZES {
                    is_sent_back(&client, target.at(family), length)
                        .await
                        .map_err(|error| case.explain(&error))?;
                }
            }
        }
        // Fragments of which the first is the last to come, by no socket, so that packets decide also for a pod.
        for family in Family::ALL {
            let by_packets = ways_of_large(&case, family).into_iter().take(3);
            for (client, target) in by_packets {
                let (own, to) = (client.ip(family), target.at(family));
                let socket = client.namespace().udp(SocketAddr::new(own, 0))?;
                let source = text(SocketAddr::new(own, socket.local_addr()?.port()));
                for order in ["reversed", "shuffled"] {
                    let args = ["fragments", &source, &text(to), "5000", order].map(str::to_owned);
                    eventually(PATIENCE, &format!("{order} fragments to {to} come back"), || async {
                        send(&client, &args).await?;
                        receives(&socket, &content(5_000), to).await
                    })
                    .await
                    .map_err(|error| case.explain(&error))?;
                }
                // What overlaps is discarded by kernels since 4.19, or never delivered with other bytes.
                let args = ["fragments", &source, &text(to), "5000", "overlapping"].map(str::to_owned);
                send(&client, &args).await?;
                let overlapped = receives(&socket, &content(5_000), to).await;
                ensure!(
                    overlapped.is_ok() || format!("{overlapped:?}").contains("no answer"),
                    "{overlapped:?}"
                );
                is_sent_back(&client, to, 3_000).await?;
            }
        }
        Ok(())
    })
}

/// ICMP "port unreachable" of an endpoint reaches the client as one about the frontend.
#[test]
fn errors_of_endpoints_reach_the_client_with_its_own_addresses() -> Result<()> {
    Case::run(166, Setup::Plain, async |case| {
        // Otherwise one peer gets six in a row and then one per second.
        let pod = case.world().local(1)?;
        pod.namespace().sysctl(&[
            ("ipv4/icmp_ratelimit", "0"),
            ("ipv6/icmp/ratelimit", "0"),
            ("ipv4/icmp_ratemask", "0"),
            ("ipv6/icmp/ratemask", "255"),
        ])?;
        let mut dns = port("dns", 80, Transport::Udp);
        dns["nodePort"] = json!(case.node_port(1));
        case.make("svc", 1, &json!({"ports": [dns]})).await?;
        // No process listens there.
        let l1 = on_node(&case, 1);
        case.slices_of("svc", "a", &[port("dns", 19, Transport::Udp)], std::slice::from_ref(&l1)).await?;
        case.synced().await?;
        for (client, target) in ways(&case) {
            // Sockets of the node are connected to the endpoint: they see the error, which is about its address.
            let want = if is_at_sockets() && client.is_on_node() { Want::Reset } else { Want::Reject };
            case.eventually_all(vec![(client, target.over(Transport::Udp), want)]).await?;
        }
        Ok(())
    })
}

/// Adds an address to pod 1, and one to the client outside, that the node reaches by a smaller MTU than all others.
fn narrow(case: &Case) -> Result<(Dual, NetClient)> {
    let last = case.number();
    let endpoint = Dual {
        v4: Ipv4Addr::new(10, 244, 1, last),
        v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, last.into()),
    };
    let [a, b, c, _] = CLIENT.v4.octets();
    let mut outside = CLIENT.v6.segments();
    outside[7] = last.into();
    let outside = Dual { v4: Ipv4Addr::new(a, b, c, last & 0x7f | 0x40), v6: outside.into() };
    let pod = case.world().local(1)?;
    let client = case.client().from(outside);
    for (place, at) in [(pod.namespace(), endpoint), (client.namespace(), outside)] {
        place.ip(&format!("addr add {}/32 dev eth0\naddr add {}/128 dev eth0 nodad\n", at.v4, at.v6))?;
    }
    for (at, device) in [(endpoint, "cni0"), (outside, "eth0")] {
        case.world().node().ip(&format!(
            "route add {}/32 dev {device} mtu lock {NARROW}\nroute add {}/128 dev {device} mtu lock {NARROW}\n",
            at.v4, at.v6
        ))?;
    }
    Ok((endpoint, client))
}

/// Sends and receives so much that full packets go both ways.
async fn transfers(client: &NetClient, to: SocketAddr) -> Result<()> {
    let socket = client.namespace().tcp_client(client.ip(Family::of(to.ip())))?;
    let exchanged = async {
        let mut stream = socket.connect(to).await?;
        let (mut from, mut into) = stream.split();
        let wanted = content(TRANSFER);
        let mut received = vec![0; TRANSFER];
        tokio::try_join!(into.write_all(&wanted), from.read_exact(&mut received))?;
        ensure!(received == wanted, "other bytes came back");
        Ok(())
    };
    let limited = tokio::time::timeout(2 * answer_time() + Duration::from_secs(20), exchanged).await;
    limited.context("the transfer stopped")?.with_context(|| format!("{TRANSFER} bytes to {to}"))
}

/// ICMP "fragmentation needed" and "packet too big" reach the sender, client or endpoint, and it learns the path's MTU: what it
/// sends next arrives. Datagrams are fragmented then, and segments are smaller.
#[test]
fn a_path_with_a_smaller_mtu_is_learnt_in_both_directions() -> Result<()> {
    Case::run(167, Setup::Plain, async |case| {
        let (endpoint, narrow_client) = narrow(&case)?;
        let echo = Echo::start(&case, Some(endpoint))?;
        echo.serve(&case).await?;
        let more = [(narrow_client.clone(), case.np(1)), (narrow_client, case.w(1))];
        for family in Family::ALL {
            for (client, target) in ways_of_large(&case, family).into_iter().chain(more.clone()) {
                let to = target.at(family);
                // Neither fits: the first one is lost with the error that it causes.
                is_sent_back(&client, to, 1_400).await.map_err(|error| case.explain(&error))?;
                if transports().contains(&Transport::Tcp) {
                    transfers(&client, to).await.map_err(|error| case.explain(&error))?;
                }
            }
        }
        Ok(())
    })
}

/// Whatever comes in: the proxy stays in sync, repairs nothing, and Services answer.
#[test]
fn malformed_packets_harm_nothing() -> Result<()> {
    Case::run_alone(168, Setup::Plain, async |case| {
        let mut random = Seeded::new()?;
        let ep = on_node(&case, 1);
        case.serve("svc", 1, &json!({}), std::slice::from_ref(&ep)).await?;
        let mut open = Vec::new();
        for (client, target) in ways(&case) {
            for family in Family::ALL {
                let mut flow = client.open(target.at(family), Transport::Tcp)?;
                flow.ask(answer_time()).await?;
                open.push(flow);
            }
        }
        let before = repaired(&case).await?;
        let frontends: Vec<String> = ways(&case)
            .into_iter()
            .flat_map(|(_, target)| Family::ALL.map(|family| text(target.at(family))))
            .chain(Family::ALL.map(|family| text(NODE.at(family, 10256))))
            .collect();
        for client in [case.client(), case.pod()] {
            let mut args = vec!["malformed".to_owned(), random.rng().random::<u32>().to_string()];
            args.push((MALFORMED / patience() as usize).to_string());
            args.extend(frontends.iter().cloned());
            let sent = send(&client, &args).await?;
            eprintln!("{} sent {}", client.ip(Family::V4), sent.trim_end());
        }
        for flow in &mut open {
            let answer = flow.ask(answer_time()).await?;
            ensure!(
                matches!(answer, keelson_cluster::net::Outcome::Answered { .. }),
                "an open connection: {answer:?}"
            );
        }
        // Changes are made, and every client has the endpoint.
        case.synced().await?;
        let table = [(case.pod(), case.v(1), kept([&ep])), (case.client(), case.w(1), masked([&ep]))];
        case.eventually_all(table.to_vec()).await?;
        ensure!(repaired(&case).await? == before, "rules were repaired");
        Ok(())
    })
}

async fn repaired(case: &Case) -> Result<f64> {
    if case.subject() == Subject::KubeProxy {
        return Ok(0.0);
    }
    let text = case.metrics().await?;
    let found = text.lines().filter(|line| line.starts_with("keelson_proxy_repaired"));
    Ok(found.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum())
}
