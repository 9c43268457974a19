//! Owns: the network of a node: its namespaces, and the servers in them.
//! Out: namespaces to run a proxy in, to send requests from and to inspect.
//!
//! ```text
//!   pod, local(1..=3)      veth each, a /32 and a /128 each: they reach each other only through the node
//!        | bridge cni0 10.244.1.1
//!   node (forwards)        N 192.168.10.1, which serves as an endpoint too, N2 192.168.10.101
//!        | eth0
//!   bridge in `wire` ------ other (192.168.10.2, remote(1..=5)), C, B, each of which knows all routes by N only
//!   `wire` itself is the gateway 192.168.10.254: the node's default route. It has every address of Services and load
//!   balancers and answers there, so that what the node leaves alone is seen to be left alone.
//! ```

use super::icmp::Rejections;
use super::namespace::Namespace;
use super::plan::{
    BRIDGE, CLIENT, CLIENT_NETWORKS, Dual, EXTERNAL_CIDRS, Family, GATEWAY, LOCALS, NODE, NODE_2, NODE_CIDRS,
    NODE_NETWORKS, NODE_OTHER, OUTSIDE_CLIENT, POD, REMOTES, SERVED, SERVICE_CIDRS, UNTOUCHED, local, remote,
};
use super::servers::Servers;
use super::sockets::SocketLevel;
use anyhow::{Result, bail};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use tokio::net::TcpListener;

/// B's networks.
const OUTSIDE_NETWORKS: [&str; 2] = ["198.51.100.0/24", "fd00:bb::/64"];
const OTHER_PODS: [&str; 2] = ["10.244.2.0/24", "fd00:10:244:2::/64"];

#[derive(Debug)]
pub(super) struct Place {
    pub(super) namespace: Namespace,
    pub(super) rejections: Rejections,
    /// The node itself, or one of its pods.
    is_on_node: bool,
}

impl Place {
    fn new(role: &str) -> Result<Arc<Self>> {
        let namespace = Namespace::new(role)?;
        namespace.sysctl(&[
            ("ipv6/conf/all/accept_dad", "0"),
            ("ipv6/conf/default/accept_dad", "0"),
            ("ipv4/conf/all/accept_redirects", "0"),
            ("ipv4/conf/default/accept_redirects", "0"),
            ("ipv6/conf/default/accept_redirects", "0"),
            ("ipv6/conf/default/accept_ra", "0"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
        ])?;
        let rejections = Rejections::watch(&namespace)?;
        let is_on_node = !["wire", "other", "c", "b"].contains(&role);
        Ok(Arc::new(Self { namespace, rejections, is_on_node }))
    }
}

/// Removed on drop.
#[derive(Debug)]
pub struct World {
    node: Arc<Place>,
    pod: Arc<Place>,
    locals: Vec<Arc<Place>>,
    client: Arc<Place>,
    outside_client: Arc<Place>,
    _servers: Vec<Servers>,
    _others: [Arc<Place>; 2],
    sockets: OnceLock<SocketLevel>,
}

/// A client: a namespace and the source address of its requests.
#[derive(Clone, Debug)]
pub struct NetClient {
    pub(super) place: Arc<Place>,
    pub(super) address: Dual,
}

impl NetClient {
    /// The same client with another address of its namespace.
    pub fn from(&self, address: Dual) -> Self {
        Self { place: self.place.clone(), address }
    }

    pub fn ip(&self, family: Family) -> IpAddr {
        self.address.of(family)
    }

    pub fn namespace(&self) -> &Namespace {
        &self.place.namespace
    }

