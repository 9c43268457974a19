//! Restarts, other versions, drift and removal.

use aya::programs::links::{FdLink, PinnedLink};

use super::*;

fn is_refused(to: &str) -> bool {
    TcpStream::connect_timeout(&at(to, 80), ANSWER).is_err()
}

/// The kernel detaches a program some milliseconds after its last link is gone.
fn refused_soon(to: &str) -> bool {
    let until = Instant::now() + ANSWER;
    while !is_refused(to) {
        if Instant::now() > until {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}

#[test]
fn traffic_goes_on_without_a_process_and_a_restart_writes_nothing() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        let wanted = || vec![port(Protocol::Tcp, V, &[server])];
        let mut sockets = world.sockets();
        assert!(!world.pinned().is_running());
        assert!(find_pins().unwrap().is_empty(), "nothing is left by what only looks");
        serve(&mut sockets, Family::V4, wanted());
        let before = world.pinned().read().unwrap();
        drop(sockets);
        assert!(world.pinned().is_running());
        assert_eq!(ask_tcp(at(V, 80)), server);
        let mut sockets = world.sockets();
        sockets.plan.set(Family::V4, &ServiceName::new("default", "web"), wanted());
        for family in Family::ALL {
            let outcome = sockets.sync(family, Instant::now()).unwrap();
            assert!(outcome.full && outcome.is_nothing(), "{outcome:?}");
        }
        assert_eq!(world.pinned().read().unwrap(), before);
        assert_eq!(ask_tcp(at(V, 80)), server);
    });
}

#[test]
fn another_layout_takes_over_after_the_first_sync() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        let mut sizes = usual_sizes();
        sizes.insert("slots", 1_000);
        let former = Pinned::find(Some(&world.cgroup), sizes).unwrap();
        let mut former = Sockets::new(Some(Box::new(former)), usual_capacity(), [true, true]);
        serve(&mut former, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        drop(former);
        let pins = find_pins().unwrap();
        assert_eq!(pins.len(), 2);
        // Held open, they would stay attached without their pins.
        let held =
            links::HOOKS.map(|(hook, _)| FdLink::from(PinnedLink::from_pin(pins[0].join(hook)).unwrap()));
        let ids = held.each_ref().map(|link| link.info().unwrap().id());
        let attached = || {
            let cgroups = links::places_of_links("cgroup_id").unwrap();
            ids.iter().filter(|id| cgroups[id] != 0).count()
        };
        assert_eq!(attached(), held.len());
        let mut sockets = world.sockets();
        sockets.plan.set(
            Family::V4,
            &ServiceName::new("default", "web"),
            vec![port(Protocol::Tcp, V, &[server])],
        );
        sockets.sync(Family::V4, Instant::now()).unwrap();
        assert_eq!(find_pins().unwrap().len(), 4, "those of IPv6 still are the former ones");
        assert_eq!(ask_tcp(at(V, 80)), server, "both translate");
        sockets.sync(Family::V6, Instant::now()).unwrap();
        assert_eq!(find_pins().unwrap().len(), 2);
        assert_eq!(attached(), 0);
        assert_eq!(ask_tcp(at(V, 80)), server);
    });
}

#[test]
fn what_another_program_changed_is_repaired() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        let later = Instant::now() + Duration::from_secs(301);
        assert!(!sockets.begin_check(Family::V4, Instant::now()).unwrap());
        assert!(sockets.begin_check(Family::V4, later).unwrap(), "the maps are due");
        let check = |sockets: &mut Sockets| {
            let contents = world.pinned().read().unwrap();
            let seen = crate::sockets::Seen { contents, sync: 0 };
            sockets.snapshots.put(Family::V4, seen);
            sockets.check(Family::V4, later).unwrap()
        };
        assert!(check(&mut sockets).is_nothing());
        // Elements that are gone, changed and too many.
        let mut other = world.pinned();
        let before = other.read().unwrap();
        for (key, value) in &before.frontends {
            other.apply(&Change::Delete(crate::elements::Key::Frontend(*key))).unwrap();
            let odd = crate::layout::FrontendKey { port: 81, ..*key };
            other.apply(&Change::Put(crate::elements::Element::Frontend(odd, *value))).unwrap();
        }
        for (place, value) in &before.slots {
            let odd = crate::layout::SlotValue { number: 99, ..*value };
            other.apply(&Change::Put(crate::elements::Element::Slot(*place, odd))).unwrap();
        }
        assert!(refused_soon(V));
        let outcome = check(&mut sockets);
        assert!(outcome.repaired, "{outcome:?}");
        assert_eq!((outcome.added, outcome.deleted), (2, 1));
        assert_eq!(other.read().unwrap(), before);
        assert_eq!(ask_tcp(at(V, 80)), server);
        // A link that was removed.
        for folder in find_pins().unwrap() {
            let _ = fs::remove_file(folder.join("connect4"));
        }
        assert!(refused_soon(V));
        assert!(sockets.begin_check(Family::V4, Instant::now()).unwrap());
        let outcome = check(&mut sockets);
        assert_eq!((outcome.repaired, outcome.structure), (true, 1));
        assert_eq!(ask_tcp(at(V, 80)), server);
    });
}

