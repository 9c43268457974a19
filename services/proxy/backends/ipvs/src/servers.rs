//! Virtual servers and their real servers.
//!
//! Owns: [`ServerTable`], what the kernel is known to have of ours, and [`ServerChange`]. In: what was read; what is wanted.
//! Out: changes. Pure.
//!
//! A real server that is not wanted any more gets the weight 0: it keeps its connections and gets no new ones (kube-proxy's
//! graceful termination), until it has none and is deleted ([`ServerTable::finished`]). One of UDP that does not serve is
//! deleted at once, so that its flows go to others. A virtual server without endpoints, or whose frontend is gone, stays as
//! long as its last connections.
//!
//! Ours are marked by a byte of their flags, which IPVS keeps and does not use.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
};

use keelson_proxy::{
    leftovers::{OUR_SERVERS, OUR_SERVERS_MASK},
    model::{Endpoint, Protocol},
};

/// Where packets are destined to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Socket {
    pub(crate) ip: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

impl fmt::Display for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", SocketAddr::new(self.ip, self.port), self.protocol)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ServerKey {
    Socket(Socket),
    /// Packets with this mark.
    Mark(u32),
}

impl fmt::Display for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(socket) => socket.fmt(f),
            Self::Mark(mark) => write!(f, "mark {mark:#x}"),
        }
    }
}

/// The byte of the flags that has the protocol: a virtual server by mark has none.
const PROTOCOL_SHIFT: u32 = 16;
// linux/ip_vs.h: IP_VS_SVC_F_PERSISTENT, _SCHED1 and _SCHED2.
const PERSISTENT: u32 = 1;
/// Schedulers sh and mh: choose again if the chosen real server has the weight 0.
const HASH_FALLBACK: u32 = 8;
/// Scheduler mh: the hash is of the source port, too. Source: kube-proxy's `FlagSourceHash`.
const HASH_PORT: u32 = 0x10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) scheduler: String,
    pub(crate) flags: u32,
    /// Seconds that a client keeps its real server; 0: no affinity.
    pub(crate) timeout: u32,
}

impl Spec {
    pub(crate) fn new(scheduler: &str, protocol: Protocol, affinity_seconds: u32) -> Self {
        let mut flags = OUR_SERVERS | u32::from(protocol.number()) << PROTOCOL_SHIFT;
        if affinity_seconds != 0 {
            flags |= PERSISTENT;
        }
        match scheduler {
            "sh" => flags |= HASH_FALLBACK,
            "mh" => flags |= HASH_FALLBACK | HASH_PORT,
            _ => {}
        }
        Self { scheduler: scheduler.to_owned(), flags, timeout: affinity_seconds }
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.flags & OUR_SERVERS_MASK == OUR_SERVERS
    }

