//! UDP sessions through the proxy.

use super::*;

struct Client(UdpSocket);

impl Client {
    fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Self(socket)
    }

    /// The answer to a datagram, and who sent it. UDP may lose some, so it is repeated.
    fn ask(&self, to: &str) -> (String, SocketAddr) {
        for _ in 0..50 {
            if let Some(answer) = self.ask_once(to) {
                return answer;
            }
        }
        panic!("{to} does not answer");
    }

    fn ask_once(&self, to: &str) -> Option<(String, SocketAddr)> {
        self.0.send_to(b"!", to).unwrap();
        let mut buffer = [0; 64];
        let (length, from) = self.0.recv_from(&mut buffer).ok()?;
        Some((String::from_utf8_lossy(&buffer[..length]).into_owned(), from))
    }
}

#[test]
fn replies_come_from_the_frontend_and_a_session_keeps_its_endpoint() {
    let servers = [udp_endpoint("a"), udp_endpoint("b")];
    let place = "127.80.1.1:9001";
    let mut proxy = Proxy::start(|_| {});
    proxy.set(udp_port("dns", "127.80.1.1", 9001, &servers));
    let client = Client::new();
    let (first, from) = client.ask(place);
    assert_eq!(from, place.parse().unwrap());
    for _ in 0..10 {
        assert_eq!(client.ask(place).0, first);
    }
    assert_eq!(proxy.sessions().udp_sessions, 1);
    let clients: Vec<Client> = (0..40).map(|_| Client::new()).collect();
    let answers: BTreeSet<String> = clients.iter().map(|client| client.ask(place).0).collect();
    assert_eq!(answers, ["a!".to_owned(), "b!".to_owned()].into(), "other sessions choose at random");
    assert_eq!(proxy.sessions().udp_sessions, 41);
}

#[test]
fn case_48_sessions_to_an_endpoint_that_is_gone_end() {
    let (first, second) = (udp_endpoint("a"), udp_endpoint("b"));
    let place = "127.80.1.2:9002";
    let mut proxy = Proxy::start(|_| {});
    proxy.set(udp_port("dns", "127.80.1.2", 9002, &[first]));
    let client = Client::new();
    assert_eq!(client.ask(place).0, "a!");
    let mut both = udp_port("dns", "127.80.1.2", 9002, &[second]);
    both.serving = sorted(&[first, second]);
    proxy.set(both);
    assert_eq!(client.ask(place).0, "a!", "case 50: it still serves");
    assert_eq!(Client::new().ask(place).0, "b!");
    proxy.set(udp_port("dns", "127.80.1.2", 9002, &[second]));
    assert_eq!(client.ask(place).0, "b!");
}

#[test]
fn idle_sessions_end() {
    let mut proxy = Proxy::start(|options| options.relay.udp_timeout = Duration::from_millis(200));
    proxy.set(udp_port("dns", "127.80.1.3", 9003, &[udp_endpoint("a")]));
    Client::new().ask("127.80.1.3:9003");
    assert_eq!(proxy.sessions().udp_sessions, 1);
    wait_for("the end", || proxy.sessions().udp_sessions == 0);
}

#[test]
fn dropped_and_rejected_datagrams_have_no_session() {
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
    assert_eq!(client.ask(place).0, "a!");
    assert_eq!(Client::new().ask_once(place), None, "too many sessions");
    proxy.set(udp_port("dns", "127.80.1.4", 9004, &[]));
    assert_eq!(client.ask_once(place), None);
    wait_for("the end", || proxy.sessions().udp_sessions == 0);
}

#[test]
fn a_session_ends_when_its_endpoint_is_closed() {
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut proxy = Proxy::start(|_| {});
    let place = "127.80.1.5:9005";
    proxy.set(udp_port("dns", "127.80.1.5", 9005, &[closed, udp_endpoint("a")]));
    assert_eq!(Client::new().ask(place).0, "a!", "the next datagram chooses again");
    let mut tcp = service_port("dns-tcp", "127.80.1.5", 9005, &[endpoint("t")]);
    tcp.name.port = "tcp".into();
    proxy.set(tcp);
    assert_eq!(ask(place), 't', "case 14: TCP at the same address is another frontend");
}
