//! Owns: servers. In: namespaces, addresses, ports. Out: to every request, the server's own address and the source that
//! it saw: `ADDRESS:PORT SOURCE` and a line feed.

use super::namespace::{Namespace, as_datagrams};
use super::plan::{Dual, Family};
use super::sctp::{self, Chunk, Packet};
use anyhow::Result;
use socket2::{Protocol, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

/// All servers of a namespace, until dropped.
#[derive(Debug)]
pub(super) struct Servers {
    _tasks: JoinSet<()>,
}

impl Servers {
    /// TCP, UDP and SCTP on each of these addresses and ports.
    pub(super) fn endpoints(namespace: &Namespace, addresses: &[Dual], ports: &[u16]) -> Result<Self> {
        let mut tasks = JoinSet::new();
        for ip in addresses.iter().flat_map(|address| Family::ALL.map(|family| address.of(family))) {
            for port in ports {
                let at = SocketAddr::new(ip, *port);
                tasks.spawn(serve_tcp(namespace.tcp_listener(at)?));
                tasks.spawn(serve_udp(namespace.udp(at)?));
            }
            let socket = raw_sctp(namespace, ip)?;
            tasks.spawn(serve_sctp(socket, ports.to_vec()));
        }
        Ok(Self { _tasks: tasks })
    }

    /// TCP on these ports of every address of the namespace; UDP to them is received and not answered.
    pub(super) fn at_all_addresses(namespace: &Namespace, ports: &[u16]) -> Result<Self> {
        let mut tasks = JoinSet::new();
        for ip in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
            for port in ports {
                let at = SocketAddr::new(ip, *port);
                tasks.spawn(serve_tcp(namespace.tcp_listener(at)?));
                let silent = namespace.udp(at)?;
                tasks.spawn(async move {
                    let mut buffer = [0; 64];
                    loop {
                        let _ = silent.recv_from(&mut buffer).await;
                    }
                });
            }
        }
        Ok(Self { _tasks: tasks })
    }
}

fn answer(own: SocketAddr, source: IpAddr) -> String {
    format!("{own} {source}\n")
}

async fn serve_tcp(listener: TcpListener) {
    let mut open = JoinSet::new();
    loop {
        while open.try_join_next().is_some() {}
        // An error is that of a connection that broke before it was accepted.
        if let Ok((stream, source)) = listener.accept().await {
            open.spawn(async move {
                let _ = serve_stream(stream, source.ip()).await;
            });
        }
    }
}

async fn serve_stream(mut stream: TcpStream, source: IpAddr) -> io::Result<()> {
    let answer = answer(stream.local_addr()?, source);
    let mut buffer = [0; 64];
    loop {
        let length = stream.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        for _ in buffer[..length].iter().filter(|byte| **byte == b'\n') {
            stream.write_all(answer.as_bytes()).await?;
        }
    }
}

async fn serve_udp(socket: UdpSocket) {
    let Ok(own) = socket.local_addr() else { return };
    let mut buffer = [0; 64];
    loop {
        // An error is the result of an earlier response, whose client is gone.
        if let Ok((_, source)) = socket.recv_from(&mut buffer).await {
            let _ = socket.send_to(answer(own, source.ip()).as_bytes(), source).await;
        }
    }
}

/// A raw SCTP socket that receives for this address alone.
pub(super) fn raw_sctp(namespace: &Namespace, ip: IpAddr) -> Result<SctpSocket> {
    let protocol = Protocol::from(sctp::PROTOCOL);
    let socket = namespace.socket(Type::RAW, Some(protocol), SocketAddr::new(ip, 0))?;
    Ok(SctpSocket { socket: as_datagrams(socket)?, ip })
}

#[derive(Debug)]
pub(super) struct SctpSocket {
    socket: UdpSocket,
    ip: IpAddr,
}

impl SctpSocket {
    /// The next valid packet, and its source.
    pub(super) async fn receive(&self) -> io::Result<(Packet, IpAddr)> {
        let mut buffer = [0; 2048];
        loop {
            let (length, source) = self.socket.recv_from(&mut buffer).await?;
            // IPv4 includes its header.
            let header = if self.ip.is_ipv4() { usize::from(buffer[0] & 15) * 4 } else { 0 };
            if let Some(packet) = buffer.get(header..length).and_then(Packet::decode) {
                return Ok((packet, source.ip()));
            }
        }
    }

    pub(super) async fn send(&self, packet: &Packet, to: IpAddr) -> io::Result<()> {
        self.socket.send_to(&packet.encode(), SocketAddr::new(to, 0)).await.map(drop)
    }
}

async fn serve_sctp(socket: SctpSocket, ports: Vec<u16>) {
    while let Ok((packet, source)) = socket.receive().await {
        let Chunk::Init { tag } = packet.chunk else { continue };
        if !ports.contains(&packet.destination) {
            continue;
        }
        let own = SocketAddr::new(socket.ip, packet.destination);
        let answer = Packet {
            source: packet.destination,
            destination: packet.source,
            verification_tag: tag,
            chunk: Chunk::InitAck { tag: tag ^ 1, text: answer(own, source) },
        };
        // An error is that of a source without a route, which gets no response then.
        let _ = socket.send(&answer, source).await;
    }
}
