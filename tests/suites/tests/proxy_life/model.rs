//! Owns: the tests' model of Services. In: differences from the usual. Out: manifests, and the endpoints that each
//! frontend must lead to.

use anyhow::Result;
use keelson_cluster::manifests::ManifestFolder;
use keelson_cluster::net::plan::{LOCALS, REMOTES, local, remote};
use keelson_cluster::net::{Family, Transport};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(crate) const NODE_NAME: &str = "node";
pub(crate) const PORT: u16 = 80;

/// A destination of packets to a Service: an address, or None for a node port; the protocol; the port.
pub(crate) type Frontend = (Option<IpAddr>, Transport, u16);

/// The endpoints of each frontend. An empty set: refused.
pub(crate) type Meaning = BTreeMap<Frontend, BTreeSet<SocketAddr>>;

/// A Service of one family with one slice.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) family: Family,
    /// V and all other addresses and ports are derived from this number.
    number: u16,
    pub(crate) endpoints: Vec<SocketAddr>,
    pub(crate) transports: Vec<Transport>,
    pub(crate) affinity: Option<u32>,
    pub(crate) external: Vec<IpAddr>,
    pub(crate) node_port: Option<u16>,
}

impl Service {
    /// TCP, with only V. `number` is below 4096, and unique in the test.
    pub(crate) fn new(number: u16, family: Family, endpoints: &[SocketAddr]) -> Self {
        Self {
            name: format!("s{number}"),
            family,
            number,
            endpoints: endpoints.to_vec(),
            transports: vec![Transport::Tcp],
            affinity: None,
            external: Vec::new(),
            node_port: None,
        }
    }

    /// Gives it a node port that no other Service has.
    pub(crate) fn expose(&mut self) {
        self.node_port = Some(30_990 + self.number);
    }

    /// Writes the Service and its slice as one manifest.
    pub(crate) fn write(&self, manifests: &ManifestFolder) -> Result<()> {
        manifests.put(&format!("{}.json", self.name), &self.objects())
    }

    pub(crate) fn delete(&self, manifests: &ManifestFolder) -> Result<()> {
        manifests.remove(&format!("{}.json", self.name))
    }

    pub(crate) fn ip(&self) -> IpAddr {
        let [high, low] = self.number.to_be_bytes();
        match self.family {
            Family::V4 => Ipv4Addr::new(10, 96, 16 + high, low).into(),
            Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x1000 + self.number).into(),
        }
    }

    pub(crate) fn at(&self) -> SocketAddr {
        SocketAddr::new(self.ip(), PORT)
    }

    /// An external address that no other Service has.
    pub(crate) fn own_external(&self) -> IpAddr {
        let [high, low] = self.number.to_be_bytes();
        match self.family {
            Family::V4 => Ipv4Addr::new(172, 30, high, low).into(),
            Family::V6 => Ipv6Addr::new(0xfd00, 0xee, 0, 0, 0, 2, self.number, 0).into(),
        }
    }

    /// An external address that encodes a version of the Service: once the kernel has it, it has that version. For
    /// numbers below 16.
    pub(crate) fn marker(&self, version: u16) -> IpAddr {
        match self.family {
            Family::V4 => {
                let [high, low] = ((self.number % 16) << 12 | version & 0xfff).to_be_bytes();
                Ipv4Addr::new(172, 31, high, low).into()
            }
            Family::V6 => Ipv6Addr::new(0xfd00, 0xee, 0, 0, 0, 1, self.number, version).into(),
        }
    }

    pub(crate) fn objects(&self) -> [Value; 2] {
        let ports = |number: u16, own: bool| {
            let one = |transport: &Transport| {
                let mut port = json!({"name": transport.name().to_lowercase(), "protocol": transport.name(), "port": number});
                if let (true, Some(node_port)) = (own, self.node_port) {
                    port["nodePort"] = json!(node_port);
                }
                port
            };
            self.transports.iter().map(one).collect::<Vec<_>>()
        };
        let metadata = json!({"name": self.name, "namespace": "ns"});
        let mut spec = json!({
            "type": if self.node_port.is_some() { "NodePort" } else { "ClusterIP" },
            "clusterIP": self.ip(), "clusterIPs": [self.ip()], "ipFamilies": [self.family.as_str()],
            "externalIPs": self.external, "ports": ports(PORT, true),
        });
        if let Some(seconds) = self.affinity {
            spec["sessionAffinity"] = json!("ClientIP");
            spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": seconds}});
        }
        let endpoint = |at: &SocketAddr| {
            let node = if is_local(at.ip()) { NODE_NAME } else { "other" };
            json!({"addresses": [at.ip()], "nodeName": node, "conditions": {"ready": true}})
        };
        // One number is enough for every test: all of a Service's endpoints listen at the same port.
        let number = self.endpoints.first().map_or(8080, SocketAddr::port);
        [
            json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}),
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "name": format!("{}-a", self.name), "namespace": "ns",
                    "labels": {"kubernetes.io/service-name": self.name},
                },
                "addressType": self.family.as_str(), "ports": ports(number, false),
                "endpoints": self.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
            }),
        ]
    }

    pub(crate) fn meaning(&self) -> Meaning {
        let mut all = Meaning::new();
        for transport in &self.transports {
            let mut add = |ip, port| {
                all.insert((ip, *transport, port), self.endpoints.iter().copied().collect());
            };
            add(Some(self.ip()), PORT);
            self.external.iter().for_each(|ip| add(Some(*ip), PORT));
            self.node_port.into_iter().for_each(|port| add(None, port));
        }
        all
    }
}

/// For each family a Service with a number of endpoints, changed by `change`, and one with session affinity.
pub(crate) fn plain_and_affine(
    endpoints: usize,
    affinity_seconds: u32,
    change: impl Fn(&mut Service),
) -> Vec<Service> {
    let mut all = Vec::new();
    for (index, family) in (0..).zip(Family::ALL) {
        let mut plain = Service::new(10 + index, family, &pool(family, 8080)[..endpoints]);
        change(&mut plain);
        let mut affine = Service::new(12 + index, family, &pool(family, 8081));
        affine.affinity = Some(affinity_seconds);
        all.extend([plain, affine]);
    }
    all
}

pub(crate) fn meaning<'a>(services: impl IntoIterator<Item = &'a Service>, family: Family) -> Meaning {
    services.into_iter().filter(|service| service.family == family).flat_map(Service::meaning).collect()
}

fn is_local(ip: IpAddr) -> bool {
    (1..=LOCALS).any(|n| local(n).of(Family::of(ip)) == ip)
}

/// Addresses of all servers with this port: pods of the node and of the other.
pub(crate) fn pool(family: Family, port: u16) -> Vec<SocketAddr> {
    let all = (1..=LOCALS).map(local).chain((1..=REMOTES).map(remote));
    all.map(|address| address.at(family, port)).collect()
}
