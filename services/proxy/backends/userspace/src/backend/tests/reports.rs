//! What the backend says about itself.

use keelson_proxy::explain::{Source, Target};

use super::*;

fn text(proxy: &Proxy) -> String {
    let mut text = String::new();
    proxy.backend.ruleset()(&mut text).unwrap();
    text
}

fn ways(proxy: &Proxy, target: &str, from: Source) -> pb::Explanation {
    let target: Target = target.parse().unwrap();
    proxy.backend.explain(&Question::new(target, from).unwrap(), &[])
}

/// In a network for documentation, so that no interface has it.
const UNBINDABLE: &str = "203.0.113.10";

/// Above the ports that Linux gives to connections (`net.ipv4.ip_local_port_range`).
const MAPPED_PORT_BASE: u16 = 61_000;

#[test]
fn an_address_that_cannot_be_bound_is_served_at_a_mapped_port() {
    isolated(|| {
        let server = endpoint("a");
        let mut proxy = Proxy::start(|options| options.relay.mapped_port_base = MAPPED_PORT_BASE);
        proxy.set(service_port("web", UNBINDABLE, 80, &[server]));
        let details = proxy.backend.details(Family::V4);
        assert_eq!(details.elements, BTreeMap::from([("mapped-ports".to_owned(), 1)]));
        let line = text(&proxy);
        let line = line.lines().find(|line| line.contains(UNBINDABLE)).unwrap().to_owned();
        let address = line.split("served at ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        assert_eq!(
            line,
            format!(
                "{UNBINDABLE}:80/TCP default/web (cluster IP) -> {server}; served at {address} instead: no interface \
             of this node has the address, and no route is added: not wanted"
            )
        );
        assert!(address.parse::<SocketAddr>().unwrap().port() >= MAPPED_PORT_BASE, "{address}");
        assert_eq!(ask(&address), 'a');
        let explanation = ways(&proxy, &format!("{UNBINDABLE}:80"), Source::Node);
        assert!(explanation.ways[0].steps[0].contains(&address), "{explanation:?}");
        assert!(proxy.backend.features()[0].contains("1 at a mapped port"), "{:?}", proxy.backend.features());
        let mut proxy = proxy.restart();
        proxy.set(service_port("web", UNBINDABLE, 80, &[server]));
        assert_eq!(ask(&address), 'a', "the same port after a restart");
        proxy.delete("web");
        wait_for("a refusal", || is_refused(&address));
    });
}

#[test]
fn sockets_that_listen_leave_open_files_for_connections() {
    isolated(|| {
        let server = endpoint("a");
        let mut proxy = Proxy::start(|options| options.sync_period = Duration::ZERO);
        let relay = Relay::start_with(proxy.options.relay.clone(), Some(200)).unwrap();
        proxy.backend.relay = Some(relay);
        for n in 1..=151 {
            proxy.set(service_port(&format!("web-{n}"), &format!("127.80.9.{n}"), 8109, &[server]));
        }
        let details = proxy.backend.details(Family::V4);
        let expected = [("failing".to_owned(), 1), ("listeners".to_owned(), 150)];
        assert_eq!(details.elements, BTreeMap::from(expected));
        assert!(
            text(&proxy).contains("150 sockets listen, and the rest of 200 open files"),
            "{}",
            text(&proxy)
        );
        assert!(is_refused("127.80.9.151:8109"), "not at a mapped port either");
        let mut stream = connect("127.80.9.1:8109");
        assert!(name_of(&mut stream).is_err(), "150 listeners and 128 other descriptors leave none of 200");
        for n in 20..=150 {
            proxy.delete(&format!("web-{n}"));
        }
        wait_for("an end of listeners", || {
            !proxy.backend.maintain(Family::V4, Instant::now()).unwrap().is_nothing()
        });
        wait_for("room for a connection", || name_of(&mut connect("127.80.9.151:8109")).is_ok());
    });
}

#[test]
fn a_port_in_use_is_retried() {
    isolated(|| {
        let blocker = TcpListener::bind("127.80.2.2:8102").unwrap();
        let mut proxy = Proxy::start(|options| options.sync_period = Duration::ZERO);
        proxy.set(service_port("web", "127.80.2.2", 8102, &[endpoint("a")]));
        assert!(text(&proxy).contains("another program listens there"), "{}", text(&proxy));
        assert!(proxy.backend.maintain(Family::V4, Instant::now()).unwrap().is_nothing());
        drop(blocker);
        let outcome = proxy.backend.maintain(Family::V4, Instant::now()).unwrap();
        assert_eq!(outcome.structure, 2, "one opened, one closed");
        assert_eq!(ask("127.80.2.2:8102"), 'a');
    });
}

