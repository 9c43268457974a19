use super::{
    super::{
        Outcome,
        facts::{Backend, Cluster, Kubeadm},
        testing::{facts, settings},
    },
    *,
};
use crate::kubelet::Process;

fn backend_of(name: &'static str, is_automatic: bool, opened: Result<(), &str>) -> Backend {
    Backend {
        name,
        is_automatic,
        opened: opened.map_err(ToOwned::to_owned),
        rules: Vec::new(),
        includes: None,
    }
}

fn with(proxy: Proxy) -> Facts {
    Facts { proxy: Some(proxy), ..facts() }
}

fn outcomes(checks: &[Check]) -> Vec<Outcome> {
    checks.iter().map(|check| check.outcome).collect()
}

#[test]
fn the_backend_that_would_be_chosen() {
    let no_nft = Err("no netlink");
    for (configured, nft, iptables, expected) in [
        (ProxyBackend::Nft, Ok(()), Ok(()), Outcome::Ok),
        (ProxyBackend::Nft, no_nft, Ok(()), Outcome::Failed),
        (ProxyBackend::Auto, Ok(()), Ok(()), Outcome::Ok),
        (ProxyBackend::Auto, no_nft, Ok(()), Outcome::Warning),
        (ProxyBackend::Auto, no_nft, Err("no iptables"), Outcome::Failed),
        (ProxyBackend::Iptables, no_nft, Ok(()), Outcome::Ok),
        (ProxyBackend::Ipvs, Ok(()), Ok(()), Outcome::Failed),
    ] {
        let backends = vec![
            backend_of("nft", true, nft),
            backend_of("ipvs", false, Err("no IPVS")),
            backend_of("iptables", true, iptables),
        ];
        let facts = Facts {
            settings: settings(|settings| settings.proxy.backend = configured),
            ..with(Proxy { backends, ..Proxy::default() })
        };
        let checks = backend(&facts, facts.proxy.as_ref().expect("a proxy"));
        assert_eq!(outcomes(&checks), [expected], "{checks:?}");
    }
    let mut left = backend_of("iptables", true, Ok(()));
    left.rules.push("9 chains".into());
    let facts = Facts {
        settings: settings(|settings| settings.proxy.backend = ProxyBackend::Nft),
        ..with(Proxy { backends: vec![backend_of("nft", true, Ok(())), left], ..Proxy::default() })
    };
    let checks = backend(&facts, facts.proxy.as_ref().expect("a proxy"));
    assert_eq!(outcomes(&checks), [Outcome::Ok, Outcome::Warning]);
    // The tables of nft are a part of the backend ebpf.
    let mut tables = backend_of("nft", true, Ok(()));
    tables.rules.push("table ip keelson".into());
    let ebpf = Backend { includes: Some("nft"), ..backend_of("ebpf", false, Ok(())) };
    let facts = Facts {
        settings: settings(|settings| settings.proxy.backend = ProxyBackend::Ebpf),
        ..with(Proxy { backends: vec![ebpf, tables], ..Proxy::default() })
    };
    let checks = backend(&facts, facts.proxy.as_ref().expect("a proxy"));
    assert_eq!(outcomes(&checks), [Outcome::Ok]);
}

#[test]
fn rules_of_another_backend_stay_beside_named_proxies() {
    let names = || vec![keelson_config::ProxyName("edge".into())];
    for (published, name, take_over, expected) in [
        (Vec::new(), None, true, "the proxy removes them after its first sync; or: "),
        (Vec::new(), None, false, "keelson proxy cleanup --backend nft, after"),
        (names(), None, true, "they decide beside this proxy; if no proxy"),
        (Vec::new(), names().pop(), true, "they decide beside this proxy; if no proxy"),
    ] {
        let facts = Facts {
            settings: settings(|settings| {
                settings.endpoints.service_proxy_names = published;
                settings.proxy.service_proxy_name = name;
                settings.proxy.take_over = take_over;
            }),
            ..facts()
        };
        let advice = advice(&facts, "nft");
        assert!(advice.starts_with(expected) && advice.contains("cleanup --backend nft"), "{advice}");
    }
}

