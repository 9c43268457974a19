//! Service endpoints of the fake agent: ten thousand Services, one of which is made to be looked at.
//!
//! In: the scene and the time. Out: documents of `keelson.endpoints.v1`'s service Inspection: current with a revision
//! every five seconds in the busy scene, off in the idle one, stale where everything is away.

use keelson_proto::endpoints as pb;

use crate::world::{Scene, now_ms};

const SERVICES: u32 = 10_000;
const NODE: &str = "worker-7.eu-central-1.compute.internal";
const REFUSED: &str = "the API server https://10.96.0.1:443 cannot be reached: connection refused";

/// What is kept of endpoints.
#[derive(Debug)]
pub(crate) struct Endpoints {
    scene: Scene,
    began: i64,
}

impl Endpoints {
    pub(crate) fn new(scene: Scene) -> Self {
        Self { scene, began: now_ms() }
    }

    fn rev(&self) -> u64 {
        let passed = if self.scene == Scene::Busy { now_ms() - self.began } else { 0 };
        81_204 + u64::try_from(passed / 5_000).unwrap_or_default()
    }

    /// As `GetState`.
    pub(crate) fn state(&self, namespace: &str, max_services: u32) -> pb::State {
        if self.scene == Scene::Idle {
            let reason = "no API server is configured, and no folder of manifests".into();
            return pb::State { state: "off".into(), reason, ..Default::default() };
        }
        let down = self.scene == Scene::Down;
        let since = if down { self.began - 124_000 } else { self.began - 86_400_000 };
        let rev = self.rev();
        let names = (0..SERVICES).map(name).filter(|(of, _)| namespace.is_empty() || namespace == of);
        let list = names.take(usize::try_from(max_services).unwrap_or(usize::MAX));
        pb::State {
            state: if down { "stale" } else { "current" }.into(),
            reason: if down { REFUSED.into() } else { String::new() },
            since_unix_ms: since,
            instance_id: "17293822569102704640".into(),
            rev,
            published_unix_ms: if down { since } else { now_ms() - (now_ms() - self.began) % 5_000 },
            source: "kube".into(),
            source_place: "https://10.96.0.1:443".into(),
            sources: sources(down, since),
            faults: if down { faults() } else { Vec::new() },
            listen: vec![
                "unix:///run/keelson-endpoints/endpoints.sock".into(),
                "tcp://127.0.0.1:12345".into(),
            ],
            node: Some(node()),
            services: SERVICES.into(),
            endpoints: u64::from(SERVICES) * 10,
            events: 412_007,
            revisions: rev,
            watchers: watchers(rev, self.began),
            list: list.zip(0..).map(|(name, number)| summary(name, number, rev)).collect(),
            durable: !down,
            backends: vec![backend(rev, down, now_ms())],
        }
    }

    /// As `Explain`.
    pub(crate) fn explain(&self, namespace: &str, name: &str) -> Option<pb::Explanation> {
        let known = (0..SERVICES).map(self::name).any(|(of, known)| of == namespace && known == name);
        (known && self.scene != Scene::Idle).then(|| explanation(namespace, name, self.rev()))
    }
}

fn name(number: u32) -> (String, String) {
    const NAMESPACES: [&str; 4] = ["default", "kube-system", "payments", "web"];
    let namespace = NAMESPACES[usize::try_from(number / 2_500).unwrap_or_default() % 4];
    (namespace.into(), format!("service-{:04}", number % 2_500))
}

fn summary((namespace, name): (String, String), number: u32, rev: u64) -> pb::ServiceSummary {
    let odd = number % 7 == 3;
    pb::ServiceSummary {
        namespace,
        name,
        r#type: if odd { "LoadBalancer" } else { "ClusterIP" }.into(),
        cluster_ips: vec![format!("10.96.{}.{}", number / 250, number % 250), format!("fd00:96::{number:x}")],
        ports: vec![if odd { "http 80:30080/TCP" } else { "http 80/TCP" }.into(), "metrics 9090/TCP".into()],
        ready: if number % 11 == 5 { 0 } else { 10 },
        local_ready: u32::from(odd),
        selected: if number % 11 == 5 { 0 } else { 4 },
        rev: if number < 3 { rev } else { 17 },
    }
}

