//! The endpoints state on disk.
//!
//! Owns: the format of the records and the order of their writes. In: a state that is about to be published. Out:
//! records in the table `endpoints` of the store, and the state read from them.
//!
//! | key | content |
//! |---|---|
//! | `meta` | [`Meta`]: instance ID, revision, node |
//! | `s/<namespace>/<name>` | a Service, or that it was deleted, and at which revision |
//! | `p/<namespace>/<name>/<n>` | the n-th further part of a Service that is too large for one record |
//!
//! A write that fits into one batch is atomic. A batch of 10,000 records would cost the store 90 MB of memory, a
//! hundred batches of 100 a sixth of that, so larger writes are split. The first batch marks the state as incomplete
//! and the last one clears the mark. A state that is found incomplete is discarded.

use std::collections::{BTreeMap, HashMap};

use bytes::{Bytes, BytesMut};
use keelson_proto::localnetv1::NodeInfo;
use keelson_storage::{Batch, StateStore, StoreError, Table};
use prost::Message;
use rpds::RedBlackTreeMapSync;

use super::feed::proxy_name;
use super::{Item, ServiceName};

/// Format of the records; a state of another version is discarded.
const VERSION: u32 = 1;
const META: &[u8] = b"meta";
pub(super) const CHUNK_RECORDS: usize = 128;
/// Size after which a batch is full; one more record may follow.
const CHUNK_BYTES: usize = 1024 * 1024;
/// Bytes of a Service in one record; the store accepts 1 MiB.
const PART_BYTES: usize = 512 * 1024;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Meta {
    #[prost(uint32, tag = "1")]
    pub(super) version: u32,
    #[prost(fixed64, tag = "2")]
    pub(super) instance_id: u64,
    #[prost(uint64, tag = "3")]
    pub(super) rev: u64,
    #[prost(string, tag = "4")]
    pub(super) node_name: String,
    #[prost(message, optional, tag = "5")]
    pub(super) node: Option<NodeInfo>,
    /// The revision of the last change of `node`.
    #[prost(uint64, tag = "6")]
    pub(super) node_rev: u64,
    /// Each deletion after this revision has a record.
    #[prost(uint64, tag = "7")]
    pub(super) since: u64,
    #[prost(uint64, tag = "8")]
    pub(super) services: u64,
    /// Number of records of deleted Services.
    #[prost(uint64, tag = "9")]
    pub(super) deleted: u64,
    #[prost(int64, tag = "10")]
    pub(super) published_unix_ms: i64,
    /// Further batches were to follow.
    #[prost(bool, tag = "11")]
    pub(super) incomplete: bool,
    /// When the state was last current, in Unix milliseconds; 0: written by an older agent.
    #[prost(int64, tag = "12")]
    pub(super) current_unix_ms: i64,
    /// Boot ID of the node at that time.
    #[prost(string, tag = "13")]
    pub(super) boot_id: String,
}

impl Meta {
    pub(super) fn last_current(&self) -> i64 {
        if self.current_unix_ms == 0 { self.published_unix_ms } else { self.current_unix_ms }
    }
}

#[derive(Clone, PartialEq, Message)]
struct ServiceRecord {
    #[prost(uint64, tag = "1")]
    rev: u64,
    #[prost(bytes = "bytes", tag = "2")]
    message: Bytes,
    #[prost(uint32, tag = "3")]
    parts: u32,
    #[prost(bool, tag = "4")]
    deleted: bool,
}

/// The fields of a Service from disk that are checked, and its number of endpoints.
#[derive(Clone, PartialEq, Message)]
struct Head {
    #[prost(message, optional, tag = "2")]
    endpoints: Option<ServiceHead>,
}

#[derive(Clone, PartialEq, Message)]
struct ServiceHead {
    #[prost(string, tag = "1")]
    namespace: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(message, repeated, tag = "7")]
    endpoints: Vec<()>,
    #[prost(string, tag = "22")]
    service_proxy_name: String,
}

pub(super) fn endpoints_in(message: &Bytes) -> u64 {
    let head = Head::decode(message.clone()).ok().and_then(|head| head.endpoints);
    head.map_or(0, |head| head.endpoints.len() as u64)
}

#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) name: ServiceName,
    pub(super) former_bytes: usize,
}

#[derive(Debug, Clone)]
pub(super) enum Write {
    Changes {
        /// After the change.
        meta: Box<Meta>,
        services: RedBlackTreeMapSync<ServiceName, Item>,
        changes: Vec<Change>,
        /// Deleted Services whose records are removed.
        forgotten: Vec<ServiceName>,
    },
    /// The full state, which replaces what is on disk.
    Full {
        meta: Box<Meta>,
        services: RedBlackTreeMapSync<ServiceName, Item>,
        /// With the revision of the deletion.
        deleted: BTreeMap<ServiceName, u64>,
    },
}

