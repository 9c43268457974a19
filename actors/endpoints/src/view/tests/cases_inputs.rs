//! Cases: which Services, slices and fields count.

use keelson_proto::localnetv1::Protocol;

use super::*;
use crate::view::{explain_for, view_for};

#[track_caller]
fn not_served(service: Svc, why: &str) {
    let scene = scene(service, [http("a", "L1")]);
    assert_eq!(scene.view(), None);
    let explained = scene.explain();
    assert!(!explained.served && explained.reason.contains(why), "{explained:#?}");
    assert!(explained.ports.is_empty() && explained.slices.iter().all(|slice| !slice.used), "{explained:#?}");
}

#[test]
fn case_01_services_without_a_cluster_ip_have_no_frontend() {
    not_served(svc().edit(|spec| spec.cluster_ip = "None".to_owned()), "headless");
    not_served(svc().kind("ExternalName"), "ExternalName");
    not_served(svc().edit(|spec| spec.cluster_ip.clear()), "spec.clusterIP is empty");
    not_served(svc().kind("ExternalName").edit(|spec| spec.cluster_ip.clear()), "ExternalName");
    not_served(svc().edit(|spec| spec.cluster_ip = "None".to_owned()).kind("ExternalName"), "headless");
}

#[test]
fn a_service_needs_a_usable_cluster_ip_and_a_port() {
    not_served(balanced(), "no valid port");
    not_served(
        balanced().port("http", "ICMP", 80).port("p", "TCP", 0).port("q", "TCP", 65536),
        "no valid port",
    );
    not_served(svc().edit(|spec| spec.cluster_ips.clear()), "none of its cluster IPs");
    not_served(svc().edit(|spec| spec.cluster_ips = vec![V6.to_owned()]), "none of its cluster IPs");
    not_served(svc().edit(|spec| spec.ip_families = vec!["IPX".to_owned()]), "none of its cluster IPs");
    let odd = svc().edit(|spec| {
        spec.cluster_ip = "nonsense".to_owned();
        spec.ip_families.clear();
    });
    not_served(odd, "none of its cluster IPs");
    let nothing = Service::default();
    assert_eq!(view(&nothing, &[], &n1()), None);
    assert!(!explain(Some(&nothing), &[], &n1()).served);
}

#[test]
fn case_02_a_service_of_another_proxy_has_no_frontend() {
    for value in ["", "cilium"] {
        not_served(
            svc().label("service.kubernetes.io/service-proxy-name", value),
            "assigns it to another service proxy",
        );
    }
    scene(svc().label("app", "web"), [http("a", "L1")]).expect("{L1}", "{L1}", "{L1}");
}

#[test]
fn case_03_a_family_without_endpoints_rejects() {
    let scene = scene(svc().dual_stack(), [http("a", "R1")]);
    assert_eq!(scene.outcome(To::ClusterIp), "{R1}");
    assert_eq!(scene.outcome6(To::ClusterIp), "REJECT");
    let ips = scene.served().i_ps.unwrap();
    let cluster_ips = ips.cluster_i_ps.unwrap();
    assert_eq!(
        (ips.cluster_ip.as_str(), cluster_ips.v4, cluster_ips.v6),
        (V, vec![V.to_owned()], vec![V6.to_owned()])
    );
}

#[test]
fn both_families_are_served_and_kept_apart() {
    let slices = [http("a", "R1 L2!"), http("b", "R61! L62~").kind("IPv6")];
    let scene = scene(svc().dual_stack().external_local(), slices);
    scene.expect("{R1}", "DROP", "{R1}");
    let fates = [To::ClusterIp, To::Outside, To::Inside].map(|to| scene.outcome6(to));
    assert_eq!(fates, ["{L62}", "{L62}", "{L62}"]);
}