fn backend(rev: u64, down: bool, now: i64) -> pb::Backend {
    pb::Backend {
        name: "nft".into(),
        pid: 2_104,
        version: "0.1.0".into(),
        debug: "unix:///run/keelson-proxy/proxy.sock".into(),
        http: "http://127.0.0.1:9441/".into(),
        instance_id: 17_293_822_569_102_704_640,
        rev: if down { rev - 3 } else { rev },
        state: if down { "failing" } else { "synced" }.into(),
        reason: if down { "IPv4: the kernel has no room for another element".into() } else { String::new() },
        last_sync_unix_ms: now - if down { 96_000 } else { 2_000 },
        service_ports: 20_000,
        seen_unix_ms: now - now % 10_000,
        silent: false,
        behind: if down { 3 } else { 0 },
    }
}

fn sources(down: bool, since: i64) -> Vec<pb::SourceState> {
    [("services", 10_000), ("endpointslices", 10_412), ("servicecidrs", 1), ("nodes", 1)]
        .map(|(resource, objects)| pb::SourceState {
            resource: resource.into(),
            synced: true,
            objects,
            health: if down { "failing" } else { "well" }.into(),
            reason: if down { REFUSED.into() } else { String::new() },
            since_unix_ms: since,
        })
        .into()
}

fn faults() -> Vec<pb::FileFault> {
    let fault = |file: &str, line, reason: &str, earlier_in_use| pb::FileFault {
        file: file.into(),
        line,
        reason: reason.into(),
        earlier_in_use,
    };
    vec![
        fault("web.yaml", 12, "mapping values are not allowed here: <b>port: : 80</b>", true),
        fault("old/ledger.json", 0, "the file cannot be read: permission denied", false),
    ]
}

fn node() -> pb::NodeState {
    pb::NodeState {
        name: NODE.into(),
        exists: true,
        zone: "eu-central-1a".into(),
        ips: vec!["192.0.2.17".into(), "2001:db8::17".into()],
        pod_cidrs: vec!["10.180.7.0/24".into(), "fd00:180:7::/64".into()],
        eligible: true,
        service_cidrs: vec!["10.96.0.0/16".into()],
    }
}

fn watchers(rev: u64, began: i64) -> Vec<pb::Watcher> {
    let watcher = |id, peer: &str, listener: &str, api: &str, behind| pb::Watcher {
        id,
        peer: peer.into(),
        listener: listener.into(),
        api: api.into(),
        since_unix_ms: began - 3_600_000,
        rev: rev - behind,
        behind,
        items: 1_204_551,
        bytes: 931_004_112,
    };
    vec![
        watcher(1, "pid 4711", "unix:///run/keelson-endpoints/endpoints.sock", "Watch", 0),
        watcher(2, "127.0.0.1:52044", "tcp://127.0.0.1:12345", "Next", 37),
    ]
}

fn explanation(namespace: &str, name: &str, rev: u64) -> pb::Explanation {
    pb::Explanation {
        namespace: namespace.into(),
        name: name.into(),
        served: true,
        reason: "it has a cluster IP and is not headless".into(),
        r#type: "LoadBalancer".into(),
        cluster_ips: vec!["10.96.0.10".into(), "fd00:96::a".into()],
        external_ips: vec!["203.0.113.9".into()],
        load_balancer_ips: vec!["198.51.100.4".into()],
        source_ranges: vec!["192.0.2.0/25".into()],
        internal_traffic_policy: "Cluster: any endpoint may be chosen".into(),
        external_traffic_policy: "Local: from outside only endpoints on this node".into(),
        affinity: "ClientIP, 10800 s".into(),
        health_check_node_port: 32_101,
        ports: vec![port("http", 80, 30_080), port("metrics", 9_090, 0)],
        slices: vec![
            slice(name, "x7k2p", true, ""),
            slice(name, "fqdn0", false, "names are not looked up: its address type is FQDN"),
        ],
        rev,
        ignored: vec!["the external IP 2001:db8::9, of a family that the Service does not have".into()],
    }
}

