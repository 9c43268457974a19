//! Full maps.

use super::*;

fn addresses(from: u8, count: u8) -> Vec<IpNet> {
    (from..from + count).map(|last| IpNet::from(IpAddr::from([192, 0, 2, last]))).collect()
}

/// Too many networks are refused at the start; as many as there may be can all be replaced at once.
#[test]
fn networks_without_room_are_refused_at_the_start() {
    in_world(|world| {
        let mut sizes = small_sizes();
        sizes.insert(layout::NETWORKS, 20);
        let open = |nodes| open_with_nodes(DirectReturnHook::Tc, &sizes, nodes, None);
        world.nodes[0].run(|| {
            // Two are those of pods.
            let error = open(addresses(1, 7)).err().unwrap();
            assert!(error.is_fatal(), "{error}");
            assert!(
                error.to_string().contains("have 9 networks") && error.to_string().contains("know 8"),
                "{error}"
            );
            for from in [1, 101] {
                let mut direct = open(addresses(from, 6)).unwrap();
                direct.detected = ["10.245.0.0/16", "fd00:10:245::/64"].map(|network| network.parse().ok());
                direct.set_networks();
                for family in Family::ALL {
                    direct.sockets.sync(family, Instant::now()).unwrap();
                }
                assert_eq!(
                    direct.sockets.kernel().unwrap().detached().unwrap(),
                    [""; 0],
                    "the maps have all of them"
                );
            }
        });
    });
}

/// More new ranges at once than the map has room for: what goes makes room for the next sync.
#[test]
fn a_full_map_of_source_ranges_has_room_again_in_the_next_sync() {
    in_world(|world| {
        let mut sizes = small_sizes();
        sizes.insert(SOURCE_RANGES.name, 2);
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, sizes);
        let mut sync = |ranges: [&str; 2]| {
            let port = ServicePort {
                external_ips: Vec::new(),
                load_balancer_ips: vec![EXTERNAL[0].parse().unwrap()],
                source_ranges: ranges.map(|range| range.parse().unwrap()).into(),
                ..service(Protocol::Tcp, 0, &[0], 0)
            };
            let sockets = &mut cluster.levels[0].sockets;
            sockets.plan.set(Family::V4, &port.name.service.clone(), vec![port]);
            world.nodes[0].run(|| sockets.sync(Family::V4, Instant::now()))
        };
        sync(["10.0.0.0/8", "172.16.0.0/12"]).unwrap();
        let others = ["192.0.2.0/25", "198.51.100.0/25"];
        let full = sync(others);
        assert!(matches!(full, Err(KernelError::Full { map: MapName::SourceRanges })), "{full:?}");
        sync(others).unwrap();
    });
}

/// The first devices have programs, the rest is named, and one that goes makes room.
#[test]
fn devices_without_room_are_left_out() {
    in_world(|world| {
        let mut sizes = small_sizes();
        sizes.insert(layout::DEVICES, 2);
        let node = &world.nodes[0];
        node.ip("link add eth1 type veth peer name eth2");
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, sizes);
        serve_all(world, Protocol::Tcp, 0);
        let set = |cluster: &mut Cluster<'_>, names: &[&str]| {
            node.run(|| {
                let index =
                    |name: &str| usize::try_from(nix::net::if_::if_nametoindex(name).unwrap()).unwrap();
                let of = |name: &&str| Interface { name: (*name).into(), index: index(name) };
                let level = &mut cluster.levels[0];
                level.set_interfaces(&names.iter().map(of).collect::<Vec<_>>());
                for family in Family::ALL {
                    level.sockets.sync(family, Instant::now()).unwrap();
                }
                let differs = level.sockets.kernel().unwrap().detached().unwrap();
                assert_eq!(differs, [""; 0], "{names:?}: the map has them");
            });
            (cluster.levels[0].devices(), cluster.levels[0].features().join("\n"))
        };
        let mut all = ["eth0", "eth1", "eth2"];
        node.run(|| all.sort_by_key(|name| nix::net::if_::if_nametoindex(*name).unwrap()));
        let (devices, text) = set(&mut cluster, &all);
        assert_eq!(devices, all[..2]);
        assert!(text.contains("1 devices beyond the first 2 are left out"), "{text}");
        let (devices, text) = set(&mut cluster, &all[1..]);
        assert_eq!(devices, all[1..]);
        assert!(!text.contains("left out"), "{text}");
        let (devices, _) = set(&mut cluster, &["eth0"]);
        assert_eq!(devices, ["eth0"]);
        cluster.serve(Protocol::Tcp, 0, &[1]);
        assert_eq!(ask(world, Protocol::Tcp, at(NODES[0][0], NODE_PORT)).0, "pod1");
    });
}

/// More replies in fragments than the map remembers: the oldest are forgotten, and each new one is complete.
#[test]
fn replies_in_fragments_are_complete_when_the_map_is_full() {
    const SIZE: u32 = 256;
    in_world(|world| {
        let mut sizes = small_sizes();
        sizes.insert(layout::FRAGMENTS, SIZE);
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, sizes);
        serve_udp(&world.pods[0], PODS[0][0], PORT, "pod");
        cluster.serve(Protocol::Udp, 0, &[0]);
        world.client.run(|| {
            let socket = udp_socket(at(NODES[0][0], NODE_PORT));
            for number in 0..2 * SIZE {
                let answer = exchange(&socket, "3000");
                assert!(
                    answer.starts_with("pod ") && answer.len() > 3_000,
                    "{number}: {} bytes",
                    answer.len()
                );
            }
        });
    });
}

#[test]
#[ignore = "another test runs it with few rights"]
fn the_programs_load() {
    super::kernel::load(&mut Loader::default(), None, &usual_sizes(true)).unwrap();
}

#[test]
fn one_capability_is_needed_besides() {
    let test = "direct::tests::limits::the_programs_load";
    assert!(run_with(&["bpf", "net_admin"], test).unwrap_err().contains("CAP_PERFMON"));
    run_with(&["bpf", "net_admin", "perfmon"], test).unwrap();
}
