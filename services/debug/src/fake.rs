//! A scripted agent for tests.

use std::sync::{Arc, Mutex, MutexGuard};

use keelson_proto::{debug as pb, endpoints as ep, node};
use tokio::sync::watch;

use keelson_serve::history::{History, Kind, Series, Unit};

use crate::{AgentView, Check, ConditionError, ViewError};

#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) pulls: Result<pb::PullList, ViewError>,
    pub(crate) limit: Result<pb::Limit, ViewError>,
    pub(crate) heartbeats: Result<node::Heartbeats, ViewError>,
    /// Contains every Service.
    pub(crate) endpoints: Result<ep::State, ViewError>,
    /// Of the only Service that can be explained.
    pub(crate) explanation: Result<ep::Explanation, ViewError>,
    /// The result of setting and clearing a condition.
    pub(crate) condition: Result<bool, ConditionError>,
    pub(crate) ready: Vec<Check>,
    pub(crate) live: Vec<Check>,
    /// Whether users with read access may also change something.
    pub(crate) may_change: bool,
    /// Never answers.
    pub(crate) stuck: bool,
    /// `max_queued` of every request for pulls.
    pub(crate) asked: Vec<u32>,
    /// `max_services` of every request for endpoints, with the namespace.
    pub(crate) asked_endpoints: Vec<(String, u32)>,
    pub(crate) set: Vec<Option<u32>>,
    pub(crate) conditions: Vec<node::SetConditionRequest>,
    /// Types.
    pub(crate) cleared: Vec<String>,
}

