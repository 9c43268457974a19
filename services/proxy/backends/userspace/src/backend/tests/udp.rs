//! UDP sessions through the proxy.

use std::cell::Cell;

use super::*;

pub(super) struct Client {
    socket: UdpSocket,
    asked: Cell<u32>,
}

impl Client {
    pub(super) fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Self { socket, asked: Cell::new(0) }
    }

    /// The name of who answers, and the address that the answer comes from. UDP may lose some, so it is repeated.
    pub(super) fn ask(&self, to: &str) -> (String, SocketAddr) {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(answer) = self.ask_once(to) {
                return answer;
            }
        }
        panic!("{to} does not answer");
    }

    /// Each datagram has a number, so that a late answer to an earlier one does not count.
    fn ask_once(&self, to: &str) -> Option<(String, SocketAddr)> {
        let number = format!(" {}", self.asked.replace(self.asked.get() + 1));
        // Some systems report here that an earlier datagram did not arrive.
        self.socket.send_to(number.as_bytes(), to).ok()?;
        let mut buffer = [0; 64];
        loop {
            let (length, from) = self.socket.recv_from(&mut buffer).ok()?;
            let answer = String::from_utf8_lossy(&buffer[..length]);
            if let Some(name) = answer.strip_suffix(&number) {
                return Some((name.to_owned(), from));
            }
        }
    }
}

#[test]
fn replies_come_from_the_frontend_and_a_session_keeps_its_endpoint() {
    isolated(|| {
        let servers = [udp_endpoint("a"), udp_endpoint("b")];
        let place = "127.80.1.1:9001";
        let mut proxy = Proxy::start(|_| {});
        proxy.set(udp_port("dns", "127.80.1.1", 9001, &servers));
        let client = Client::new();
        let (first, from) = client.ask(place);
        // Wine binds UDP sockets to every address, and lets the host choose the source.
        if cfg!(target_os = "linux") {
            assert_eq!(from, place.parse().unwrap());
        }
        for _ in 0..10 {
            assert_eq!(client.ask(place).0, first);
        }
        assert_eq!(proxy.sessions().udp_sessions, 1);
        let clients: Vec<Client> = (0..40).map(|_| Client::new()).collect();
        let answers: BTreeSet<String> = clients.iter().map(|client| client.ask(place).0).collect();
        assert_eq!(answers, ["a".to_owned(), "b".to_owned()].into(), "other sessions choose at random");
        assert_eq!(proxy.sessions().udp_sessions, 41);
    });
}

#[test]
fn case_48_sessions_to_an_endpoint_that_is_gone_end() {
    isolated(|| {
        let (first, second) = (udp_endpoint("a"), udp_endpoint("b"));
        let place = "127.80.1.2:9002";
        let mut proxy = Proxy::start(|_| {});
        proxy.set(udp_port("dns", "127.80.1.2", 9002, &[first]));
        let client = Client::new();
        assert_eq!(client.ask(place).0, "a");
        let mut both = udp_port("dns", "127.80.1.2", 9002, &[second]);
        both.serving = sorted(&[first, second]);
        proxy.set(both);
        assert_eq!(client.ask(place).0, "a", "case 50: it still serves");
        assert_eq!(Client::new().ask(place).0, "b");
        proxy.set(udp_port("dns", "127.80.1.2", 9002, &[second]));
        assert_eq!(client.ask(place).0, "b");
    });
}

#[test]
fn idle_sessions_end() {
    isolated(|| {
        let mut proxy = Proxy::start(|options| options.relay.udp_timeout = Duration::from_millis(200));
        proxy.set(udp_port("dns", "127.80.1.3", 9003, &[udp_endpoint("a")]));
        let client = Client::new();
        client.ask("127.80.1.3:9003");
        wait_for("the end", || proxy.sessions().udp_sessions == 0);
        assert_eq!(client.ask("127.80.1.3:9003").0, "a", "the next datagram opens a session");
    });
}

#[test]
fn dropped_and_rejected_datagrams_have_no_session() {
    isolated(|| {
        let server = udp_endpoint("a");
        let place = "127.80.1.4:9004";
        let mut proxy = Proxy::start(|options| options.relay.max_sessions = 1);
        let mut local = udp_port("dns", "127.80.1.4", 9004, &[server]);
        local.internal_local = true;
        proxy.set(local);
        let client = Client::new();
        assert_eq!(client.ask_once(place), None, "case 32: dropped");
        assert_eq!(proxy.sessions().udp_sessions, 0);
        proxy.set(udp_port("dns", "127.80.1.4", 9004, &[server]));
        assert_eq!(client.ask(place).0, "a");
        assert_eq!(Client::new().ask_once(place), None, "too many sessions");
        proxy.set(udp_port("dns", "127.80.1.4", 9004, &[]));
        assert_eq!(client.ask_once(place), None);
        wait_for("the end", || proxy.sessions().udp_sessions == 0);
    });
}

/// A burst of TCP connections must not end name resolution.
#[test]
fn tcp_leaves_room_for_udp() {
    isolated(|| {
        let server = udp_endpoint("a");
        let mut proxy = Proxy::start(|options| options.relay.max_sessions = 16);
        proxy.set(udp_port("dns", "127.80.1.8", 9008, &[server]));
        proxy.set(service_port("web", "127.80.1.9", 9009, &[endpoint("t")]));
        let mut held: Vec<TcpStream> = (0..14).map(|_| connect("127.80.1.9:9009")).collect();
        held.iter_mut().for_each(|client| assert_eq!(name_of(client).unwrap(), 't'));
        assert!(name_of(&mut connect("127.80.1.9:9009")).is_err());
        assert_eq!(Client::new().ask("127.80.1.8:9008").0, "a");
    });
}

/// Lookups must keep neither one another nor connections out until their idle timeout, and flows stay.
#[test]
fn sessions_with_one_exchange_make_room_for_others() {
    isolated(|| {
        let servers = ["a", "b", "c", "d"].map(udp_endpoint);
        let place = "127.80.1.6:9006";
        let mut proxy = Proxy::start(|options| options.relay.max_sessions = 24);
        proxy.set(udp_port("dns", "127.80.1.6", 9006, &servers));
        proxy.set(service_port("web", "127.80.1.7", 9007, &[endpoint("t")]));
        let flows: Vec<(Client, String)> = (0..6)
            .map(|_| {
                let client = Client::new();
                let (first, _) = client.ask(place);
                assert_eq!(client.ask(place).0, first);
                (client, first)
            })
            .collect();
        for _ in 0..100 {
            Client::new().ask(place);
        }
        assert_eq!(ask("127.80.1.7:9007"), 't');
        for (client, first) in &flows {
            assert_eq!(client.ask(place).0, *first, "it has its session");
        }
    });
}

#[test]
fn a_session_ends_when_its_endpoint_is_closed() {
    isolated(|| {
        let mut proxy = Proxy::start(|_| {});
        let place = "127.80.1.5:9005";
        proxy.set(udp_port("dns", "127.80.1.5", 9005, &[CLOSED[0], udp_endpoint("a")]));
        assert_eq!(Client::new().ask(place).0, "a", "the next datagram chooses again");
        let mut tcp = service_port("dns-tcp", "127.80.1.5", 9005, &[endpoint("t")]);
        tcp.name.port = "tcp".into();
        proxy.set(tcp);
        assert_eq!(ask(place), 't', "case 14: TCP at the same address is another frontend");
    });
}
