//! Restarts, drift, the end of real servers, removal, schedulers and scale.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, TcpStream},
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proxy::{
    backend::{Access, Driver as _, RuleOwner},
    leftovers::{self, Places, ServerOwner},
    model::{Endpoint, Family, ServicePort},
    takeover::{Former, NodeRemover, Remover as _},
};
use keelson_proxy_ipvs::Ipvs;

use crate::{
    testing::{in_namespace, service_port},
    world::{
        CLIENT, Frontends, NODE, POD_A, World, ask, ask_often, connect, endpoint, flush_servers, frontends,
        open_for, pods, run, settings, sync,
    },
};

fn works(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 2];
    stream.write_all(b"hi").and_then(|()| stream.read_exact(&mut answer)).is_ok() && answer == *b"hi"
}

fn only(pod: char) -> impl Fn(&mut ServicePort) {
    move |port| {
        let family = Family::of(port.cluster_ip);
        port.cluster = vec![endpoint(family, pod)];
    }
}

/// Virtual servers and real servers, as the kernel lists them.
fn servers() -> String {
    std::fs::read_to_string("/proc/thread-self/net/ip_vs").unwrap()
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn case_57_a_restart_changes_nothing_and_keeps_connections() {
    in_namespace(|| {
        let mut world = World::new(settings());
        assert!(world.set(|port| port.external_local = true).full);
        let Frontends { v, w, .. } = frontends(Family::V4);
        let mut streams = [connect(POD_A, v), connect(CLIENT, w), connect(NODE, w)].map(|it| it.unwrap().1);
        world.restart();
        let outcome = world.set(|port| port.external_local = true);
        assert!(outcome.full && outcome.is_nothing(), "{outcome:?}");
        assert!(world.sync().is_nothing());
        assert!(streams.iter_mut().all(works));
        assert!(world.check(Family::V4).is_nothing() && world.check(Family::V6).is_nothing());
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn connections_to_an_endpoint_that_is_gone_go_on_until_they_end() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(only('a'));
        let Frontends { v, .. } = frontends(Family::V4);
        let (_, mut stream) = connect(CLIENT, v).unwrap();
        world.set(only('b'));
        assert_eq!(pods(&ask_often(CLIENT, v)), "b", "no new connection");
        assert!(works(&mut stream));
        // The Service is deleted: its address stays for the connection.
        world.delete();
        assert!(works(&mut stream));
        assert_eq!(ask(POD_A, v), crate::world::Answer::Rejected);
        // Reset, so that the kernel forgets the connection after 10 seconds instead of 2 minutes.
        run("ip netns exec client ss -K dst 10.96.0.1 >/dev/null 2>&1; true");
        drop(stream);
        let end = Instant::now() + Duration::from_secs(200);
        while servers().contains("0A600001:0050") {
            assert!(Instant::now() < end, "{}", servers());
            world.maintain(Duration::from_secs(1));
        }
        assert!(!run("ip addr show dev keelson-ipvs0").contains("10.96.0.1/32"));
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn what_another_program_changes_is_repaired() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|port| port.external_local = true);
        let before = servers();
        for drift in [
            "ip addr del 10.96.0.1/32 dev keelson-ipvs0",
            "ip addr add 10.9.9.9/32 dev keelson-ipvs0",
            "ipset flush KEELSON-4-LOCAL",
            "ipset add KEELSON-4-DROP 10.96.0.1,tcp:80",
            "iptables -w 5 -t mangle -F KEELSON-MANGLE",
            "iptables -w 5 -t nat -F POSTROUTING",
            "ip link delete keelson-ipvs0",
        ] {
            run(drift);
            assert!(world.check(Family::V4).repaired, "{drift}");
            assert!(world.check(Family::V4).is_nothing(), "{drift}");
        }
        // What a kube-proxy left is removed without ours.
        run("ip link add kube-ipvs0 type dummy");
        let removal = leftovers::remove(&Places::default());
        assert_eq!((removal.failed, removal.removed), (Vec::new(), vec!["interface kube-ipvs0".to_owned()]));
        assert_eq!(servers(), before);
        flush_servers();
        for family in Family::ALL {
            assert!(world.check(family).repaired, "{family}");
        }
        assert_eq!(servers().lines().count(), before.lines().count());
        for family in Family::ALL {
            let Frontends { v, np, .. } = frontends(family);
            assert_eq!(pods(&ask_often(POD_A, v)), "ab", "{v}");
            assert_eq!(pods(&ask_often(CLIENT, np)), "a", "{np}");
        }
    });
}