#[test]
fn explanations_name_verdicts_and_endpoints() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        let server = endpoint("a");
        let mut port = service_port("web", "127.80.2.3", 8103, &[server]);
        port.load_balancer_ips = vec![ip("127.80.2.4")];
        port.external_local = true;
        port.source_ranges = vec!["192.0.2.0/24".parse().unwrap()];
        proxy.set(port);
        let explanation = ways(&proxy, "127.80.2.3:8103", Source::Any);
        assert_eq!(explanation.frontend, "127.80.2.3:8103/TCP is the cluster IP of default/web");
        assert_eq!(explanation.service_port, "default/web");
        for way in &explanation.ways {
            assert_eq!((way.verdict.as_str(), way.masqueraded), ("forwarded", true), "{way:?}");
            assert_eq!(way.endpoints, [server.to_string()]);
        }
        let verdicts: Vec<String> = ways(&proxy, "127.80.2.4:8103", Source::Any)
            .ways
            .into_iter()
            .map(|way| format!("{}: {}", way.from, way.verdict))
            .collect();
        assert_eq!(
            verdicts,
            [
                "a pod (10.244.0.0/16), in the source ranges (192.0.2.0/24): forwarded",
                "a pod (10.244.0.0/16), not in the source ranges (192.0.2.0/24): dropped",
                "the node itself, in the source ranges (192.0.2.0/24): forwarded",
                "the node itself, not in the source ranges (192.0.2.0/24): dropped",
                "outside, in the source ranges (192.0.2.0/24): dropped",
                "outside, not in the source ranges (192.0.2.0/24): dropped",
            ]
        );
        for (target, frontend) in [
            ("127.80.2.3:1", "127.80.2.3 is an address of default/web, which has no port 1/TCP"),
            ("127.80.2.5:8103", "127.80.2.5:8103/TCP is not a frontend"),
        ] {
            let explanation = ways(&proxy, target, Source::Outside);
            assert_eq!(
                (explanation.frontend.as_str(), explanation.ways[0].verdict.as_str()),
                (frontend, "untouched")
            );
        }
        proxy.set(service_port("web", "127.80.2.3", 8103, &[]));
        assert_eq!(ways(&proxy, "127.80.2.3:8103", Source::Pod).ways[0].verdict, "rejected");
    });
}

#[test]
fn a_dry_run_lists_what_would_change_and_opens_nothing() {
    isolated(|| {
        let options = options();
        let mut backend = UserspaceBackend::open(&options, Access::Compare).unwrap();
        backend.set_node(node(Family::V4, &options));
        let server = SocketAddr::from(([10, 244, 1, 1], 8080));
        let port = service_port("web", "127.80.2.6", 8106, &[server]);
        backend.set_service(Family::V4, &port.name.service.clone(), vec![port]);
        let line = "127.80.2.6:8106/TCP default/web (cluster IP) -> 10.244.1.1:8080";
        assert_eq!(backend.changes().unwrap(), [format!("+ {line}")]);
        let mut text = String::new();
        backend.ruleset()(&mut text).unwrap();
        assert!(text.starts_with(&format!("# IPv4\n{line}\n")), "{text}");
        assert!(is_refused("127.80.2.6:8106"));
        let error = backend.sync(Family::V4, Instant::now()).unwrap_err();
        assert!(error.to_string().contains("opened to print"), "{error}");
    });
}

#[test]
fn counts_limitations_and_features() {
    isolated(|| {
        let mut proxy =
            Proxy::start(|options| options.detect_local = DetectLocal::BridgeInterface("cni0".into()));
        let mut port = service_port("sctp", "127.80.2.7", 8107, &[endpoint("a")]);
        port.name.protocol = Protocol::Sctp;
        proxy.set(port);
        let counts = proxy.backend.counts(Family::V4);
        assert_eq!((counts.services, counts.service_ports, counts.endpoints), (1, 1, 1));
        let limitations = proxy.backend.limitations().join("\n");
        assert!(
            limitations.contains("SCTP") && limitations.contains("not detected by interface"),
            "{limitations}"
        );
        assert!(proxy.backend.details(Family::V4).elements.is_empty(), "SCTP is not served");
        assert_eq!(text(&proxy), "# IPv4\n# SCTP is not served in user space: default/sctp/SCTP\n# IPv6\n");
        let explanation = ways(&proxy, "127.80.2.7:8107/SCTP", Source::Pod);
        assert_eq!(explanation.ways[0].verdict, "untouched");
        assert!(!proxy.backend.begin_check(Family::V4).unwrap(), "there is nothing that others can change");
    });
}
