//! Encoding of netlink messages.
//!
//! Owns: [`Buffer`], to which messages are appended, and the decoding of headers, errors and attributes. In and out:
//! bytes. Messages about tables, chains, rules and sets are those of `netlink-packet-netfilter`; elements are written
//! attribute by attribute, because there are very many.

use keelson_proxy::model::Family;
use netlink_packet_core::{
    NLA_F_NESTED, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, NlaBuffer, NlasIterator,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use nix::errno::Errno;

/// The length of `nlmsghdr`.
pub(super) const HEADER: usize = 16;

/// The length of `nfgenmsg`, which follows it.
pub(super) const GENERIC: usize = 4;

/// `NFNL_SUBSYS_NFTABLES`, the upper half of the type of every message.
pub(super) const SUBSYSTEM: u16 = 10;

/// Types of the messages whose attributes are read here.
pub(super) mod message {
    pub(in crate::kernel) const NEW_TABLE: u16 = 0;
    pub(in crate::kernel) const NEW_CHAIN: u16 = 3;
    pub(in crate::kernel) const NEW_RULE: u16 = 6;
    pub(in crate::kernel) const NEW_SET: u16 = 9;
    pub(in crate::kernel) const NEW_SET_ELEMENT: u16 = 12;
    pub(in crate::kernel) const GET_SET_ELEMENT: u16 = 13;
    pub(in crate::kernel) const DELETE_SET_ELEMENT: u16 = 14;
    pub(in crate::kernel) const NEW_GENERATION: u16 = 15;
    pub(in crate::kernel) const NEW_FLOWTABLE: u16 = 22;
    pub(in crate::kernel) const DELETE_FLOWTABLE: u16 = 24;
}

/// `NLMSG_ERROR` and `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// `NLM_F_CAPPED`: the answer repeats only the header of the failed message. `NLM_F_ACK_TLVS`: attributes follow.
const CAPPED: u16 = 0x100;
const ATTRIBUTES_FOLLOW: u16 = 0x200;

/// `NLMSGERR_ATTR_MSG` and `NLMSGERR_ATTR_OFFS`.
const MESSAGE: u16 = 1;
const OFFSET: u16 = 2;

pub(super) const fn protocol(family: Family) -> NetfilterProtoFamily {
    match family {
        Family::V4 => NetfilterProtoFamily::IPv4,
        Family::V6 => NetfilterProtoFamily::IPv6,
    }
}

#[derive(Debug, Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
}

/// Start of a message or of a nested attribute: the length is written at the end.
#[derive(Debug)]
#[must_use]
pub(super) struct Open(usize);

impl Buffer {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    pub(super) fn message<T: Into<NetfilterMessageInner>>(
        &mut self,
        family: NetfilterProtoFamily,
        resource: u16,
        flags: u16,
        sequence: u32,
        inner: T,
    ) {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = sequence;
        let payload = NetfilterMessage::new(NetfilterHeader::new(family, 0, resource), inner);
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(payload));
        message.finalize();
        let start = self.bytes.len();
        self.bytes.resize(start + message.buffer_len(), 0);
        if let Some(place) = self.bytes.get_mut(start..) {
            message.serialize(place);
        }
    }

    /// Begins a message of nf_tables that is written attribute by attribute.
    pub(super) fn begin(&mut self, kind: u16, family: Family, flags: u16, sequence: u32) -> Open {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&((SUBSYSTEM << 8) | kind).to_ne_bytes());
        self.bytes.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        self.bytes.extend_from_slice(&sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&[u8::from(protocol(family)), 0, 0, 0]);
        Open(start)
    }

    pub(super) fn end(&mut self, open: Open) {
        let len = (self.bytes.len() - open.0) as u32;
        if let Some(place) = self.bytes.get_mut(open.0..open.0 + 4) {
            place.copy_from_slice(&len.to_ne_bytes());
        }
    }

    pub(super) fn nest(&mut self, kind: u16) -> Open {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NLA_F_NESTED).to_ne_bytes());
        Open(start)
    }

    /// Ends an attribute of less than 64 KiB.
    pub(super) fn close(&mut self, open: Open) {
        let len = self.bytes.len() - open.0;
        debug_assert!(u16::try_from(len).is_ok(), "an attribute of {len} bytes");
        if let Some(place) = self.bytes.get_mut(open.0..open.0 + 2) {
            place.copy_from_slice(&(len as u16).to_ne_bytes());
        }
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }

    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let open = self.plain(kind);
        self.bytes.extend_from_slice(value);
        self.close(open);
    }

    /// Writes a text with a final NUL.
    pub(super) fn text(&mut self, kind: u16, value: impl std::fmt::Display) {
        use std::io::Write;
        let open = self.plain(kind);
        // Writing to memory cannot fail.
        let _ = write!(self.bytes, "{value}\0");
        self.close(open);
    }

    fn plain(&mut self, kind: u16) -> Open {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        Open(start)
    }

    /// Sets flags of the message that begins at `start`.
    pub(super) fn add_flags(&mut self, start: usize, flags: u16) {
        if let Some(place) = self.bytes.get_mut(start + 6..start + 8) {
            let old = u16::from_ne_bytes([place[0], place[1]]);
            place.copy_from_slice(&(old | flags).to_ne_bytes());
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Incoming<'a> {
    pub(super) sequence: u32,
    pub(super) body: Body<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body<'a> {
    /// An nf_tables message; `kind` is its type.
    Message {
        kind: u16,
        family: u8,
        attributes: &'a [u8],
    },
    /// End of a dump; an error if it could not be finished.
    Done(Option<Errno>),
    Acknowledged,
    /// `offset`: position of the fault in the rejected message; `reported`: extended error text. Both only if the kernel
    /// reports them.
    Failed {
        errno: Errno,
        offset: Option<usize>,
        reported: Option<&'a str>,
    },
    Other,
}

/// Splits a datagram into messages. Errors say what is malformed.
pub(super) fn incoming(datagram: &[u8]) -> impl Iterator<Item = Result<Incoming<'_>, String>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let parsed = split(rest);
        rest = match &parsed {
            Ok((_, rest)) => rest,
            Err(_) => &[],
        };
        Some(parsed.map(|(message, _)| message))
    })
}