/// O4: a kube-proxy beside it.
#[test]
fn o4_a_kube_proxy_that_runs() {
    let process = Process { pid: 7, arguments: vec!["kube-proxy".into()] };
    let running = Proxy { kube_proxies: vec![process], leftovers: vec!["chains".into()], ..Proxy::default() };
    let facts = with(running.clone());
    assert_eq!(outcomes(&kube_proxy(&facts, &running)), [Outcome::Failed]);
    let beside = Facts {
        settings: settings(|settings| {
            settings.proxy.service_proxy_name = Some(keelson_config::ProxyName("mine".into()));
        }),
        ..facts
    };
    assert!(beside.settings.proxy.service_proxy_name.is_some());
    assert_eq!(outcomes(&kube_proxy(&beside, &running)), [Outcome::Ok]);
    let left = Proxy { kube_proxies: Vec::new(), ..running };
    assert_eq!(outcomes(&kube_proxy(&with(left.clone()), &left)), [Outcome::Ok, Outcome::Warning]);
}

/// O15: the networks of pods are compared with the cluster's.
#[test]
fn o15_networks_of_pods() {
    let node =
        |cidrs: &[&str]| NodeAnswer::Found { pod_cidrs: cidrs.iter().map(ToString::to_string).collect() };
    for (own, node, subnet, expected) in [
        (
            &["10.244.0.0/16"][..],
            node(&["10.244.3.0/24"]),
            Some("10.244.0.0/16"),
            &[Outcome::Ok, Outcome::Ok][..],
        ),
        (&["10.244.0.0/16"], node(&["10.100.3.0/24"]), None, &[Outcome::Failed]),
        (&["10.244.0.0/16"], node(&["10.244.3.0/24", "fd00:1::/64"]), None, &[Outcome::Failed]),
        (
            &["10.244.0.0/16", "fd00::/16"],
            node(&["10.244.3.0/24", "fd00:1::/64"]),
            Some("10.244.0.0/16,fd00::/16"),
            &[Outcome::Ok, Outcome::Ok],
        ),
        (&["10.0.0.0/8"], node(&["10.244.3.0/24"]), Some("10.244.0.0/16"), &[Outcome::Ok, Outcome::Failed]),
        (&["10.244.0.0/16"], node(&[]), None, &[Outcome::Skipped]),
        (&["10.244.0.0/16"], NodeAnswer::NotAsked, None, &[Outcome::Skipped]),
        (&[], node(&["10.244.3.0/24"]), None, &[Outcome::Warning]),
    ] {
        let kubeadm = Kubeadm { pod_subnet: subnet.map(ToOwned::to_owned), service_subnet: None };
        let facts = Facts {
            settings: settings(|settings| {
                settings.proxy.cluster_cidr =
                    own.iter().map(|text| text.parse().expect("a network")).collect();
            }),
            cluster: Some(Cluster { node, kubeadm, ..Cluster::default() }),
            ..with(Proxy::default())
        };
        assert_eq!(outcomes(&networks(&facts)), expected, "{own:?} {subnet:?}");
    }
    let by_node = |cidrs: &[&str]| Facts {
        settings: settings(|settings| settings.proxy.detect_local_mode = DetectLocalMode::NodeCidr),
        cluster: Some(Cluster { node: node(cidrs), ..Cluster::default() }),
        ..facts()
    };
    assert_eq!(outcomes(&networks(&by_node(&["10.244.3.0/24"]))), [Outcome::Ok]);
    assert_eq!(outcomes(&networks(&by_node(&[]))), [Outcome::Failed]);
}

#[test]
fn o14_conntrack() {
    let sysctl = |wanted, at_least, now| Sysctl { name: "nf_conntrack_max", wanted, at_least, now };
    let check = |sysctls| conntrack(&Proxy { sysctls, ..Proxy::default() });
    assert_eq!(check(Vec::new()), None);
    for (sysctl, outcome, part) in [
        (sysctl(5, false, Some(5)), Outcome::Ok, "1 settings have"),
        (sysctl(5, true, Some(6)), Outcome::Ok, "1 settings have"),
        (sysctl(5, false, Some(6)), Outcome::Ok, "nf_conntrack_max 6 -> 5"),
        (sysctl(5, false, None), Outcome::Warning, "not loaded"),
    ] {
        let check = check(vec![sysctl]).expect("a check");
        assert_eq!(check.outcome, outcome, "{check:?}");
        assert!(check.found.contains(part), "{check:?}");
    }
}

#[test]
fn without_a_proxy_nothing_is_checked() {
    assert_eq!(outcomes(&checks(&facts())), [Outcome::Skipped]);
    // The ports of kube-proxy are those of its successor.
    let names: Vec<_> = checks(&with(Proxy::default())).iter().map(|check| check.name).collect();
    for key in ["proxy.healthz_bind_address", "proxy.metrics_bind_address", "proxy.http"] {
        assert!(names.contains(&key), "{names:?}");
    }
}
