//! Connections from the client's address, with the rules of docs/proxy.md, a pod and a client. Needs root and iptables.

use std::{path::Path, process::Command, sync::mpsc};

use super::*;
use crate::{isolation::alone, testing::in_namespace};

const DOCUMENT: &str = "../../../../docs/proxy.md";

fn run(command: &str) {
    let status = Command::new("sh").args(["-ec", command]).status().unwrap();
    assert!(status.success(), "{command}");
}

/// The commands that the document gives.
fn documented_commands() -> String {
    let document = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCUMENT)).unwrap();
    let section = document.split("### Source addresses").nth(1).expect("the section");
    let block = section.split("```sh").nth(1).expect("its commands");
    block.split("```").next().unwrap().to_owned()
}

/// Runs `work` on a thread in a namespace of its own, which a link joins with this one.
fn start_peer(link: &'static str, here: &str, there: &'static str, work: impl FnOnce() + Send + 'static) {
    let gateway = here.split('/').next().unwrap().to_owned();
    let (thread, known) = mpsc::channel();
    let (linked, may_begin) = mpsc::channel();
    let (ready, is_ready) = mpsc::channel();
    thread::spawn(move || {
        in_namespace(move || {
            let id = std::fs::read_link("/proc/thread-self").unwrap();
            thread.send(id.file_name().unwrap().to_string_lossy().into_owned()).unwrap();
            may_begin.recv().unwrap();
            run(&format!(
                "ip address add {there} dev {link}; ip link set {link} up; ip route add default via {gateway}"
            ));
            ready.send(()).unwrap();
            work();
        });
    });
    let thread = known.recv().unwrap();
    run(&format!(
        "ip link add {link}-node type veth peer name {link} netns {thread}
        ip address add {here} dev {link}-node
        ip link set {link}-node up"
    ));
    linked.send(()).unwrap();
    is_ready.recv().unwrap();
}

#[test]
fn endpoints_see_the_client_with_the_documented_rules() {
    alone(|| {
        let (listens, endpoint) = mpsc::channel();
        start_peer("pod", "10.244.1.1/24", "10.244.1.2/24", move || {
            let tcp = endpoint_at("10.244.1.2:8080", |mut stream| {
                let _ = stream.write_all(stream.peer_addr().unwrap().ip().to_string().as_bytes());
            });
            let udp = UdpSocket::bind("10.244.1.2:8053").unwrap();
            listens.send((tcp, udp.local_addr().unwrap())).unwrap();
            let mut buffer = [0; 64];
            while let Ok((_, from)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(from.ip().to_string().as_bytes(), from);
            }
        });
        let (tcp, udp) = endpoint.recv().unwrap();
        run(&documented_commands());
        let mut proxy = Proxy::start(|options| {
            options.relay.redirect = true;
            options.relay.transparent = true;
        });
        proxy.set(service_port("web", "10.96.0.10", 80, &[tcp]));
        proxy.set(udp_port("dns", "10.96.0.11", 53, &[udp]));
        let (answers, seen) = mpsc::channel();
        start_peer("client", "192.0.2.1/24", "192.0.2.7/24", move || {
            let mut address = String::new();
            connect("10.96.0.10:80").read_to_string(&mut address).unwrap();
            answers.send(address).unwrap();
            let socket = UdpSocket::bind("192.0.2.7:0").unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.send_to(b"?", "10.96.0.11:53").unwrap();
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).unwrap();
            answers.send(String::from_utf8_lossy(&buffer[..length]).into_owned()).unwrap();
        });
        assert_eq!(seen.recv_timeout(PATIENCE).unwrap(), "192.0.2.7", "TCP");
        assert_eq!(seen.recv_timeout(PATIENCE).unwrap(), "192.0.2.7", "UDP");
    });
}
