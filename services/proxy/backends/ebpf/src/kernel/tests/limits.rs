//! Full maps, and what malformed calls do.

use aya::maps::{Array, HashMap, Map, MapData};

use super::*;
use crate::{
    elements::Element,
    layout::{Layout as _, Remote, SetKey, SetKind, SetValue},
    plan::Capacity,
};

/// What has no room is left out and works again when there is room; nothing else suffers.
#[test]
fn a_service_port_without_room_is_left_to_packets() {
    in_world(|world| {
        let mut sizes = usual_sizes();
        for map in ["frontends", "sets", "slots", "members"] {
            sizes.insert(map, 4);
        }
        let pinned = Pinned::find(Some(&world.cgroup), sizes).unwrap();
        let capacity =
            Capacity { frontends: 3, sets: 3, members: 3, node_addresses: 3, source_ranges: 0, slots: 4 };
        let mut sockets = Sockets::new(Some(Box::new(pinned)), capacity, [true, true]);
        let servers: Vec<SocketAddr> = (0..2).map(|_| tcp_server("127.0.0.1")).collect();
        let name = |n: u8| ServiceName::new("default", &format!("s{n}"));
        let of = |n: u8| {
            let mut port = port(Protocol::Tcp, &format!("10.96.0.{n}"), &servers);
            port.name.service = name(n);
            port
        };
        for n in 1..=3 {
            sockets.plan.set(Family::V4, &name(n), vec![of(n)]);
        }
        sync(&mut sockets);
        assert_eq!(sockets.plan.usage(Family::V4).left_out, 1);
        for n in [1, 2] {
            assert!(servers.contains(&ask_tcp(at(&format!("10.96.0.{n}"), 80))));
        }
        assert!(TcpStream::connect_timeout(&at("10.96.0.3", 80), ANSWER).is_err(), "no route leads there");
        sockets.plan.set(Family::V4, &name(1), vec![]);
        sync(&mut sockets);
        assert_eq!(sockets.plan.usage(Family::V4).left_out, 1, "the slots rest");
        let later = Instant::now() + Duration::from_secs(2);
        sockets.maintain(Family::V4, later).unwrap();
        assert_eq!(sockets.plan.usage(Family::V4).left_out, 0);
        assert!(servers.contains(&ask_tcp(at("10.96.0.3", 80))));
    });
}

/// The kernel forgets what was used least recently: nothing fails, and what is used stays.
#[test]
fn maps_of_programs_that_are_full_fail_no_call() {
    const SIZE: u32 = 256;
    const MANY: u16 = 700;
    in_world(|world| {
        let mut sizes = usual_sizes();
        for map in ["affinity", "udp_flows", "udp_replies", "tcp_peers"] {
            sizes.insert(map, SIZE);
        }
        let pinned = Pinned::find(Some(&world.cgroup), sizes).unwrap();
        let mut sockets = Sockets::new(Some(Box::new(pinned)), usual_capacity(), [true, true]);
        let (tcp, udp) = ([tcp_server("127.0.0.1"), tcp_server("127.0.0.1")], udp_server("127.0.0.1"));
        let name = ServiceName::new("default", "web");
        let mut ports = vec![port(Protocol::Udp, V, &[udp])];
        // A client has as many affinities as there are service ports.
        ports.extend((0..MANY).map(|number| {
            let mut port = ServicePort { affinity_seconds: 1_000, ..port(Protocol::Tcp, V, &tcp) };
            port.name.port = format!("p{number}").into();
            port.port = 1_000 + number;
            port
        }));
        sockets.plan.set(Family::V4, &name, ports);
        sync(&mut sockets);

        let connected: Vec<TcpStream> = (0..MANY)
            .map(|number| TcpStream::connect_timeout(&at(V, 1_000 + number), ANSWER).unwrap())
            .collect();
        let peers: Vec<SocketAddr> = connected.iter().map(|stream| stream.peer_addr().unwrap()).collect();
        assert_eq!(peers.last(), Some(&at(V, 999 + MANY)), "the last one shows the Service");
        let forgotten = peers.iter().filter(|peer| tcp.contains(peer)).count();
        assert!(forgotten >= usize::from(MANY) - SIZE as usize, "{forgotten} show their endpoint");
        let last = at(V, 999 + MANY);
        let first = ask_tcp(last);
        assert!((0..20).all(|_| ask_tcp(last) == first), "the client that comes again is remembered");

        let clients: Vec<UdpSocket> = (0..MANY).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        for client in &clients {
            client.set_read_timeout(Some(ANSWER)).unwrap();
            client.send_to(b"?", at(V, 80)).unwrap();
            let (_, from) = client.recv_from(&mut [0; 64]).unwrap();
            assert_eq!(from, at(V, 80), "an answer that comes at once shows the Service");
        }
        // The flows of the first ones are forgotten, and made again.
        clients[0].send_to(b"?", at(V, 80)).unwrap();
        assert_eq!(clients[0].recv_from(&mut [0; 64]).unwrap().1, at(V, 80));
        let pinned = sockets.kernel().unwrap();
        assert!(pinned.udp_replies().unwrap().len() <= SIZE as usize);
        let counters = pinned.counters().unwrap();
        let unremembered = counters.iter().find(|counter| counter.label == "left_unremembered").unwrap();
        assert_eq!(unremembered.total, 0, "{counters:?}");
    });
}

