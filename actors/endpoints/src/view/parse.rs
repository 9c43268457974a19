//! Addresses and CIDRs in the text forms of Kubernetes.
//!
//! Owns: which texts are addresses or CIDRs, and their canonical form. In: any text. Out: values of `std`, or
//! nothing.
//!
//! Kubernetes still accepts what old clusters stored (`k8s.io/utils/net`, `ParseIPSloppy` and `ParseCIDRSloppy`):
//! leading zeros of a number are ignored, so `10.0.0.041` is `10.0.0.41`. An IPv4 address mapped into IPv6 is that
//! IPv4 address.

use std::net::IpAddr;

use ipnet::IpNet;
pub(super) use keelson_proto::family::Family;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PerFamily<T>([T; 2]);

impl<T> PerFamily<T> {
    pub(super) fn new(v4: T, v6: T) -> Self {
        Self([v4, v6])
    }
}

impl<T> std::ops::Index<Family> for PerFamily<T> {
    type Output = T;

    fn index(&self, family: Family) -> &T {
        let [v4, v6] = &self.0;
        match family {
            Family::V4 => v4,
            Family::V6 => v6,
        }
    }
}

impl<T> std::ops::IndexMut<Family> for PerFamily<T> {
    fn index_mut(&mut self, family: Family) -> &mut T {
        let [v4, v6] = &mut self.0;
        match family {
            Family::V4 => v4,
            Family::V6 => v6,
        }
    }
}

pub(super) fn address(text: &str) -> Option<IpAddr> {
    as_written(text).map(|address| address.to_canonical())
}

/// `None` if it is not a CIDR; host bits are cleared.
pub(super) fn cidr(text: &str) -> Option<IpNet> {
    let (address, prefix) = text.split_once('/')?;
    // `parse` alone would accept a sign.
    if !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let prefix: u8 = prefix.parse().ok()?;
    let (network, prefix) = match as_written(address)? {
        IpAddr::V6(address) => match (address.to_ipv4_mapped(), prefix.checked_sub(96)) {
            (Some(mapped), Some(prefix)) => (mapped.into(), prefix),
            _ => (address.into(), prefix),
        },
        address => (address, prefix),
    };
    Some(IpNet::new(network, prefix).ok()?.trunc())
}

/// Does not resolve IPv4 mapped in IPv6, because the prefix of a CIDR counts the bits as written.
fn as_written(text: &str) -> Option<IpAddr> {
    text.parse().ok().or_else(|| without_leading_zeros(text)?.parse().ok())
}

/// `None` if there are none: then the text is invalid for another reason.
fn without_leading_zeros(text: &str) -> Option<String> {
    let mut kept = String::new();
    let mut characters = text.chars().peekable();
    let mut starts_number = true;
    while let Some(character) = characters.next() {
        let leads =
            starts_number && character == '0' && characters.peek().is_some_and(char::is_ascii_hexdigit);
        if !leads {
            kept.push(character);
            starts_number = !character.is_ascii_hexdigit();
        }
    }
    (kept.len() < text.len()).then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_kubernetes_reads_them() {
        for (text, canonical) in [
            ("10.0.0.1", "10.0.0.1"),
            ("172.30.0.041", "172.30.0.41"),
            ("10.180.00.001", "10.180.0.1"),
            ("0000000010.0.0.08", "10.0.0.8"),
            ("000.000.000.000", "0.0.0.0"),
            ("FD00::0A", "fd00::a"),
            ("fd00:0000:0000:0000:0000:0000:0000:00001", "fd00::1"),
            ("::", "::"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("::ffff:a00:1", "10.0.0.1"),
            ("::ffff:10.00.0.01", "10.0.0.1"),
            ("64:ff9b::10.0.0.01", "64:ff9b::a00:1"),
        ] {
            assert_eq!(address(text).map(|ip| ip.to_string()).as_deref(), Some(canonical), "{text}");
        }
        for text in [
            "",
            " ",
            " 10.0.0.1",
            "10.0.0.1 ",
            "10.0.0",
            "10.0.0.256",
            "10.0.0.1.1",
            "0x10.0.0.1",
            "10.0.0.a",
            "None",
            "fe80::1%eth0",
            "1::2::3",
            "10.0.0.1/32",
            "00",
            "0010",
            "::00010000",
            "１0.0.0.1",
            "10..0.1",
            "+1.0.0.1",
        ] {
            assert_eq!(address(text), None, "{text:?}");
        }
    }

    #[test]
    fn cidrs_are_read_as_kubernetes_reads_them() {
        for (text, canonical) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3/32", "10.1.2.3/32"),
            ("010.1.2.3/08", "10.0.0.0/8"),
            ("1.2.3.4/0", "0.0.0.0/0"),
            ("fd00:1::1/32", "fd00:1::/32"),
            ("fd00::1/128", "fd00::1/128"),
            ("fd00::/0", "::/0"),
            ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
            ("::ffff:10.1.2.3/96", "0.0.0.0/0"),
            ("::ffff:10.1.2.3/80", "::/80"),
        ] {
            assert_eq!(cidr(text).map(|cidr| cidr.to_string()).as_deref(), Some(canonical), "{text}");
        }
        for text in [
            "",
            "/",
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "10.0.0.0/8 ",
            "::/129",
            "::ffff:10.0.0.0/129",
            "/8",
            "10.0.0.0/8/8",
            "10.0.0.0/255.0.0.0",
            "10.0.0.0/256",
        ] {
            assert_eq!(cidr(text), None, "{text:?}");
        }
    }

    #[test]
    fn networks_are_ordered_by_family_and_number() {
        let mut cidrs: Vec<_> = ["fd00::/64", "100.0.0.0/8", "20.0.0.0/8", "20.0.0.0/7"]
            .iter()
            .filter_map(|text| cidr(text))
            .collect();
        cidrs.sort_unstable();
        let texts: Vec<_> = cidrs.iter().map(IpNet::to_string).collect();
        assert_eq!(texts, ["20.0.0.0/7", "20.0.0.0/8", "100.0.0.0/8", "fd00::/64"]);
    }
}
