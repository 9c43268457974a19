//! The count of transactions of nf_tables.
//!
//! Owns: [`generation`]. In: the network namespace of the calling thread. Out: a number that grows with each commit of any
//! program, also of iptables-nft. iptables-legacy and IP sets have none.

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};

/// A request `NFT_MSG_GETGEN`: a netlink header (length, type, flags, sequence number, port), then the family, version and
/// resource of nfnetlink. Numbers have the byte order of the machine, and here no more than one byte that is not 0.
fn request() -> Vec<u8> {
    const LENGTH: u32 = 20;
    const NFNL_SUBSYS_NFTABLES: u16 = 10;
    const NFT_MSG_GETGEN: u16 = 16;
    const NLM_F_REQUEST: u16 = 1;
    let mut bytes = Vec::new();
    bytes.extend(LENGTH.to_ne_bytes());
    bytes.extend((NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN).to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 12]);
    bytes
}

/// `None`: the kernel does not tell.
pub(crate) fn generation() -> Option<u32> {
    let socket = Socket::new(NETLINK_NETFILTER).ok()?;
    // The kernel answers before `send` returns.
    socket.set_non_blocking(true).ok()?;
    socket.connect(&netlink_sys::SocketAddr::new(0, 0)).ok()?;
    socket.send(&request(), 0).ok()?;
    let (answer, _) = socket.recv_from_full().ok()?;
    parse(&answer)
}

fn parse(answer: &[u8]) -> Option<u32> {
    const HEADERS: usize = 20;
    const NFTA_GEN_ID: u16 = 1;
    let mut rest = answer.get(HEADERS..)?;
    while let [a, b, c, d, ..] = *rest {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        if u16::from_ne_bytes([c, d]) == NFTA_GEN_ID {
            return Some(u32::from_be_bytes(rest.get(4..8)?.try_into().ok()?));
        }
        rest = rest.get(length.max(4).next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_found_among_attributes() {
        let mut answer = vec![0; 20];
        answer.extend(6_u16.to_ne_bytes());
        answer.extend(2_u16.to_ne_bytes());
        answer.extend([7, 7, 0, 0]);
        answer.extend(8_u16.to_ne_bytes());
        answer.extend(1_u16.to_ne_bytes());
        answer.extend(300_u32.to_be_bytes());
        assert_eq!(parse(&answer), Some(300));
        for length in 0..answer.len() {
            assert_eq!(parse(&answer[..length]), None, "{length}");
        }
    }
}
