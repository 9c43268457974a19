//! The backend without a kernel: explanations, text, and both levels behind one interface.

mod fake;

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::Ordering,
    time::Duration,
};

use keelson_proxy::{
    addresses::{InterfacePattern, NodePortAddresses},
    backend::{Access, Driver},
    explain::Source,
    model::{Endpoint, Protocol},
    options::{Detector, DirectReturnHook, DirectReturnOptions, EbpfOptions},
};

use super::*;
use crate::{
    Ebpf,
    stale::Swept,
    testing::{options, service_port},
};

const V: &str = "10.96.0.1:80";
const W: &str = "192.0.2.2:80";
const NP: &str = "10.0.0.7:30080";
const LOCAL: [&str; 3] = ["10.0.0.7", "10.0.0.8", "127.0.0.1"];

fn endpoint(text: &str) -> Endpoint {
    let at: SocketAddr = text.parse().unwrap();
    Endpoint { ip: at.ip(), port: at.port() }
}

fn node() -> NodeConfig {
    NodeConfig {
        family: Family::V4,
        masquerade_all: false,
        mark: 0x4000,
        detector: Some(Detector::Cidr("10.244.0.0/16".parse().unwrap())),
        service_cidrs: Vec::new(),
        node_ips: vec!["10.0.0.7".parse().unwrap()],
        node_ports: Match::AllLocal,
        untracked_pods: false,
    }
}

fn web() -> ServicePort {
    ServicePort {
        load_balancer_ips: vec!["192.0.2.2".parse().unwrap()],
        node_port: 30_080,
        has_any: true,
        cluster: ["10.244.0.1:8080", "10.244.9.1:8080"].map(endpoint).into(),
        local: vec![endpoint("10.244.0.1:8080")],
        on_node: vec![endpoint("10.244.0.1:8080")],
        ..service_port(&ServiceName::new("default", "web"), "", "10.96.0.1".parse().unwrap(), 80)
    }
}

fn backend(port: ServicePort) -> Box<dyn Backend> {
    backend_with(port, None)
}

fn backend_with(port: ServicePort, direct_return: Option<DirectReturnOptions>) -> Box<dyn Backend> {
    backend_of(port, EbpfOptions { direct_return, ..EbpfOptions::default() })
}

fn backend_of(port: ServicePort, ebpf: EbpfOptions) -> Box<dyn Backend> {
    let mut settings = options(&["10.244.0.0/16"]);
    settings.ebpf = ebpf;
    settings.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
    let mut backend = Ebpf.open(&settings, Access::Print).unwrap();
    backend.set_addresses(&LOCAL.map(|ip| ip.parse().unwrap()));
    backend.set_node(node());
    backend.set_service(Family::V4, &port.name.service.clone(), vec![port]);
    backend
}

/// From, verdict, endpoints, `+M` if masqueraded, and the first step.
fn ways(backend: &dyn Backend, from: &str, to: &str) -> Vec<String> {
    let local: Vec<IpAddr> = LOCAL.map(|ip| ip.parse().unwrap()).into();
    let question = Question::new(to.parse().unwrap(), from.parse::<Source>().unwrap()).unwrap();
    let explanation = backend.explain(&question, &local);
    let text = |way: &pb::Way| {
        let masqueraded = if way.masqueraded { " +M" } else { "" };
        let first = way.steps.first().map_or("", String::as_str);
        format!("{} {} {}{masqueraded}: {first}", way.from, way.verdict, way.endpoints.len())
    };
    explanation.ways.iter().map(text).collect()
}

