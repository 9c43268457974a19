//! Sockets that listen, and sockets to endpoints.
//!
//! Owns: [`ListeningSocket`], [`Connection`], [`connect_tcp`] and [`connect_udp`]. In: addresses, options. Out: sockets of tokio; all
//! are non-blocking. Must be called within the runtime.

use std::{
    io,
    net::SocketAddr,
    ops::{Deref, DerefMut},
    time::Duration,
};

use keelson_proxy::model::Protocol;
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

/// The kernel uses less if `net.core.somaxconn` is less.
const BACKLOG: i32 = 4096;

/// A peer that disappeared without a FIN is noticed: a connection has no idle timeout.
const KEEPALIVE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) enum ListeningSocket {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl ListeningSocket {
    /// `routed`: a route leads the address to this node, and no interface has it.
    pub(crate) fn bind(protocol: Protocol, address: SocketAddr, routed: bool) -> io::Result<Self> {
        let kind = match protocol {
            Protocol::Tcp => Type::STREAM,
            Protocol::Udp => Type::DGRAM,
            Protocol::Sctp => return Err(io::ErrorKind::Unsupported.into()),
        };
        let socket = Socket::new(Domain::for_address(address), kind, None)?;
        socket.set_nonblocking(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        // On Windows, the option would let other programs take the port.
        #[cfg(unix)]
        if kind == Type::STREAM {
            socket.set_reuse_address(true)?;
        }
        bind_maybe_routed(&socket, address, routed)?;
        match protocol {
            Protocol::Tcp => {
                socket.listen(BACKLOG)?;
                Ok(Self::Tcp(TcpListener::from_std(socket.into())?))
            }
            _ => Ok(Self::Udp(UdpSocket::from_std(socket.into())?)),
        }
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(socket) => socket.local_addr(),
            Self::Udp(socket) => socket.local_addr(),
        }
    }
}

/// Linux binds to an IPv6 address that only a route leads here with IPV6_FREEBIND alone.
fn bind_maybe_routed(socket: &Socket, address: SocketAddr, routed: bool) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if routed && address.is_ipv6() {
        socket.set_freebind_v6(true)?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = routed;
    socket.bind(&address.into())
}

/// A connection that is closed with a RST, unless both sides have ended it: the peer must not take what has come for all.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    has_ended: bool,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, has_ended: false }
    }

    pub(crate) fn end(&mut self) {
        self.has_ended = true;
    }
}

impl Deref for Connection {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut TcpStream {
        &mut self.stream
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.has_ended {
            reset(&self.stream);
        }
    }
}

/// `from`: the address of the client, to connect from it (IP_TRANSPARENT).
pub(crate) async fn connect_tcp(endpoint: SocketAddr, from: Option<SocketAddr>) -> io::Result<TcpStream> {
    let socket = if endpoint.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if let Some(from) = from {
        bind_transparent(&SockRef::from(&socket), SocketAddr::new(from.ip(), 0))?;
    }
    let stream = socket.connect(endpoint).await?;
    prepare(&stream)?;
    Ok(stream)
}

/// Options that both connections of a client have.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))
}

/// Closes a connection with a RST.
pub(crate) fn reset(stream: &TcpStream) {
    // A connection that has ended already cannot be reset.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

pub(crate) fn connect_udp(endpoint: SocketAddr, from: Option<SocketAddr>) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(endpoint), Type::DGRAM, None)?;
    socket.set_nonblocking(true)?;
    if let Some(from) = from {
        bind_transparent(&SockRef::from(&socket), SocketAddr::new(from.ip(), 0))?;
    }
    socket.connect(&endpoint.into())?;
    UdpSocket::from_std(socket.into())
}

#[cfg(target_os = "linux")]
fn bind_transparent(socket: &Socket, from: SocketAddr) -> io::Result<()> {
    match from {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
        SocketAddr::V6(_) => socket.set_ip_transparent_v6(true)?,
    }
    socket.bind(&from.into())
}

#[cfg(not(target_os = "linux"))]
fn bind_transparent(_: &Socket, _: SocketAddr) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