#[test]
fn case_04_addresses_of_a_family_without_cluster_ip_do_not_count() {
    let service = internal()
        .port("http", "TCP", 80)
        .kind("LoadBalancer")
        .external_ip("fd00:9::1")
        .ingress("fd00:9::2", None)
        .source_ranges(&["fd00::/16"]);
    let scene = scene(service, [http("a", "L1"), http("b", "L61").kind("IPv6")]);
    let served = scene.served();
    let ips = served.i_ps.unwrap();
    for set in [ips.external_i_ps, ips.load_balancer_i_ps, served.source_ranges] {
        assert_eq!(set, Some(localnetv1::IpSet::default()));
    }
    assert_eq!(ips.cluster_i_ps.unwrap().v6, Vec::<String>::new());
    assert!(served.endpoints.iter().all(|endpoint| addresses(endpoint, true).is_empty()));
    let explained = scene.explain();
    assert_eq!(explained.ignored.len(), 3, "{explained:#?}");
    assert_eq!(explained.slices[1].reason, "the Service has no cluster IP of IPv6");
}

#[test]
fn case_05_slices_that_count_for_nothing() {
    let strange = [
        http("fqdn", "").kind("FQDN").endpoint("example.org", None),
        http("nameless", "L1").edit(|slice| slice.metadata.as_mut().unwrap().labels.clear()),
        http("empty", "L1").label("kubernetes.io/service-name", ""),
        http("other", "L1").of("ns", "other"),
        http("elsewhere", "L1").of("other", "web"),
        http("headless", "L1").label("service.kubernetes.io/headless", ""),
        http("odd", "L1").kind(""),
        http("bare", "L1").edit(|slice| slice.metadata = None),
    ];
    let scene = scene(svc(), strange);
    scene.expect("REJECT", "REJECT", "REJECT");
    let explained = scene.explain();
    assert_eq!(explained.slices.len(), 8);
    for slice in explained.slices {
        assert!(!slice.used && !slice.reason.is_empty(), "{slice:?}");
    }
}

#[test]
fn owners_come_from_slices() {
    let owner = |slice: Slice| super::super::owner(&slice.build());
    assert_eq!(owner(slice("a")), Some(crate::ServiceName::new("ns", "web")));
    let headless = slice("a").label("service.kubernetes.io/headless", "");
    assert_eq!(owner(headless), Some(crate::ServiceName::new("ns", "web")));
    assert_eq!(owner(slice("a").label("kubernetes.io/service-name", "")), None);
    assert_eq!(owner(slice("a").edit(|slice| slice.metadata = None)), None);
}

#[test]
fn case_15_addresses_are_written_canonically() {
    let service = svc()
        .edit(|spec| {
            spec.cluster_ip = "172.30.0.041".to_owned();
            spec.cluster_ips = vec!["172.30.0.041".to_owned()];
        })
        .external_ip("198.051.100.007")
        .external_ip("::ffff:198.51.100.8")
        .external_ip("198.51.100.7")
        .external_ip("nonsense");
    let slice = slice("a")
        .port("http", "TCP", 80)
        .endpoint("10.180.00.001", None)
        .endpoint("::ffff:10.180.0.2", None);
    let scene = scene(service, [slice]);
    let served = scene.served();
    assert_eq!(sent(&served), "{10.180.0.1 10.180.0.2}");
    let ips = served.i_ps.unwrap();
    assert_eq!(
        (ips.cluster_ip.as_str(), ips.cluster_i_ps.unwrap().v4),
        ("172.30.0.41", vec!["172.30.0.41".to_owned()])
    );
    assert_eq!(ips.external_i_ps.unwrap().v4, ["198.51.100.7", "198.51.100.8"]);
    assert_eq!(scene.explain().ignored, ["external IP \"nonsense\": not an IP address"]);
}

