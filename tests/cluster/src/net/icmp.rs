//! Owns: ICMP messages "port unreachable" that a namespace received. In: a namespace. Out: the flows that were
//! rejected.
//!
//! A TCP socket reports "connection refused" for a reset and for a rejection; the ICMP message tells which it was.

use super::namespace::{Namespace, as_datagrams};
use anyhow::Result;
use socket2::{Protocol, Type};
use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;

/// How long a message may take to arrive in the list after its effect was seen.
const LATE: Duration = Duration::from_millis(500);

/// A flow from the sender's side: protocol number, source port, destination.
type Flow = (u8, u16, SocketAddr);

/// A watch on ICMP messages "port unreachable". Stopped on drop.
#[derive(Debug)]
pub(super) struct Rejections {
    seen: Arc<Mutex<HashSet<Flow>>>,
    tasks: [JoinHandle<()>; 2],
}

impl Rejections {
    pub(super) fn watch(namespace: &Namespace) -> Result<Self> {
        let seen = Arc::<Mutex<HashSet<Flow>>>::default();
        let start = |any: IpAddr, protocol, read: fn(&[u8]) -> Option<Flow>| {
            let unspecified = SocketAddr::new(any, 0);
            let socket = as_datagrams(namespace.socket(Type::RAW, Some(protocol), unspecified)?)?;
            let seen = seen.clone();
            Ok::<_, anyhow::Error>(tokio::spawn(async move {
                let mut buffer = [0; 2048];
                loop {
                    let length = socket.recv(&mut buffer).await;
                    if let Some(flow) = length.ok().and_then(|length| read(&buffer[..length])) {
                        seen.lock().unwrap_or_else(PoisonError::into_inner).insert(flow);
                    }
                }
            }))
        };
        let tasks = [
            start(Ipv4Addr::UNSPECIFIED.into(), Protocol::ICMPV4, read_v4)?,
            start(Ipv6Addr::UNSPECIFIED.into(), Protocol::ICMPV6, read_v6)?,
        ];
        Ok(Self { seen, tasks })
    }

    pub(super) fn is_rejected(&self, protocol: u8, port: u16, to: SocketAddr) -> bool {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).contains(&(protocol, port, to))
    }

    /// Forgets a flow, whose port may be reused.
    pub(super) fn forget(&self, protocol: u8, port: u16, to: SocketAddr) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&(protocol, port, to));
    }

    pub(super) async fn wait_until_rejected(&self, protocol: u8, port: u16, to: SocketAddr) {
        while !self.is_rejected(protocol, port, to) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Whether a flow was rejected whose socket has just reported an error.
    pub(super) async fn is_rejected_soon(&self, protocol: u8, port: u16, to: SocketAddr) -> bool {
        tokio::time::timeout(LATE, self.wait_until_rejected(protocol, port, to)).await.is_ok()
    }
}

impl Drop for Rejections {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// An IPv4 packet with ICMP type 3 code 3: the rejected packet begins after both headers.
fn read_v4(packet: &[u8]) -> Option<Flow> {
    let icmp = packet.get(usize::from(packet.first()? & 15) * 4..)?;
    if icmp.get(..2)? != [3, 3] {
        return None;
    }
    let inner = icmp.get(8..)?;
    let to: [u8; 4] = inner.get(16..20)?.try_into().ok()?;
    flow(*inner.get(9)?, Ipv4Addr::from(to).into(), inner.get(usize::from(inner.first()? & 15) * 4..)?)
}

/// ICMPv6 type 1 code 4; a raw socket of IPv6 passes no header. No sender here uses extension headers.
fn read_v6(icmp: &[u8]) -> Option<Flow> {
    if icmp.get(..2)? != [1, 4] {
        return None;
    }
    let inner = icmp.get(8..)?;
    let to: [u8; 16] = inner.get(24..40)?.try_into().ok()?;
    flow(*inner.get(6)?, Ipv6Addr::from(to).into(), inner.get(40..)?)
}

/// TCP, UDP and SCTP all begin with both ports.
fn flow(protocol: u8, to: IpAddr, rest: &[u8]) -> Option<Flow> {
    let port = |at: usize| Some(u16::from_be_bytes(rest.get(at..at + 2)?.try_into().ok()?));
    Some((protocol, port(0)?, SocketAddr::new(to, port(2)?)))
}
