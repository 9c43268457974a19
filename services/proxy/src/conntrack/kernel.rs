//! Conntrack over netlink.
//!
//! Owns: a blocking socket, [`Conntrack`]. In: requests. Out: [`Dump`]s and deletions. No program is executed.

use std::{collections::HashSet, io, time::Duration};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    conntrack::ConntrackMessage,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::{
    errno::Errno,
    sys::{
        socket::{setsockopt, sockopt::ReceiveTimeout},
        time::TimeVal,
    },
};

use super::{ConntrackError, Flow, wire};
use crate::model::{Family, Protocol};

/// Attempts to list flows while the listing is interrupted. Source: kube-proxy.
const DUMP_ATTEMPTS: usize = 5;
/// More than the kernel puts into one message of a dump.
const RECEIVE_BYTES: usize = 128 * 1024;
/// The kernel answers at once; the timeout only keeps a thread from blocking forever if it does not.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Alignment of attributes in a netlink message, in bytes.
const ALIGN: usize = 4;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dump {
    /// The requested flows, in no order.
    pub flows: HashSet<Flow>,
    /// Every attempt was interrupted: flows may be missing.
    pub interrupted: bool,
}

/// A connection to conntrack in the network namespace of the thread that opens it.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Conntrack {
    pub fn open() -> Result<Self, ConntrackError> {
        let open = || -> io::Result<Socket> {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            // Errors need not repeat the request.
            socket.set_cap_ack(true)?;
            let timeout = TimeVal::new(i64::try_from(ANSWER_TIMEOUT.as_secs()).unwrap_or(i64::MAX), 0);
            setsockopt(&socket, ReceiveTimeout, &timeout)?;
            Ok(socket)
        };
        let socket = open().map_err(|error| ConntrackError::new("open a netlink socket", error))?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(RECEIVE_BYTES) })
    }

    /// Lists the UDP flows of a family that `wanted` accepts. An interrupted listing is repeated up to five times, and
    /// the results of all attempts are combined.
    ///
    /// # Errors
    /// The kernel has no conntrack, or the process has no CAP_NET_ADMIN.
    pub fn dump(
        &mut self,
        family: Family,
        mut wanted: impl FnMut(&Flow) -> bool,
    ) -> Result<Dump, ConntrackError> {
        // An older kernel sends all protocols.
        let mut wanted = |flow: &Flow| flow.protocol == Protocol::Udp.number() && wanted(flow);
        let mut filtered = true;
        let mut flows = HashSet::new();
        let interrupted = repeat_dump(|| {
            let request = if filtered { wire::dump_udp() } else { wire::dump_all() };
            match self.dump_once(family, request, &mut wanted, &mut flows) {
                // A kernel that knows filters, but not this one.
                Err(error) if filtered && is_unknown_filter(&error) => {
                    filtered = false;
                    self.dump_once(family, wire::dump_all(), &mut wanted, &mut flows)
                }
                other => other,
            }
        })?;
        Ok(Dump { flows, interrupted })
    }

    /// The same for flows of every protocol.
    ///
    /// # Errors
    /// As for [`Self::dump`].
    pub fn dump_all(
        &mut self,
        family: Family,
        mut wanted: impl FnMut(&Flow) -> bool,
    ) -> Result<Dump, ConntrackError> {
        let mut flows = HashSet::new();
        let interrupted = repeat_dump(|| self.dump_once(family, wire::dump_all(), &mut wanted, &mut flows))?;
        Ok(Dump { flows, interrupted })
    }

    /// Returns whether the dump was interrupted.
    fn dump_once(
        &mut self,
        family: Family,
        request: NetfilterMessageInner,
        wanted: &mut impl FnMut(&Flow) -> bool,
        flows: &mut HashSet<Flow>,
    ) -> Result<bool, ConntrackError> {
        const WHAT: &str = "list flows";
        let mut interrupted = false;
        self.send(WHAT, family, request, NLM_F_DUMP)?;
        self.receive(WHAT, |header, payload| {
            interrupted |= header.flags & NLM_F_DUMP_INTR != 0;
            match payload {
                NetlinkPayload::Done(done) if done.code == 0 => Some(Ok(())),
                NetlinkPayload::Done(done) => Some(Err(done.code)),
                NetlinkPayload::Error(error) => Some(Err(error.raw_code())),
                NetlinkPayload::InnerMessage(message) => {
                    if let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) = message.inner
                    {
                        flows.extend(wire::flow(&attributes).filter(|flow| wanted(flow)));
                    }
                    None
                }
                _ => None,
            }
        })
        .map(|()| interrupted)
        .or_else(|error| match error {
            ConntrackError::Failed { source, .. } if source.raw_os_error() == Some(Errno::EINTR as i32) => {
                Ok(true)
            }
            error => Err(error),
        })
    }

    /// Deletes this flow, and no later one with the same addresses and ports. Returns `false` if it no longer exists.
    ///
    /// # Errors
    /// The kernel refuses, such as with EBUSY for a flow that is offloaded to hardware.
    pub fn delete(&mut self, flow: &Flow) -> Result<bool, ConntrackError> {
        const WHAT: &str = "delete a UDP flow";
        let family = if flow.original.source.is_ipv4() { Family::V4 } else { Family::V6 };
        self.send(WHAT, family, wire::delete(flow), NLM_F_ACK)?;
        let deleted = self.receive(WHAT, |_, payload| match payload {
            NetlinkPayload::Error(error) => match error.raw_code() {
                0 => Some(Ok(())),
                code => Some(Err(code)),
            },
            _ => None,
        });
        match deleted {
            Ok(()) => Ok(true),
            Err(ConntrackError::Failed { source, .. })
                if source.raw_os_error() == Some(Errno::ENOENT as i32) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn send(
        &mut self,
        what: &'static str,
        family: Family,
        request: NetfilterMessageInner,
        flags: u16,
    ) -> Result<(), ConntrackError> {
        let family = match family {
            Family::V4 => NetfilterProtoFamily::IPv4,
            Family::V6 => NetfilterProtoFamily::IPv6,
        };
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let message = NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), request);
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map(drop).map_err(|error| ConntrackError::new(what, error))
    }

    /// Passes every message that answers the request to `each`, until that returns the result: success or an error code
    /// (negative, as in the kernel).
    fn receive(
        &mut self,
        what: &'static str,
        mut each: impl FnMut(&NetlinkHeader, NetlinkPayload<NetfilterMessage>) -> Option<Result<(), i32>>,
    ) -> Result<(), ConntrackError> {
        let malformed = |reason: String| ConntrackError::Malformed { what, reason };
        loop {
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, 0) {
                Ok(length) if length > self.buffer.len() => {
                    return Err(malformed(format!("a message of {length} bytes")));
                }
                Ok(_) => {}
                // Interrupted by a signal: nothing was read.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ConntrackError::new(what, error)),
            }
            let mut rest = self.buffer.as_slice();
            while !rest.is_empty() {
                let length =
                    NetlinkBuffer::new_checked(rest).map_err(|error| malformed(error.to_string()))?.length();
                let message = NetlinkMessage::<NetfilterMessage>::deserialize(rest);
                rest = rest.get((length as usize).next_multiple_of(ALIGN)..).unwrap_or_default();
                let message = match message {
                    Ok(message) if message.header.sequence_number == self.sequence => message,
                    Ok(_) => continue,
                    Err(error) => {
                        tracing::debug!(%error, "conntrack message ignored");
                        continue;
                    }
                };
                match each(&message.header, message.payload) {
                    None => {}
                    Some(Ok(())) => return Ok(()),
                    Some(Err(code)) => {
                        let error = io::Error::from_raw_os_error(code.saturating_abs());
                        return Err(ConntrackError::new(what, error));
                    }
                }
            }
        }
    }
}

