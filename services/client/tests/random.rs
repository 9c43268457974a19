//! Random histories through both APIs: whatever happens, a consumer ends with the server's state, and has at each
//! `sync` exactly the state of its position.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use common::{Call, LONG, Server, started};
use keelson_client::{
    Api, BoxError, CancellationToken, Client, Handlers, NodeInfo, Options, Position, ServiceEndpoints,
    ServiceName,
};
use keelson_proto::{endpoints as pb, localnetv1 as local};
use proptest::prelude::*;
use tokio::time::timeout;

/// Services and their versions, and the version of the node.
type Contents = (BTreeMap<String, i32>, String);

#[derive(Debug, Clone)]
enum Step {
    /// Versions of Services (0: deleted), in one revision.
    Change(Vec<(u8, i32)>),
    Node(u8),
    /// The server loses its state and makes another with the same contents.
    NewInstance,
    /// The server forgets its history, so that it has to send a full state.
    Forget,
    /// The client receives the latest state.
    Deliver,
    /// The same, but the connection breaks after this number of items.
    Break(usize),
    /// The consumer fails at the next state.
    Fail,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => prop::collection::vec((0..6_u8, 0..4_i32), 1..4).prop_map(Step::Change),
        1 => (0..3_u8).prop_map(Step::Node),
        1 => Just(Step::NewInstance),
        1 => Just(Step::Forget),
        5 => Just(Step::Deliver),
        2 => (0..6_usize).prop_map(Step::Break),
        1 => Just(Step::Fail),
    ]
}

#[derive(Default)]
struct Shared {
    has: Contents,
    fail: bool,
    /// Every published state.
    published: BTreeMap<(u64, u64), Contents>,
    at: (u64, u64),
    /// After an error any Service may be delivered again.
    may_repeat: bool,
    synced: usize,
    violations: Vec<String>,
}

struct Fold(Arc<Mutex<Shared>>);

impl Handlers for Fold {
    fn node(&mut self, node: NodeInfo) {
        self.0.lock().unwrap().has.1 = node.zone;
    }

    fn delete(&mut self, name: &ServiceName) {
        let mut shared = self.0.lock().unwrap();
        if shared.has.0.remove(name.name()).is_none() && !shared.may_repeat {
            shared.violations.push(format!("{name} was deleted, and was not there"));
        }
    }

    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        let mut shared = self.0.lock().unwrap();
        let version = service.health_check_node_port;
        if shared.has.0.insert(service.name, version) == Some(version) && !shared.may_repeat {
            shared.violations.push(format!("{name} was set, and had not changed"));
        }
    }

    async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
        let mut shared = self.0.lock().unwrap();
        shared.at = (position.instance_id, position.rev);
        shared.synced += 1;
        let at = shared.at;
        if shared.published.get(&at) != Some(&shared.has) {
            let violations =
                format!("at {at:?} it has {:?}, not {:?}", shared.has, shared.published.get(&at));
            shared.violations.push(violations);
        }
        shared.may_repeat = std::mem::take(&mut shared.fail);
        if shared.may_repeat {
            // All that it had is lost.
            shared.has.0.clear();
            shared.has.1.clear();
            return Err("it failed".into());
        }
        Ok(())
    }
}

/// A server's state with a history, which answers as the protocol defines.
struct Publisher {
    server: Server,
    watch: Option<Call>,
    contents: Contents,
    at: (u64, u64),
    /// Position of the open watch.
    sent: (u64, u64),
    /// The first revision of this instance since which changes are known.
    since: u64,
    shared: Arc<Mutex<Shared>>,
}

fn node(zone: &str) -> NodeInfo {
    NodeInfo { zone: zone.into(), ..Default::default() }
}

impl Publisher {
    fn publish(&mut self) {
        self.shared.lock().unwrap().published.insert(self.at, self.contents.clone());
    }

    /// Sends at most `most` items that lead to the latest state; returns whether the state was complete.
    async fn send(&mut self, api: Api, most: usize) -> bool {
        if api == Api::Next { self.send_next(most).await } else { self.send_watch(most).await }
    }

    async fn send_next(&mut self, most: usize) -> bool {
        let call = self.server.expect_method("Next").await;
        if (call.instance_id, call.rev) == self.at {
            // It is up to date and would wait; all it may notice is the broken connection.
            return most == usize::MAX;
        }
        let next = local::NextFilter { instance_id: self.at.0, rev: self.at.1, ..Default::default() };
        let first =
            local::NextItem { next: Some(next), node: Some(node(&self.contents.1)), ..Default::default() };
        let rest = self.contents.0.iter().map(|(name, version)| local::NextItem {
            endpoints: Some(common::service(name, *version)),
            ..Default::default()
        });
        for (count, item) in std::iter::once(first).chain(rest).enumerate() {
            if count >= most {
                return false;
            }
            call.send(&item).await;
        }
        if most == usize::MAX {
            call.status(0).await;
        }
        most == usize::MAX
    }

