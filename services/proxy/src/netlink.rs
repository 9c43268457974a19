//! Netlink messages and sockets, for this crate and for backends.
//!
//! Owns: [`Connection`], and the encoding of messages and attributes. In: requests. Out: answers, and the error of each
//! request that failed.
//!
//! Many requests are one datagram, and only the last one asks for an acknowledgement: the kernel reports errors of the
//! others in any case, and works in order. So thousands of changes cost a few system calls.

use std::io;

pub use netlink_sys::protocols::{NETLINK_GENERIC, NETLINK_NETFILTER, NETLINK_ROUTE};
use netlink_sys::{Socket, SocketAddr};

// linux/netlink.h.
const HEADER_BYTES: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLA_F_NESTED: u16 = 1 << 15;
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Requests in one datagram. Their errors fit into the receive buffer of a socket.
const BATCH: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub kind: u16,
    pub flags: u16,
    /// The header of the protocol (genlmsghdr, ifaddrmsg) and attributes.
    pub body: Vec<u8>,
}

/// A request that the kernel refused: its place, and the error number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    pub at: usize,
    pub errno: i32,
}

#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    sequence: u32,
}

impl Connection {
    /// `protocol`: such as [`NETLINK_ROUTE`]. In the network namespace of the calling thread.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends all requests, and returns those that the kernel refused. It continues after a refused one.
    pub fn send_all(&mut self, requests: &[Request]) -> io::Result<Vec<Refused>> {
        let mut refused = Vec::new();
        for (number, batch) in requests.chunks(BATCH).enumerate() {
            let first = self.sequence;
            let mut datagram = Vec::new();
            for (at, request) in batch.iter().enumerate() {
                let ack = if at + 1 == batch.len() { NLM_F_ACK } else { 0 };
                self.append(&mut datagram, request, ack);
            }
            self.socket.send(&datagram, 0)?;
            let last = self.sequence;
            self.receive(|message| {
                let place = message.sequence.wrapping_sub(first.wrapping_add(1)) as usize;
                if message.kind != NLMSG_ERROR || place >= batch.len() {
                    return Ok(false);
                }
                let errno = error_number(message.body)?;
                if errno != 0 {
                    refused.push(Refused { at: number * BATCH + place, errno });
                }
                Ok(message.sequence == last)
            })?;
        }
        Ok(refused)
    }

    /// Sends a request, and passes the body of each answer.
    pub fn dump(&mut self, request: &Request, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        self.ask(request, NLM_F_DUMP, &mut each)
    }

    /// Sends a request that has one answer, or an error.
    pub fn get(&mut self, request: &Request) -> io::Result<Vec<u8>> {
        let mut answer = Vec::new();
        self.ask(request, NLM_F_ACK, &mut |body| answer.extend_from_slice(body))?;
        Ok(answer)
    }

    fn ask(&mut self, request: &Request, flags: u16, each: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let mut datagram = Vec::new();
        self.append(&mut datagram, request, flags);
        self.socket.send(&datagram, 0)?;
        let sequence = self.sequence;
        self.receive(|message| {
            if message.sequence != sequence {
                return Ok(false);
            }
            match message.kind {
                NLMSG_DONE => Ok(true),
                NLMSG_ERROR => match error_number(message.body)? {
                    0 => Ok(true),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                },
                _ => {
                    each(message.body);
                    Ok(false)
                }
            }
        })
    }

    fn append(&mut self, datagram: &mut Vec<u8>, request: &Request, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let length = HEADER_BYTES + request.body.len();
        datagram.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        datagram.extend(request.kind.to_ne_bytes());
        datagram.extend((NLM_F_REQUEST | request.flags | flags).to_ne_bytes());
        datagram.extend(self.sequence.to_ne_bytes());
        datagram.extend([0; 4]);
        datagram.extend(&request.body);
        datagram.resize(datagram.len().next_multiple_of(4), 0);
    }