#[test]
fn the_level_that_decides_is_named() {
    let web_backend = backend(web());
    let of_sockets = |from: &str| format!("{from} forwarded 2: socket level: program keelson_connect4");
    for to in [V, W, NP] {
        let all = ways(web_backend.as_ref(), "", to);
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!(all[0], of_sockets("a pod (10.244.0.0/16)"));
        assert!(
            all[1].starts_with("the node itself") && all[1].contains("socket level: program"),
            "{}",
            all[1]
        );
        assert!(
            all[2].starts_with("outside forwarded 2 +M: ") && !all[2].contains("socket level"),
            "{}",
            all[2]
        );
    }
    for (from, has_sockets) in [("10.244.0.5", true), ("10.0.0.8", true), ("192.0.2.77", false)] {
        let found = ways(web_backend.as_ref(), from, V);
        assert_eq!(found.iter().all(|way| way.contains("socket level")), has_sockets, "{from}: {found:?}");
    }
    // Not here, no frontend, another protocol.
    for to in ["127.0.0.1:30080", "10.96.0.1:81", "10.96.0.1:80/UDP", "10.0.0.9:30080"] {
        let found = ways(web_backend.as_ref(), "pod", to);
        assert!(found.iter().all(|way| !way.contains("socket level")), "{to}: {found:?}");
    }
}

#[test]
fn what_is_left_to_packets_says_why() {
    let left = |port: ServicePort, to: &str| ways(backend(port).as_ref(), "pod", to).remove(0);
    let ranges = ServicePort { source_ranges: vec!["10.244.0.0/16".parse().unwrap()], ..web() };
    let why = "socket level: left to packets, because it has source ranges";
    let text = left(ranges.clone(), W);
    assert!(text.contains(why), "{text}");
    assert!(left(ranges, V).contains("program keelson_connect4"));
    let none =
        ServicePort { has_any: false, cluster: Vec::new(), local: Vec::new(), on_node: Vec::new(), ..web() };
    let text = left(none, V);
    assert!(text.contains("rejected 0: socket level: left to packets, because no endpoint"), "{text}");
    let mut dns = web();
    dns.name.protocol = Protocol::Udp;
    let text = left(dns.clone(), "10.0.0.7:30080/UDP");
    assert!(text.contains("because a datagram to a port of the node may be an answer"), "{text}");
    assert!(left(dns, "10.96.0.1:80/UDP").contains("program keelson_connect4 or keelson_sendmsg4"));
    let sticky = ServicePort { affinity_seconds: 60, ..web() };
    let local: Vec<IpAddr> = LOCAL.map(|ip| ip.parse().unwrap()).into();
    let question = Question::new(V.parse().unwrap(), Source::Pod).unwrap();
    let steps = backend(sticky).explain(&question, &local).ways.remove(0).steps.join("\n");
    assert_eq!(
        steps,
        "socket level: program keelson_connect4\n\
         map frontends: 10.96.0.1:80/TCP : set 2 cluster\n\
         map sets: 2 cluster : 2 slots from 0\n\
         map affinity: the endpoint of the last 60 s, otherwise one of map slots at random\n\
         the socket sends to the endpoint; packets are not translated"
    );
}

fn direct_return() -> Option<DirectReturnOptions> {
    Some(DirectReturnOptions {
        devices: vec![InterfacePattern::parse("eth0")],
        hook: DirectReturnHook::Xdp,
        nodes: vec!["10.0.0.0/24".parse().unwrap()],
    })
}

#[test]
fn packets_that_are_handed_over_to_pods_are_explained() {
    let local: Vec<IpAddr> = LOCAL.map(|ip| ip.parse().unwrap()).into();
    let question = Question::new(NP.parse().unwrap(), Source::Outside).unwrap();
    for (hook, expected) in [(DirectReturnHook::Tc, true), (DirectReturnHook::Xdp, false)] {
        let direct_return = direct_return().map(|own| DirectReturnOptions { hook, ..own });
        let pod_devices = vec![InterfacePattern::parse("veth*")];
        let ebpf = EbpfOptions { direct_return, pod_devices, ..EbpfOptions::default() };
        let ways = backend_of(web(), ebpf).explain(&question, &local).ways;
        let step = "pod devices: to an endpoint of this node by its device";
        assert_eq!(ways[0].steps.iter().any(|text| text.starts_with(step)), expected, "{ways:?}");
    }
}