/// The own virtual servers have connections at every moment: that must not delay the take-over from a kube-proxy in mode ipvs.
#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn a_busy_node_takes_over_from_mode_ipvs() {
    in_namespace(|| {
        let mut world = World::new(settings());
        world.set(|_| {});
        run("ip link add kube-ipvs0 type dummy; ip link set kube-ipvs0 up
             ip addr add 10.96.9.9/32 dev kube-ipvs0; ip addr add fd00:10:96::9:9/128 dev kube-ipvs0 nodad
             ipvsadm -A -t 10.96.9.9:80 -s rr; ipvsadm -a -t 10.96.9.9:80 -r 10.244.1.2:8080 -m
             ipvsadm -A -t [fd00:10:96::9:9]:80 -s rr; ipvsadm -a -t [fd00:10:96::9:9]:80 -r [fd00:244:1::2]:8080 -m");
        let count = |interface, owner| leftovers::virtual_connections(&Places::default(), interface, owner);
        let counts =
            || (count("keelson-ipvs0", ServerOwner::Keelson), count("kube-ipvs0", ServerOwner::Other));
        let mut ours: Vec<_> =
            Family::ALL.map(|family| connect(CLIENT, frontends(family).v).unwrap().1).into();
        assert_eq!(counts(), (2, 0));
        let theirs = ["10.96.9.9:80", "[fd00:10:96::9:9]:80"]
            .map(|to| connect(CLIENT, to.parse().unwrap()).unwrap().1);
        assert_eq!(counts(), (2, 2));
        let mut remover =
            NodeRemover { own: &Ipvs, all: vec![&Ipvs], places: Places::default(), has_kube_proxy: true };
        assert!(remover.remove(Former::KubeProxy).waits.is_some_and(|reason| reason.starts_with("2 ")));
        drop(theirs);
        let end = Instant::now() + Duration::from_secs(60);
        while counts().1 > 0 {
            assert!(Instant::now() < end, "{:?}", counts());
            std::thread::sleep(Duration::from_millis(100));
        }
        let before = servers();
        assert!(before.contains("0A600909:0050"), "{before}");
        let done = remover.remove(Former::KubeProxy);
        let removed = ["2 virtual servers of ipvs", "interface kube-ipvs0"];
        assert_eq!(
            (done.waits, &done.removed[..], &done.failed[..]),
            (None, &removed.map(String::from)[..], &[][..])
        );
        assert!(!servers().contains("0A600909:0050") && ours.iter_mut().all(works), "{}", servers());
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn removal_leaves_nothing_but_what_others_have() {
    in_namespace(|| {
        let before = run("iptables-save | grep '^-A' || true; ip link show type dummy; ipset list -name");
        let mut world = World::new(settings());
        world.set(|port| port.external_local = true);
        let fresh = open_for(&world.options, Access::Compare).changes().unwrap();
        assert!(fresh.iter().any(|line| line.contains("delete")), "{fresh:?}");
        let mut removed = Vec::new();
        Ipvs.remove_rules(RuleOwner::Keelson, &mut |object| removed.push(object)).unwrap();
        assert!(removed.len() >= 7, "{removed:?}");
        let after = run("iptables-save | grep '^-A' || true; ip link show type dummy; ipset list -name");
        assert_eq!(after, before);
        assert_eq!(servers().lines().count(), 3, "the head of the list: {}", servers());
        assert!(!run("iptables-save; ip6tables-save").contains("KEELSON"));
        removed.clear();
        Ipvs.remove_rules(RuleOwner::Keelson, &mut |object| removed.push(object)).unwrap();
        assert_eq!(removed, [""; 0]);
    });
}

#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn options_reach_the_kernel() {
    in_namespace(|| {
        let mut options = settings();
        options.ipvs.scheduler = "mh".into();
        options.ipvs.strict_arp = true;
        options.ipvs.tcp_timeout = Duration::from_secs(77);
        let mut world = World::new(options);
        world.set(|_| {});
        let features = world.backend.features();
        assert!(features[1].starts_with("ipvs timeouts: TCP 77 s,"), "{features:?}");
        assert!(servers().contains(" mh "), "{}", servers());
        let arp = run("cat /proc/sys/net/ipv4/conf/all/arp_ignore /proc/sys/net/ipv4/conf/all/arp_announce");
        assert_eq!(arp, "1\n2\n");
        // Which one is by a hash of the port.
        assert!(!pods(&ask_often(CLIENT, frontends(Family::V4).np)).is_empty());
        // A real server that drains is not chosen.
        world.set(only('a'));
        assert_eq!(pods(&ask_often(CLIENT, frontends(Family::V4).np)), "a");
        // Another scheduler, by a restart.
        world.options.ipvs.scheduler = "lc".into();
        world.restart();
        assert!(!world.set(|_| {}).is_nothing());
        assert!(servers().contains(" lc ") && !servers().contains(" mh "), "{}", servers());
        for scheduler in ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh"] {
            let mut options = settings();
            options.ipvs.scheduler = scheduler.into();
            Ipvs.open(&options, Access::Program).unwrap();
        }
        let mut options = settings();
        options.ipvs.scheduler = "none-such".into();
        let error = Ipvs.open(&options, Access::Program).err().unwrap();
        assert!(error.is_fatal && error.to_string().contains("ip_vs_none-such"), "{error}");
    });
}

/// Prints what a first sync and one endpoint cost, with `KEELSON_TEST_SERVICES` Services. The processors of the VM are slow.
#[test]
#[ignore = "needs a kernel with IPVS: run by in_the_vm"]
fn one_endpoint_costs_the_same_with_many_services() {
    const CHANGES: usize = 500;
    let services = std::env::var("KEELSON_TEST_SERVICES").map_or(1_000, |count| count.parse().unwrap());
    in_namespace(|| {
        let mut backend = open_for(&settings(), Access::Program);
        let ip = |net: u8, number: usize| -> IpAddr {
            let [_, high, rest @ ..] = u32::try_from(number).unwrap().to_be_bytes();
            [10, net + high, rest[0], rest[1]].into()
        };
        let name = |number: usize| ServiceName::new("default", &format!("service-{number}"));
        let web = |number: usize, endpoints: usize| {
            let mut port = service_port(&name(number), "", ip(96, number + 1), 80);
            port.has_any = true;
            port.cluster =
                (0..endpoints).map(|at| Endpoint { ip: ip(244, number * 11 + at), port: 8080 }).collect();
            port
        };
        let set_all = |backend: &mut dyn keelson_proxy::backend::Backend| {
            for number in 0..services {
                backend.set_service(Family::V4, &name(number), vec![web(number, 10)]);
            }
            sync(backend);
        };
        let begun = Instant::now();
        set_all(backend.as_mut());
        println!("first sync of {services} x 10: {:?}", begun.elapsed());
        // One on the node is an entry of an IP set as well.
        for (place, is_here, cost) in [("of another node", false, 1), ("of the node", true, 2)] {
            set_all(backend.as_mut());
            let mut times: Vec<Duration> = (0..CHANGES)
                .map(|number| {
                    // In turn: one more endpoint of a Service, and one less.
                    let endpoints = if (number / services).is_multiple_of(2) { 11 } else { 10 };
                    let number = number % services;
                    let mut port = web(number, endpoints);
                    if is_here {
                        port.on_node = port.cluster.split_off(endpoints.min(10));
                        port.cluster.extend(&port.on_node);
                    }
                    backend.set_service(Family::V4, &name(number), vec![port]);
                    let begun = Instant::now();
                    let outcome = backend.sync(Family::V4, Instant::now()).unwrap();
                    assert_eq!((outcome.operations(), outcome.transactions), (cost, cost), "{outcome:?}");
                    begun.elapsed()
                })
                .collect();
            times.sort_unstable();
            let at = |percent: usize| times[times.len() * percent / 100];
            let (median, p99, longest) = (at(50), at(99), times[CHANGES - 1]);
            println!("one endpoint {place}: median {median:?}, p99 {p99:?}, longest {longest:?}");
        }
        // Reading everything, as a check does.
        let mut observer = backend.observer().unwrap();
        let begun = Instant::now();
        observer.read(Family::V4).unwrap();
        println!("reading everything: {:?}", begun.elapsed());
    });
}