/// One that is idle stays known, however many others have come and gone.
#[test]
fn sockets_that_have_ended_take_no_room() {
    const SIZE: u32 = 256;
    in_world(|world| {
        let mut sizes = usual_sizes();
        sizes.extend([("udp_replies", SIZE), ("tcp_peers", SIZE)]);
        let pinned = Pinned::find(Some(&world.cgroup), sizes).unwrap();
        let mut sockets = Sockets::new(Some(Box::new(pinned)), usual_capacity(), [true, true]);
        let mapped = format!("::ffff:{V}");
        let connect = |ip: &str| {
            let own = if ip.contains(':') { "::" } else { "0.0.0.0" };
            let udp = UdpSocket::bind((own.parse::<IpAddr>().unwrap(), 0)).unwrap();
            udp.connect(at(ip, 80)).unwrap();
            let domain = socket2::Domain::for_address(at(ip, 80));
            let tcp = socket2::Socket::new(domain, socket2::Type::STREAM, None).unwrap();
            tcp.connect_timeout(&at(ip, 80).into(), ANSWER).unwrap();
            (udp, TcpStream::from(tcp))
        };
        for (ip, own) in [(V, "127.0.0.1"), (V6, "::1")] {
            let (tcp, udp) = (tcp_server(own), udp_server(own));
            let ports = vec![port(Protocol::Tcp, ip, &[tcp]), port(Protocol::Udp, ip, &[udp])];
            serve(&mut sockets, family_of_ip(ip), ports);
        }
        let idle: Vec<_> = [V, V6, &mapped].into_iter().map(|ip| (ip, connect(ip))).collect();
        for _ in 0..2 * SIZE {
            [V, V6, &mapped].into_iter().for_each(|ip| drop(connect(ip)));
        }
        for (ip, (udp, tcp)) in &idle {
            assert_eq!((udp.peer_addr().unwrap(), tcp.peer_addr().unwrap()), (at(ip, 80), at(ip, 80)));
        }
        let maps = sockets.kernel().unwrap().maps_folder();
        for map in ["udp_replies", "tcp_peers"] {
            let data = MapData::from_pin(maps.join(map)).unwrap();
            let entries = HashMap::<_, [u8; 32], [u8; 24]>::try_from(Map::LruHashMap(data)).unwrap();
            assert_eq!(entries.keys().count(), idle.len(), "{map} has the sockets that live");
        }
    });
}

/// More addresses than the map of node addresses has: a sync does not fail.
#[test]
fn a_node_with_very_many_addresses_is_synced() {
    in_world(|world| {
        let mut sockets = world.sockets();
        let (server, first) = (tcp_server("127.0.0.1"), at("192.0.2.1", 30_080));
        let many = (0..20_000_u32).map(|number| IpAddr::from((0x0a0a_0000 + number).to_be_bytes()));
        let all: Vec<IpAddr> = std::iter::once(first.ip()).chain(many).collect();
        sockets.plan.set_node_addresses(Family::V4, &all);
        serve(
            &mut sockets,
            Family::V4,
            vec![ServicePort { node_port: 30_080, ..port(Protocol::Tcp, V, &[server]) }],
        );
        assert_eq!(ask_tcp(first), server);
        let rest = at("10.10.78.31", 30_080);
        assert!(TcpStream::connect_timeout(&rest, ANSWER).is_err(), "it is left to packets");
        let usage = sockets.plan.usage(Family::V4);
        assert_eq!((usage.node_addresses, usage.left_addresses), (7_168, 20_001 - 7_168));
    });
}

/// Elements of another program fill a map: the sync fails, says which map, and the next one goes on.
#[test]
fn a_map_that_another_program_fills_is_named() {
    in_world(|world| {
        let mut sizes = usual_sizes();
        sizes.insert("frontends", 2);
        let find = || Pinned::find(Some(&world.cgroup), sizes.clone()).unwrap();
        let mut sockets = Sockets::new(Some(Box::new(find())), usual_capacity(), [true, true]);
        sync(&mut sockets);
        let mut other = find();
        for port in [1, 2] {
            let frontend = keelson_proxy::model::Frontend::Address {
                ip: "10.9.9.9".parse().unwrap(),
                protocol: Protocol::Tcp,
                port,
            };
            let key = crate::layout::FrontendKey::of(frontend, Family::V4);
            let value = crate::layout::SetKey { number: 2, kind: 0 };
            other.apply(&Change::Put(crate::elements::Element::Frontend(key, value))).unwrap();
        }
        let server = tcp_server("127.0.0.1");
        sockets.plan.set(
            Family::V4,
            &ServiceName::new("default", "web"),
            vec![port(Protocol::Tcp, V, &[server])],
        );
        let error = sockets.sync(Family::V4, Instant::now()).unwrap_err();
        assert!(error.to_string().contains("the map frontends has no room"), "{error}");
        // The next one compares everything: it deletes what is not ours, and then there is room.
        assert!(sockets.sync(Family::V4, Instant::now()).is_err());
        sockets.sync(Family::V4, Instant::now()).unwrap();
        assert_eq!(ask_tcp(at(V, 80)), server);
    });
}