#[test]
fn direct_return_is_explained_for_outside_clients() {
    let direct = backend_with(web(), direct_return());
    for to in [W, NP] {
        let all = ways(direct.as_ref(), "outside", to);
        assert_eq!(
            all[0], "outside at no device forwarded 2: direct return: program keelson_dr_xdp",
            "{all:?}"
        );
        assert!(
            all[1].starts_with("outside forwarded 2 +M: direct return: left to nftables at other"),
            "{all:?}"
        );
        // Nodes and pods, and what the socket level decides.
        for from in ["10.0.0.99", "10.244.7.1", "pod", "node"] {
            let all = ways(direct.as_ref(), from, to);
            assert!(all.iter().all(|way| !way.contains("direct return")), "{from}: {all:?}");
        }
    }
    let all = ways(direct.as_ref(), "192.0.2.77", V);
    assert!(all[0].contains("direct return: left to nftables, because it is a cluster IP"), "{all:?}");
    let sticky = backend_with(ServicePort { affinity_seconds: 60, ..web() }, direct_return());
    let all = ways(sticky.as_ref(), "outside", NP);
    assert!(
        all[0].contains("direct return: left to nftables, because the service port has session"),
        "{all:?}"
    );
    let ranges = ServicePort { source_ranges: vec!["192.0.2.0/24".parse().unwrap()], ..web() };
    let ranges = backend_with(ranges, direct_return());
    let all = ways(ranges.as_ref(), "outside", W);
    let from: Vec<&str> = all.iter().filter_map(|way| way.split(": ").next()).collect();
    assert_eq!(
        from,
        [
            "outside, in the source ranges (192.0.2.0/24) at no device forwarded 2",
            "outside, in the source ranges (192.0.2.0/24) forwarded 2 +M",
            "outside, not in the source ranges (192.0.2.0/24) dropped 0"
        ]
    );
    let all = ways(ranges.as_ref(), "198.51.100.9", W);
    assert!(all.len() == 1 && all[0].starts_with("198.51.100.9, outside dropped 0"), "{all:?}");
    let question = Question::new(W.parse().unwrap(), Source::Outside).unwrap();
    let local: Vec<IpAddr> = LOCAL.map(|ip| ip.parse().unwrap()).into();
    let steps = ranges.explain(&question, &local).ways.remove(0).steps;
    assert_eq!(steps[2], "map source_ranges: one of 1 has the client; others are left to nftables");
    let mut text = String::new();
    ranges.ruleset()(&mut text).unwrap();
    assert!(text.lines().any(|line| line == "#   2 192.0.2.0/24"), "{text}");
    let mut text = String::new();
    direct.ruleset()(&mut text).unwrap();
    for line in ["# direct return, eBPF map frontends of IPv4", "#   2 10.244.0.1:8080 : cluster here"] {
        assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
    }
    let names =
        |backend: &dyn Backend| -> Vec<&str> { backend.map_fills().iter().map(|fill| fill.map).collect() };
    for map in ["node_addresses", "direct_frontends", "networks", "devices"] {
        assert!(names(direct.as_ref()).contains(&map), "{map}");
    }
    assert!(!names(backend(web()).as_ref()).contains(&"direct_frontends"));
}

#[test]
fn the_text_has_tables_and_maps() {
    let mut dns = web();
    dns.name.protocol = Protocol::Udp;
    dns.serving = dns.cluster.clone();
    let mut text = String::new();
    let mut backend = backend(dns.clone());
    backend.set_service(Family::V4, &dns.name.service.clone(), vec![dns, web()]);
    backend.ruleset()(&mut text).unwrap();
    let (tables, maps) = text.split_once("# eBPF map").unwrap();
    assert!(tables.contains("table ip keelson {"), "{tables}");
    for line in [
        "#   10.0.0.8",
        "#   10.96.0.1:80/UDP : 4 cluster",
        "#   node port 30080/TCP of IPv4 : 2 cluster",
        "#   2 cluster : 2 slots from 0",
        "#   1 : 10.244.9.1:8080 of 2",
        "#   4 10.244.0.1:8080 : cluster serving",
    ] {
        assert!(maps.lines().any(|found| found == line), "{line} is missing:\n{maps}");
    }
    assert!(!maps.contains("30080/UDP"), "left to packets: {maps}");
    assert!(maps.lines().skip(1).all(|line| line.starts_with('#')), "nft skips comments only");
    assert!(!maps.contains("127.0.0.1"), "{maps}");
}