#[test]
fn cluster_ips_are_paired_with_families() {
    let ips = |service: Svc| {
        let served = scene(service, []).served();
        let ips = served.i_ps.unwrap();
        let cluster = ips.cluster_i_ps.unwrap();
        (ips.cluster_ip, cluster.v4.join(","), cluster.v6.join(","))
    };
    let expected = |one: &str, v4: &str, v6: &str| (one.to_owned(), v4.to_owned(), v6.to_owned());
    assert_eq!(ips(svc().dual_stack()), expected(V, V, V6));
    // Without `ipFamilies`, `clusterIP` decides.
    assert_eq!(ips(svc().dual_stack().edit(|spec| spec.ip_families.clear())), expected(V, V, ""));
    // More families than addresses.
    assert_eq!(ips(svc().edit(|spec| spec.ip_families.push("IPv6".to_owned()))), expected(V, V, ""));
    // An address of another family than the one at its index.
    let crossed = svc().dual_stack().edit(|spec| spec.cluster_ips[1] = "10.96.0.11".to_owned());
    assert_eq!(ips(crossed), expected(V, V, ""));
    // `clusterIP` is none of the served addresses.
    let other = svc().dual_stack().edit(|spec| {
        spec.cluster_ip = "10.96.0.99".to_owned();
        spec.ip_families = vec!["IPv6".to_owned(), "IPv4".to_owned()];
        spec.cluster_ips = vec![V6.to_owned(), V.to_owned()];
    });
    assert_eq!(ips(other), expected(V6, V, V6));
}

#[test]
fn unusable_ports_are_dropped() {
    let service = balanced()
        .port("a", "", 80)
        .port("b", "UDP", 80)
        .node_port(30081)
        .port("c", "SCTP", 70000)
        .port("d", "ICMP", 80)
        .port("e", "TCP", 80)
        .port("f", "TCP", 81)
        .node_port(-1)
        .port("f", "TCP", 82)
        .port("g", "TCP", i32::MIN);
    let scene = scene(service, []);
    let ports: Vec<_> = scene
        .served()
        .ports
        .into_iter()
        .map(|port| (port.name.clone(), port.protocol(), port.port, port.node_port, port.target_port))
        .collect();
    let expected = [
        ("a".to_owned(), Protocol::Tcp, 80, 0, 0),
        ("b".to_owned(), Protocol::Udp, 80, 30081, 0),
        ("f".to_owned(), Protocol::Tcp, 82, 0, 0),
    ];
    assert_eq!(ports, expected);
    assert_eq!(scene.explain().ignored.len(), 5, "{:#?}", scene.explain());
}

#[test]
fn case_17_only_listed_ports_and_addresses_are_frontends_and_service_cidrs_are_known() {
    let served = scene(svc(), [http("a", "L1").port("admin", "TCP", 9)]).served();
    assert_eq!(served.ports.iter().map(|port| port.port).collect::<Vec<_>>(), [80]);
    let cidr = |texts: &[&str]| crate::ServiceCidr {
        spec: Some(keelson_proto::kubernetes::ServiceCidrSpec {
            cidrs: texts.iter().map(|text| (*text).to_owned()).collect(),
        }),
        ..Default::default()
    };
    let cidrs =
        [cidr(&["fd00:96::/112", "10.96.0.0/12"]), cidr(&["9.0.0.1/8", "10.96.00.0/12", "?"]), cidr(&[])];
    let info = super::super::node_info(&n1(), &cidrs);
    assert_eq!(info.service_cid_rs, ["9.0.0.0/8", "10.96.0.0/12", "fd00:96::/112"]);
}

#[test]
fn the_node_is_published_in_canonical_form() {
    let node = NodeView {
        ips: ["192.0.2.2", "::ffff:192.0.2.1", "fd00::2", "192.0.2.2"].map(ip).to_vec(),
        pod_cidrs: ["10.1.2.3/24", "no", "fd00:1::/64"].map(str::to_owned).to_vec(),
        ..n1()
    };
    let info = super::super::node_info(&node, &[]);
    let ips = info.i_ps.clone().unwrap();
    assert_eq!(
        (ips.v4.join(" "), ips.v6.join(" ")),
        ("192.0.2.2 192.0.2.1".to_owned(), "fd00::2".to_owned())
    );
    assert_eq!(info.pod_cid_rs, ["10.1.2.0/24", "fd00:1::/64"]);
    assert_eq!((info.name.as_str(), info.zone.as_str(), info.exists, info.eligible), ("n1", "a", true, true));
    let unknown = NodeView { exists: false, zone: None, eligible: false, ..n1() };
    let info = super::super::node_info(&unknown, &[]);
    assert_eq!((info.zone.as_str(), info.exists, info.eligible), ("", false, false), "case 54");
}

