//! Restarts, drift, devices and removal.

use super::*;

fn ping(stream: &mut TcpStream) {
    stream.write_all(b"ping\n").unwrap();
    assert_eq!(read_line(stream), "ping");
}

#[test]
fn traffic_goes_on_without_a_process_and_a_restart_keeps_flows() {
    for hook in [DirectReturnHook::Tc, DirectReturnHook::Xdp] {
        in_world(|world| {
            let mut cluster = Cluster::new(world, hook, small_sizes());
            serve_all(world, Protocol::Tcp, 0);
            cluster.serve(Protocol::Tcp, 0, &[0, 1]);
            let to = at(NODES[0][0], NODE_PORT);
            let mut streams: Vec<TcpStream> = world.client.run(|| (0..8).map(|_| connect(to).0).collect());
            for n in [0, 1] {
                cluster.restart(n);
                streams.iter_mut().for_each(ping);
                let port = service(Protocol::Tcp, 0, &[0, 1], n);
                cluster.levels[n].sockets.plan.set(Family::V4, &port.name.service.clone(), vec![port]);
                for outcome in cluster.sync(n) {
                    assert!(outcome.full && outcome.is_nothing(), "{outcome:?}");
                }
                streams.iter_mut().for_each(ping);
            }
            assert!(ask(world, Protocol::Tcp, to).0.starts_with("pod"));
        });
    }
}

/// A check, as the proxy does it.
pub(super) fn check(cluster: &mut Cluster<'_>, n: usize) -> keelson_proxy::backend::Outcome {
    let level = &mut cluster.levels[n];
    cluster.world.nodes[n].run(|| {
        assert!(level.begin_check(Family::V4, Instant::now()).unwrap(), "something is missing");
        let contents = level.sockets.kernel().unwrap().read().unwrap();
        level.sockets.snapshots.put(Family::V4, crate::sockets::Seen { contents, sync: 0 });
        level.sockets.check(Family::V4, Instant::now()).unwrap()
    })
}

#[test]
fn detached_programs_are_attached_again() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[1]);
        let to = at(NODES[0][0], NODE_PORT);
        assert_eq!(ask(world, Protocol::Tcp, to).0, "pod1");
        let is_missing = |cluster: &mut Cluster<'_>| {
            let level = &mut cluster.levels[0];
            world.nodes[0].run(|| level.begin_check(Family::V4, Instant::now()).unwrap())
        };
        assert!(!is_missing(&mut cluster));
        // Links by their pins; filters, on kernels without links, with their qdisc.
        let pins = world.nodes[0].run(|| find_pins().unwrap());
        let folder = pins.iter().find(|path| path.to_string_lossy().contains("direct-links-")).unwrap();
        let has_links = fs::read_dir(folder)
            .unwrap()
            .flatten()
            .all(|pin| pin.file_name().to_string_lossy().starts_with(['i', 'o']));
        match has_links {
            true => fs::remove_file(fs::read_dir(folder).unwrap().flatten().next().unwrap().path()).unwrap(),
            false => world.nodes[0].command("tc", "qdisc del dev eth0 clsact"),
        }
        let outcome = check(&mut cluster, 0);
        assert!(outcome.repaired && outcome.structure >= 1, "{outcome:?}");
        assert!(!is_missing(&mut cluster));
        assert_eq!(ask(world, Protocol::Tcp, to).0, "pod1");
        // All pins.
        world.nodes[0].run(|| remove_pins(&mut drop).unwrap());
        let error = world.nodes[0].run(|| {
            let level = &mut cluster.levels[0];
            level.begin_check(Family::V4, Instant::now()).unwrap();
            level
                .sockets
                .snapshots
                .put(Family::V4, crate::sockets::Seen { contents: Contents::default(), sync: 0 });
            level.sockets.check(Family::V4, Instant::now()).unwrap_err().to_string()
        });
        assert!(error.contains("were removed by another program"), "{error}");
        cluster.sync(0);
        assert_eq!(ask(world, Protocol::Tcp, to).0, "pod1");
    });
}

/// The kernel detaches a program some milliseconds after its last link is gone. Connections in between end.
fn wait_until_left(world: &World, to: SocketAddr) {
    let until = Instant::now() + ANSWER;
    let name = || {
        let mut answer = [0; 6];
        let mut stream = TcpStream::connect_timeout(&to, ANSWER).ok()?;
        stream.set_read_timeout(Some(Duration::from_millis(200))).ok()?;
        stream.read_exact(&mut answer).ok()?;
        Some(answer)
    };
    while world.client.run(name) != Some(*b"node0 ") {
        assert!(Instant::now() < until, "the programs still decide");
    }
}

#[test]
fn another_hook_replaces_the_first_one_and_removal_leaves_nothing() {
    in_world(|world| {
        let _switch = world.prepare_for_xdp();
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        cluster.serve(Protocol::Tcp, 0, &[0]);
        let to = at(NODES[0][0], NODE_PORT);
        let mut stream = world.client.run(|| connect(to).0);
        for hook in [DirectReturnHook::Xdp, DirectReturnHook::Tc] {
            cluster.hook = hook;
            cluster.restart(0);
            let port = service(Protocol::Tcp, 0, &[0], 0);
            cluster.serve_on(0, port);
            ping(&mut stream);
            let pins = world.nodes[0].run(|| find_pins().unwrap());
            assert_eq!(pins.len(), 2, "{pins:?}");
            assert_eq!(fs::read_dir(&pins[0]).unwrap().count(), 2, "two programs");
            assert_eq!(ask(world, Protocol::Tcp, to).0, "pod0");
        }
        let mut removed = Vec::new();
        world.nodes[0].run(|| remove_pins(&mut |what| removed.push(what)).unwrap());
        assert!(removed[0].ends_with("with 2 pins") && removed[1].ends_with("with 14 pins"), "{removed:?}");
        wait_until_left(world, to);
    });
}

/// A device that is made later, and one that goes.
#[test]
fn devices_come_and_go() {
    in_world(|world| {
        let mut cluster = Cluster::new(world, DirectReturnHook::Tc, small_sizes());
        serve_all(world, Protocol::Tcp, 0);
        let level = &mut cluster.levels[0];
        world.nodes[0].run(|| level.set_interfaces(&[]));
        cluster.serve(Protocol::Tcp, 0, &[1]);
        let to = at(NODES[0][0], NODE_PORT);
        assert_eq!(ask(world, Protocol::Tcp, to).0, "node0");
        let lines = cluster.levels[0].features();
        assert!(lines[0].contains("tc of no device"), "{lines:?}");
        let level = &mut cluster.levels[0];
        world.nodes[0].run(|| {
            let index = usize::try_from(nix::net::if_::if_nametoindex("eth0").unwrap()).unwrap();
            let of = |name: &str, index| Interface { name: name.into(), index };
            level.set_interfaces(&[of("eth0", index), of("eth7", 77), of("pod", 3)]);
        });
        assert_eq!(ask(world, Protocol::Tcp, to).0, "pod1");
        let lines = cluster.levels[0].features();
        assert!(lines[0].contains("tc of eth0,") && lines[1].contains("not Ethernet: eth7"), "{lines:?}");
        let level = &mut cluster.levels[0];
        world.nodes[0].run(|| level.set_interfaces(&[]));
        wait_until_left(world, to);
    });
}
