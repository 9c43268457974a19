//! Listening TCP sockets.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use tokio::net::{TcpListener, TcpSocket};

/// As in Go's servers.
const BACKLOG: u32 = 1024;

/// Listens at one address, of its own family only. Must be called within a runtime.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    open(address, true)
}

/// Listens at an address of the settings. As in kube-proxy (and other programs in Go), `0.0.0.0` and `[::]` mean all
/// addresses of both families, if the kernel has both.
pub fn listen_widely(address: SocketAddr) -> io::Result<TcpListener> {
    if !address.ip().is_unspecified() {
        return open(address, true);
    }
    let both = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), address.port());
    match open(both, false) {
        // Other errors may be caused by missing IPv6.
        Err(error) if address.is_ipv4() && error.kind() != io::ErrorKind::AddrInUse => open(address, true),
        opened => opened,
    }
}

fn open(address: SocketAddr, own_family: bool) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            setsockopt(&socket, Ipv6V6Only, &own_family)?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
