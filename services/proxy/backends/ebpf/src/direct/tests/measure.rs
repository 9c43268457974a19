//! A measurement: a node port by direct return and by nftables, beside the endpoint itself. `cargo test --release -p
//! keelson-proxy-ebpf --lib measure_node_ports -- --ignored --nocapture`.
//!
//! All namespaces share the processors, and devices are pairs of veth: figures say what one way costs beside another, not what a
//! network carries.

// The result is its output.
#![allow(clippy::print_stderr)]

use keelson_proxy::backend::{Access, Backend, Driver as _};
use keelson_proxy_nft::Nft;

use super::*;

const CONNECTIONS: u32 = 3_000;
const BYTES: usize = 512 << 20;
const TURNS: usize = 5;

/// Reads all that it gets.
fn swallow(net: &Net, ip: &str) {
    net.run(|| {
        let listener = TcpListener::bind(at(ip, PORT)).unwrap();
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
            }
        });
    });
}

/// Connections a second, one after the other, and MiB a second of one connection.
fn measure(world: &World, to: SocketAddr) -> [f64; 2] {
    world.client.run(|| {
        let begun = Instant::now();
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect_timeout(&to, ANSWER).unwrap();
            // Without a TIME_WAIT that would keep the port.
            socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
        let connections = f64::from(CONNECTIONS) / begun.elapsed().as_secs_f64();
        let data = vec![7; 1 << 18];
        let begun = Instant::now();
        let mut stream = TcpStream::connect_timeout(&to, ANSWER).unwrap();
        for _ in 0..BYTES / data.len() {
            stream.write_all(&data).unwrap();
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read(&mut [0]).unwrap();
        let mebibytes = f64::from(u32::try_from(BYTES >> 20).unwrap());
        [connections, mebibytes / begun.elapsed().as_secs_f64()]
    })
}

fn by_nft(world: &World, pod: usize) -> Box<dyn Backend> {
    world.nodes[0].run(|| {
        let mut nft = Nft.open(&options(&["10.244.0.0/16"]), Access::Program).unwrap();
        nft.set_addresses(&[NODES[0][0].parse().unwrap()]);
        nft.set_node(NodeConfig {
            family: Family::V4,
            masquerade_all: false,
            mark: 0x4000,
            detector: Some(Detector::Cidr("10.244.0.0/16".parse().unwrap())),
            service_cidrs: Vec::new(),
            node_ips: vec![NODES[0][0].parse().unwrap()],
            node_ports: Match::AllLocal,
        });
        let port = service(Protocol::Tcp, 0, &[pod], 0);
        nft.set_service(Family::V4, &port.name.service.clone(), vec![port]);
        nft.sync(Family::V4, Instant::now()).unwrap();
        nft
    })
}

/// One line: the best of all turns.
fn report(world: &World, name: &str, pod: usize, to: SocketAddr) {
    let turns: Vec<[f64; 2]> = (0..TURNS).map(|_| measure(world, to)).collect();
    let best = |of: usize| turns.iter().map(|turn| turn[of]).fold(0.0, f64::max);
    let place = ["here", "on the other node"][pod];
    eprintln!("{name:28} endpoint {place:18} {:8.0} connections/s {:8.0} MiB/s", best(0), best(1));
}

#[test]
#[ignore = "a measurement"]
fn measure_node_ports() {
    for pod in [0, 1] {
        for is_offloaded in [true, false] {
            let offload = if is_offloaded { "" } else { ", no offload" };
            let node_port = at(NODES[0][0], NODE_PORT);
            let in_world = |body: &(dyn Fn(&World) + Sync)| {
                in_world(|world| {
                    swallow(&world.pods[pod], PODS[pod][0]);
                    body(world);
                });
            };
            in_world(&|world| {
                let _switch = (!is_offloaded).then(|| world.prepare_for_xdp());
                world.client.ip(&format!("route add 10.244.0.0/16 via {}", NODES[0][0]));
                report(world, &format!("endpoint itself{offload}"), pod, at(PODS[pod][0], PORT));
            });
            in_world(&|world| {
                let _switch = (!is_offloaded).then(|| world.prepare_for_xdp());
                let _nft = by_nft(world, pod);
                report(world, &format!("nft{offload}"), pod, node_port);
            });
            let hook = if is_offloaded { DirectReturnHook::Tc } else { DirectReturnHook::Xdp };
            for with_nft in [false, true] {
                in_world(&|world| {
                    // In the backend, the tables of nftables are there as well.
                    let _nft = with_nft.then(|| by_nft(world, pod));
                    let mut cluster = Cluster::new(world, hook, usual_sizes());
                    cluster.serve(Protocol::Tcp, 0, &[pod]);
                    let tables = if with_nft { " and tables" } else { "" };
                    report(world, &format!("{}{tables}{offload}", hook.as_str()), pod, node_port);
                });
            }
        }
    }
}