/// Short, unspecified, of other families and without an address: the kernel's answers are those without programs.
#[test]
fn odd_calls_have_the_answers_of_the_kernel() {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrIn6, connect, socket};
    let odd = || {
        let mut answers = Vec::new();
        let of = |family, kind| socket(family, kind, SockFlag::SOCK_NONBLOCK, None).unwrap();
        use std::os::fd::AsRawFd as _;
        for kind in [SockType::Stream, SockType::Datagram] {
            let six = of(AddressFamily::Inet6, kind);
            let four: SockaddrIn = "10.96.0.10:81".parse::<std::net::SocketAddrV4>().unwrap().into();
            answers.push(format!("{:?}", connect(six.as_raw_fd(), &four)));
            let four = of(AddressFamily::Inet, kind);
            let six: SockaddrIn6 = "[fd00:10:96::a]:81".parse::<std::net::SocketAddrV6>().unwrap().into();
            answers.push(format!("{:?}", connect(four.as_raw_fd(), &six)));
            let zero: SockaddrIn = "0.0.0.0:0".parse::<std::net::SocketAddrV4>().unwrap().into();
            answers.push(format!("{:?}", connect(of(AddressFamily::Inet, kind).as_raw_fd(), &zero)));
        }
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        answers.push(format!("{:?}", udp.send(b"?").map_err(|error| error.kind())));
        answers.push(format!("{:?}", udp.send_to(&[0; 70_000], at(V, 80)).map_err(|error| error.kind())));
        answers.push(format!("{:?}", udp.peer_addr().map_err(|error| error.kind())));
        answers
    };
    in_world(|world| {
        let mut sockets = world.sockets();
        let before = odd();
        let servers = [tcp_server("127.0.0.1"), udp_server("127.0.0.1")];
        serve(
            &mut sockets,
            Family::V4,
            vec![port(Protocol::Tcp, V, &servers[..1]), port(Protocol::Udp, V, &servers[1..])],
        );
        assert_eq!(odd(), before);
        assert_eq!(ask_tcp(at(V, 80)), servers[0]);
    });
}

/// The memory of the map and the calls of the kernel write and show the same slots, wherever these begin in a page.
#[test]
fn slots_are_written_and_read_through_their_memory() {
    const PLACES: u32 = 1_000;
    in_world(|world| {
        let mut pinned = world.pinned();
        assert!(!pinned.is_read() && pinned.prepare().unwrap(), "the maps are new");
        assert!(pinned.is_read() && !pinned.prepare().unwrap(), "programs of another version may have them");
        let value = |place: u32| SlotValue {
            remote: Remote::from(Endpoint { ip: IpAddr::from(place.to_be_bytes()), port: 80 }),
            number: 1 + place,
        };
        // Far and near places, in order and not, over ends of pages, and the last one.
        let last = usual_sizes()["slots"] - 1;
        let written: Vec<u32> = (3..PLACES).step_by(2).chain([5_000, 4_999, 170, 171, last, 0]).collect();
        let slots: Vec<(u32, SlotValue)> = written.iter().map(|place| (*place, value(*place))).collect();
        pinned.put_slots(&slots).unwrap();
        let data = MapData::from_pin(pinned.maps_folder().join("slots")).unwrap();
        let array = Array::<_, [u8; 24]>::try_from(Map::Array(data)).unwrap();
        for place in (0..=PLACES).chain([4_998, 4_999, 5_000, 5_001, last]) {
            let expected = if written.contains(&place) { value(place).to_bytes() } else { [0; 24] };
            assert_eq!(array.get(&place, 0).unwrap(), expected, "place {place}");
        }
        for (first, count) in [(0, 4), (169, 3), (4_999, 2), (last, 1), (last, 5)] {
            let set = Element::Set(
                SetKey::new(first, SetKind::Cluster),
                SetValue { first, count, affinity_seconds: 0 },
            );
            pinned.apply(&Change::Put(set)).unwrap();
        }
        let read = pinned.read().unwrap().slots;
        assert_eq!(read.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 169, 170, 171, 4_999, 5_000, last]);
        assert!([0, 3, 169, 170, 171, 4_999, 5_000, last].iter().all(|place| read[place] == value(*place)));
        for first in [last, last - 30] {
            let slots: Vec<_> = (first..last + 2).map(|place| (place, value(place))).collect();
            let beyond = pinned.put_slots(&slots).unwrap_err();
            assert!(beyond.to_string().contains(&format!("there is no place {}", last + 1)), "{beyond}");
        }
    });
}