fn slice(service: &str, suffix: &str, used: bool, reason: &str) -> pb::SliceExplanation {
    pb::SliceExplanation {
        name: format!("{service}-{suffix}"),
        address_type: if used { "IPv4" } else { "FQDN" }.into(),
        endpoints: 10,
        used,
        reason: reason.into(),
    }
}

fn port(name: &str, port: i32, node_port: i32) -> pb::PortExplanation {
    let endpoints: Vec<pb::EndpointExplanation> = (0..10).map(endpoint).collect();
    let chosen = |set: fn(&pb::EndpointExplanation) -> bool| -> Vec<String> {
        endpoints
            .iter()
            .filter(|endpoint| set(endpoint))
            .map(|endpoint| format!("{}:{}", endpoint.address, endpoint.port))
            .collect()
    };
    let traffic = |from: &str, to: String, verdict: &str, endpoints: Vec<String>, reason: &str| {
        pb::TrafficExplanation {
            from: from.into(),
            to,
            verdict: verdict.into(),
            endpoints,
            reason: reason.into(),
        }
    };
    let cluster = chosen(|endpoint| endpoint.cluster_set);
    let four = pb::FamilyExplanation {
        family: "IPv4".into(),
        topology: "zone".into(),
        topology_reason: "all ready endpoints have zone hints, 1 of them for zone eu-central-1a of this node"
            .into(),
        traffic: vec![
            traffic(
                "anyone",
                format!("10.96.0.10:{port}"),
                "forwarded",
                cluster.clone(),
                "the internal policy is Cluster",
            ),
            traffic(
                "pods and the node",
                format!("198.51.100.4:{port}"),
                "forwarded",
                cluster,
                "from within, the external policy does not count",
            ),
            traffic(
                "outside",
                format!("198.51.100.4:{port}"),
                "forwarded",
                chosen(|endpoint| endpoint.local_set),
                "the external policy is Local",
            ),
        ],
        endpoints,
    };
    let reason = "no slice of this family has an endpoint";
    let six = pb::FamilyExplanation {
        family: "IPv6".into(),
        topology: "none".into(),
        topology_reason: "there is no ready endpoint".into(),
        traffic: vec![traffic("anyone", format!("[fd00:96::a]:{port}"), "rejected", Vec::new(), reason)],
        endpoints: Vec::new(),
    };
    pb::PortExplanation {
        name: name.into(),
        protocol: "TCP".into(),
        port,
        node_port,
        families: vec![four, six],
    }
}

fn endpoint(number: i32) -> pb::EndpointExplanation {
    let (ready, near) = (number != 4, number < 4);
    pb::EndpointExplanation {
        address: format!("10.180.{}.{}", 7 + number, 10 + number),
        port: 8_080,
        pod: format!("service-{number}-6f7d9c5b8-x2x9q"),
        node: if number == 0 { NODE.into() } else { format!("worker-{number}") },
        zone: if near { "eu-central-1a" } else { "eu-central-1b" }.into(),
        slice: "x7k2p".into(),
        ready,
        serving: true,
        terminating: number == 4,
        local: number == 0,
        cluster_set: near,
        local_set: number == 0,
        reason: match number {
            0 => "ready, on this node, and hinted for eu-central-1a",
            1..4 => "ready and hinted for eu-central-1a",
            4 => "it ends and others are ready",
            _ => "its hints name eu-central-1b only",
        }
        .into(),
    }
}
