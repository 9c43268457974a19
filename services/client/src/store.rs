//! Computes changes from full states.
//!
//! Owns: [`DiffStore`], which holds the name and a hash of the bytes of every delivered Service, and [`Batch`],
//! the changes that lead to the next state. In: states, or changes of them. Out: the calls of [`Handlers`].
//!
//! A Service takes its name and about 60 bytes, however many endpoints it has: 1 MB for 10,000 Services. The hash has
//! 64 bits and a random key, so that one in 2^64 changes is missed.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    iter,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use bytes::Bytes;
use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};

use crate::{Error, Handlers, Position, RawService, ServiceName, State, state::decode};

/// Maximum number of bytes of changed Services that are kept decoded. Above it each is decoded to check it and again
/// when it is delivered, which takes less memory.
const DECODED_AT_ONCE: usize = 1 << 20;
/// Number of Services that are decoded ahead of the consumer at a time, which costs a wake-up; twice as many may wait for it.
const AHEAD: usize = 32;

/// The changes that lead to the next state.
#[derive(Debug)]
pub(crate) struct Batch {
    /// A full state: Services that are not listed do not exist.
    pub(crate) is_full: bool,
    pub(crate) position: Position,
    pub(crate) node: Option<NodeInfo>,
    /// In the order of their names, which are unique; `None`: deleted.
    pub(crate) services: Vec<(ServiceName, Option<Bytes>)>,
}

impl From<State> for Batch {
    fn from(state: State) -> Self {
        let services = state.services.into_iter().map(|RawService { name, bytes }| (name, Some(bytes)));
        Self { is_full: true, position: state.position, node: state.node, services: services.collect() }
    }
}

/// Computes changes from full states, for consumers that get states from [`crate::Client::next`] or elsewhere.
/// [`crate::Client::run`] has its own.
#[derive(Debug, Default)]
pub struct DiffStore {
    /// What the consumer has: the hash of the bytes, or `None` if it is not known.
    held: BTreeMap<ServiceName, Option<u64>>,
    node: Option<NodeInfo>,
    last: Option<Position>,
    /// The consumer resumed, and holds more than is known here.
    has_unknown_services: bool,
    hasher: RandomState,
    decoded: u64,
}

#[derive(Debug)]
struct Set {
    name: ServiceName,
    bytes: Bytes,
    hash: u64,
    decoded: Option<ServiceEndpoints>,
}

#[derive(Debug)]
struct Plan {
    deletes: Vec<ServiceName>,
    sets: Vec<Set>,
    node: Option<NodeInfo>,
    position: Position,
    is_full: bool,
}

struct Decoded<S> {
    name: ServiceName,
    hash: u64,
    service: Result<S, Error>,
}

impl<S: From<ServiceEndpoints>> From<Set> for Decoded<S> {
    fn from(Set { name, bytes, hash, decoded }: Set) -> Self {
        let service = decoded.map_or_else(|| decode(&name, &bytes), Ok).map(S::from);
        Self { name, hash, service }
    }
}

/// Passes Services on in their order, until one fails. Many are decoded on a thread of their own, ahead of the consumer.
fn decode_ahead<S: From<ServiceEndpoints> + Send>(
    sets: Vec<Set>,
    mut pass: impl FnMut(Decoded<S>) -> Result<(), Error>,
) -> Result<(), Error> {
    let undecoded = sets.iter().filter(|set| set.decoded.is_none()).map(|set| set.bytes.len());
    let is_many = undecoded.sum::<usize>() > DECODED_AT_ONCE;
    let sets = Mutex::new(sets.into_iter());
    let next = || sets.lock().unwrap_or_else(PoisonError::into_inner).next().map(Decoded::from);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(1);
        let next_batch = move || Some(iter::from_fn(next).take(AHEAD).collect::<Vec<_>>());
        let batches = iter::from_fn(next_batch).take_while(|batch| !batch.is_empty());
        // Ends with the receiver.
        let decode_all = move || batches.map(|batch| sender.send(batch)).all(|sent| sent.is_ok());
        let decoder = thread::Builder::new().name("decode".to_owned());
        match is_many.then(|| decoder.spawn_scoped(scope, decode_all)) {
            Some(Ok(_)) => receiver.into_iter().flatten().try_for_each(pass),
            // Without a thread.
            Some(Err(_)) | None => iter::from_fn(next).try_for_each(&mut pass),
        }
    })
}

impl DiffStore {
    /// A store for a consumer that holds only these Services, whose content is not known.
    #[must_use]
    pub fn new(held: impl IntoIterator<Item = ServiceName>) -> Self {
        Self { held: held.into_iter().map(|name| (name, None)).collect(), ..Self::default() }
    }

