use std::{collections::HashMap, net::IpAddr, process::Command};

use super::{
    super::tests::{get, request},
    *,
};
use crate::{addresses::Match, testing::in_namespace};

const RETRY: Duration = Duration::from_millis(50);

fn check(name: &str, port: u16, local: [Option<u32>; 2]) -> ServiceHealthCheck {
    ServiceHealthCheck {
        name: ServiceName::new("default", name),
        port,
        local_v4: local[0],
        local_v6: local[1],
    }
}

fn all_addresses() -> ListenAddresses {
    ListenAddresses { v4: Match::AllLocal, v6: Match::AllLocal }
}

fn at(texts: &[&str]) -> Match {
    Match::Addresses(texts.iter().map(|text| text.parse().unwrap()).collect())
}

fn v4(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn v6(port: u16) -> SocketAddr {
    SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port))
}

async fn is_closed(at: SocketAddr) -> bool {
    let connected = tokio::net::TcpStream::connect(at).await;
    connected.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Waits until a socket is closed. A child process that another test starts holds copies of every socket until its
/// exec, so the close may come a moment late.
async fn closes(at: SocketAddr) {
    while !is_closed(at).await {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs a test in a network namespace, where every port is free; its loopback interface has two more addresses.
fn in_runtime<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send) {
    in_namespace(|| {
        for address in ["192.0.2.1/32", "192.0.2.2/32"] {
            let status = Command::new("ip").args(["address", "add", address, "dev", "lo"]).status();
            assert!(status.unwrap().success());
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let end = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(120), test()).await });
        end.expect("it ends");
    });
}

/// Waits until the last request has been processed and every socket has the status in `settled`.
async fn settled(
    checks: &HealthChecks,
    settled: impl Fn(&[HealthCheckState]) -> bool,
) -> Vec<HealthCheckState> {
    checks.states().wait_for(|states| settled(states)).await.unwrap().to_vec()
}

fn open(states: &[HealthCheckState], expected: &[(&str, &[SocketAddr])]) -> bool {
    let have: HashMap<&str, Vec<SocketAddr>> = states
        .iter()
        .map(|state| {
            let open = state.sockets.iter().filter(|socket| socket.state == SocketState::Open);
            (state.check.name.name(), open.map(|socket| socket.address).collect())
        })
        .collect();
    have.len() == expected.len()
        && expected.iter().all(|(name, sockets)| have.get(name).map(Vec::as_slice) == Some(*sockets))
}

fn any_v4(port: u16) -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], port))
}

fn any_v6(port: u16) -> SocketAddr {
    SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port))
}

#[test]
fn case_51_local_endpoints_make_200_with_their_number_at_any_path() {
    in_runtime(|| async {
        let checks = HealthChecks::start(Health::new(Duration::from_secs(30), None), RETRY);
        checks.apply(
            vec![check("web", 30_500, [Some(2), Some(1)]), check("v4", 30_501, [Some(1), None])],
            all_addresses(),
        );
        settled(&checks, |states| {
            open(states, &[("web", &[any_v4(30_500), any_v6(30_500)]), ("v4", &[any_v4(30_501)])])
        })
        .await;
        for (at, local) in [(v4(30_500), 2), (v6(30_500), 1)] {
            for path in ["/", "/healthz", "/any/other?path"] {
                let got = get(at, path).await;
                assert_eq!(got.status, 200, "{got:?}");
                let body = format!(
                    "{{\n\t\"service\": {{\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t}},\n\
                     \t\"localEndpoints\": {local},\n\t\"serviceProxyHealthy\": true\n}}"
                );
                assert_eq!(got.body, body);
                for header in [
                    "content-type: application/json",
                    "x-content-type-options: nosniff",
                    &format!("x-load-balancing-endpoint-weight: {local}"),
                ] {
                    assert!(got.headers.lines().any(|have| have == header), "{header} in {}", got.headers);
                }
            }
        }
        assert_eq!(request(v4(30_500), "POST", "/").await.status, 200);
        let head = request(v4(30_500), "HEAD", "/").await;
        assert_eq!((head.status, head.body.as_str()), (200, ""));
        assert!(is_closed(v6(30_501)).await, "a Service of IPv4 alone");
    });
}

