//! The count of transactions of nf_tables.
//!
//! Owns: [`generation`]. In: the network namespace of the calling thread. Out: a number that grows with each commit of any
//! program, also of iptables-nft. iptables-legacy and IP sets have none.

use keelson_proxy::netlink::{Connection, NETLINK_NETFILTER, Request, attributes};

/// The header of nfnetlink: family, version and resource.
const NFGENMSG: [u8; 4] = [0; 4];

/// `None`: the kernel does not tell.
pub(crate) fn generation() -> Option<u32> {
    const NFNL_SUBSYS_NFTABLES: u16 = 10;
    const NFT_MSG_GETGEN: u16 = 16;
    let kind = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN;
    let request = Request { kind, flags: 0, body: NFGENMSG.to_vec() };
    parse(&Connection::open(NETLINK_NETFILTER).ok()?.get(&request).ok()?)
}

fn parse(answer: &[u8]) -> Option<u32> {
    const NFTA_GEN_ID: u16 = 1;
    let mut attributes = attributes(answer.get(NFGENMSG.len()..)?);
    let (_, number) = attributes.find(|(kind, _)| *kind == NFTA_GEN_ID)?;
    number.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_found_among_attributes() {
        let mut answer = NFGENMSG.to_vec();
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
