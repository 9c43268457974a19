//! The core against a small model of the API server.
//!
//! Owns: [`World`], which advances time, performs effects at once, and records every request. In: the state of host,
//! runtime and server. Out: the requests and their times.

mod economy;
mod faults;
mod problems;
mod roles;
mod writers;

use std::{collections::VecDeque, sync::Arc};

use keelson_actor_system::{
    cluster::ApiErrorKind,
    file_system::FileSystem,
    reports::{
        NETWORK_READY, RUNTIME_READY, RuntimeAvailability, RuntimeCondition, RuntimeImage, StaleCause,
    },
};
use keelson_storage::StoreState;
use serde_json::{Value, json};

use super::*;
use crate::status::{
    compute::{conditions::problem, tests::idle},
    external::{ExternalRecord, tests::condition},
    kinds::ConditionStatus,
    patch::tests::apply,
    policy::EndpointsOrigin,
};

/// 2026-01-01T00:00:00Z.
const NEW_YEAR: i64 = 1_767_225_600_000;
const SECOND: i64 = 1000;
const MINUTE: i64 = 60 * SECOND;
const HOUR: i64 = 60 * MINUTE;

#[derive(Debug, Clone, Copy)]
enum Fault {
    Says(ApiErrorKind),
    /// No answer until the request times out.
    Hangs,
    /// The request is carried out, but the answer is lost.
    Swallows,
}

fn away() -> RuntimeAvailability {
    RuntimeAvailability::Down { down_for: Duration::from_secs(1), reason: "no socket".into() }
}

#[derive(Debug, Clone, PartialEq)]
struct Request {
    at: i64,
    verb: &'static str,
    body: Value,
}

struct World {
    core: Core,
    policy: StatusPolicy,
    /// Milliseconds since boot; the process began at `began`.
    boot: i64,
    began: i64,
    wall: i64,
    /// Whether the watch reports the server's changes.
    watches: bool,
    node: Option<Value>,
    version: u64,
    made: u64,
    faults: VecDeque<Fault>,
    always: Option<Fault>,
    requests: Vec<Request>,
    closed: usize,
    collected: Collected,
    reported: Option<Reported>,
    conditions: std::collections::BTreeMap<String, ExternalRecord>,
    health: JobHealth,
    notes: Vec<String>,
    counted: Vec<Counted>,
    random: f64,
}

fn healthy() -> Collected {
    let ok = |kind: &str| RuntimeCondition { kind: kind.into(), ok: true, ..RuntimeCondition::default() };
    let fs = FileSystem {
        capacity_bytes: 100 << 30,
        available_bytes: 60 << 30,
        inodes: 1_000_000,
        inodes_free: 900_000,
    };
    Collected {
        facts: HostFacts {
            machine_id: "machine".into(),
            boot_id: "boot-1".into(),
            operating_system: "linux".into(),
            architecture: "amd64".into(),
            ..HostFacts::default()
        },
        readings: HostReadings {
            cpus: Some(4),
            memory_capacity_bytes: Some(8 << 30),
            memory_available_bytes: Some(6 << 30),
            swap_capacity_bytes: Some(0),
            node_fs: Some(fs),
            image_fs: Some(fs),
            pids: Some((32_768, 500)),
            addresses: vec![[10, 0, 0, 7].into()],
            ..HostReadings::default()
        },
        since_boot: Duration::ZERO,
        runtime: Ok(RuntimeReport {
            version: "containerd://v2.4.2".into(),
            conditions: vec![ok(RUNTIME_READY), ok(NETWORK_READY)],
            images: Arc::new(vec![RuntimeImage { names: vec!["r/a:1".into()], size_bytes: 7 }]),
            image_fs: Some("/var/lib/containerd".into()),
        }),
        runtime_down: None,
        pulls_view: Ok(idle()),
        endpoints: EndpointsView::Disabled,
        store: StoreState::Open,
    }
}

impl World {
    fn new(role: Role) -> Self {
        Self::with(StatusPolicy::new(role, "n1"))
    }

    fn with(policy: StatusPolicy) -> Self {
        let mut world = Self {
            core: Core::new(policy.clone()),
            policy,
            boot: HOUR,
            began: HOUR,
            wall: NEW_YEAR,
            watches: true,
            node: None,
            version: 100,
            made: 0,
            faults: VecDeque::new(),
            always: None,
            requests: Vec::new(),
            closed: 0,
            collected: healthy(),
            reported: None,
            conditions: std::collections::BTreeMap::new(),
            health: JobHealth::Pending,
            notes: Vec::new(),
            counted: Vec::new(),
            random: 0.5,
        };
        world.start();
        world
    }