    async fn send_watch(&mut self, most: usize) -> bool {
        use pb::watch_item::Item;
        if self.watch.is_none() {
            let call = self.server.expect_method("Watch").await;
            self.sent = (call.instance_id, call.rev);
            self.watch = Some(call);
        }
        let (from, to) = {
            let shared = self.shared.lock().unwrap();
            let known = self.sent.0 == self.at.0 && self.sent.1 >= self.since;
            (known.then(|| shared.published.get(&self.sent).cloned()).flatten(), self.contents.clone())
        };
        let mut items = Vec::new();
        if from.is_none() {
            items.push(Item::Reset(pb::Reset {}));
        }
        let (before, node_before) = from.clone().unwrap_or_default();
        for (name, version) in &to.0 {
            if before.get(name) != Some(version) {
                items.push(Item::Set(common::service(name, *version)));
            }
        }
        for name in before.keys().filter(|name| !to.0.contains_key(*name)) {
            items.push(Item::Delete(pb::ServiceName { namespace: "ns".into(), name: name.clone() }));
        }
        if from.is_none() || node_before != to.1 {
            items.push(Item::Node(node(&to.1)));
        }
        items.push(Item::Sync(pb::Sync { instance_id: self.at.0, rev: self.at.1, ..Default::default() }));
        let is_full = items.len() <= most;
        let call = self.watch.as_ref().unwrap();
        for item in items.into_iter().take(most) {
            call.watch(item).await;
        }
        self.sent = self.at;
        is_full
    }

    /// Breaks every connection and listens again.
    fn restart(&mut self) {
        self.watch = None;
        self.server.restart();
    }

    /// Waits until the consumer has the latest state without an error.
    async fn deliver(&mut self, api: Api) {
        loop {
            let fails = {
                let shared = self.shared.lock().unwrap();
                if shared.at == self.at && !shared.may_repeat {
                    return;
                }
                shared.fail
            };
            let before = self.shared.lock().unwrap().synced;
            self.send(api, usize::MAX).await;
            while self.shared.lock().unwrap().synced == before {
                tokio::task::yield_now().await;
            }
            if fails {
                // It closes this stream, and requests the state again.
                self.watch = None;
            }
        }
    }
}

async fn history(api: Api, steps: &[Step]) {
    let (server, options) = started();
    let shared = Arc::new(Mutex::new(Shared::default()));
    let mut publisher = Publisher {
        server,
        watch: None,
        contents: Contents::default(),
        at: (1, 1),
        sent: (0, 0),
        since: 1,
        shared: shared.clone(),
    };
    publisher.publish();
    let mut client =
        Client::new(Options { api, error_delay: std::time::Duration::from_millis(1), ..options });
    let token: CancellationToken = client.cancellation();
    let mut fold = Fold(shared.clone());
    let running = tokio::spawn(async move { client.run(&mut fold).await });
    for step in steps {
        match step {
            Step::Change(changes) => {
                for (service, version) in changes {
                    let name = format!("s{service}");
                    match version {
                        0 => drop(publisher.contents.0.remove(&name)),
                        version => drop(publisher.contents.0.insert(name, *version)),
                    }
                }
                publisher.at.1 += 1;
                publisher.publish();
            }
            Step::Node(version) => {
                publisher.contents.1 = format!("zone-{version}");
                publisher.at.1 += 1;
                publisher.publish();
            }
            Step::NewInstance => {
                publisher.at = (publisher.at.0 + 1, 1);
                publisher.since = 1;
                publisher.publish();
                publisher.restart();
            }
            Step::Forget => {
                publisher.at.1 += 1;
                publisher.since = publisher.at.1;
                publisher.publish();
                publisher.restart();
            }
            Step::Deliver => publisher.deliver(api).await,
            Step::Break(most) => {
                let synced = shared.lock().unwrap().synced;
                // A full state that arrives before the break has to be waited for, to know the client's position.
                if publisher.send(api, *most).await && *most > 0 && shared.lock().unwrap().at != publisher.at
                {
                    while shared.lock().unwrap().synced == synced {
                        tokio::task::yield_now().await;
                    }
                }
                publisher.restart();
            }
            Step::Fail => shared.lock().unwrap().fail = true,
        }
    }
    publisher.deliver(api).await;
    token.cancel();
    let position = running.await.unwrap();
    assert_eq!((position.instance_id, position.rev), publisher.at);
    let shared = shared.lock().unwrap();
    assert_eq!(shared.has, publisher.contents);
    assert!(shared.violations.is_empty(), "{:?}", shared.violations);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_history_ends_in_the_servers_state_on_either_api(
        steps in prop::collection::vec(step(), 1..40)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for api in [Api::Watch, Api::Next] {
            runtime.block_on(async { timeout(LONG, history(api, &steps)).await.expect("it ends") });
        }
    }
}