#[test]
fn case_52_without_ready_local_endpoints_it_is_503() {
    in_runtime(|| async {
        let checks = HealthChecks::start(Health::new(Duration::from_secs(30), None), RETRY);
        checks.apply(vec![check("web", 30_500, [Some(0), None])], all_addresses());
        settled(&checks, |states| open(states, &[("web", &[any_v4(30_500)])])).await;
        let got = get(v4(30_500), "/").await;
        assert_eq!(got.status, 503);
        assert!(got.headers.contains("x-load-balancing-endpoint-weight: 0\r\n"), "{}", got.headers);
        assert!(got.body.contains("\"localEndpoints\": 0,\n\t\"serviceProxyHealthy\": true"), "{}", got.body);
        // A changed count needs no new socket.
        checks.apply(vec![check("web", 30_500, [Some(3), None])], all_addresses());
        settled(&checks, |states| states[0].check.local_v4 == Some(3)).await;
        let got = get(v4(30_500), "/").await;
        assert_eq!(got.status, 200);
        assert!(got.headers.contains("x-load-balancing-endpoint-weight: 3\r\n"), "{}", got.headers);
    });
}

#[test]
fn case_53_an_unhealthy_proxy_makes_503_and_ports_follow_their_services() {
    in_runtime(|| async {
        // With a sync period of 0, every pending change is late.
        let health = Health::new(Duration::ZERO, None);
        let checks = HealthChecks::start(health.clone(), RETRY);
        checks.apply(vec![check("web", 30_500, [Some(1), None])], all_addresses());
        settled(&checks, |states| open(states, &[("web", &[any_v4(30_500)])])).await;
        assert_eq!(get(v4(30_500), "/").await.status, 200);
        health.synced(Family::V6);
        health.queued(Family::V6);
        let got = get(v4(30_500), "/").await;
        assert_eq!(got.status, 503);
        assert!(
            got.body.contains("\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": false\n}"),
            "{}",
            got.body
        );
        health.synced(Family::V6);
        assert_eq!(get(v4(30_500), "/").await.status, 200);

        checks.apply(vec![check("web", 30_600, [Some(1), None])], all_addresses());
        settled(&checks, |states| open(states, &[("web", &[any_v4(30_600)])])).await;
        closes(v4(30_500)).await;
        assert_eq!(get(v4(30_600), "/").await.status, 200);
        // externalTrafficPolicy Cluster: no such port.
        checks.apply(Vec::new(), all_addresses());
        settled(&checks, <[_]>::is_empty).await;
        closes(v4(30_600)).await;
    });
}

#[test]
fn ports_listen_at_the_addresses_that_match_and_follow_them() {
    in_runtime(|| async {
        let checks = HealthChecks::start(Health::new(Duration::from_secs(30), None), RETRY);
        let web = || vec![check("web", 30_500, [Some(1), Some(1)])];
        let socket = |text: &str| SocketAddr::new(text.parse::<IpAddr>().unwrap(), 30_500);
        checks.apply(web(), ListenAddresses { v4: at(&["192.0.2.1"]), v6: at(&[]) });
        settled(&checks, |states| open(states, &[("web", &[socket("192.0.2.1")])])).await;
        assert_eq!(get(socket("192.0.2.1"), "/").await.status, 200);
        assert!(is_closed(socket("192.0.2.2")).await);
        assert!(is_closed(socket("127.0.0.1")).await);

        checks.apply(web(), ListenAddresses { v4: at(&["192.0.2.2"]), v6: Match::AllLocal });
        settled(&checks, |states| open(states, &[("web", &[socket("192.0.2.2"), any_v6(30_500)])])).await;
        closes(socket("192.0.2.1")).await;
        assert_eq!(get(socket("192.0.2.2"), "/").await.status, 200);
        assert!(is_closed(v4(30_500)).await, "[::] is IPv6 alone");
        // From single addresses to all and back: a socket of one address must be closed before the one of all addresses
        // can be bound.
        checks.apply(web(), all_addresses());
        settled(&checks, |states| open(states, &[("web", &[any_v4(30_500), any_v6(30_500)])])).await;
        checks.apply(web(), ListenAddresses { v4: at(&["192.0.2.1", "192.0.2.2"]), v6: at(&[]) });
        settled(&checks, |states| open(states, &[("web", &[socket("192.0.2.1"), socket("192.0.2.2")])]))
            .await;
    });
}