fn split(bytes: &[u8]) -> Result<(Incoming<'_>, &[u8]), String> {
    let short = || format!("a datagram ends within a message: {} bytes are left", bytes.len());
    let (header, _) = bytes.split_first_chunk::<HEADER>().ok_or_else(short)?;
    let [l0, l1, l2, l3, t0, t1, f0, f1, s0, s1, s2, s3, ..] = *header;
    let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
    let (kind, flags) = (u16::from_ne_bytes([t0, t1]), u16::from_ne_bytes([f0, f1]));
    let payload = bytes.get(HEADER..len).ok_or_else(short)?;
    let body = match kind {
        ERROR => failure(payload, flags)?,
        DONE => Body::Done(first_errno(payload)),
        kind if kind >> 8 == SUBSYSTEM => {
            let (generic, attributes) = payload.split_first_chunk::<GENERIC>().ok_or_else(short)?;
            Body::Message { kind: kind & 0xff, family: generic[0], attributes }
        }
        _ => Body::Other,
    };
    let message = Incoming { sequence: u32::from_ne_bytes([s0, s1, s2, s3]), body };
    Ok((message, bytes.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

/// The errno at the beginning of an answer; `None` if it is 0 or missing.
fn first_errno(payload: &[u8]) -> Option<Errno> {
    let code = i32::from_ne_bytes(*payload.first_chunk::<4>()?);
    (code != 0).then(|| Errno::from_raw(code.wrapping_neg()))
}

fn failure(payload: &[u8], flags: u16) -> Result<Body<'_>, String> {
    let (_, about) = payload.split_first_chunk::<4>().ok_or("an error without a number")?;
    let Some(errno) = first_errno(payload) else {
        return Ok(Body::Acknowledged);
    };
    let (mut offset, mut reported) = (None, None);
    let len = about.first_chunk::<4>().map_or(0, |len| u32::from_ne_bytes(*len) as usize);
    let skipped = if flags & CAPPED != 0 { HEADER } else { len.next_multiple_of(4) };
    if flags & ATTRIBUTES_FOLLOW != 0 {
        for attribute in attributes(about.get(skipped..).unwrap_or_default()) {
            match attribute {
                Ok((OFFSET, value)) => {
                    offset = value.first_chunk::<4>().map(|value| u32::from_ne_bytes(*value) as usize);
                }
                Ok((MESSAGE, value)) => {
                    reported = std::str::from_utf8(value).ok().map(|text| text.trim_end_matches('\0'))
                }
                // Extended error data is optional: the error is valid without it.
                Ok(_) | Err(_) => {}
            }
        }
    }
    Ok(Body::Failed { errno, offset, reported })
}

/// Splits bytes into kinds and values. Errors say what is malformed.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), String>> {
    NlasIterator::new(bytes).map(|attribute| {
        let attribute: NlaBuffer<&[u8]> = attribute.map_err(|error| error.to_string())?;
        let value: &[u8] = attribute.into_inner().get(4..usize::from(attribute.length())).unwrap_or_default();
        Ok((attribute.kind(), value))
    })
}

/// A text attribute without its final NUL.
pub(super) fn text(value: &[u8]) -> Result<&str, String> {
    let value = value.strip_suffix(&[0]).unwrap_or(value);
    std::str::from_utf8(value).map_err(|error| format!("a name that is not UTF-8: {error}"))
}

/// A number in network byte order.
pub(super) fn number(value: &[u8]) -> Result<u32, String> {
    let bytes: [u8; 4] = value.try_into().map_err(|_| format!("a number of {} bytes", value.len()))?;
    Ok(u32::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let len = (HEADER + payload.len()) as u32;
        [
            &len.to_ne_bytes()[..],
            &kind.to_ne_bytes(),
            &flags.to_ne_bytes(),
            &7_u32.to_ne_bytes(),
            &[0; 4],
            payload,
        ]
        .concat()
    }

    fn one(datagram: &[u8]) -> Result<Incoming<'_>, String> {
        let mut messages = incoming(datagram);
        let first = messages.next().unwrap();
        assert!(messages.next().is_none());
        first
    }

    #[test]
    fn an_error_contains_number_offset_and_text() {
        let repeated = [0; HEADER];
        let text = [8, 0, 1, 0, b'n', b'o', b'!', 0];
        let place = [&[8, 0, 2, 0][..], &40_u32.to_ne_bytes()].concat();
        let payload = [&(-17_i32).to_ne_bytes()[..], &repeated, &text, &place].concat();
        let bytes = datagram(ERROR, CAPPED | ATTRIBUTES_FOLLOW, &payload);
        assert_eq!(
            one(&bytes).unwrap(),
            Incoming {
                sequence: 7,
                body: Body::Failed { errno: Errno::EEXIST, offset: Some(40), reported: Some("no!") }
            }
        );
        let plain = datagram(ERROR, 0, &[&(-1_i32).to_ne_bytes()[..], &repeated].concat());
        assert_eq!(
            one(&plain).unwrap().body,
            Body::Failed { errno: Errno::EPERM, offset: None, reported: None }
        );
        let taken = datagram(ERROR, CAPPED, &[&[0; 4][..], &repeated].concat());
        assert_eq!(one(&taken).unwrap().body, Body::Acknowledged);
    }

    #[test]
    fn the_end_of_a_dump_may_be_an_error() {
        let end = |code: i32| datagram(DONE, 0, &code.to_ne_bytes());
        assert_eq!(one(&end(0)).unwrap().body, Body::Done(None));
        assert_eq!(one(&end(-2)).unwrap().body, Body::Done(Some(Errno::ENOENT)));
    }

    #[test]
    fn truncated_or_wrong_input_is_an_error() {
        let whole = datagram((SUBSYSTEM << 8) | message::NEW_TABLE, 0, &[2, 0, 0, 0]);
        assert!(matches!(
            one(&whole).unwrap().body,
            Body::Message { kind: message::NEW_TABLE, family: 2, .. }
        ));
        for end in 1..whole.len() {
            assert!(one(&whole[..end]).is_err(), "{end} bytes");
        }
        for len in [0_u32, 15, u32::MAX] {
            let mut wrong = whole.clone();
            wrong[..4].copy_from_slice(&len.to_ne_bytes());
            assert!(one(&wrong).is_err(), "length {len}");
        }
        assert!(one(&datagram(ERROR, ATTRIBUTES_FOLLOW, &[1])).is_err());
    }

    #[test]
    fn attributes_are_padded_and_lengths_filled_in() {
        let mut buffer = Buffer::default();
        let outer = buffer.nest(3);
        buffer.text(1, "abcd");
        buffer.attribute(2, &[9]);
        buffer.close(outer);
        let (kind, value) = attributes(buffer.as_slice()).next().unwrap().unwrap();
        assert_eq!(kind, 3);
        let inner: Vec<_> = attributes(value).map(Result::unwrap).collect();
        assert_eq!(inner, [(1, &b"abcd\0"[..]), (2, &[9][..])]);
        assert_eq!(text(inner[0].1), Ok("abcd"));
    }
}
