//! Owns: requests and their outcomes. In: an [`NetClient`], an address, a protocol. Out: who answered and which source it
//! saw, or how the request was refused.

use super::plan::Family;
use super::sctp::{Chunk, Packet};
use super::servers::{SctpSocket, raw_sctp};
use super::world::NetClient;
use anyhow::{Context as _, Result, bail};
use futures_util::StreamExt as _;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpStream, UdpSocket};

const AT_ONCE: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    Tcp,
    Udp,
    Sctp,
}

impl Transport {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The name in objects of the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    Answered {
        /// The endpoint's own address; the requested address if it was not translated.
        by: SocketAddr,
        /// The source address that the endpoint saw.
        source: IpAddr,
    },
    /// ICMP "port unreachable".
    Rejected,
    /// TCP reset: nothing listens there.
    Reset,
    /// No response within the timeout.
    Dropped,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(pub BTreeMap<Outcome, usize>);

impl Tally {
    pub fn by_endpoint(&self) -> BTreeMap<SocketAddr, usize> {
        let mut counts = BTreeMap::new();
        for (outcome, count) in &self.0 {
            if let Outcome::Answered { by, .. } = outcome {
                *counts.entry(*by).or_default() += count;
            }
        }
        counts
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (outcome, count)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match outcome {
                Outcome::Answered { by, source } => write!(f, "{comma}{count} by {by} (saw {source})")?,
                other => write!(f, "{comma}{count} {other:?}")?,
            }
        }
        Ok(())
    }
}

impl NetClient {
    /// Sends `times` requests over separate connections, each with a timeout of `patience`.
    pub async fn ask_times(
        &self,
        to: SocketAddr,
        transport: Transport,
        times: usize,
        patience: Duration,
    ) -> Result<Tally> {
        let questions = (0..times).map(|_| async { self.open(to, transport)?.ask(patience).await });
        let mut outcomes = futures_util::stream::iter(questions).buffer_unordered(AT_ONCE);
        let mut tally = Tally::default();
        while let Some(outcome) = outcomes.next().await {
            *tally.0.entry(outcome?).or_default() += 1;
        }
        Ok(tally)
    }

    pub async fn ask(&self, to: SocketAddr, transport: Transport, patience: Duration) -> Result<Outcome> {
        self.open(to, transport)?.ask(patience).await
    }

    /// Opens a flow that may be used repeatedly, with the same ports. Nothing is sent yet.
    pub fn open(&self, to: SocketAddr, transport: Transport) -> Result<Flow> {
        let own = SocketAddr::new(self.ip(Family::of(to.ip())), 0);
        let namespace = self.namespace();
        let socket = match transport {
            Transport::Tcp => FlowSocket::NewTcp(namespace.tcp_client(own.ip())?),
            Transport::Udp => FlowSocket::Udp(namespace.udp(own)?),
            Transport::Sctp => FlowSocket::Sctp(raw_sctp(namespace, own.ip())?),
        };
        let port = match &socket {
            FlowSocket::NewTcp(socket) => socket.local_addr()?.port(),
            FlowSocket::Udp(socket) => socket.local_addr()?.port(),
            FlowSocket::Tcp(_) | FlowSocket::Broken => 0,
            FlowSocket::Sctp(_) => next_port(),
        };
        self.place.rejections.forget(transport.number(), port, to);
        Ok(Flow { client: self.clone(), to, transport, port, socket })
    }
}

/// A port that no other SCTP flow of this process has: the kernel assigns none to raw sockets.
fn next_port() -> u16 {
    static LAST: AtomicU16 = AtomicU16::new(0);
    20_000 + LAST.fetch_add(1, Ordering::Relaxed) % 40_000
}

/// One connection, or datagrams between the same two ports.
#[derive(Debug)]
pub struct Flow {
    client: NetClient,
    to: SocketAddr,
    transport: Transport,
    port: u16,
    socket: FlowSocket,
}

#[derive(Debug)]
enum FlowSocket {
    NewTcp(tokio::net::TcpSocket),
    Tcp(BufReader<TcpStream>),
    Udp(UdpSocket),
    Sctp(SctpSocket),
    /// A TCP connection that ended.
    Broken,
}

