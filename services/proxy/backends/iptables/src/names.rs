//! Names of the chains of Services.
//!
//! Owns: the names of chains that depend on Services, and which sets always exist. In: what a chain is for. Out: names that
//! are the same in every run and on every node.

use std::net::IpAddr;

use keelson_proxy::model::{Endpoint, Family, PortName, Protocol};
pub(crate) use keelson_proxy_xtables::names::*;

/// The sets that always exist.
pub(crate) const FIXED_SETS: [SetKind; 5] =
    [SetKind::Hairpin, SetKind::Reject, SetKind::Drop, SetKind::RejectNodePorts, SetKind::DropNodePorts];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortChain {
    /// Chooses an endpoint of ClusterSet.
    Cluster,
    /// Chooses an endpoint of LocalSet.
    Local,
    /// Decides between the two by the source: externalTrafficPolicy Local.
    External,
}

pub(crate) fn port_chain(kind: PortChain, name: &PortName) -> String {
    let letter = match kind {
        PortChain::Cluster => 'C',
        PortChain::Local => 'L',
        PortChain::External => 'X',
    };
    format!("{PREFIX}{letter}-{}", hash(&port_text(name)))
}

/// Admits the sources of a load-balancer address.
pub(crate) fn ranges_chain(name: &PortName, ip: IpAddr) -> String {
    format!("{PREFIX}R-{}", hash(&format!("{} {ip}", port_text(name))))
}

/// Remembers the client and translates to one endpoint.
pub(crate) fn endpoint_chain(name: &PortName, endpoint: Endpoint) -> String {
    format!("{PREFIX}E-{}", hash(&format!("{} {endpoint}", port_text(name))))
}

/// A node of the tree over addresses.
pub(crate) fn address_chain(family: Family, prefix: u128, length: u8) -> String {
    match family {
        Family::V4 => format!("{PREFIX}A-{prefix:08x}-{length}"),
        Family::V6 => {
            let hash = hash(&format!("{prefix:032x}"));
            format!("{PREFIX}A-{}-{length}", &hash[..13])
        }
    }
}

/// A node of the tree over node ports.
pub(crate) fn node_port_chain(protocol: Protocol, prefix: u128, length: u8) -> String {
    format!("{PREFIX}N-{}-{prefix:04x}-{length}", protocol.as_str())
}

#[cfg(test)]
mod tests {
    use keelson_client::ServiceName;

    use super::*;

    #[test]
    fn names_fit_and_differ() {
        let port = |service: &str, port: &str, protocol| PortName {
            service: ServiceName::new("a-namespace", service),
            port: port.into(),
            protocol,
        };
        let (a, b) = (port("web", "http", Protocol::Tcp), port("web", "http", Protocol::Udp));
        let endpoint = Endpoint { ip: "10.0.0.1".parse().unwrap(), port: 80 };
        let chains = [
            port_chain(PortChain::Cluster, &a),
            port_chain(PortChain::Cluster, &b),
            port_chain(PortChain::Local, &a),
            port_chain(PortChain::External, &a),
            ranges_chain(&a, "10.0.0.1".parse().unwrap()),
            endpoint_chain(&a, endpoint),
            address_chain(Family::V4, 0x0a60_0000, 12),
            address_chain(Family::V6, u128::MAX, 128),
            node_port_chain(Protocol::Sctp, 0x7530, 16),
            REFUSE_NODE_PORTS.to_owned(),
        ];
        let distinct: std::collections::BTreeSet<_> = chains.iter().collect();
        assert_eq!(distinct.len(), chains.len());
        for chain in &chains {
            assert!(chain.len() <= 28 && chain.starts_with(PREFIX), "{chain}");
        }
        // Names are in the kernel while another version of the program starts.
        assert_eq!(chains[0], "KEELSON-C-LPYC56QZWFO2KTC5");
        for kind in FIXED_SETS {
            assert!(SetName::fixed(Family::V6, kind).as_str().len() <= 31);
        }
        let set = SetName::affinity(Family::V4, &a, endpoint);
        assert!(is_affinity(Family::V4, set.as_str()) && !is_affinity(Family::V6, set.as_str()));
        assert!(set.as_str().len() <= 31);
    }

    #[test]
    fn ranks_follow_references() {
        let order = [
            "KEELSON-E-X",
            "KEELSON-C-X",
            "KEELSON-X-X",
            "KEELSON-R-X",
            "KEELSON-A-00000000-32",
            "KEELSON-A-00000000-0",
            NODE_PORTS,
            SERVICES,
            NAT_OUTPUT,
        ];
        assert!(order.windows(2).all(|pair| rank(pair[0]) < rank(pair[1])));
    }
}
