//! What programs remember of flows, when it is deleted, and when there is no room for more.

use aya::maps::{HashMap, Map, MapData};

use super::*;
use crate::{
    direct::flows::{ENDED_BY_CLIENT, ENDED_BY_ENDPOINT, LASTS, ONE_SIDED, RESET},
    layout::{DirectKey, DirectReply, Layout as _, MapDefinition},
};

type FlowMap = HashMap<MapData, [u8; 44], [u8; 32]>;

fn open_map(cluster: &Cluster<'_>, n: usize, map: MapDefinition) -> FlowMap {
    let pin = cluster.levels[n].sockets.kernel().unwrap().maps_folder().join(map.name);
    Map::HashMap(MapData::from_pin(pin).unwrap()).try_into().unwrap()
}

/// States by the port of the client.
fn states(cluster: &Cluster<'_>, n: usize) -> BTreeMap<u16, u16> {
    let entries = open_map(cluster, n, REPLIES);
    let entries = entries.iter().map(Result::unwrap);
    entries
        .map(|(key, value)| (DirectKey::from_bytes(key).client.port, DirectReply::from_bytes(value).state))
        .collect()
}

/// Waits until the flows of these ports have these states: nothing tells a client when its last packet has arrived. A slow machine may
/// send the end of a connection again, and be answered by a reset.
fn expect<const N: usize>(cluster: &Cluster<'_>, n: usize, ports: [u16; N], expected: [u16; N]) {
    let begun = Instant::now();
    loop {
        let seen = states(cluster, n);
        let both = ENDED_BY_CLIENT | ENDED_BY_ENDPOINT;
        let without_late = |state: u16| if state & both == both { state & !RESET } else { state };
        let state = ports.map(|port| without_late(seen.get(&port).copied().unwrap_or_default()));
        if state == expected || begun.elapsed() >= ANSWER {
            return assert_eq!(state, expected, "node {n}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The number of flows and of replies that are left after a sweep at a later time.
fn sweep_after(cluster: &mut Cluster<'_>, n: usize, seconds: u64) -> [usize; 2] {
    let level = &mut cluster.levels[n];
    level.maintain(Family::V4, Instant::now() + Duration::from_secs(seconds)).unwrap();
    let begun = Instant::now();
    while level.flows.is_busy() {
        assert!(begun.elapsed() < ANSWER, "the sweep does not end");
        thread::sleep(Duration::from_millis(5));
    }
    [layout::FLOWS, REPLIES].map(|map| open_map(cluster, n, map).keys().count())
}

fn port(stream: &TcpStream) -> u16 {
    stream.local_addr().unwrap().port()
}

fn end(mut stream: TcpStream) {
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn flows_are_deleted_when_they_have_ended_or_are_idle() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[0]);
        let to = at(NODES[0][0], NODE_PORT);
        let open = || world.client.run(|| connect(to).0);
        let (mut lasting, ended, reset) = (open(), open(), open());
        let ports = [&lasting, &ended, &reset].map(port);
        world.client.run(|| {
            end(ended);
            socket2::SockRef::from(&reset).set_linger(Some(Duration::ZERO)).unwrap();
            drop(reset);
        });
        let both = ENDED_BY_CLIENT | ENDED_BY_ENDPOINT;
        expect(&cluster, 0, ports, [LASTS, LASTS | both, LASTS | RESET]);
        assert_eq!(sweep_after(&mut cluster, 0, 0), [3, 3], "nothing is old");
        assert_eq!(sweep_after(&mut cluster, 0, 31), [2, 2], "what both have ended is");
        assert_eq!(sweep_after(&mut cluster, 0, 301), [1, 1]);
        lasting.write_all(b"x").unwrap();
        assert_eq!(lasting.read(&mut [0]).unwrap(), 1, "an idle connection goes on");
    });
}

#[test]
fn datagrams_that_go_on_for_longer_are_remembered_for_longer() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Udp, 0);
        cluster.serve(Protocol::Udp, 0, &[0]);
        let to = at(NODES[0][0], NODE_PORT);
        let sockets = world.client.run(|| [udp_socket(to), udp_socket(to)]);
        for socket in &sockets {
            assert!(exchange(socket, "0").starts_with("pod0 "));
        }
        thread::sleep(Duration::from_millis(1_100));
        assert!(exchange(&sockets[1], "0").starts_with("pod0 "));
        let states = states(&cluster, 0);
        let state = sockets.each_ref().map(|socket| states[&socket.local_addr().unwrap().port()]);
        assert_eq!(state, [0, LASTS]);
        assert_eq!(sweep_after(&mut cluster, 0, 31), [1, 1]);
        assert_eq!(sweep_after(&mut cluster, 0, 121), [0, 0]);
        assert!(exchange(&sockets[1], "0").starts_with("pod0 "), "it begins again");
    });
}