    /// As [`Self::new`], for a consumer that resumes and may hold Services that are not named.
    pub(crate) fn resumed(held: impl IntoIterator<Item = ServiceName>) -> Self {
        Self { has_unknown_services: true, ..Self::new(held) }
    }

    /// Delivers the changes that lead to this state: see [`Handlers`]. Nothing is delivered if nothing has changed and
    /// the position is that of the state before.
    ///
    /// # Errors
    /// A changed Service cannot be decoded: nothing was delivered, or of the first state only Services before it, without
    /// `sync`. Or `sync` failed: the next state, which may be the same, is delivered in full.
    pub async fn deliver<S: From<ServiceEndpoints> + Send>(
        &mut self,
        state: State,
        handlers: &mut impl Handlers<S>,
    ) -> Result<(), Error> {
        self.deliver_batch(state.into(), handlers).await
    }

    /// Number of Services decoded so far.
    #[must_use]
    pub fn decoded(&self) -> u64 {
        self.decoded
    }

    pub(crate) async fn deliver_batch<S: From<ServiceEndpoints> + Send>(
        &mut self,
        batch: Batch,
        handlers: &mut impl Handlers<S>,
    ) -> Result<(), Error> {
        let plan = self.plan(batch)?;
        let nothing = plan.deletes.is_empty() && plan.sets.is_empty() && plan.node.is_none();
        if nothing && self.last.as_ref() == Some(&plan.position) {
            return Ok(());
        }
        self.call(plan, handlers).await
    }

    /// Whether the consumer has nothing. The first state is the largest, and nothing is in effect before it is complete:
    /// its Services are decoded once, each when it is delivered.
    fn is_first(&self, is_full: bool) -> bool {
        is_full && self.last.is_none() && self.held.is_empty()
    }

    /// Compares, and decodes what has changed; does not change the store.
    fn plan(&mut self, batch: Batch) -> Result<Plan, Error> {
        let Batch { is_full, position, node, services } = batch;
        let mut deletes = Vec::new();
        if is_full {
            let gone = |name: &&ServiceName| services.binary_search_by(|(other, _)| other.cmp(name)).is_err();
            deletes.extend(self.held.keys().filter(gone).cloned());
        }
        let mut sets = Vec::new();
        for (name, bytes) in services {
            match bytes {
                Some(bytes) => {
                    let hash = self.hasher.hash_one(&*bytes);
                    if self.held.get(&name) != Some(&Some(hash)) {
                        sets.push(Set { name, bytes, hash, decoded: None });
                    }
                }
                None if self.has_unknown_services || self.held.contains_key(&name) => deletes.push(name),
                None => {}
            }
        }
        let mut total = 0_usize;
        let checked = if self.is_first(is_full) { &mut [][..] } else { &mut sets };
        for set in checked {
            total = total.saturating_add(set.bytes.len());
            self.decoded += 1;
            set.decoded = Some(decode(&set.name, &set.bytes)?).filter(|_| total <= DECODED_AT_ONCE);
        }
        let node = node.filter(|node| self.node.as_ref() != Some(node));
        Ok(Plan { deletes, sets, node, position, is_full })
    }