impl Write {
    pub(super) fn identity(&self) -> (u64, u64) {
        let (Self::Changes { meta, .. } | Self::Full { meta, .. }) = self;
        (meta.instance_id, meta.rev)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Restored {
    pub(super) meta: Meta,
    pub(super) services: RedBlackTreeMapSync<ServiceName, Item>,
    /// With the revision of the deletion.
    pub(super) deleted: BTreeMap<ServiceName, u64>,
    pub(super) endpoints: u64,
}

#[derive(Debug, Clone)]
pub(super) enum Loaded {
    Nothing,
    Lost(String),
    Full(Box<Restored>),
}

fn service_key(name: &ServiceName) -> Vec<u8> {
    format!("s/{name}").into_bytes()
}

fn part_key(name: &ServiceName, part: usize) -> Vec<u8> {
    format!("p/{name}/{part:04}").into_bytes()
}

/// Number of further parts of a message of this length in bytes.
fn parts(bytes: usize) -> usize {
    bytes.div_ceil(PART_BYTES).saturating_sub(1)
}

struct Chunks<'a> {
    store: &'a dyn StateStore,
    meta: &'a Meta,
    batch: Batch,
    bytes: usize,
    marked: bool,
}

impl Chunks<'_> {
    fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), StoreError> {
        self.bytes += key.len() + value.len();
        self.batch.put(Table::Endpoints, key, value);
        self.flush_if_full()
    }

    fn delete(&mut self, key: Vec<u8>) -> Result<(), StoreError> {
        self.batch.delete(Table::Endpoints, key);
        self.flush_if_full()
    }

    fn flush_if_full(&mut self) -> Result<(), StoreError> {
        if self.batch.len() < CHUNK_RECORDS && self.bytes < CHUNK_BYTES {
            return Ok(());
        }
        if !self.marked {
            self.marked = true;
            let mut mark = Batch::new();
            let meta = Meta { version: VERSION, incomplete: true, ..self.meta.clone() };
            mark.put(Table::Endpoints, META, meta.encode_to_vec());
            self.store.apply(&mark)?;
        }
        self.bytes = 0;
        self.store.apply(&std::mem::take(&mut self.batch))
    }

    fn item(&mut self, name: &ServiceName, item: &Item) -> Result<(), StoreError> {
        let more = parts(item.message.len());
        let message = item.message.slice(..item.message.len().min(PART_BYTES));
        let parts = u32::try_from(more).unwrap_or(u32::MAX);
        let record = ServiceRecord { rev: item.rev, message, parts, deleted: false };
        self.put(service_key(name), record.encode_to_vec())?;
        for (part, bytes) in item.message.chunks(PART_BYTES).enumerate().skip(1) {
            self.put(part_key(name, part), bytes.to_vec())?;
        }
        Ok(())
    }

    fn deleted(&mut self, name: &ServiceName, rev: u64) -> Result<(), StoreError> {
        let record = ServiceRecord { rev, deleted: true, ..ServiceRecord::default() };
        self.put(service_key(name), record.encode_to_vec())
    }

    fn change(&mut self, change: &Change, item: Option<&Item>) -> Result<(), StoreError> {
        let name = &change.name;
        let more = match item {
            Some(item) => {
                self.item(name, item)?;
                parts(item.message.len())
            }
            None => {
                self.deleted(name, self.meta.rev)?;
                0
            }
        };
        (more + 1..=parts(change.former_bytes)).try_for_each(|part| self.delete(part_key(name, part)))
    }

    fn finish(mut self) -> Result<(), StoreError> {
        let meta = Meta { version: VERSION, incomplete: false, ..self.meta.clone() };
        self.batch.put(Table::Endpoints, META, meta.encode_to_vec());
        self.store.apply(&self.batch)
    }
}

/// Returns when the write is durable. After an error, the disk holds the state before, or all of this one, or an
/// incomplete one that is discarded.
///
/// # Errors
/// The store's.
pub(super) fn write(store: &dyn StateStore, write: &Write) -> Result<(), StoreError> {
    let (Write::Changes { meta, .. } | Write::Full { meta, .. }) = write;
    let mut chunks = Chunks { store, meta, batch: Batch::new(), bytes: 0, marked: false };
    match write {
        Write::Changes { services, changes, forgotten, .. } => {
            changes.iter().try_for_each(|change| chunks.change(change, services.get(&change.name)))?;
            forgotten.iter().try_for_each(|name| chunks.delete(service_key(name)))?;
        }
        Write::Full { services, deleted, .. } => {
            let stays = |key: &[u8]| match split_key(key) {
                Some(Key::Meta) => true,
                Some(Key::Service(name)) => services.contains_key(&name) || deleted.contains_key(&name),
                Some(Key::Part(name, part)) => {
                    services.get(&name).is_some_and(|item| part <= parts(item.message.len()))
                }
                None => false,
            };
            let keys = store.scan(Table::Endpoints)?.into_iter().map(|(key, _)| key);
            let leftovers: Vec<_> = keys.filter(|key| !stays(key)).collect();
            leftovers.into_iter().try_for_each(|key| chunks.delete(key))?;
            services.iter().try_for_each(|(name, item)| chunks.item(name, item))?;
            deleted.iter().try_for_each(|(name, rev)| chunks.deleted(name, *rev))?;
        }
    }
    chunks.finish()
}