/// The first node sees the client alone, that of the endpoint both.
#[test]
fn nodes_forget_a_connection_that_they_have_seen_end() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[1]);
        let (lasting, ended, reset) = world.client.run(|| {
            let to = at(NODES[0][0], NODE_PORT);
            let [lasting, ended, reset] = [(); 3].map(|()| connect(to).0);
            let ports = (port(&ended), port(&reset));
            end(ended);
            socket2::SockRef::from(&reset).set_linger(Some(Duration::ZERO)).unwrap();
            drop(reset);
            (lasting, ports.0, ports.1)
        });
        let both = ENDED_BY_CLIENT | ENDED_BY_ENDPOINT;
        for (n, side, end) in [(0, ONE_SIDED, ENDED_BY_CLIENT), (1, 0, both)] {
            let ports = [port(&lasting), ended, reset];
            expect(&cluster, n, ports, [LASTS | side, LASTS | side | end, LASTS | side | RESET]);
            // The endpoint's node has no flows.
            let flows = |number| if n == 0 { number } else { 0 };
            assert_eq!(sweep_after(&mut cluster, n, 121), [flows(2), 2], "node {n}");
            assert_eq!(sweep_after(&mut cluster, n, 301), [flows(1), 1], "node {n}");
        }
    });
}

/// More flows than there is room for: new ones are left to nftables, and the others go on.
#[test]
fn full_maps_leave_new_flows_and_end_none() {
    const ROOM: usize = 128;
    // Flows have no room first, or replies.
    for (flows, replies) in [(128, 256), (256, 128)] {
        in_world(|world| {
            let mut sizes = small_sizes();
            sizes.extend([(layout::FLOWS.name, flows), (REPLIES.name, replies)]);
            let mut cluster = Cluster::new(world, DirectReturnHook::Tc, sizes);
            serve_all(world, Protocol::Udp, 0);
            cluster.serve(Protocol::Udp, 0, &[0, 1]);
            let to = at(NODES[0][0], NODE_PORT);
            let sockets: Vec<UdpSocket> =
                world.client.run(|| (0..2 * ROOM).map(|_| udp_socket(to)).collect());
            let ask = || sockets.iter().map(|socket| exchange(socket, "0").starts_with("pod"));
            let begun: Vec<bool> = ask().collect();
            assert_eq!(begun.iter().filter(|is_pod| **is_pod).count(), ROOM);
            assert_eq!(cluster.counted(0)["left_full"], ROOM as u64);
            assert_eq!(ask().collect::<Vec<_>>(), begun, "each stays where it is");
            for n in [0, 1] {
                assert_eq!(sweep_after(&mut cluster, n, 31), [0, 0]);
            }
            assert!(ask().take(ROOM).all(|is_pod| is_pod), "there is room again");
        });
    }
}

/// Sends a packet of TCP that is no part of the client's connection, and waits until the first node has seen it.
fn forge(cluster: &Cluster<'_>, port: u16, flags: u8) {
    let packets = || {
        let counted = cluster.counted(0);
        ["packet_here", "packet_redirected", "packet_routed"].map(|label| counted[label]).iter().sum::<u64>()
    };
    let (before, begun) = (packets(), Instant::now());
    odd::send_tcp(cluster.world, port, (NODES[0][0], NODE_PORT), flags);
    while packets() == before {
        assert!(begun.elapsed() < ANSWER, "the packet with the flags {flags} does not arrive");
        thread::sleep(Duration::from_millis(5));
    }
}

/// On the endpoint's node its answer would say that the connection lasts.
#[test]
fn a_forged_opening_changes_nothing() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[1]);
        let (stream, _) = world.client.run(|| connect(at(NODES[0][0], NODE_PORT)));
        let port = port(&stream);
        expect(&cluster, 0, [port], [LASTS | ONE_SIDED]);
        forge(&cluster, port, odd::SYN);
        expect(&cluster, 0, [port], [LASTS | ONE_SIDED]);
    });
}

#[test]
fn a_forged_reset_counts_until_the_next_packet() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[0]);
        let (mut stream, _) = world.client.run(|| connect(at(NODES[0][0], NODE_PORT)));
        let port = port(&stream);
        expect(&cluster, 0, [port], [LASTS]);
        forge(&cluster, port, odd::RST);
        expect(&cluster, 0, [port], [LASTS | RESET]);
        stream.write_all(b"x").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 1);
        expect(&cluster, 0, [port], [LASTS]);
    });
}