    async fn call<S: From<ServiceEndpoints> + Send>(
        &mut self,
        plan: Plan,
        handlers: &mut impl Handlers<S>,
    ) -> Result<(), Error> {
        let Plan { deletes, sets, node, position, is_full } = plan;
        let is_first = self.is_first(is_full);
        // Until `sync` succeeds, delivered Services count as neither present nor deleted.
        let before = self.last.take();
        if let Some(node) = &node {
            self.node = None;
            handlers.node(node.clone());
        }
        for name in &deletes {
            self.held.insert(name.clone(), None);
            handlers.delete(name);
        }
        let mut set_now = Vec::with_capacity(sets.len());
        decode_ahead(sets, |Decoded { name, hash, service }| {
            self.decoded += u64::from(is_first);
            let service = service?;
            self.held.insert(name.clone(), None);
            handlers.set(&name, service);
            set_now.push((name, hash));
            Ok(())
        })?;
        tracing::debug!(
            rev = position.rev,
            from = before.map_or(0, |before| before.rev),
            sets = set_now.len(),
            deletes = deletes.len(),
            "endpoints changed"
        );
        if let Err(error) = handlers.sync(&position).await {
            // A consumer that failed may have lost its earlier state.
            self.held.values_mut().for_each(|hash| *hash = None);
            self.node = None;
            return Err(Error::Handler(error));
        }
        for name in &deletes {
            self.held.remove(name);
        }
        self.held.extend(set_now.into_iter().map(|(name, hash)| (name, Some(hash))));
        self.has_unknown_services &= !is_full;
        self.node = node.or(self.node.take());
        self.last = Some(position);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::BoxError;

    /// Records its calls.
    #[derive(Default)]
    struct Calls {
        calls: Vec<String>,
        fail: bool,
    }

    impl Handlers for Calls {
        fn node(&mut self, node: NodeInfo) {
            self.calls.push(format!("node {}", node.zone));
        }

        fn delete(&mut self, name: &ServiceName) {
            self.calls.push(format!("-{}", name.name()));
        }

        fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
            self.calls.push(format!("{}={}", name.name(), service.health_check_node_port));
        }

        async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
            self.calls.push(format!("@{}", position.rev));
            if self.fail { Err("no room in the kernel".into()) } else { Ok(()) }
        }
    }

    fn name(name: &str) -> ServiceName {
        ServiceName::new("ns", name)
    }

    fn bytes(service: &str, version: i32) -> Bytes {
        let service = ServiceEndpoints {
            namespace: "ns".into(),
            name: service.into(),
            health_check_node_port: version,
            ..Default::default()
        };
        service.encode_to_vec().into()
    }

    fn at(rev: u64) -> Position {
        Position { instance_id: 1, rev, ..Position::default() }
    }

    fn full_batch(rev: u64, services: &[(&str, i32)]) -> Batch {
        let services = services
            .iter()
            .map(|&(service, version)| RawService { name: name(service), bytes: bytes(service, version) });
        State::new(at(rev), None, services.collect()).unwrap().into()
    }

    fn changes(rev: u64, sets: &[(&str, i32)], deletes: &[&str]) -> Batch {
        let sets = sets.iter().map(|&(service, version)| (name(service), Some(bytes(service, version))));
        let mut services: Vec<_> = sets.chain(deletes.iter().map(|service| (name(service), None))).collect();
        services.sort();
        Batch { is_full: false, position: at(rev), node: None, services }
    }

    async fn calls(store: &mut DiffStore, batch: Batch) -> String {
        let mut calls = Calls::default();
        store.deliver_batch(batch, &mut calls).await.unwrap();
        calls.calls.join(" ")
    }

    async fn failing(store: &mut DiffStore, batch: Batch) -> String {
        let mut calls = Calls { fail: true, ..Calls::default() };
        let error = store.deliver_batch(batch, &mut calls).await.unwrap_err();
        assert!(matches!(error, Error::Handler(_)), "{error}");
        calls.calls.join(" ")
    }

    #[tokio::test]
    async fn only_changed_services_are_decoded_and_delivered() {
        let mut store = DiffStore::default();
        assert_eq!(calls(&mut store, full_batch(1, &[("a", 1), ("b", 1), ("c", 1)])).await, "a=1 b=1 c=1 @1");
        assert_eq!(store.decoded(), 3);
        assert_eq!(calls(&mut store, full_batch(2, &[("a", 1), ("b", 2), ("d", 1)])).await, "-c b=2 d=1 @2");
        assert_eq!(store.decoded(), 5);
        assert_eq!(calls(&mut store, full_batch(3, &[("a", 1), ("b", 2), ("d", 1)])).await, "@3");
        assert_eq!(
            calls(&mut store, full_batch(3, &[("a", 1), ("b", 2), ("d", 1)])).await,
            "",
            "nothing at all"
        );
        assert_eq!(store.decoded(), 5);
        assert_eq!(calls(&mut store, changes(4, &[("a", 2), ("b", 2)], &["d", "x"])).await, "-d a=2 @4");
        assert_eq!(store.decoded(), 6);
        assert_eq!(calls(&mut store, full_batch(5, &[])).await, "-a -b @5");
    }

    #[tokio::test]
    async fn the_node_comes_when_it_has_changed_and_staleness_when_it_does() {
        let mut store = DiffStore::default();
        let node = |zone: &str| Some(NodeInfo { zone: zone.into(), ..Default::default() });
        assert_eq!(calls(&mut store, Batch { node: node("z"), ..full_batch(1, &[]) }).await, "node z @1");
        assert_eq!(calls(&mut store, Batch { node: node("z"), ..full_batch(2, &[]) }).await, "@2");
        assert_eq!(calls(&mut store, Batch { node: node("y"), ..changes(3, &[], &[]) }).await, "node y @3");
        let mut stale = changes(3, &[], &[]);
        stale.position.stale = true;
        assert_eq!(calls(&mut store, stale).await, "@3");
        assert_eq!(calls(&mut store, changes(3, &[], &[])).await, "@3");
        assert_eq!(calls(&mut store, changes(3, &[], &[])).await, "");
    }

    #[tokio::test]
    async fn after_an_error_the_next_state_is_a_full_state() {
        let mut store = DiffStore::default();
        assert_eq!(calls(&mut store, full_batch(1, &[("a", 1), ("b", 1), ("c", 1)])).await, "a=1 b=1 c=1 @1");
        assert_eq!(failing(&mut store, changes(2, &[("a", 2), ("n", 1)], &["b"])).await, "-b a=2 n=1 @2");
        // b may have been deleted and n set, so both are deleted.
        assert_eq!(failing(&mut store, full_batch(3, &[("a", 2), ("c", 1)])).await, "-b -n a=2 c=1 @3");
        assert_eq!(calls(&mut store, full_batch(3, &[("a", 2), ("c", 1)])).await, "-b -n a=2 c=1 @3");
        assert_eq!(calls(&mut store, full_batch(3, &[("a", 2), ("c", 1)])).await, "");
        assert_eq!(calls(&mut store, full_batch(4, &[("a", 2)])).await, "-c @4");
    }

    #[tokio::test]
    async fn services_held_before_are_deleted_when_they_are_gone() {
        let mut store = DiffStore::new([name("a"), name("b")]);
        assert_eq!(calls(&mut store, full_batch(1, &[("b", 1), ("c", 1)])).await, "-a b=1 c=1 @1");
        let mut store = DiffStore::resumed([]);
        assert_eq!(calls(&mut store, changes(5, &[("c", 1)], &["a"])).await, "-a c=1 @5");
        assert_eq!(calls(&mut store, full_batch(6, &[])).await, "-c @6");
        assert_eq!(calls(&mut store, changes(7, &[], &["x"])).await, "@7", "by now all is known");
    }

    #[tokio::test]
    async fn a_state_that_cannot_be_decoded_is_not_delivered() {
        let mut store = DiffStore::default();
        calls(&mut store, full_batch(1, &[("a", 1)])).await;
        let mut broken = full_batch(2, &[("a", 2), ("b", 1)]);
        let Some(bytes) = &mut broken.services[1].1 else { panic!() };
        *bytes = [bytes, &[0x3a, 200][..]].concat().into();
        let mut handlers = Calls::default();
        let error = store.deliver_batch(broken, &mut handlers).await.unwrap_err();
        assert!(error.to_string().contains("cannot decode Service ns/b"), "{error}");
        assert!(handlers.calls.is_empty());
        assert_eq!(calls(&mut store, full_batch(2, &[("a", 1), ("b", 1)])).await, "b=1 @2");
    }

    #[tokio::test]
    async fn a_first_state_that_cannot_be_decoded_is_not_synced() {
        let mut store = DiffStore::default();
        let mut broken = full_batch(1, &[("a", 1), ("b", 1), ("c", 1)]);
        let Some(bytes) = &mut broken.services[1].1 else { panic!() };
        *bytes = [bytes, &[0x3a, 200][..]].concat().into();
        let mut handlers = Calls::default();
        let error = store.deliver_batch(broken, &mut handlers).await.unwrap_err();
        assert!(error.to_string().contains("cannot decode Service ns/b"), "{error}");
        assert_eq!((handlers.calls.join(" "), store.decoded()), ("a=1".to_owned(), 2));
        // What was delivered counts as neither present nor deleted.
        assert_eq!(calls(&mut store, full_batch(2, &[("b", 1), ("c", 1)])).await, "-a b=1 c=1 @2");
    }

    /// Many are decoded on another thread.
    #[tokio::test]
    async fn of_a_large_first_state_only_what_is_before_an_error_is_delivered() {
        let names: Vec<String> =
            (0..3000).map(|number| format!("s{number:04}-{}", "x".repeat(500))).collect();
        let services: Vec<(&str, i32)> = names.iter().map(|name| (&**name, 1)).collect();
        let mut broken = full_batch(1, &services);
        let Some(bytes) = &mut broken.services[2000].1 else { panic!() };
        *bytes = [bytes, &[0x3a, 200][..]].concat().into();
        let mut store = DiffStore::default();
        let mut handlers = Calls::default();
        let error = store.deliver_batch(broken, &mut handlers).await.unwrap_err();
        assert!(error.to_string().contains("cannot decode Service ns/s2000-"), "{error}");
        let delivered = (0..2000).zip(&handlers.calls);
        assert_eq!(handlers.calls.len(), 2000);
        for (number, call) in delivered {
            assert!(call.starts_with(&format!("s{number:04}-")), "{call}");
        }
    }

    #[tokio::test]
    async fn more_services_than_one_chunk_are_delivered() {
        let names: Vec<String> =
            (0..3000).map(|number| format!("s{number:04}-{}", "x".repeat(500))).collect();
        let services: Vec<(&str, i32)> = names.iter().map(|name| (&**name, 1)).collect();
        let mut store = DiffStore::default();
        let text = calls(&mut store, full_batch(1, &services)).await;
        assert_eq!(text.split(' ').count(), 3001);
        assert_eq!(store.decoded(), 3000);
        assert!(names.iter().zip(text.split(' ')).all(|(name, call)| call == format!("{name}=1")));
    }
}
