//! The header of the PROXY protocol, versions 1 and 2.
//!
//! Owns: [`header`]. In: the addresses of a client's connection. Out: bytes that precede its data. Pure. Source:
//! <https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>.

use std::net::{IpAddr, SocketAddr};

use keelson_proxy::options::ProxyProtocol;

const SIGNATURE_V2: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY.
const PROXY_V2: u8 = 0x21;
/// Address families, with the transport STREAM.
const TCP_V4: u8 = 0x11;
const TCP_V6: u8 = 0x21;

/// `destination`: the frontend that the client connected to. Both are of one IP family; an IPv4-mapped address counts
/// as IPv4.
pub(crate) fn header(version: ProxyProtocol, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let (from, to) = (source.ip().to_canonical(), destination.ip().to_canonical());
    let ports = (source.port(), destination.port());
    match version {
        ProxyProtocol::V1 => v1(from, to, ports),
        ProxyProtocol::V2 => v2(from, to, ports),
    }
}

fn v1(from: IpAddr, to: IpAddr, (source, destination): (u16, u16)) -> Vec<u8> {
    let family = match (from, to) {
        (IpAddr::V4(_), IpAddr::V4(_)) => "TCP4",
        (IpAddr::V6(_), IpAddr::V6(_)) => "TCP6",
        _ => return b"PROXY UNKNOWN\r\n".to_vec(),
    };
    format!("PROXY {family} {from} {to} {source} {destination}\r\n").into_bytes()
}

fn v2(from: IpAddr, to: IpAddr, (source, destination): (u16, u16)) -> Vec<u8> {
    let mut addresses = Vec::with_capacity(36);
    let family = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            addresses.extend(from.octets());
            addresses.extend(to.octets());
            TCP_V4
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            addresses.extend(from.octets());
            addresses.extend(to.octets());
            TCP_V6
        }
        _ => 0,
    };
    if family != 0 {
        addresses.extend(source.to_be_bytes());
        addresses.extend(destination.to_be_bytes());
    }
    let mut header = SIGNATURE_V2.to_vec();
    header.extend([PROXY_V2, family]);
    header.extend(u16::try_from(addresses.len()).unwrap_or_default().to_be_bytes());
    header.extend(addresses);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn version_1() {
        for (source, destination, line) in [
            ("198.51.100.7:4000", "10.96.0.10:80", "PROXY TCP4 198.51.100.7 10.96.0.10 4000 80\r\n"),
            ("[2001:db8::7]:4000", "[fd00::a]:80", "PROXY TCP6 2001:db8::7 fd00::a 4000 80\r\n"),
            ("[::ffff:198.51.100.7]:1", "10.0.0.1:2", "PROXY TCP4 198.51.100.7 10.0.0.1 1 2\r\n"),
            ("198.51.100.7:1", "[fd00::a]:2", "PROXY UNKNOWN\r\n"),
        ] {
            assert_eq!(header(ProxyProtocol::V1, at(source), at(destination)), line.as_bytes());
        }
    }

    #[test]
    fn version_2() {
        let v4 = header(ProxyProtocol::V2, at("198.51.100.7:4000"), at("10.96.0.10:80"));
        assert_eq!(
            v4,
            [
                0x0d, 0x0a, 0x0d, 0x0a, 0x00, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a, // signature
                0x21, 0x11, 0x00, 0x0c, // PROXY, TCP over IPv4, 12 bytes
                198, 51, 100, 7, 10, 96, 0, 10, 0x0f, 0xa0, 0x00, 0x50,
            ]
        );
        let v6 = header(ProxyProtocol::V2, at("[2001:db8::7]:4000"), at("[fd00::a]:80"));
        assert_eq!(v6.len(), 16 + 36);
        assert_eq!(v6[12..16], [0x21, 0x21, 0x00, 0x24]);
        assert_eq!(v6[16..32], "2001:db8::7".parse::<std::net::Ipv6Addr>().unwrap().octets());
        assert_eq!(v6[48..], [0x0f, 0xa0, 0x00, 0x50]);
        let unknown = header(ProxyProtocol::V2, at("198.51.100.7:1"), at("[fd00::a]:2"));
        assert_eq!(unknown[12..], [0x21, 0x00, 0x00, 0x00]);
    }
}