enum Key {
    Meta,
    Service(ServiceName),
    Part(ServiceName, usize),
}

fn split_key(key: &[u8]) -> Option<Key> {
    let key = std::str::from_utf8(key).ok()?;
    let name = |text: &str| text.split_once('/').map(|(namespace, name)| ServiceName::new(namespace, name));
    match key.split_once('/') {
        None if key.as_bytes() == META => Some(Key::Meta),
        Some(("s", rest)) => name(rest).map(Key::Service),
        Some(("p", rest)) => {
            let (rest, part) = rest.rsplit_once('/')?;
            Some(Key::Part(name(rest)?, part.parse().ok()?))
        }
        _ => None,
    }
}

/// # Errors
/// Those of the store. Records that cannot be decoded are no error but [`Loaded::Lost`].
pub(super) fn load(store: &dyn StateStore, node_name: &str) -> Result<Loaded, StoreError> {
    let records = store.scan(Table::Endpoints)?;
    if records.is_empty() {
        return Ok(Loaded::Nothing);
    }
    let restored = restore(records, node_name);
    Ok(restored.map_or_else(Loaded::Lost, |restored| Loaded::Full(Box::new(restored))))
}

fn restore(records: Vec<(Vec<u8>, Vec<u8>)>, node_name: &str) -> Result<Restored, String> {
    let (mut meta, mut more) = (None, HashMap::<(ServiceName, usize), Vec<u8>>::new());
    let (mut services, mut deleted) = (RedBlackTreeMapSync::new_sync(), BTreeMap::new());
    let mut endpoints = 0;
    // Keys are sorted: meta, then parts, then Services.
    for (key, value) in records {
        match split_key(&key).ok_or_else(|| format!("no record has the key {key:?}"))? {
            Key::Meta => meta = Some(check_meta(&value, node_name)?),
            Key::Part(name, part) => drop(more.insert((name, part), value)),
            Key::Service(name) => {
                let record = ServiceRecord::decode(Bytes::from(value))
                    .map_err(|error| format!("cannot decode the record of {name}: {error}"))?;
                if record.deleted {
                    deleted.insert(name, record.rev);
                    continue;
                }
                let item = item(&name, record, &mut more)?;
                endpoints += endpoints_in(&item.message);
                services.insert_mut(name, item);
            }
        }
    }
    let meta = meta.ok_or_else(|| "the identity record is missing".to_owned())?;
    let (have, should) = ((services.size() as u64, deleted.len() as u64), (meta.services, meta.deleted));
    if have != should {
        return Err(format!("found records of {have:?} present and deleted services, expected {should:?}"));
    }
    let newest = services.values().map(|item| item.rev).chain(deleted.values().copied()).max();
    if newest > Some(meta.rev) || !more.is_empty() {
        return Err("the records are of different revisions".to_owned());
    }
    Ok(Restored { meta, services, deleted, endpoints })
}

fn check_meta(value: &[u8], node_name: &str) -> Result<Meta, String> {
    let meta = Meta::decode(value).map_err(|error| format!("cannot decode the identity record: {error}"))?;
    if meta.version != VERSION {
        return Err(format!("the format version is {}, but this agent supports {VERSION}", meta.version));
    }
    if meta.incomplete {
        return Err("the agent exited during a write".to_owned());
    }
    if meta.node_name != node_name {
        return Err(format!("it is for node {:?}, but this node is {node_name:?}", meta.node_name));
    }
    if meta.instance_id == 0 || meta.rev == 0 {
        return Err("it has no identity".to_owned());
    }
    Ok(meta)
}

fn item(
    name: &ServiceName,
    record: ServiceRecord,
    more: &mut HashMap<(ServiceName, usize), Vec<u8>>,
) -> Result<Item, String> {
    let mut message = record.message;
    if record.parts > 0 {
        let mut full = BytesMut::from(&*message);
        for part in 1..=record.parts as usize {
            let bytes = more.remove(&(name.clone(), part));
            full.extend_from_slice(&bytes.ok_or_else(|| format!("a part of {name} is missing"))?);
        }
        message = full.freeze();
    }
    let head = Head::decode(message.clone()).map_err(|error| format!("cannot decode {name}: {error}"))?;
    match head.endpoints {
        Some(head) if head.namespace == name.namespace() && head.name == name.name() => {
            let proxy_name = proxy_name(&head.service_proxy_name);
            Ok(Item { message, rev: record.rev, proxy_name })
        }
        _ => Err(format!("the record of {name} has another type")),
    }
}