    /// Receives until `done` says so. Answers to earlier requests are skipped.
    fn receive(&mut self, mut done: impl FnMut(&Message<'_>) -> io::Result<bool>) -> io::Result<()> {
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while let Some((message, next)) = Message::split(rest) {
                if done(&message)? {
                    return Ok(());
                }
                rest = next;
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Message<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

impl<'a> Message<'a> {
    /// The first message, and what follows.
    fn split(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
        let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
        let sequence = u32::from_ne_bytes(*bytes.get(8..)?.first_chunk()?);
        let body = bytes.get(HEADER_BYTES..length)?;
        Some((Self { kind, sequence, body }, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
    }
}

fn error_number(body: &[u8]) -> io::Result<i32> {
    let code = body.first_chunk().map(|code| i32::from_ne_bytes(*code));
    code.map(i32::saturating_abs).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Attributes, appended to a message.
#[derive(Debug, Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// After a header of the protocol.
    pub fn after(header: &[u8]) -> Self {
        Self(header.to_vec())
    }

    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn u16(self, kind: u16, value: u16) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// In network byte order, as ports are.
    pub fn be16(self, kind: u16, value: u16) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Terminated by a zero byte.
    pub fn text(self, kind: u16, value: &str) -> Self {
        let bytes: Vec<u8> = value.bytes().chain([0]).collect();
        self.bytes(kind, &bytes)
    }

    pub fn nested(self, kind: u16, inner: Self) -> Self {
        self.bytes(kind | NLA_F_NESTED, &inner.0)
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Type and value of each attribute, up to the first one that is truncated.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & NLA_TYPE_MASK, value))
    })
}

/// A number in the byte order of the machine.
pub fn number(value: &[u8]) -> Option<u32> {
    match value.len() {
        2 => value.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes).into()),
        _ => value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_written() {
        let inner = Attributes::default().be16(4, 80).text(6, "rr");
        let bytes = Attributes::after(&[9; 4]).u16(1, 2).u32(2, 3).nested(3, inner).into_bytes();
        let found: Vec<_> = attributes(&bytes[4..]).collect();
        assert_eq!(found[0], (1, &2_u16.to_ne_bytes()[..]));
        assert_eq!((found[1].0, number(found[1].1)), (2, Some(3)));
        let inner: Vec<_> = attributes(found[2].1).collect();
        assert_eq!(inner, [(4, &[0, 80][..]), (6, &b"rr\0"[..])]);
        for length in 0..bytes.len() {
            // Nothing is made up from a part.
            let count = attributes(&bytes[4.min(length)..length]).count();
            assert!(count < 3, "{length}");
        }
    }

    #[test]
    fn messages_are_split() {
        let mut connection = Connection::open(NETLINK_ROUTE).unwrap();
        let request = |body: &[u8]| Request { kind: 7, flags: 0x200, body: body.to_vec() };
        let mut datagram = Vec::new();
        connection.append(&mut datagram, &request(&[1, 2, 3]), NLM_F_ACK);
        connection.append(&mut datagram, &request(&[4]), 0);
        let (first, rest) = Message::split(&datagram).unwrap();
        assert_eq!((first.kind, first.sequence, first.body), (7, 1, &[1, 2, 3][..]));
        let (second, rest) = Message::split(rest).unwrap();
        assert_eq!((second.sequence, second.body, rest.len()), (2, &[4][..], 0));
        assert_eq!(Message::split(rest), None);
        for length in 0..HEADER_BYTES + 3 {
            assert_eq!(Message::split(&datagram[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn the_kernel_reports_each_refused_request() {
        // Deletes an interface and an address that do not exist.
        let mut connection = Connection::open(NETLINK_ROUTE).unwrap();
        let delete = Request {
            kind: 17,
            flags: 0,
            body: Attributes::after(&[0; 16]).text(3, "keelson-none").into_bytes(),
        };
        let refused = connection.send_all(&vec![delete; 300]).unwrap();
        let places: Vec<usize> = refused.iter().map(|refused| refused.at).collect();
        assert_eq!(places, (0..300).collect::<Vec<_>>());
    }
}
