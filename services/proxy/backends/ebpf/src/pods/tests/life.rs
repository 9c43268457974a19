//! Restarts, drift, devices that come and go, and removal.

use super::*;
use crate::kernel::{Pinned, SocketKernel as _, remove_pins};

fn check(world: &World, pods: &mut Pods) -> Outcome {
    world.node.run(|| {
        assert!(pods.begin_check().unwrap(), "something is missing");
        pods.check().unwrap()
    })
}

fn is_in_order(world: &World, pods: &Pods) -> bool {
    world.node.run(|| !pods.begin_check().unwrap())
}

#[test]
fn packets_are_handed_over_without_a_process_and_a_restart_changes_nothing() {
    in_world(Layout::Routed, |world| {
        let pods = world.start();
        world.serve(1);
        drop(pods);
        let mut pods = world.open();
        assert!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)) > EXCHANGES);
        let outcome = world.begin(&mut pods);
        assert!(outcome.is_nothing(), "{outcome:?}");
        assert!(is_in_order(world, &pods));
        assert!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)) > EXCHANGES);
    });
}

/// The rules may have been removed while no process ran, and are not complete yet.
#[test]
fn what_an_earlier_run_has_left_ends_while_flows_are_tracked() {
    in_world(Layout::Routed, |world| {
        drop(world.start());
        world.serve(1);
        let mut pods = world.open();
        world.node.run(|| {
            for (family, network) in Family::ALL.into_iter().zip(networks()) {
                pods.narrow(family, network).unwrap();
                pods.set_network(family, None).unwrap();
            }
        });
        assert_eq!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)), 0);
    });
}

/// What an earlier run has left ends before the rules are made for other networks.
#[test]
fn another_network_ends_it_before_the_rules_change() {
    in_world(Layout::Routed, |world| {
        drop(world.start());
        world.serve(1);
        let mut pods = world.open();
        let folders = world.node.run(|| crate::kernel::find_pins().unwrap());
        let former = folders[0].with_file_name("pods-links-00000000");
        std::fs::create_dir(&former).unwrap();
        world.node.run(|| pods.narrow(Family::V6, networks()[1])).unwrap();
        assert!(former.exists(), "it may go on in the same networks");
        world.node.run(|| pods.narrow(Family::V4, "10.244.0.0/24".parse().ok())).unwrap();
        assert!(!former.exists(), "its networks are not known");
        assert_eq!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)), 0);
        assert!(handed_over(&pods, || world.talk(0, 1, 1, Protocol::Tcp)) > EXCHANGES);
        world.node.run(|| pods.narrow(Family::V6, None)).unwrap();
        assert_eq!(handed_over(&pods, || world.talk(0, 1, 1, Protocol::Tcp)), 0);
    });
}

#[test]
fn what_was_removed_is_made_again() {
    in_world(Layout::Routed, |world| {
        let mut pods = world.start();
        world.serve(1);
        assert!(is_in_order(world, &pods));
        let folders = world.node.run(|| crate::kernel::find_pins().unwrap());
        let links = folders.iter().find(|path| path.to_string_lossy().contains("pods-links-")).unwrap();
        let pin = std::fs::read_dir(links).unwrap().flatten().next().unwrap().path();
        // A filter, on kernels without links, goes with its qdisc.
        match pin.file_name().unwrap().to_string_lossy().starts_with("pods-") {
            true => std::fs::remove_file(pin).unwrap(),
            false => world.node.command("tc", "qdisc del dev veth1 clsact"),
        }
        let outcome = check(world, &mut pods);
        assert!(outcome.repaired && outcome.structure >= 1, "{outcome:?}");
        assert!(is_in_order(world, &pods));
        // Everything.
        world.node.run(|| remove_pins(&mut drop).unwrap());
        assert!(check(world, &mut pods).repaired);
        assert!(is_in_order(world, &pods));
        assert!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)) > EXCHANGES);
    });
}

/// Without the setting, they are what is left of a former one.
#[test]
fn what_a_former_setting_has_left_is_removed() {
    in_world(Layout::Routed, |world| {
        drop(world.start());
        world.serve(1);
        world.node.run(|| {
            // Nothing is attached there.
            let cgroup = tempfile::tempdir().unwrap();
            std::fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
            let mut pinned = Pinned::find(Some(cgroup.path()), crate::kernel::usual_sizes()).unwrap();
            pinned.has_pod_devices = true;
            assert_eq!(pinned.remove_former_pods().unwrap(), 0);
            pinned.has_pod_devices = false;
            assert_eq!(pinned.remove_former_pods().unwrap(), PODS.len() + layout::POD_MAPS.len());
            assert_eq!(pinned.remove_former_pods().unwrap(), 0);
        });
        world.talk(0, 1, 0, Protocol::Tcp);
    });
}

/// A pod that is made again, with the same addresses at another device.
#[test]
fn pods_come_and_go() {
    for layout in LAYOUTS {
        in_world(layout, |world| {
            let mut pods = world.start();
            world.serve(1);
            world.talk(0, 1, 0, Protocol::Udp);
            world.node.ip("link delete veth1");
            serve(&world.make_pod("veth9", 1), 1);
            if layout == Layout::Bridged {
                // As the word of a new pod about its address does.
                world.node.ip("neigh flush dev cni0");
            }
            // Its device is not known yet, and the former one is gone.
            world.talk(0, 1, 0, Protocol::Udp);
            world.look(&mut pods);
            let outcome = world.node.run(|| pods.maintain(Instant::now()));
            assert!(outcome.structure >= 2, "one attached, one removed: {outcome:?}");
            assert!(is_in_order(world, &pods));
            assert!(handed_over(&pods, || world.talk(0, 1, 0, Protocol::Tcp)) > EXCHANGES);
        });
    }
}

#[test]
fn devices_without_room_and_those_of_no_pod_are_named() {
    in_world(Layout::Routed, |world| {
        world.node.ip("link add veth7 type veth peer name peer7");
        let mut sizes = usual_sizes(false);
        sizes.insert(DEVICES, 2);
        let mut pods = world.open_with(sizes);
        world.begin(&mut pods);
        let lines = pods.features().join("\n");
        assert!(lines.contains("program at 2 devices"), "{lines}");
        assert!(lines.contains("no pairs of veth with another network namespace: veth7"), "{lines}");
        assert!(lines.contains("1 devices beyond the first 2 are left out"), "{lines}");
        assert_eq!(
            pods.devices.values().map(|device| device.name.as_str()).collect::<Vec<_>>(),
            ["veth0", "veth1"]
        );
        world.serve(2);
        // Left out, and reached all the same.
        world.talk(0, 2, 0, Protocol::Tcp);
    });
}

#[test]
#[ignore = "another test runs it with few rights"]
fn the_program_loads() {
    super::kernel::load(&mut Loader::default(), None, &usual_sizes(true)).unwrap();
}

#[test]
fn the_rights_of_the_documentation_are_enough() {
    check_rights("pods::tests::life::the_program_loads");
}