/// Returns whether every attempt was interrupted.
fn repeat_dump(mut once: impl FnMut() -> Result<bool, ConntrackError>) -> Result<bool, ConntrackError> {
    for _ in 0..DUMP_ATTEMPTS {
        if !once()? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_unknown_filter(error: &ConntrackError) -> bool {
    match error {
        ConntrackError::NotSupported { .. } => true,
        ConntrackError::Failed { source, .. } => source.raw_os_error() == Some(Errno::EINVAL as i32),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::Node, *};

    #[test]
    fn the_kernel_lists_udp_only() {
        for family in Family::ALL {
            Node::run(family, |node| {
                node.nat();
                node.send(4001, node.v, 53);
                let _connection = node.connect(node.v, 53);
                let mut conntrack = Conntrack::open().unwrap();
                let mut listed = |request| {
                    let (mut protocols, mut flows) = (HashSet::new(), HashSet::new());
                    let mut note = |flow: &Flow| protocols.insert(flow.protocol);
                    let interrupted = conntrack.dump_once(family, request, &mut note, &mut flows).unwrap();
                    assert!(!interrupted && !flows.is_empty());
                    protocols
                };
                assert_eq!(listed(wire::dump_all()), HashSet::from([6, 17]), "there is TCP");
                assert_eq!(listed(wire::dump_udp()), HashSet::from([17]));
            });
        }
    }

    #[test]
    fn an_interrupted_dump_is_repeated_five_times_and_used() {
        for (answers, asked, interrupted) in
            [(vec![false], 1, false), (vec![true, true, false], 3, false), (vec![true; 9], 5, true)]
        {
            let mut calls = 0;
            let result = repeat_dump(|| {
                calls += 1;
                Ok(answers[calls - 1])
            });
            assert_eq!((calls, result.unwrap()), (asked, interrupted), "{answers:?}");
        }
        let refused = repeat_dump(|| {
            Err(ConntrackError::new("list", io::Error::from_raw_os_error(Errno::EPERM as i32)))
        });
        assert!(matches!(refused, Err(ConntrackError::NotPermitted { what: "list" })), "{refused:?}");
    }
}