/// Another program removes pins: all of them, or those of the maps alone.
#[test]
fn removed_pins_are_made_again() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        let wanted = || vec![port(Protocol::Tcp, V, &[server])];
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, wanted());
        let check = |sockets: &mut Sockets| {
            let contents = world.pinned().read().unwrap();
            sockets.snapshots.put(Family::V4, crate::sockets::Seen { contents, sync: 0 });
            sockets.check(Family::V4, Instant::now())
        };
        remove_pins(&mut drop).unwrap();
        assert!(is_refused(V));
        assert!(sockets.begin_check(Family::V4, Instant::now()).unwrap());
        let error = check(&mut sockets).unwrap_err().to_string();
        assert!(error.contains("were removed by another program"), "{error}");
        let outcome = sockets.sync(Family::V4, Instant::now()).unwrap();
        assert!(outcome.repaired && outcome.structure == 9, "{outcome:?}");
        assert!(check(&mut sockets).unwrap().is_nothing());
        assert_eq!(ask_tcp(at(V, 80)), server);

        // Programs go on with maps that no process finds: the next process attaches others.
        drop(sockets);
        let maps = find_pins().unwrap().into_iter().find(|path| path.to_string_lossy().contains("maps-"));
        places::remove(&maps.unwrap()).unwrap();
        assert_eq!(ask_tcp(at(V, 80)), server);
        let other = tcp_server("127.0.0.1");
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[other])]);
        let until = Instant::now() + ANSWER;
        // A connection that the former programs decide may show its endpoint as the peer.
        while read_answer(TcpStream::connect_timeout(&at(V, 80), ANSWER).unwrap()) != other {
            assert!(Instant::now() < until, "the former programs still decide");
            thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn removal_leaves_nothing() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        assert_eq!(ask_tcp(at(V, 80)), server);
        let mut removed = Vec::new();
        remove_pins(&mut |what| removed.push(what)).unwrap();
        assert_eq!(removed.len(), 2, "{removed:?}");
        assert!(removed[0].ends_with("with 9 pins") && removed[1].ends_with("with 10 pins"), "{removed:?}");
        assert!(is_refused(V), "also while a process has the maps open");
        assert!(!world.folder.path().join("bpf/keelson").exists());
        remove_pins(&mut |what| panic!("{what}")).unwrap();
    });
}

#[test]
fn a_pin_of_another_kind_does_not_hinder_removal() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        let pins = find_pins().unwrap();
        let (links, maps) = (&pins[0], &pins[1]);
        fs::remove_file(links.join("connect6")).unwrap();
        fs::rename(maps.join("sets"), links.join("connect6")).unwrap();
        remove_pins(&mut drop).unwrap();
        assert!(is_refused(V));
        assert_eq!(find_pins().unwrap(), [""; 0].map(PathBuf::from));
    });
}

/// A probe attaches programs for a moment, beside those that are attached, and leaves nothing.
#[test]
fn a_probe_leaves_nothing() {
    in_world(|world| {
        world.pinned().probe(&mut Loader::default(), true).unwrap();
        assert!(!world.folder.path().join("bpf/keelson").exists());
        let server = tcp_server("127.0.0.1");
        let mut sockets = world.sockets();
        serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
        let before = find_pins().unwrap();
        world.pinned().probe(&mut Loader::default(), true).unwrap();
        assert_eq!(ask_tcp(at(V, 80)), server);
        assert_eq!(find_pins().unwrap(), before);
        assert!(world.pinned().is_running());
        remove_pins(&mut drop).unwrap();
        assert!(is_refused(V), "nothing that the probe attached translates");
    });
}

/// The first sync goes on with what the probe has loaded; what others have pinned meanwhile comes before it.
#[test]
fn what_a_probe_has_loaded_is_used() {
    in_world(|world| {
        let server = tcp_server("127.0.0.1");
        for is_behind in [false, true] {
            let mut pinned = world.pinned();
            pinned.probe(&mut Loader::default(), true).unwrap();
            if is_behind {
                let mut other = world.sockets();
                serve(&mut other, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
            }
            let mut sockets = World::sockets_of(pinned);
            serve(&mut sockets, Family::V4, vec![port(Protocol::Tcp, V, &[server])]);
            assert_eq!(ask_tcp(at(V, 80)), server);
            assert!(world.pinned().is_running());
            remove_pins(&mut drop).unwrap();
            assert!(is_refused(V), "behind: {is_behind}");
        }
    });
}

/// When direct return is off, its pins are those of a former setting.
#[test]
fn direct_return_that_is_off_is_removed() {
    in_world(|world| {
        let mut sockets = world.sockets();
        sync(&mut sockets);
        let pins = places::own_folder().unwrap().join(format!("{}1-0", places::DIRECT_MAPS_PREFIX));
        fs::create_dir(&pins).unwrap();
        let mut pinned = world.pinned();
        pinned.has_direct_return = true;
        assert_eq!(pinned.former().unwrap(), [""; 0].map(PathBuf::from));
        pinned.has_direct_return = false;
        assert_eq!(pinned.former().unwrap(), [pins]);
        assert_eq!(pinned.remove_former().unwrap(), 0);
        assert_eq!(find_pins().unwrap().len(), 2);
    });
}

#[test]
fn what_is_missing_is_said() {
    in_world(|world| {
        // The root of the cgroups has the sockets of the machine, which are in another network namespace.
        let error = Pinned::find(None, usual_sizes()).err().unwrap();
        assert!(error.is_fatal() && error.to_string().contains("set proxy.ebpf_cgroup"), "{error}");
        let bpf = world.folder.path().join("bpf");
        nix::mount::umount(&bpf).unwrap();
        let error = Pinned::find(Some(&world.cgroup), usual_sizes()).err().unwrap();
        assert!(error.is_fatal() && error.to_string().contains("mount -t bpf"), "{error}");
        assert_eq!(find_pins().unwrap(), [""; 0].map(PathBuf::from));
    });
}