    /// The Node was created by a kubelet.
    fn with_node(role: Role) -> Self {
        let mut world = Self { node: None, ..Self::new(role) };
        world.make_node();
        world
    }

    /// The first status is a minute old.
    fn settled(role: Role) -> Self {
        let mut world = Self::after(role, MINUTE);
        world.send_node();
        world.forget();
        world
    }

    /// The agent has reported, and `ms` have passed since its start.
    fn after(role: Role, ms: i64) -> Self {
        let mut world = Self::with_node(role);
        world.restart();
        world.pass(ms);
        world.forget();
        world
    }

    /// There is no Node, and the agent has not started since.
    fn without_node(policy: StatusPolicy) -> Self {
        let mut world = Self::with(policy);
        world.write(None);
        world.reported = None;
        world.forget();
        world
    }

    fn make_node(&mut self) {
        self.made += 1;
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1", "uid": format!("uid-{}", self.made), "labels": {"foreign": "yes"}},
            "spec": {"podCIDR": "10.244.1.0/24"},
            "status": {
                "conditions": [{"type": "Foreign", "status": "True"}],
                "capacity": {"example.com/gpu": "2"},
                "phase": "Running",
                "volumesInUse": ["v"],
            },
        });
        self.write(Some(node));
    }

    fn now(&self) -> Now {
        let mono = Duration::from_millis(u64::try_from(self.boot - self.began).expect("after the start"));
        Now { mono, unix_ms: self.wall }
    }

    fn since_boot(&self) -> Duration {
        Duration::from_millis(u64::try_from(self.boot).expect("positive"))
    }

    fn stamp(&self) -> Stamp {
        Stamp::new(&self.collected.facts.boot_id, self.since_boot(), self.now())
    }

    fn start(&mut self) {
        self.core = Core::new(self.policy.clone());
        let conditions = self.conditions.iter().map(|(kind, record)| (kind.clone(), Some(record.clone())));
        let restored = Restored {
            reported: self.reported.clone().map(Box::new),
            conditions: conditions.collect(),
            unreadable: Vec::new(),
        };
        self.step(Event::Started { restored, stamp: self.stamp() });
        if self.watches && self.node.is_some() {
            self.send_node();
        }
        if self.policy.role == Role::Node && self.collected.runtime.is_ok() {
            self.step(Event::RuntimeReady);
        }
    }

    fn restart(&mut self) {
        self.began = self.boot;
        self.start();
    }

    fn pass(&mut self, ms: i64) {
        let end = self.boot + ms;
        while let Some(due) = self.core.due() {
            let due = self.began + i64::try_from(due.as_millis()).expect("small");
            if due > end {
                break;
            }
            self.skip((due - self.boot).max(0));
            self.step(Event::Due);
        }
        self.skip((end - self.boot).max(0));
    }

    /// Advances time; then the watch catches up.
    fn pass_watched(&mut self, ms: i64) {
        self.pass(ms);
        self.send_node();
    }

    fn skip(&mut self, ms: i64) {
        self.boot += ms;
        self.wall += ms;
    }

    fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let effects = self.core.handle(event, self.now(), self.random);
            let requests = effects.iter().filter(|effect| is_request(effect)).count();
            assert!(requests <= 1, "one request at a time: {effects:?}");
            for effect in effects {
                events.extend(self.act(effect));
            }
        }
    }

    fn act(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Collect { .. } => {
                let collected = Collected { since_boot: self.since_boot(), ..self.collected.clone() };
                return Some(Event::Collected(Box::new(collected)));
            }
            Effect::Get => {
                return Some(Event::Got(self.request("get", json!(null), |world| {
                    world.node.as_ref().map(|node| Box::new(typed(node))).ok_or(ApiErrorKind::NotFound)
                })));
            }
            Effect::Create(node) => {
                let body = serde_json::to_value(&*node).expect("JSON");
                return Some(Event::Created(
                    self.request("create", body.clone(), |world| world.create(body)),
                ));
            }
            Effect::PatchNode(patch) => {
                return Some(Event::Repaired(
                    self.request("repair", patch.clone(), |world| world.patch(&patch)),
                ));
            }
            Effect::PatchStatus(patch) => {
                return Some(Event::Patched(
                    self.request("patch", patch.clone(), |world| world.patch(&patch)),
                ));
            }
            Effect::CloseConnections => self.closed += 1,
            Effect::Save(Write::Reported(reported)) => self.reported = Some(*reported),
            Effect::Save(Write::Conditions(writes)) => self.save(writes),
            Effect::Health(health) => self.health = health,
            Effect::Computed(_) => {}
            Effect::Count(counted) => self.counted.push(counted),
            Effect::Note { text, .. } => self.notes.push(text),
        }
        None
    }

    fn save(&mut self, writes: Vec<ExternalWrite>) {
        for (kind, record) in writes {
            match record {
                Some(record) => drop(self.conditions.insert(kind, record)),
                None => drop(self.conditions.remove(&kind)),
            }
        }
    }

    fn request<T>(
        &mut self,
        verb: &'static str,
        body: Value,
        serve: impl FnOnce(&mut Self) -> Result<T, ApiErrorKind>,
    ) -> Result<T, ApiError> {
        self.requests.push(Request { at: self.boot, verb, body });
        let fault = self.faults.pop_front().or(self.always);
        let result = match fault {
            None => serve(self),
            Some(Fault::Says(kind)) => Err(kind),
            Some(Fault::Hangs | Fault::Swallows) => {
                if matches!(fault, Some(Fault::Swallows)) {
                    drop(serve(self));
                }
                self.skip(10 * SECOND);
                Err(ApiErrorKind::Timeout)
            }
        };
        result.map_err(|kind| ApiError { server: "https://api".into(), kind, reason: kind.name().into() })
    }

    fn create(&mut self, mut node: Value) -> Result<Box<Node>, ApiErrorKind> {
        if self.node.is_some() {
            return Err(ApiErrorKind::AlreadyExists);
        }
        self.made += 1;
        node["metadata"]["uid"] = format!("uid-{}", self.made).into();
        self.write(Some(node));
        Ok(Box::new(typed(self.node.as_ref().expect("made"))))
    }

    fn patch(&mut self, patch: &Value) -> Result<Written, ApiErrorKind> {
        let mut node = self.node.clone().ok_or(ApiErrorKind::NotFound)?;
        apply(&mut node, patch);
        self.write(Some(node));
        let metadata = &self.node.as_ref().expect("there")["metadata"];
        let text = |key: &str| metadata[key].as_str().expect("a text").to_owned();
        Ok(Written { uid: text("uid"), resource_version: text("resourceVersion") })
    }

    /// Stores the Node on the server; the watch reports it later than the answer.
    fn write(&mut self, node: Option<Value>) {
        if node == self.node {
            return;
        }
        self.version += 1;
        self.node = node;
        if let Some(node) = &mut self.node {
            node["metadata"]["resourceVersion"] = self.version.to_string().into();
        }
    }

    /// Another process writes.
    fn other(&mut self, patch: &Value) {
        let mut node = self.node.clone().expect("the Node exists");
        apply(&mut node, patch);
        self.write(Some(node));
        self.send_node();
    }

    /// The watch catches up.
    fn send_node(&mut self) {
        let node = self.node.as_ref().map(|node| Arc::new(typed(node)));
        self.step(Event::Node(node));
    }

    fn delete(&mut self) {
        self.write(None);
        self.send_node();
    }

    fn verbs(&self) -> Vec<&'static str> {
        self.requests.iter().map(|request| request.verb).collect()
    }

    fn forget(&mut self) {
        self.requests.clear();
        self.notes.clear();
        self.counted.clear();
        self.closed = 0;
    }

    /// When status was written, in milliseconds since boot.
    fn writes(&self) -> Vec<i64> {
        let writes = self.requests.iter().filter(|request| matches!(request.verb, "patch" | "create"));
        writes.map(|request| request.at).collect()
    }

    fn condition(&self, kind: &str) -> Value {
        let list = self.node.as_ref().expect("a Node")["status"]["conditions"].clone();
        let found = list.as_array().and_then(|list| list.iter().find(|of| of["type"] == kind).cloned());
        found.unwrap_or(Value::Null)
    }

    #[track_caller]
    fn assert_condition(&self, kind: &str, status: &str, reason: &str) {
        let is = self.condition(kind);
        assert_eq!((&is["status"], &is["reason"]), (&json!(status), &json!(reason)), "{is}");
    }

    fn message(&self, kind: &str) -> String {
        self.condition(kind)["message"].as_str().expect("a text").to_owned()
    }

    fn fails(&self) -> (String, i64) {
        match &self.health {
            JobHealth::Failing { reason, since_unix_ms, .. } => (reason.clone(), *since_unix_ms),
            other => panic!("{other:?}"),
        }
    }

    fn set(&mut self, of: crate::status::ExternalCondition) {
        let write = self.core.set_condition(of, self.now()).expect("taken");
        self.save(write.into_iter().collect());
    }

    fn clear(&mut self, kind: &str) {
        let write = self.core.clear_condition(kind, self.now()).expect("was there");
        self.save(vec![write]);
    }
}

fn is_request(effect: &Effect) -> bool {
    matches!(effect, Effect::Get | Effect::Create(_) | Effect::PatchNode(_) | Effect::PatchStatus(_))
}

fn typed(node: &Value) -> Node {
    serde_json::from_value(node.clone()).expect("a Node")
}
