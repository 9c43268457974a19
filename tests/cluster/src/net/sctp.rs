//! Owns: the two SCTP packets that begin an association (RFC 9260), for kernels without SCTP sockets: netfilter still
//! tracks and translates the protocol, and checks its checksum.
//! In: ports, tags, a text. Out: encoded and decoded packets.

pub(super) const PROTOCOL: i32 = 132;

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
/// The parameter that an INIT ACK must have; its contents are up to the sender.
const STATE_COOKIE: u16 = 7;
/// Offset of the first chunk, which is also the length of the fixed part of an INIT and an INIT ACK.
const HEADER: usize = 12;
const FIXED: usize = 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source: u16,
    pub(super) destination: u16,
    pub(super) verification_tag: u32,
    pub(super) chunk: Chunk,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// Opens an association; responses carry this tag.
    Init { tag: u32 },
    /// Accepts it, with a text in the state cookie.
    InitAck { tag: u32, text: String },
}

impl Packet {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, tag, text) = match &self.chunk {
            Chunk::Init { tag } => (INIT, *tag, None),
            Chunk::InitAck { tag, text } => (INIT_ACK, *tag, Some(text.as_bytes())),
        };
        let parameter = text.map_or(0, |text| 4 + text.len());
        let mut bytes = Vec::new();
        bytes.extend(self.source.to_be_bytes());
        bytes.extend(self.destination.to_be_bytes());
        bytes.extend(self.verification_tag.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend([kind, 0]);
        bytes.extend(length(FIXED + parameter));
        bytes.extend(tag.to_be_bytes());
        // The window, one stream in each direction, and the first sequence number.
        bytes.extend(65_535_u32.to_be_bytes());
        bytes.extend([0, 1, 0, 1]);
        bytes.extend(1_u32.to_be_bytes());
        if let Some(text) = text {
            bytes.extend(STATE_COOKIE.to_be_bytes());
            bytes.extend(length(parameter));
            bytes.extend(text);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        let sum = crc32c(&bytes);
        bytes[8..12].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// None if it is neither of the two, or its checksum is wrong.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut summed = bytes.to_vec();
        summed.get_mut(8..12)?.fill(0);
        if crc32c(&summed).to_le_bytes() != bytes.get(8..12)? {
            return None;
        }
        let u16_at = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let tag = u32_at(HEADER + 4)?;
        let chunk = match *bytes.get(HEADER)? {
            INIT => Chunk::Init { tag },
            INIT_ACK => {
                let at = HEADER + FIXED;
                let text = bytes.get(at + 4..at + usize::from(u16_at(at + 2)?))?;
                Chunk::InitAck { tag, text: String::from_utf8(text.to_vec()).ok()? }
            }
            _ => return None,
        };
        Some(Self { source: u16_at(0)?, destination: u16_at(2)?, verification_tag: u32_at(4)?, chunk })
    }
}

fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes()
}

/// CRC-32C, bit by bit: packets are few and short.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_rfc() {
        // The check value of CRC-32C.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn packets_survive_a_round_trip() {
        let text = "10.244.1.11:8080 203.0.113.10".to_owned();
        for chunk in [Chunk::Init { tag: 7 }, Chunk::InitAck { tag: 9, text }] {
            let packet = Packet { source: 1, destination: 2, verification_tag: 3, chunk };
            let mut bytes = packet.encode();
            assert_eq!(Packet::decode(&bytes), Some(packet));
            bytes[0] ^= 1;
            assert_eq!(Packet::decode(&bytes), None);
        }
    }
}