#[test]
fn a_failed_bind_is_reported_and_retried() {
    in_runtime(|| async {
        let other = tokio::net::TcpListener::bind(any_v4(30_500)).await.unwrap();
        let checks = HealthChecks::start(Health::new(Duration::from_secs(30), None), RETRY);
        checks.apply(
            vec![check("taken", 30_500, [Some(1), None]), check("web", 30_501, [Some(1), None])],
            all_addresses(),
        );
        let states =
            settled(&checks, |states| open(states, &[("taken", &[]), ("web", &[any_v4(30_501)])])).await;
        let [Socket { address, state: SocketState::Failing(reason) }] = states[0].sockets.as_slice() else {
            panic!("{states:?}");
        };
        assert_eq!(*address, any_v4(30_500));
        assert!(reason.contains("in use"), "{reason}");
        assert_eq!(get(v4(30_501), "/").await.status, 200);
        drop(other);
        settled(&checks, |states| open(states, &[("taken", &[any_v4(30_500)]), ("web", &[any_v4(30_501)])]))
            .await;
        assert_eq!(get(v4(30_500), "/").await.status, 200);
    });
}

#[test]
fn a_port_passes_to_the_second_service_when_the_first_is_deleted() {
    in_runtime(|| async {
        let checks = HealthChecks::start(Health::new(Duration::from_secs(30), None), RETRY);
        let (a, b) = (check("a", 30_500, [Some(1), None]), check("b", 30_500, [Some(2), None]));
        checks.apply(vec![b.clone()], all_addresses());
        settled(&checks, |states| open(states, &[("b", &[any_v4(30_500)])])).await;
        // The Service that is first by name does not take the socket over.
        checks.apply(vec![a.clone(), b.clone()], all_addresses());
        let states = settled(&checks, |states| states.len() == 2).await;
        assert!(open(&states, &[("a", &[]), ("b", &[any_v4(30_500)])]), "{states:?}");
        let failing = SocketState::Failing("the port is used by Service default/b".to_owned());
        assert_eq!(states[0].sockets, [Socket { address: any_v4(30_500), state: failing }]);
        checks.apply(vec![a], all_addresses());
        settled(&checks, |states| open(states, &[("a", &[any_v4(30_500)])])).await;
        assert!(get(v4(30_500), "/").await.body.contains("\"name\": \"a\""));
    });
}

#[test]
fn two_hundred_ports_are_served_and_closed_at_the_end() {
    in_runtime(|| async {
        let checks = HealthChecks::start(Health::new(Duration::from_secs(30), None), RETRY);
        let wanted = (0..200).map(|n| check(&format!("web-{n}"), 31_000 + n, [Some(1), Some(1)])).collect();
        checks.apply(wanted, all_addresses());
        let all_open = |states: &[HealthCheckState]| {
            states.len() == 200
                && states
                    .iter()
                    .flat_map(|state| &state.sockets)
                    .filter(|s| s.state == SocketState::Open)
                    .count()
                    == 400
        };
        settled(&checks, all_open).await;
        for n in (0..200).step_by(40) {
            assert_eq!(get(v4(31_000 + n), "/").await.status, 200);
            assert_eq!(get(v6(31_000 + n), "/").await.status, 200);
        }
        drop(checks);
        closes(v4(31_199)).await;
    });
}