fn ranges(service: Svc) -> (Vec<String>, Vec<String>) {
    let ranges = scene(service, [http("a", "L1")]).served().source_ranges.unwrap();
    (ranges.v4, ranges.v6)
}

#[test]
fn case_40_source_ranges_are_normalised() {
    let (v4, v6) =
        ranges(svc().source_ranges(&[" 203.0.113.1/25", "192.0.2.7/24 ", "192.0.2.0/24", "no", ""]));
    assert_eq!((v4, v6), (vec!["192.0.2.0/24".to_owned(), "203.0.113.0/25".to_owned()], vec![]));
}

#[test]
fn case_41_ranges_of_another_family_and_ranges_of_everything_filter_nothing() {
    assert_eq!(ranges(svc().source_ranges(&["fd00::/16"])), (vec![], vec![]));
    let both = ["fd00::/16", "10.0.0.0/8"];
    assert_eq!(ranges(svc().dual_stack().source_ranges(&both)).1, ["fd00::/16"]);
    assert_eq!(
        ranges(svc().dual_stack().source_ranges(&["fd00::/16"])),
        (vec![], vec!["fd00::/16".to_owned()])
    );
    assert_eq!(ranges(svc().source_ranges(&["10.0.0.0/8", "0.0.0.0/0"])), (vec![], vec![]));
    let one_open = ["10.0.0.0/8", "1.2.3.4/0", "fd00::/16"];
    assert_eq!(ranges(svc().dual_stack().source_ranges(&one_open)), (vec![], vec!["fd00::/16".to_owned()]));
}

#[test]
fn case_42_ranges_stay_when_there_is_no_endpoint() {
    let scene = scene(svc().source_ranges(&["203.0.113.0/25"]), []);
    scene.expect("REJECT", "REJECT", "REJECT");
    assert_eq!(scene.served().source_ranges.unwrap().v4, ["203.0.113.0/25"]);
}

#[test]
fn case_43_only_vips_are_captured() {
    let service = internal()
        .kind("LoadBalancer")
        .port("http", "TCP", 80)
        .ingress("203.0.113.1", Some("Proxy"))
        .ingress("203.0.113.2", Some("VIP"))
        .ingress(W, None)
        .ingress("", None)
        .ingress("203.0.113.3", Some(""));
    let found = scene(service.clone(), []);
    let ips = found.served().i_ps.unwrap();
    assert_eq!(ips.load_balancer_i_ps.unwrap().v4, ["203.0.113.2", W]);
    assert_eq!(found.explain().ignored.len(), 2);
    // For every type.
    let ips = scene(service.kind("ClusterIP"), []).served().i_ps.unwrap();
    assert_eq!(ips.load_balancer_i_ps.unwrap().v4, ["203.0.113.2", W]);
    let ips = scene(internal().port("http", "TCP", 80), []).served().i_ps.unwrap();
    assert_eq!(ips.load_balancer_i_ps.unwrap().v4, Vec::<String>::new());
}

#[test]
fn case_44_a_load_balancer_without_node_port() {
    let scene = scene(balanced().port("http", "TCP", 80), [http("a", "R1")]);
    assert_eq!(scene.served().ports[0].node_port, 0);
    scene.expect("{R1}", "{R1}", "{R1}");
    let to: Vec<_> = scene.explain().ports[0].families[0].traffic.iter().map(|row| row.to.clone()).collect();
    assert_eq!(to, [format!("{V}:80"), format!("{W}:80")]);
}

