//! A measurement: a node port by direct return and by nftables, beside the endpoint itself. `cargo test --release -p
//! keelson-proxy-ebpf --lib measure_node_ports -- --ignored --nocapture`.
//!
//! All namespaces share the processors, and devices are pairs of veth: the processor time of everything, from the client to the
//! endpoint, says what one way costs beside another, and not what a network carries.

// The result is its output.
#![allow(clippy::print_stderr)]

use super::*;

const CONNECTIONS: u32 = 1_000;
const MEBIBYTES: u32 = 128;
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

/// Of all threads of the process: the client, the endpoint, and what the kernel does for them.
fn processor_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap().into()
}

/// Processor time of a connection, and of a MiB of one connection, in microseconds.
fn measure(world: &World, to: SocketAddr) -> [f64; 2] {
    let per =
        |begun: Duration, number: u32| (processor_time() - begun).as_secs_f64() * 1e6 / f64::from(number);
    world.client.run(|| {
        let begun = processor_time();
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect_timeout(&to, ANSWER).unwrap();
            // Without a TIME_WAIT that would keep the port.
            socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
        let connection = per(begun, CONNECTIONS);
        let data = vec![7; 1 << 20];
        let mut stream = TcpStream::connect_timeout(&to, ANSWER).unwrap();
        let begun = processor_time();
        for _ in 0..MEBIBYTES {
            stream.write_all(&data).unwrap();
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read(&mut [0]).unwrap();
        [connection, per(begun, MEBIBYTES)]
    })
}

/// One line: the least of all turns.
fn report(world: &World, name: &str, pod: usize, to: SocketAddr) {
    let turns: Vec<[f64; 2]> = (0..TURNS).map(|_| measure(world, to)).collect();
    let least = |of: usize| turns.iter().map(|turn| turn[of]).fold(f64::INFINITY, f64::min);
    let place = ["here", "on the other node"][pod];
    eprintln!("{name:28} endpoint {place:18} {:6.1} us/connection {:6.0} us/MiB", least(0), least(1));
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
                let _nft = tables(world, Protocol::Tcp, &[pod]);
                report(world, &format!("nft{offload}"), pod, node_port);
            });
            let hook = if is_offloaded { DirectReturnHook::Tc } else { DirectReturnHook::Xdp };
            for with_nft in [false, true] {
                in_world(&|world| {
                    // In the backend, the tables of nftables are there as well.
                    let _nft = with_nft.then(|| tables(world, Protocol::Tcp, &[pod]));
                    let mut cluster = Cluster::new(world, hook, usual_sizes(false));
                    cluster.serve(Protocol::Tcp, 0, &[pod]);
                    let tables = if with_nft { " and tables" } else { "" };
                    report(world, &format!("{}{tables}{offload}", hook.as_str()), pod, node_port);
                });
            }
        }
    }
}