impl Flow {
    pub async fn ask(&mut self, patience: Duration) -> Result<Outcome> {
        let (transport, port, to) = (self.transport.number(), self.port, self.to);
        let answer = tokio::time::timeout(patience, self.exchange()).await;
        let rejections = &self.client.place.rejections;
        match answer {
            Ok(Ok(text)) => parse(&text),
            // Refused: a rejection and a reset look the same to a socket.
            Ok(Err(error)) if refused(&error) => {
                let rejected = rejections.is_rejected_soon(transport, port, to).await;
                Ok(if rejected { Outcome::Rejected } else { Outcome::Reset })
            }
            // The node's own rules drop or reject the outgoing packet.
            Ok(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                let rejected = rejections.is_rejected_soon(transport, port, to).await;
                Ok(if rejected { Outcome::Rejected } else { Outcome::Dropped })
            }
            Ok(Err(error)) => {
                Err(error).with_context(|| format!("asking {to} over {}", self.transport.name()))
            }
            Err(_) if rejections.is_rejected(transport, port, to) => Ok(Outcome::Rejected),
            Err(_) => Ok(Outcome::Dropped),
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    async fn exchange(&mut self) -> io::Result<String> {
        if let FlowSocket::NewTcp(_) = self.socket {
            let FlowSocket::NewTcp(socket) = std::mem::replace(&mut self.socket, FlowSocket::Broken) else {
                return Err(io::ErrorKind::NotConnected.into());
            };
            self.socket = FlowSocket::Tcp(BufReader::new(socket.connect(self.to).await?));
        }
        match &mut self.socket {
            FlowSocket::Tcp(stream) => {
                let mut line = String::new();
                stream.write_all(b"?\n").await?;
                if stream.read_line(&mut line).await? == 0 {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                Ok(line)
            }
            FlowSocket::Udp(socket) => match udp_exchange(socket, self.to).await {
                // A proxy at the socket level ends a connected socket whose endpoint is gone: the error comes once.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
                    udp_exchange(socket, self.to).await
                }
                outcome => outcome,
            },
            FlowSocket::Sctp(socket) => {
                let rejected = self.client.place.rejections.wait_until_rejected(132, self.port, self.to);
                tokio::select! {
                    text = sctp_exchange(socket, self.port, self.to) => text,
                    () = rejected => Err(io::ErrorKind::ConnectionRefused.into()),
                }
            }
            FlowSocket::NewTcp(_) | FlowSocket::Broken => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

/// Connected, so that only responses of the destination count, and refusals are reported.
async fn udp_exchange(socket: &UdpSocket, to: SocketAddr) -> io::Result<String> {
    socket.connect(to).await?;
    socket.send(b"?\n").await?;
    let mut buffer = [0; 256];
    let length = socket.recv(&mut buffer).await?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

async fn sctp_exchange(socket: &SctpSocket, port: u16, to: SocketAddr) -> io::Result<String> {
    let tag = 0x4b00_0000 | u32::from(port);
    let chunk = Chunk::Init { tag };
    socket
        .send(&Packet { source: port, destination: to.port(), verification_tag: 0, chunk }, to.ip())
        .await?;
    loop {
        // A raw socket receives the packets of all flows.
        let (packet, source) = socket.receive().await?;
        if let Chunk::InitAck { text, .. } = packet.chunk
            && (packet.destination, packet.verification_tag) == (port, tag)
            && (source, packet.source) == (to.ip(), to.port())
        {
            return Ok(text);
        }
    }
}

fn refused(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable};
    matches!(error.kind(), ConnectionRefused | ConnectionReset | HostUnreachable)
}

fn parse(text: &str) -> Result<Outcome> {
    let parsed = text
        .trim_end()
        .split_once(' ')
        .and_then(|(by, source)| Some((by.parse().ok()?, source.parse().ok()?)));
    let Some((by, source)) = parsed else { bail!("a strange answer: {text:?}") };
    Ok(Outcome::Answered { by, source })
}