#[test]
fn case_45_the_node_ip_of_a_family_is_its_first() {
    let node = NodeView { ips: ["fd00::5", "192.0.2.9", "192.0.2.1"].map(ip).to_vec(), ..n1() };
    let ips = super::super::node_info(&node, &[]).i_ps.unwrap();
    assert_eq!((ips.v4[0].as_str(), ips.v6[0].as_str()), ("192.0.2.9", "fd00::5"));
}

#[test]
fn case_47_affinity_has_a_timeout() {
    let seconds = |service: Svc| scene(service, []).served().client_ip_affinity_seconds;
    assert_eq!(seconds(svc()), 0);
    assert_eq!(seconds(svc().affinity(Some(60))), 60);
    assert_eq!(seconds(svc().affinity(None)), 10_800);
    let bare = svc().edit(|spec| spec.session_affinity = "ClientIP".to_owned());
    assert_eq!(seconds(bare), 10_800);
    for (asked, got) in [(0, 10_800), (-5, 10_800), (i32::MIN, 10_800), (86_400, 86_400), (i32::MAX, 86_400)]
    {
        assert_eq!(seconds(svc().affinity(Some(asked))), got, "{asked}");
    }
    assert_eq!(scene(svc().affinity(Some(60)), []).explain().affinity, "ClientIP, 60 s");
}

#[test]
fn triggers_are_times_of_the_annotation() {
    let at = |text: &str| {
        let slice = slice("a").edit(|slice| {
            let annotations = &mut slice.metadata.as_mut().unwrap().annotations;
            annotations
                .insert("endpoints.kubernetes.io/last-change-trigger-time".to_owned(), text.to_owned());
        });
        super::super::triggered_unix_ms(&slice.build())
    };
    assert_eq!(at("2026-01-02T03:04:05Z"), Some(1_767_323_045_000));
    assert_eq!(at("2026-01-02T03:04:05.678901234+01:00"), Some(1_767_319_445_678));
    for text in ["", "yesterday", "2026-01-02", "99999-01-02T03:04:05Z"] {
        assert_eq!(at(text), None, "{text:?}");
    }
    assert_eq!(super::super::triggered_unix_ms(&slice("a").build()), None);
}

#[test]
fn unused_fields_are_not_stored() {
    let service = svc().label("app", "web").label("service.kubernetes.io/service-proxy-name", "");
    let mut service = service.build();
    let metadata = service.metadata.as_mut().unwrap();
    metadata.resource_version = "7".to_owned();
    metadata.annotations.insert("a".to_owned(), "b".to_owned());
    let expected = internal().label("service.kubernetes.io/service-proxy-name", "").build().metadata;
    assert_eq!(trim_service(service).metadata, expected);
    let mut kept = http("a", "R1@a#n1").label("service.kubernetes.io/headless", "").build();
    let trimmed = trim_slice(kept.clone());
    assert_eq!(trimmed, kept);
    let metadata = kept.metadata.as_mut().unwrap();
    metadata.resource_version = "7".to_owned();
    metadata.labels.insert("endpointslice.kubernetes.io/managed-by".to_owned(), "x".to_owned());
    metadata.annotations.insert("a".to_owned(), "b".to_owned());
    kept.endpoints[0].addresses.push("10.9.9.9".to_owned());
    assert_eq!(trim_slice(kept), trimmed);
}

#[test]
fn services_of_another_proxy_are_published_for_its_name_only() {
    const LABEL: &str = "service.kubernetes.io/service-proxy-name";
    let names = ["edge".to_owned(), "mesh".to_owned()];
    for (label, published) in [(None, true), (Some("edge"), true), (Some("other"), false), (Some(""), false)]
    {
        let service = match label {
            Some(label) => svc().label(LABEL, label),
            None => svc(),
        };
        let service = service.port("http", "TCP", 80).build();
        let seen = view_for(&names, &service, &[], &n1());
        assert_eq!(seen.is_some(), published, "{label:?}");
        assert_eq!(explain_for(&names, Some(&service), &[], &n1()).served, published, "{label:?}");
        if let Some(seen) = seen {
            assert_eq!(seen.service_proxy_name, label.unwrap_or_default());
        }
    }
}