/// At the first sync, and after what failed.
#[test]
fn stale_sockets_are_looked_for_until_it_succeeds() {
    let (kernel, handle) = fake::kernel();
    let mut sockets = Sockets::new(Some(Box::new(kernel)), usual_capacity(), [true, false]);
    let now = Instant::now();
    sockets.sync(Family::V4, now).unwrap();
    let sweeps = |sockets: &mut Sockets, seconds| {
        let result = sockets.maintain(Family::V4, now + Duration::from_secs(seconds));
        (result.is_ok(), handle.lock().unwrap().sweeps.load(Ordering::SeqCst))
    };
    handle.lock().unwrap().fails = true;
    assert_eq!(sweeps(&mut sockets, 0), (false, 1));
    handle.lock().unwrap().fails = false;
    assert_eq!(sweeps(&mut sockets, 0), (true, 2));
    assert_eq!(sweeps(&mut sockets, 0), (true, 2), "nothing was lost since");
    for (needs_retry, expected) in [(true, 3), (false, 3)] {
        let failure = Some("scripted".to_owned());
        sockets.sweeper().record(Swept { destroyed: 0, failure, needs_retry });
        assert!(sweeps(&mut sockets, 20).1 == 2 || !needs_retry, "not at once");
        assert_eq!(sweeps(&mut sockets, 31), (true, expected));
        assert_eq!(sweeps(&mut sockets, 60), (true, expected));
    }
}

#[test]
fn a_failure_of_the_maps_is_an_error_and_the_next_sync_compares_everything() {
    let (kernel, handle) = fake::kernel();
    let mut sockets = Sockets::new(Some(Box::new(kernel)), usual_capacity(), [true, false]);
    let now = Instant::now();
    sockets.plan.set_facts(Family::V4, NodeFacts { detects_pods: true, ..NodeFacts::default() });
    sockets.plan.set(Family::V4, &web().name.service, vec![web()]);
    let first = sockets.sync(Family::V4, now).unwrap();
    assert_eq!((first.full, first.repaired, first.added, first.structure), (true, false, 6, 8));
    assert!(sockets.sync(Family::V4, now).unwrap().is_nothing());

    sockets.plan.set(Family::V4, &web().name.service, vec![ServicePort { node_port: 0, ..web() }]);
    handle.lock().unwrap().fails = true;
    assert!(sockets.sync(Family::V4, now).is_err());
    assert!(!sockets.begin_check(Family::V4, now).unwrap(), "the next sync compares everything anyway");
    handle.lock().unwrap().fails = false;
    let repaired = sockets.sync(Family::V4, now).unwrap();
    assert!(repaired.full && repaired.repaired && repaired.deleted == 1, "{repaired:?}");

    // A program that was detached, and elements that were deleted.
    handle.lock().unwrap().attached = false;
    assert!(sockets.begin_check(Family::V4, now).unwrap());
    handle.lock().unwrap().contents.frontends.clear();
    let contents = handle.lock().unwrap().contents.clone();
    sockets.snapshots.put(Family::V4, crate::sockets::Seen { contents, sync: 0 });
    let outcome = sockets.check(Family::V4, now).unwrap();
    assert!(outcome.repaired && outcome.added == 2 && outcome.structure == 8, "{outcome:?}");

    // What was read before a sync is no drift.
    let stale = handle.lock().unwrap().contents.clone();
    sockets.plan.set(Family::V4, &web().name.service, vec![]);
    sockets.sync(Family::V4, now).unwrap();
    sockets.snapshots.put(Family::V4, crate::sockets::Seen { contents: stale, sync: 0 });
    assert!(sockets.check(Family::V4, now + Duration::from_secs(1)).unwrap().is_nothing());
    assert!(handle.lock().unwrap().contents.frontends.is_empty());
}