    /// Whether it is the node itself or one of its pods.
    pub fn is_on_node(&self) -> bool {
        self.place.is_on_node
    }
}

impl World {
    /// Creates it, and starts all servers. Must be called on a runtime, which runs them.
    pub fn new() -> Result<Self> {
        let (node, wire, other) = (Place::new("node")?, Place::new("wire")?, Place::new("other")?);
        let (client, outside_client) = (Place::new("c")?, Place::new("b")?);
        set_up_node(&node.namespace)?;
        wire.namespace.ip("link add br0 type bridge\nlink set br0 up")?;
        for place in [&node, &other, &client, &outside_client] {
            let port = place.namespace.name().rsplit('-').next().unwrap_or_default().to_owned();
            let (name, wire) = (place.namespace.name(), &wire.namespace);
            wire.ip(&format!(
                "link add p-{port} type veth peer name eth0 netns {name}\n\
                 link set p-{port} master br0 up"
            ))?;
            place.namespace.ip("link set eth0 up")?;
        }
        set_up_wire(&wire.namespace)?;
        node.namespace.ip(&node_routes()?)?;
        other.namespace.sysctl(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
        let mut at_other = addresses(NODE_OTHER, ["24", "64"], "eth0");
        for number in 1..=REMOTES {
            at_other += &addresses(remote(number), ["32", "128"], "lo");
        }
        other.namespace.ip(&(at_other + &default_by_node()))?;
        for (place, address) in [(&client, CLIENT), (&outside_client, OUTSIDE_CLIENT)] {
            let mut lines = addresses(address, ["32", "128"], "eth0");
            for network in NODE_NETWORKS {
                writeln!(lines, "route add {network} dev eth0")?;
            }
            place.namespace.ip(&(lines + &default_by_node()))?;
        }
        let mut servers = vec![
            Servers::endpoints(&other.namespace, &(1..=REMOTES).map(remote).collect::<Vec<_>>(), &SERVED)?,
            Servers::at_all_addresses(&wire.namespace, &UNTOUCHED)?,
            Servers::endpoints(&node.namespace, &[NODE], &SERVED)?,
        ];
        let pod = make_pod(&node.namespace, "pod", POD)?;
        let mut locals = Vec::new();
        for number in 1..=LOCALS {
            let place = make_pod(&node.namespace, &format!("l{number}"), local(number))?;
            servers.push(Servers::endpoints(&place.namespace, &[local(number)], &SERVED)?);
            locals.push(place);
        }
        Ok(Self {
            node,
            pod,
            locals,
            client,
            outside_client,
            _servers: servers,
            _others: [wire, other],
            sockets: OnceLock::new(),
        })
    }

    pub fn node(&self) -> &Namespace {
        &self.node.namespace
    }

    /// The cgroup of the sockets that the node and its pods make from the first call on.
    pub(super) fn sockets(&self) -> Result<&SocketLevel> {
        if self.sockets.get().is_none() {
            let level = SocketLevel::new()?;
            for place in self.locals.iter().chain([&self.node, &self.pod]) {
                level.join(&place.namespace)?;
            }
            // A second caller at the same time would have made another cgroup and joined it last: there is none.
            let _ = self.sockets.set(level);
        }
        self.sockets.get().ok_or_else(|| anyhow::anyhow!("the cgroup of the node is there"))
    }

    /// The BPF file system of the proxies of this test process, after [`KeelsonProxyOptions::at_socket_level`].
    ///
    /// [`KeelsonProxyOptions::at_socket_level`]: super::KeelsonProxyOptions::at_socket_level
    pub fn bpf(&self) -> Result<PathBuf> {
        Ok(self.sockets()?.bpf())
    }

    /// A pod of the node that is no endpoint.
    pub fn pod(&self) -> NetClient {
        NetClient { place: self.pod.clone(), address: POD }
    }

    /// A pod of the node that is an endpoint: `local(number)`, counted from 1.
    pub fn local(&self, number: u8) -> Result<NetClient> {
        let Some(place) = self.locals.get(usize::from(number).wrapping_sub(1)) else {
            bail!("the pods of the node are 1 to {LOCALS}, not {number}");
        };
        Ok(NetClient { place: place.clone(), address: local(number) })
    }

    /// The node itself. Its source is N2, so that the server can tell whether the connection was masqueraded: then the
    /// source is N, or the bridge.
    pub fn host(&self) -> NetClient {
        NetClient { place: self.node.clone(), address: NODE_2 }
    }

    /// C.
    pub fn client(&self) -> NetClient {
        NetClient { place: self.client.clone(), address: CLIENT }
    }

    /// B.
    pub fn outside_client(&self) -> NetClient {
        NetClient { place: self.outside_client.clone(), address: OUTSIDE_CLIENT }
    }

    /// Makes an address of the node, such as one of its loopback, reachable from this namespace, at a free port of the loopback.
    pub async fn reach_node(self: &Arc<Self>, inside: SocketAddr) -> Result<SocketAddr> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let outside = listener.local_addr()?;
        // Ends with the runtime of the test.
        let world = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let Some(world) = world.upgrade() else { return };
                let Ok(socket) = world.node().tcp_client(Ipv4Addr::UNSPECIFIED.into()) else { return };
                tokio::spawn(async move {
                    if let Ok(mut server) = socket.connect(inside).await {
                        // Either side may end it.
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Ok(outside)
    }

    /// Adds an address to the node, like one of a load balancer that is bound to it.
    pub fn bind_to_node(&self, ip: IpAddr) -> Result<()> {
        let length = if ip.is_ipv4() { 32 } else { 128 };
        self.node().ip(&format!("addr add {ip}/{length} dev lo nodad"))
    }
}

/// Configures the kernel of a node: it forwards, filters by reverse path, and does not limit the rate of ICMP
/// rejections (default: six in a row to one peer and then one per second, fifty in a row to all).
fn set_up_node(node: &Namespace) -> Result<()> {
    node.sysctl(&[
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv4/conf/all/send_redirects", "0"),
        ("ipv4/conf/default/send_redirects", "0"),
        ("ipv4/icmp_ratelimit", "0"),
        ("ipv6/icmp/ratelimit", "0"),
        // The limit for all peers together applies to the types in these masks: none, and one that no test sends.
        ("ipv4/icmp_ratemask", "0"),
        ("ipv6/icmp/ratemask", "255"),
        ("ipv4/conf/all/rp_filter", "1"),
        ("ipv4/conf/default/rp_filter", "1"),
    ])?;
    let bridge = addresses(BRIDGE, ["24", "64"], "cni0");
    node.ip(&format!("link add cni0 type bridge\nlink set cni0 up\n{bridge}"))
}

/// The gateway has every address of Services and load balancers, and its routes to all others go through N.
fn set_up_wire(wire: &Namespace) -> Result<()> {
    let mut lines = addresses(GATEWAY, ["24", "64"], "br0");
    for network in SERVICE_CIDRS.iter().chain(&EXTERNAL_CIDRS) {
        writeln!(lines, "route add local {network} dev lo")?;
    }
    let networks = [CLIENT_NETWORKS, OUTSIDE_NETWORKS, OTHER_PODS, NODE_CIDRS];
    for (network, via) in networks.iter().flat_map(|two| two.iter().zip([NODE.v4.into(), NODE.v6.into()])) {
        let via: IpAddr = via;
        writeln!(lines, "route add {network} via {via}")?;
    }
    wire.ip(&lines)
}

fn node_routes() -> Result<String> {
    let mut lines = addresses(NODE, ["24", "64"], "eth0");
    // Outgoing connections start from N: IPv4 prefers the first address, IPv6 the one that is not deprecated.
    writeln!(lines, "addr add {}/24 dev eth0", NODE_2.v4)?;
    writeln!(lines, "addr add {}/64 dev eth0 nodad preferred_lft 0", NODE_2.v6)?;
    for network in CLIENT_NETWORKS.iter().chain(&OUTSIDE_NETWORKS) {
        writeln!(lines, "route add {network} dev eth0")?;
    }
    for (network, via) in OTHER_PODS.iter().zip([IpAddr::from(NODE_OTHER.v4), NODE_OTHER.v6.into()]) {
        writeln!(lines, "route add {network} via {via}")?;
    }
    writeln!(lines, "route add default via {} src {}", GATEWAY.v4, NODE.v4)?;
    writeln!(lines, "route add ::/0 via {} src {}", GATEWAY.v6, NODE.v6)?;
    Ok(lines)
}

fn default_by_node() -> String {
    format!("route add default via {}\nroute add ::/0 via {}\n", NODE.v4, NODE.v6)
}

fn addresses(address: Dual, lengths: [&str; 2], device: &str) -> String {
    let [v4, v6] = lengths;
    format!("addr add {}/{v4} dev {device}\naddr add {}/{v6} dev {device} nodad\n", address.v4, address.v6)
}

/// A pod on the bridge. Its port is in hairpin mode, as the bridge plugin of CNI sets it up for kernels whose bridges
/// pass packets to netfilter, so that a pod may reach itself. Its address is alone in its network, so that a response
/// to another pod goes through the node.
fn make_pod(node: &Namespace, role: &str, address: Dual) -> Result<Arc<Place>> {
    let place = Place::new(role)?;
    let name = place.namespace.name();
    node.ip(&format!(
        "link add veth-{role} type veth peer name eth0 netns {name}\nlink set veth-{role} master cni0 up\n\
         link set veth-{role} type bridge_slave hairpin on"
    ))?;
    let own = addresses(address, ["32", "128"], "eth0");
    place.namespace.ip(&format!(
        "link set eth0 up\n{own}route add {0} dev eth0\nroute add default via {0}\n\
         route add {1} dev eth0\nroute add ::/0 via {1}\n",
        BRIDGE.v4, BRIDGE.v6
    ))?;
    Ok(place)
}