impl Script {
    /// Number of changes of the limit, conditions set, and conditions cleared.
    pub(crate) fn changes(&self) -> [usize; 3] {
        [self.set.len(), self.conditions.len(), self.cleared.len()]
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Fake {
    script: Arc<Mutex<Script>>,
    bump: Arc<watch::Sender<u64>>,
}

pub(crate) fn check(name: &str, ok: bool, message: &str) -> Check {
    Check { name: name.into(), ok, message: message.into(), since_unix_ms: 0 }
}

impl Fake {
    pub(crate) fn new() -> Self {
        let script = Script {
            pulls: Ok(pulls()),
            limit: Ok(limit()),
            may_change: true,
            heartbeats: Ok(heartbeats()),
            endpoints: Ok(endpoints()),
            explanation: Ok(explanation()),
            condition: Ok(true),
            ready: vec![check("store", true, ""), check("runtime", true, "")],
            live: vec![check("actors", true, "")],
            stuck: false,
            asked: Vec::new(),
            asked_endpoints: Vec::new(),
            set: Vec::new(),
            conditions: Vec::new(),
            cleared: Vec::new(),
        };
        Self { script: Arc::new(Mutex::new(script)), bump: Arc::new(watch::channel(0).0) }
    }

    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    pub(crate) fn bump(&self) {
        self.bump.send_modify(|n| *n += 1);
    }

    /// Sets the number of running pulls.
    pub(crate) fn run(&self, running: u32) {
        self.script().pulls.as_mut().unwrap().running = running;
        self.bump();
    }

    pub(crate) fn watchers(&self) -> usize {
        self.bump.receiver_count()
    }

    async fn wait_if_stuck(&self) {
        if self.script().stuck {
            std::future::pending::<()>().await;
        }
    }
}

pub(crate) fn limit() -> pb::Limit {
    pb::Limit {
        max_parallel_image_pulls: 3,
        configured: 3,
        when_full: "wait".into(),
        enforced_by: "agent".into(),
        ..Default::default()
    }
}

pub(crate) fn pulls() -> pb::PullList {
    let pull = pb::Pull {
        id: 7,
        image: "r.example/a:1".into(),
        registry: "r.example".into(),
        state: pb::PullState::Running.into(),
        callers: 2,
        attempts: 1,
        requested_unix_ms: 1_000,
        started_unix_ms: 2_000,
        progress: Some(pb::Progress {
            bytes_done: 1,
            bytes_total: 2,
            phase: "downloading".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    pb::PullList {
        limit: Some(limit()),
        running: 1,
        pulls: vec![pull],
        runtime_health: "up".into(),
        ..Default::default()
    }
}

pub(crate) fn heartbeats() -> node::Heartbeats {
    let ready = node::Condition {
        r#type: "Ready".into(),
        status: "True".into(),
        reason: "KubeletReady".into(),
        message: "healthy".into(),
        last_transition_unix_ms: 1_000,
        source: "agent".into(),
        contested: false,
    };
    let certificate = node::Credential {
        kind: "client_certificate".into(),
        file: "/pki/client.pem".into(),
        user: "system:node:n1".into(),
        expires_unix_ms: 9_000,
        state: "healthy".into(),
        ..Default::default()
    };
    node::Heartbeats {
        state: "healthy".into(),
        role: "node".into(),
        node_name: "n1".into(),
        server: "https://192.0.2.1:6443".into(),
        lease: Some(node::Lease {
            name: "n1".into(),
            state: "healthy".into(),
            age_ms: 4,
            ..Default::default()
        }),
        status: Some(node::Status { state: "healthy".into(), reports: 2, ..Default::default() }),
        conditions: vec![ready],
        credentials: vec![certificate],
        ..Default::default()
    }
}

pub(crate) fn endpoints() -> ep::State {
    let service = |namespace: &str, name: &str, port: &str| ep::ServiceSummary {
        namespace: namespace.into(),
        name: name.into(),
        r#type: "ClusterIP".into(),
        cluster_ips: vec!["10.96.0.10".into()],
        ports: vec![port.into()],
        ready: 2,
        local_ready: 1,
        selected: 2,
        rev: 7,
    };
    let list = vec![
        service("kube-system", "dns", "53/UDP"),
        service("shop", "cart", "80/TCP"),
        service("shop", "web", "http 80:30080/TCP"),
    ];
    let watcher =
        ep::Watcher { id: 1, peer: "pid 12".into(), api: "Next".into(), rev: 7, ..Default::default() };
    let backend = ep::Backend {
        name: "nft".into(),
        pid: 13,
        http: "http://127.0.0.1:9441/".into(),
        rev: 5,
        state: "failing".into(),
        reason: "no nft".into(),
        behind: 2,
        ..Default::default()
    };
    ep::State {
        state: "synced".into(),
        since_unix_ms: 1_000,
        instance_id: u64::MAX.to_string(),
        rev: 7,
        source: "files".into(),
        source_place: "/etc/keelson/manifests".into(),
        services: 3,
        endpoints: 6,
        watchers: vec![watcher],
        backends: vec![backend],
        list,
        durable: true,
        ..Default::default()
    }
}

/// The status while no Service is known.
pub(crate) fn without_endpoints(state: &str, reason: &str) -> ep::State {
    ep::State { state: state.into(), reason: reason.into(), ..Default::default() }
}

pub(crate) fn explanation() -> ep::Explanation {
    let endpoint = ep::EndpointExplanation {
        address: "10.1.0.1".into(),
        port: 8080,
        ready: true,
        cluster_set: true,
        reason: "it is ready".into(),
        ..Default::default()
    };
    let family = ep::FamilyExplanation {
        family: "IPv4".into(),
        topology: "none".into(),
        endpoints: vec![endpoint],
        ..Default::default()
    };
    let port = ep::PortExplanation {
        protocol: "TCP".into(),
        port: 80,
        families: vec![family],
        ..Default::default()
    };
    ep::Explanation {
        namespace: "shop".into(),
        name: "web".into(),
        served: true,
        ports: vec![port],
        rev: 7,
        ..Default::default()
    }
}

fn actor() -> pb::Actor {
    pb::Actor {
        name: "PullCoordinator".into(),
        status: "running".into(),
        mailbox_capacity: 64,
        ..Default::default()
    }
}

impl AgentView for Fake {
    async fn version(&self) -> pb::GetVersionResponse {
        self.wait_if_stuck().await;
        pb::GetVersionResponse {
            version: "1.2.3".into(),
            node_name: "n1".into(),
            ready: true,
            ..Default::default()
        }
    }

    async fn actors(&self) -> Vec<pb::Actor> {
        self.wait_if_stuck().await;
        vec![actor()]
    }

    async fn actor(&self, name: &str) -> Option<pb::Actor> {
        self.wait_if_stuck().await;
        let event = pb::ActorEvent { unix_ms: 5, text: "started".into() };
        let full = pb::Actor { state_json: r#"{"limit":3}"#.into(), events: vec![event], ..actor() };
        (name == "PullCoordinator").then_some(full)
    }

    fn actor_names(&self) -> Vec<String> {
        vec!["PullCoordinator".into(), "RuntimeClient".into()]
    }

    async fn pulls(&self, max_queued: u32) -> Result<pb::PullList, ViewError> {
        self.wait_if_stuck().await;
        self.script().asked.push(max_queued);
        self.script().pulls.clone()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.bump.subscribe()
    }

    fn may_change(&self, _: u32) -> bool {
        self.script().may_change
    }

    async fn limit(&self) -> Result<pb::Limit, ViewError> {
        self.script().limit.clone()
    }

    async fn set_limit(&self, limit: Option<u32>) -> Result<pb::Limit, ViewError> {
        self.script().set.push(limit);
        self.script().limit.clone()
    }

    async fn storage(&self) -> Result<pb::Storage, ViewError> {
        let table = pb::StorageTable { name: "pulls".into(), records: 4 };
        Ok(pb::Storage {
            backend: "memory".into(),
            schema_version: 1,
            tables: vec![table],
            ..Default::default()
        })
    }

    async fn config(&self) -> pb::Config {
        let setting = pb::Setting {
            key: "pulls.when_full".into(),
            value: "\"wait\"".into(),
            origin: "default".into(),
            live: true,
        };
        pb::Config { settings: vec![setting], feature_gates: Vec::new() }
    }

    async fn heartbeats(&self) -> Result<node::Heartbeats, ViewError> {
        self.wait_if_stuck().await;
        self.script().heartbeats.clone()
    }

    async fn set_condition(&self, condition: node::SetConditionRequest) -> Result<bool, ConditionError> {
        self.wait_if_stuck().await;
        self.script().conditions.push(condition);
        self.script().condition.clone()
    }

    async fn clear_condition(&self, kind: &str) -> Result<(), ConditionError> {
        self.wait_if_stuck().await;
        self.script().cleared.push(kind.to_owned());
        self.script().condition.clone().map(drop)
    }

    async fn endpoints(&self, namespace: &str, max_services: u32) -> Result<ep::State, ViewError> {
        self.wait_if_stuck().await;
        self.script().asked_endpoints.push((namespace.to_owned(), max_services));
        let mut state = self.script().endpoints.clone()?;
        state.list.retain(|service| namespace.is_empty() || service.namespace == namespace);
        state.list.truncate(usize::try_from(max_services).unwrap());
        Ok(state)
    }

    async fn explain(&self, namespace: &str, name: &str) -> Result<Option<ep::Explanation>, ViewError> {
        self.wait_if_stuck().await;
        let explanation = self.script().explanation.clone()?;
        Ok((explanation.namespace == namespace && explanation.name == name).then_some(explanation))
    }

    async fn livez(&self) -> Vec<Check> {
        self.wait_if_stuck().await;
        self.script().live.clone()
    }

    async fn readyz(&self) -> Vec<Check> {
        self.wait_if_stuck().await;
        self.script().ready.clone()
    }

    fn history(&self) -> History {
        const SERIES: &[Series] =
            &[Series { name: "queued", title: "Queued pulls", unit: Unit::Count, kind: Kind::Gauge }];
        let history = History::new(SERIES);
        history.record(7, &[Some(3.0)]);
        history
    }

    async fn metrics(&self) -> String {
        self.wait_if_stuck().await;
        "# TYPE up gauge\nup 1\n# EOF\n".into()
    }
}