    /// Not of UDP: the client would never know that its endpoint is gone.
    fn keeps_connections(&self) -> bool {
        self.flags >> PROTOCOL_SHIFT & 0xff != u32::from(Protocol::Udp.number())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoundDestination {
    pub(crate) endpoint: Endpoint,
    pub(crate) weight: u32,
    pub(crate) connections: u32,
    /// With session affinity.
    pub(crate) clients: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundServer {
    pub(crate) spec: Spec,
    pub(crate) destinations: Vec<FoundDestination>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WantedServer<'a> {
    pub(crate) spec: Spec,
    /// Without duplicates.
    pub(crate) endpoints: &'a [Endpoint],
    /// Of UDP: those that keep their flows, in `endpoints` or not.
    pub(crate) serving: &'a [Endpoint],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServerChange {
    AddServer(ServerKey, Spec),
    SetServer(ServerKey, Spec),
    DeleteServer(ServerKey),
    /// With the weight 1.
    AddDestination(ServerKey, Endpoint),
    SetWeight(ServerKey, Endpoint, u32),
    DeleteDestination(ServerKey, Endpoint),
}

impl ServerChange {
    /// Whether traffic ends or decreases by it: it comes after all others.
    pub(crate) fn is_removal(&self) -> bool {
        matches!(self, Self::DeleteServer(_) | Self::DeleteDestination(..) | Self::SetWeight(_, _, 0))
    }

    pub(crate) fn key(&self) -> ServerKey {
        match self {
            Self::AddServer(key, _)
            | Self::SetServer(key, _)
            | Self::DeleteServer(key)
            | Self::AddDestination(key, _)
            | Self::SetWeight(key, ..)
            | Self::DeleteDestination(key, _) => *key,
        }
    }
}

impl fmt::Display for ServerChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddServer(key, spec) => write!(f, "add virtual server {key}, scheduler {}", spec.scheduler),
            Self::SetServer(key, spec) => write!(f, "set virtual server {key}, scheduler {}", spec.scheduler),
            Self::DeleteServer(key) => write!(f, "delete virtual server {key}"),
            Self::AddDestination(key, endpoint) => write!(f, "add {endpoint} to virtual server {key}"),
            Self::SetWeight(key, endpoint, weight) => {
                write!(f, "set the weight of {endpoint} of virtual server {key} to {weight}")
            }
            Self::DeleteDestination(key, endpoint) => {
                write!(f, "delete {endpoint} from virtual server {key}")
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Server {
    spec: Spec,
    /// Weight by endpoint.
    destinations: BTreeMap<Endpoint, u32>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct ServerTable {
    known: BTreeMap<ServerKey, Server>,
    /// Those with a real server of weight 0.
    draining: BTreeSet<ServerKey>,
}

impl ServerTable {
    /// Ours: those with our flag, and those that are wanted.
    pub(crate) fn of(
        found: &BTreeMap<ServerKey, FoundServer>,
        is_wanted: impl Fn(ServerKey) -> bool,
    ) -> Self {
        let mut table = Self::default();
        for (key, server) in found.iter().filter(|(key, server)| server.spec.is_ours() || is_wanted(**key)) {
            let destinations =
                server.destinations.iter().map(|found| (found.endpoint, found.weight)).collect();
            table.known.insert(*key, Server { spec: server.spec.clone(), destinations });
            table.update_draining(*key);
        }
        table
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = ServerKey> + '_ {
        self.known.keys().copied()
    }

    /// Whether there is a virtual server at an address.
    pub(crate) fn uses(&self, ip: IpAddr) -> bool {
        let first = Socket { ip, protocol: Protocol::Tcp, port: 0 };
        let next = self.known.range(ServerKey::Socket(first)..).next();
        next.is_some_and(|(key, _)| matches!(key, ServerKey::Socket(socket) if socket.ip == ip))
    }

    /// What makes a virtual server the wanted one.
    pub(crate) fn changes(
        &self,
        key: ServerKey,
        wanted: Option<&WantedServer<'_>>,
        out: &mut Vec<ServerChange>,
    ) {
        let known = self.known.get(&key);
        let Some(wanted) = wanted else {
            let Some(known) = known else { return };
            if known.destinations.is_empty() {
                out.push(ServerChange::DeleteServer(key));
            } else {
                let drained = known.destinations.iter().filter(|(_, weight)| **weight != 0);
                out.extend(drained.map(|(endpoint, _)| ServerChange::SetWeight(key, *endpoint, 0)));
            }
            return;
        };
        match known {
            None => out.push(ServerChange::AddServer(key, wanted.spec.clone())),
            Some(known) if known.spec != wanted.spec => {
                out.push(ServerChange::SetServer(key, wanted.spec.clone()));
            }
            Some(_) => {}
        }
        let none = BTreeMap::new();
        let destinations = known.map_or(&none, |known| &known.destinations);
        out.extend(wanted.endpoints.iter().filter_map(|endpoint| match destinations.get(endpoint) {
            None => Some(ServerChange::AddDestination(key, *endpoint)),
            Some(1) => None,
            Some(_) => Some(ServerChange::SetWeight(key, *endpoint, 1)),
        }));
        if destinations.is_empty() {
            return;
        }
        let stays: BTreeSet<&Endpoint> = wanted.endpoints.iter().collect();
        let gone = destinations.iter().filter(|(endpoint, _)| !stays.contains(endpoint));
        let keeps = |endpoint| wanted.spec.keeps_connections() || wanted.serving.contains(endpoint);
        out.extend(gone.filter_map(|(endpoint, weight)| match (keeps(endpoint), weight) {
            (true, 0) => None,
            (true, _) => Some(ServerChange::SetWeight(key, *endpoint, 0)),
            (false, _) => Some(ServerChange::DeleteDestination(key, *endpoint)),
        }));
    }

    /// Notes a change that was made.
    pub(crate) fn apply(&mut self, change: &ServerChange) {
        let key = change.key();
        match change {
            ServerChange::AddServer(_, spec) => {
                self.known.insert(key, Server { spec: spec.clone(), destinations: BTreeMap::new() });
            }
            ServerChange::DeleteServer(_) => {
                self.known.remove(&key);
            }
            ServerChange::SetServer(_, spec) => {
                if let Some(server) = self.known.get_mut(&key) {
                    server.spec.clone_from(spec);
                }
            }
            ServerChange::AddDestination(_, endpoint) => self.set_weight(key, *endpoint, 1),
            ServerChange::SetWeight(_, endpoint, weight) => self.set_weight(key, *endpoint, *weight),
            ServerChange::DeleteDestination(_, endpoint) => {
                if let Some(server) = self.known.get_mut(&key) {
                    server.destinations.remove(endpoint);
                }
            }
        }
        // Only a weight of 0 starts it, and only these end it.
        if change.is_removal() || self.draining.contains(&key) {
            self.update_draining(key);
        }
    }

    fn set_weight(&mut self, key: ServerKey, endpoint: Endpoint, weight: u32) {
        if let Some(server) = self.known.get_mut(&key) {
            server.destinations.insert(endpoint, weight);
        }
    }

    fn update_draining(&mut self, key: ServerKey) {
        let has_any = |server: &Server| server.destinations.values().any(|weight| *weight == 0);
        match self.known.get(&key).is_some_and(has_any) {
            true => self.draining.insert(key),
            false => self.draining.remove(&key),
        };
    }

    /// At most `count` virtual servers with a real server of weight 0, after `last` in turn.
    pub(crate) fn draining(&self, last: Option<ServerKey>, count: usize) -> Vec<ServerKey> {
        let later = self.draining.iter().filter(|key| Some(**key) > last);
        let earlier = self.draining.iter().filter(|key| Some(**key) <= last);
        later.chain(earlier).take(count).copied().collect()
    }

    /// Real servers of weight 0 that have no connections, and the virtual server if it is not wanted and has no other.
    /// `found`: those that the kernel has.
    pub(crate) fn finished(
        &self,
        key: ServerKey,
        found: &[FoundDestination],
        is_wanted: bool,
    ) -> Vec<ServerChange> {
        let Some(server) = self.known.get(&key) else { return Vec::new() };
        let busy: BTreeSet<Endpoint> =
            found.iter().filter(|found| found.connections > 0).map(|found| found.endpoint).collect();
        let drained =
            server.destinations.iter().filter(|(endpoint, weight)| **weight == 0 && !busy.contains(endpoint));
        let mut changes: Vec<ServerChange> =
            drained.map(|(endpoint, _)| ServerChange::DeleteDestination(key, *endpoint)).collect();
        if !is_wanted && changes.len() == server.destinations.len() {
            changes.push(ServerChange::DeleteServer(key));
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(port: u16) -> ServerKey {
        ServerKey::Socket(Socket { ip: [10, 96, 0, 1].into(), protocol: Protocol::Tcp, port })
    }

    fn endpoints(hosts: &[u8]) -> Vec<Endpoint> {
        hosts.iter().map(|host| Endpoint { ip: [10, 244, 0, *host].into(), port: 8080 }).collect()
    }

    fn spec(protocol: Protocol) -> Spec {
        Spec::new("rr", protocol, 0)
    }

    /// Applies what makes the server have these endpoints, and returns it as text.
    fn set(table: &mut ServerTable, key: ServerKey, protocol: Protocol, hosts: Option<&[u8]>) -> Vec<String> {
        set_serving(table, key, protocol, hosts, &[])
    }

    fn set_serving(
        table: &mut ServerTable,
        key: ServerKey,
        protocol: Protocol,
        hosts: Option<&[u8]>,
        serving: &[u8],
    ) -> Vec<String> {
        let (endpoints, serving) = (hosts.map(endpoints), endpoints(serving));
        let wanted = endpoints.as_ref().map(|all| WantedServer {
            spec: spec(protocol),
            endpoints: all,
            serving: &serving,
        });
        let mut changes = Vec::new();
        table.changes(key, wanted.as_ref(), &mut changes);
        changes.iter().for_each(|change| table.apply(change));
        let mut again = Vec::new();
        table.changes(key, wanted.as_ref(), &mut again);
        assert_eq!(again, [], "nothing is left to do");
        changes.iter().map(ToString::to_string).collect()
    }

    fn found(host: u8, weight: u32, connections: u32) -> FoundDestination {
        FoundDestination { endpoint: endpoints(&[host])[0], weight, connections, clients: 0 }
    }

    #[test]
    fn one_endpoint_is_one_change() {
        let (mut table, key) = (ServerTable::default(), socket(80));
        let first = set(&mut table, key, Protocol::Tcp, Some(&[1, 2]));
        assert_eq!(
            first,
            [
                "add virtual server 10.96.0.1:80/TCP, scheduler rr",
                "add 10.244.0.1:8080 to virtual server 10.96.0.1:80/TCP",
                "add 10.244.0.2:8080 to virtual server 10.96.0.1:80/TCP",
            ]
        );
        let more = set(&mut table, key, Protocol::Tcp, Some(&[1, 2, 3]));
        assert_eq!(more, ["add 10.244.0.3:8080 to virtual server 10.96.0.1:80/TCP"]);
        let less = set(&mut table, key, Protocol::Tcp, Some(&[1, 3]));
        assert_eq!(less, ["set the weight of 10.244.0.2:8080 of virtual server 10.96.0.1:80/TCP to 0"]);
        let back = set(&mut table, key, Protocol::Tcp, Some(&[1, 2, 3]));
        assert_eq!(back, ["set the weight of 10.244.0.2:8080 of virtual server 10.96.0.1:80/TCP to 1"]);
        assert_eq!(table.draining(None, 9), []);
    }

    #[test]
    fn connections_end_before_a_real_server_is_deleted() {
        for protocol in [Protocol::Tcp, Protocol::Sctp] {
            let (mut table, key) = (ServerTable::default(), socket(80));
            set(&mut table, key, protocol, Some(&[1, 2]));
            set(&mut table, key, protocol, Some(&[1]));
            assert_eq!(table.draining(None, 9), [key]);
            assert_eq!(table.finished(key, &[found(1, 1, 5), found(2, 0, 1)], true), []);
            let finished = table.finished(key, &[found(1, 1, 5), found(2, 0, 0)], true);
            assert_eq!(finished, [ServerChange::DeleteDestination(key, endpoints(&[2])[0])]);
            finished.iter().for_each(|change| table.apply(change));
            assert_eq!(table.draining(None, 9), []);
        }
    }

    #[test]
    fn a_virtual_server_ends_with_its_last_connection() {
        let (mut table, key) = (ServerTable::default(), socket(80));
        set(&mut table, key, Protocol::Tcp, Some(&[1, 2]));
        assert_eq!(set(&mut table, key, Protocol::Tcp, None).len(), 2);
        let finished = table.finished(key, &[found(1, 0, 0), found(2, 0, 1)], false);
        assert_eq!(finished.len(), 1);
        finished.iter().for_each(|change| table.apply(change));
        assert!(table.uses([10, 96, 0, 1].into()) && !table.uses([10, 96, 0, 2].into()));
        let finished = table.finished(key, &[found(2, 0, 0)], false);
        assert_eq!(finished.last(), Some(&ServerChange::DeleteServer(key)));
        finished.iter().for_each(|change| table.apply(change));
        assert_eq!(table, ServerTable::default());
        // Without a real server there is nothing to wait for.
        set(&mut table, key, Protocol::Tcp, Some(&[]));
        assert_eq!(set(&mut table, key, Protocol::Tcp, None), ["delete virtual server 10.96.0.1:80/TCP"]);
    }

    #[test]
    fn flows_of_udp_stay_with_an_endpoint_that_serves() {
        let (mut table, key) = (ServerTable::default(), socket(53));
        let mut set = |hosts, serving: &[u8]| set_serving(&mut table, key, Protocol::Udp, hosts, serving);
        set(Some(&[1, 2]), &[1, 2]);
        let terminating = set(Some(&[2]), &[1, 2]);
        assert_eq!(
            terminating,
            ["set the weight of 10.244.0.1:8080 of virtual server 10.96.0.1:53/TCP to 0"]
        );
        let gone = set(Some(&[2]), &[2]);
        assert_eq!(gone, ["delete 10.244.0.1:8080 from virtual server 10.96.0.1:53/TCP"]);
        // Where no endpoint is left there is nowhere else to go.
        let last = set(None, &[]);
        assert_eq!(last, ["set the weight of 10.244.0.2:8080 of virtual server 10.96.0.1:53/TCP to 0"]);
        let another = set(Some(&[3]), &[3]);
        assert_eq!(
            another,
            [
                "add 10.244.0.3:8080 to virtual server 10.96.0.1:53/TCP",
                "delete 10.244.0.2:8080 from virtual server 10.96.0.1:53/TCP",
            ]
        );
        set(None, &[]);
        let finished = table.finished(key, &[found(3, 0, 0)], false);
        finished.iter().for_each(|change| table.apply(change));
        assert_eq!(table, ServerTable::default());
    }

    #[test]
    fn those_of_other_programs_are_left_alone() {
        let other = Spec { scheduler: "wlc".into(), flags: PERSISTENT, timeout: 300 };
        let all: BTreeMap<ServerKey, FoundServer> = [
            (socket(80), FoundServer { spec: spec(Protocol::Tcp), destinations: vec![found(1, 0, 1)] }),
            (socket(81), FoundServer { spec: other.clone(), destinations: vec![found(1, 3, 1)] }),
            (socket(82), FoundServer { spec: other, destinations: Vec::new() }),
        ]
        .into();
        let mut table = ServerTable::of(&all, |key| key == socket(81));
        assert_eq!(table.keys().collect::<Vec<_>>(), [socket(80), socket(81)]);
        assert_eq!(table.draining(None, 9), [socket(80)], "an earlier run has begun it");
        // What is wanted becomes ours.
        let taken = set(&mut table, socket(81), Protocol::Tcp, Some(&[1]));
        assert_eq!(taken.len(), 2, "{taken:?}");
    }

    #[test]
    fn turns_are_taken() {
        let mut table = ServerTable::default();
        for port in 1..=3 {
            set(&mut table, socket(port), Protocol::Tcp, Some(&[1]));
            set(&mut table, socket(port), Protocol::Tcp, None);
        }
        assert_eq!(table.draining(None, 2), [socket(1), socket(2)]);
        assert_eq!(table.draining(Some(socket(2)), 2), [socket(3), socket(1)]);
    }

    #[test]
    fn flags_follow_the_scheduler() {
        assert_eq!(Spec::new("rr", Protocol::Tcp, 0).flags & 0xffff, 0);
        assert_eq!(Spec::new("rr", Protocol::Tcp, 60).flags & 0xffff, PERSISTENT);
        assert_eq!(Spec::new("sh", Protocol::Tcp, 0).flags & 0xffff, 8);
        assert_eq!(Spec::new("mh", Protocol::Udp, 60).flags & 0xffff, 0x19);
    }
}