#[test]
fn pods_are_untracked_only_where_their_networks_are_known() {
    let told = |cidrs: &[&str], detect: Option<DetectLocal>| {
        let mut settings = options(cidrs);
        settings.ebpf.untracked_pods = true;
        settings.detect_local = detect.unwrap_or(settings.detect_local);
        let backend = Ebpf.open(&settings, Access::Print).unwrap();
        backend
            .limitations()
            .iter()
            .any(|line| line.contains("proxy.ebpf_untracked_pods needs their network"))
    };
    assert!(!told(&["10.244.0.0/16"], None));
    assert!(!told(&[], Some(DetectLocal::NodeCidr)));
    assert!(told(&[], None));
    assert!(told(&["0.0.0.0/0"], None));
    assert!(told(&[], Some(DetectLocal::BridgeInterface("cni0".to_owned()))));
}

#[test]
fn explain_shows_whom_endpoints_see_where_pods_are_untracked() {
    const POD: &str = "10.244.0.5, a pod (10.244.0.0/16)";
    for (untracked, masqueraded) in [(false, ""), (true, " +M")] {
        let mut settings = options(&["10.244.0.0/16"]);
        settings.ebpf.untracked_pods = untracked;
        let mut backend = Ebpf.open(&settings, Access::Print).unwrap();
        backend.set_node(node());
        backend.set_service(Family::V4, &web().name.service, vec![web()]);
        let mut local: Vec<IpAddr> = LOCAL.map(|ip| ip.parse().unwrap()).into();
        backend.set_addresses(&local);
        let by_socket = ways(backend.as_ref(), "10.244.0.5", V);
        assert_eq!(by_socket, [format!("{POD} forwarded 2: socket level: program keelson_connect4")]);
        // Left to packets: an interface of the node has the address.
        local.push("10.96.0.1".parse().unwrap());
        backend.set_addresses(&local);
        let by_packets = ways(backend.as_ref(), "10.244.0.5", V).remove(0);
        assert!(by_packets.starts_with(&format!("{POD} forwarded 2{masqueraded}: ")), "{by_packets}");
    }
}

/// Packets come first: where no program reads the maps yet, they are filled meanwhile, and nothing is attached.
#[test]
fn no_program_is_attached_before_packets_are_whole() {
    let settings = options(&["10.244.0.0/16"]);
    let (kernel, handle) = fake::kernel();
    // Opened to print, it fails to write.
    let packets = keelson_proxy_nft::Nft.open(&settings, Access::Print).unwrap();
    let mut backend =
        EbpfBackend::new(packets, Some(Box::new(kernel)), &settings, &mut Loader::default()).unwrap();
    backend.set_node(node());
    backend.set_service(Family::V4, &web().name.service, vec![web()]);
    assert!(backend.sync(Family::V4, Instant::now()).is_err());
    assert!(!handle.lock().unwrap().attached && !backend.has_synced(Family::V4));
    assert_eq!(handle.lock().unwrap().contents.slots.len(), 2);
    // Programs of an earlier run read the maps: these wait for packets.
    let (kernel, handle) = fake::kernel();
    handle.lock().unwrap().attached = true;
    let packets = keelson_proxy_nft::Nft.open(&settings, Access::Print).unwrap();
    let mut backend =
        EbpfBackend::new(packets, Some(Box::new(kernel)), &settings, &mut Loader::default()).unwrap();
    backend.set_service(Family::V4, &web().name.service, vec![web()]);
    assert!(backend.sync(Family::V4, Instant::now()).is_err());
    assert!(handle.lock().unwrap().contents.slots.is_empty());
}
