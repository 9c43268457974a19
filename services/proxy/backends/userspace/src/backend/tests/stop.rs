//! What happens to connections and session affinity when the process stops.

use std::{io::ErrorKind, sync::mpsc};

use super::*;

#[test]
fn connections_may_end_while_the_proxy_stops() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| {
            options.relay.stop_timeout = Duration::from_secs(3_600);
            // It counts for removed Services only.
            options.relay.drain_timeout = Duration::ZERO;
        });
        let place = "127.80.3.1:8301";
        proxy.set(service_port("web", "127.80.3.1", 8301, &[endpoint("a")]));
        let mut client = connect(place);
        assert_eq!(name_of(&mut client).unwrap(), 'a');
        let drain = proxy.stop();
        wait_for("a refusal", || is_refused(place));
        thread::scope(|scope| {
            let drained = scope.spawn(drain);
            assert_eq!(echo(&mut client, "still there"), "still there");
            assert!(!drained.is_finished(), "the process waits for the connection");
            drop(client);
            drained.join().unwrap();
        });
        let error = proxy.backend.sync(Family::V4, Instant::now()).unwrap_err();
        assert!(error.to_string().contains("the proxy stops"), "{error}");
        assert!(proxy.backend.stop().is_none(), "it has stopped");
    });
}

#[test]
fn connections_that_do_not_end_are_reset() {
    isolated(|| {
        let timeout = Duration::from_millis(300);
        let mut proxy = Proxy::start(|options| options.relay.stop_timeout = timeout);
        let (ended, end) = mpsc::channel();
        let server = endpoint_at("127.0.0.1:0", move |mut stream| {
            let _ = stream.write_all(b"a");
            let _ = ended.send(stream.read(&mut [0]).map_err(|error| error.kind()));
        });
        proxy.set(service_port("web", "127.80.3.2", 8302, &[server]));
        let mut client = connect("127.80.3.2:8302");
        assert_eq!(name_of(&mut client).unwrap(), 'a');
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(proxy.stop());
            // It waits already: Wine tells a reset only to a call that waits for data.
            assert_eq!(name_of(&mut client).unwrap_err().kind(), ErrorKind::ConnectionReset);
            assert!(begun.elapsed() >= timeout, "{:?}", begun.elapsed());
        });
        let end = end.recv_timeout(PATIENCE).unwrap();
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "the endpoint does not take it for the whole");
    });
}

#[test]
fn udp_sessions_end_when_the_proxy_stops() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| options.relay.stop_timeout = Duration::from_secs(3_600));
        proxy.set(udp_port("dns", "127.80.3.3", 9301, &[udp_endpoint("a")]));
        assert_eq!(udp::Client::new().ask("127.80.3.3:9301").0, "a");
        let shared = proxy.backend.relay.as_ref().unwrap().shared().clone();
        assert_eq!(shared.sessions().udp_sessions, 1);
        proxy.stop()();
        wait_for("the end", || shared.sessions().udp_sessions == 0);
    });
}

#[test]
fn case_57_affinity_is_kept_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("affinity.json");
    isolated(|| {
        let servers = [endpoint("a"), endpoint("b"), endpoint("c")];
        let set = |proxy: &mut Proxy| {
            let mut port = service_port("web", "127.80.3.4", 8304, &servers);
            port.affinity_seconds = 3_600;
            proxy.set(port);
        };
        let mut proxy = Proxy::start(|options| options.relay.affinity_file = Some(file.clone()));
        set(&mut proxy);
        let first = ask("127.80.3.4:8304");
        proxy.stop()();
        let same = |proxy: &mut Proxy| {
            let clients = proxy.backend.observer().unwrap().affinity_clients(Family::V4).unwrap();
            assert_eq!(clients, Some(vec![("clients", 1)]), "it is read before the first connection");
            set(proxy);
            let answers: String = (0..20).map(|_| ask("127.80.3.4:8304")).collect();
            assert_eq!(answers, first.to_string().repeat(20));
        };
        let mut proxy = proxy.restart();
        same(&mut proxy);
        // A process that is killed has written it before.
        std::fs::remove_file(&file).unwrap();
        proxy.backend.maintain(Family::V4, Instant::now()).unwrap();
        wait_for("the file", || file.exists());
        let mut proxy = proxy.restart();
        same(&mut proxy);
        let features = proxy.backend.features().join("\n");
        assert!(features.contains(&format!("affinity-file: {}", file.display())), "{features}");
    });
}
