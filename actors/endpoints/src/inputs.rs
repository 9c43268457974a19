//! The objects received from the sources.
//!
//! Owns: the Services, EndpointSlices, ServiceCIDRs and the Node as last received, and the Services whose view may
//! have changed since it was last computed. In: objects as [`ObjectEvent`], by kind. Out: the view of one Service,
//! computed on each call.
//!
//! Objects are kept encoded and reduced to the fields that are read, because most are rarely used: a cluster of
//! 10,000 Services with 10 endpoints each takes about as many megabytes as its slices have on the wire.

use std::collections::{BTreeMap, HashMap};

use keelson_proto::{
    endpoints as pb,
    kubernetes::{ObjectMeta, ServiceCidrSpec},
    localnetv1::{NodeInfo, ServiceEndpoints},
};
use prost::Message;

use super::{
    Ack, EndpointSlice, NodeView, ObjectEvent, Service, ServiceCidr, ServiceName, SourceKind,
    view::{self, owner, triggered_unix_ms, trim_service, trim_slice},
};

/// Longer names are ignored: Kubernetes allows 253 bytes for a name and 63 for a namespace.
const MAX_NAME_LEN: usize = 1024;

/// Progress of listing one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    Unknown,
    Listing,
    Listed,
}

#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    stage: Stage,
    listing: u32,
}

#[derive(Debug)]
struct Packed {
    bytes: Box<[u8]>,
    /// The last listing that contained it.
    listing: u32,
}

/// A Service and its slices. Slices may arrive before the Service and stay after its deletion.
#[derive(Debug, Default)]
struct Entry {
    service: Option<Packed>,
    slices: Vec<(ServiceName, Packed)>,
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.service.is_none() && self.slices.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct Dirty {
    /// With the Unix milliseconds of the oldest change whose time is known.
    pub(super) services: HashMap<ServiceName, Option<i64>>,
    pub(super) node: bool,
}

impl Dirty {
    fn add(&mut self, name: ServiceName, triggered: Option<i64>) {
        let oldest = self.services.entry(name).or_default();
        *oldest = (*oldest).into_iter().chain(triggered).min();
    }

    fn is_empty(&self) -> bool {
        self.services.is_empty() && !self.node
    }
}

#[derive(Debug)]
pub(super) struct Inputs {
    entries: HashMap<ServiceName, Entry>,
    /// The Service of each slice, which can change.
    owners: HashMap<ServiceName, ServiceName>,
    services: usize,
    cidrs: BTreeMap<ServiceName, (ServiceCidr, u32)>,
    node: Option<NodeView>,
    remembered: Option<NodeView>,
    remembered_cidrs: Vec<String>,
    progress: [Progress; 3],
    dirty: Dirty,
    /// Times of changes before this are ignored, in Unix milliseconds.
    since_unix_ms: i64,
    /// Service proxies beside the usual one, whose Services are published, sorted.
    proxy_names: Vec<String>,
}

/// Index of a listed kind in [`Inputs::progress`].
fn place(kind: SourceKind) -> Option<usize> {
    match kind {
        SourceKind::Services => Some(0),
        SourceKind::EndpointSlices => Some(1),
        SourceKind::ServiceCidrs => Some(2),
        SourceKind::Node => None,
    }
}

fn name_of(metadata: Option<&ObjectMeta>) -> Option<ServiceName> {
    let metadata = metadata.filter(|metadata| !metadata.name.is_empty());
    let name = metadata.map(|metadata| ServiceName::new(&metadata.namespace, &metadata.name));
    let name = name.filter(|name| name.as_str().len() <= MAX_NAME_LEN);
    if name.is_none() {
        tracing::warn!(actor = "EndpointPublisher", "object without a valid name ignored");
    }
    name
}

fn pack(object: &impl Message, listing: u32) -> Packed {
    Packed { bytes: object.encode_to_vec().into(), listing }
}

fn unpack<T: Message + Default>(packed: &Packed) -> Option<T> {
    T::decode(&*packed.bytes).ok()
}

impl Inputs {
    /// Times of changes before `since_unix_ms` are ignored, as in kube-proxy, because they precede the start of the
    /// agent.
    pub(super) fn new(since_unix_ms: i64, mut proxy_names: Vec<String>) -> Self {
        proxy_names.sort_unstable();
        proxy_names.dedup();
        Self {
            entries: HashMap::new(),
            owners: HashMap::new(),
            services: 0,
            cidrs: BTreeMap::new(),
            node: None,
            remembered: None,
            remembered_cidrs: Vec::new(),
            progress: [Progress::default(); 3],
            dirty: Dirty::default(),
            since_unix_ms,
            proxy_names,
        }
    }

    pub(super) fn services(&mut self, seen: Vec<ObjectEvent<Service>>) -> Ack {
        self.take(0, seen, Self::put_service, Self::remove_service, Self::sweep_services)
    }

    pub(super) fn slices(&mut self, seen: Vec<ObjectEvent<EndpointSlice>>) -> Ack {
        self.take(
            1,
            seen,
            Self::put_slice,
            |inputs, name| inputs.remove_slice(name, None),
            Self::sweep_slices,
        )
    }

    pub(super) fn service_cidrs(&mut self, seen: Vec<ObjectEvent<ServiceCidr>>) -> Ack {
        self.take(2, seen, Self::put_cidr, Self::remove_cidr, Self::sweep_cidrs)
    }

    pub(super) fn remember_node(&mut self, node: &NodeInfo) {
        self.remembered = Some(view::node_view(node));
        self.remembered_cidrs.clone_from(&node.service_cid_rs);
    }

    pub(super) fn node(&mut self, node: NodeView) {
        let node = node.or_last(self.node.as_ref().or(self.remembered.as_ref()));
        let Some(former) = self.node.replace(node) else {
            self.dirty.node = true;
            return self.all_dirty();
        };
        let Some(node) = &self.node else { return };
        self.dirty.node |= former != *node;
        if (&former.name, &former.zone) != (&node.name, &node.zone) {
            self.all_dirty();
        }
    }

    fn all_dirty(&mut self) {
        for name in self.entries.keys() {
            self.dirty.add(name.clone(), None);
        }
    }

    fn take<T>(
        &mut self,
        place: usize,
        seen: Vec<ObjectEvent<T>>,
        put: fn(&mut Self, T),
        remove: fn(&mut Self, &ServiceName),
        sweep: fn(&mut Self, u32),
    ) -> Ack {
        for seen in seen {
            let progress = &mut self.progress[place];
            match (seen, progress.stage) {
                (ObjectEvent::Listing, _) => {
                    progress.stage = Stage::Listing;
                    progress.listing = progress.listing.wrapping_add(1);
                }
                (_, Stage::Unknown) => return Ack::Relist,
                (ObjectEvent::Upsert(object), _) => put(self, *object),
                (ObjectEvent::Deleted(name), _) => remove(self, &name),
                (ObjectEvent::ListComplete, Stage::Listing) => {
                    progress.stage = Stage::Listed;
                    let listing = progress.listing;
                    sweep(self, listing);
                }
                (ObjectEvent::ListComplete, Stage::Listed) => {}
                (ObjectEvent::Refused, _) => {
                    progress.stage = Stage::Listed;
                    self.recall(place);
                }
            }
        }
        // A source without changes learns here that it must list again.
        if self.progress[place].stage == Stage::Unknown { Ack::Relist } else { Ack::Accepted }
    }

    fn put_service(&mut self, service: Service) {
        let Some(name) = name_of(service.metadata.as_ref()) else { return };
        let packed = pack(&trim_service(service), self.progress[0].listing);
        let name = self.known(name);
        let entry = self.entries.entry(name.clone()).or_default();
        let former = entry.service.replace(packed);
        self.services += usize::from(former.is_none());
        if former.map(|former| former.bytes).as_ref() != entry.service.as_ref().map(|new| &new.bytes) {
            self.dirty.add(name, None);
        }
    }

    fn remove_service(&mut self, name: &ServiceName) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        if entry.service.take().is_some() {
            self.services -= 1;
            self.dirty.add(name.clone(), None);
        }
        if entry.is_empty() {
            self.entries.remove(name);
        }
    }

    fn sweep_services(&mut self, listing: u32) {
        let dirty = &mut self.dirty;
        let services = &mut self.services;
        self.entries.retain(|name, entry| {
            if entry.service.take_if(|service| service.listing != listing).is_some() {
                *services -= 1;
                dirty.add(name.clone(), None);
            }
            !entry.is_empty()
        });
    }

    fn put_slice(&mut self, slice: EndpointSlice) {
        let Some(name) = name_of(slice.metadata.as_ref()) else { return };
        let since = self.since_unix_ms;
        let triggered = triggered_unix_ms(&slice).filter(|triggered| *triggered >= since);
        let owner = owner(&slice);
        if self.owners.get(&name) != owner.as_ref() {
            self.remove_slice(&name, triggered);
        }
        let Some(owner) = owner else { return };
        let packed = pack(&trim_slice(slice), self.progress[1].listing);
        let owner = self.known(owner);
        let slices = &mut self.entries.entry(owner.clone()).or_default().slices;
        match slices.binary_search_by(|(other, _)| other.cmp(&name)) {
            Ok(at) => {
                let former = std::mem::replace(&mut slices[at].1, packed);
                if former.bytes == slices[at].1.bytes {
                    return;
                }
            }
            Err(at) => {
                // Most Services have one or two slices.
                slices.reserve_exact(1);
                slices.insert(at, (name.clone(), packed));
                self.owners.insert(name, owner.clone());
            }
        }
        self.dirty.add(owner, triggered);
    }

    fn remove_slice(&mut self, name: &ServiceName, triggered: Option<i64>) {
        let Some(owner) = self.owners.remove(name) else { return };
        if let Some(entry) = self.entries.get_mut(&owner) {
            entry.slices.retain(|(slice, _)| slice != name);
            if entry.is_empty() {
                self.entries.remove(&owner);
            }
        }
        self.dirty.add(owner, triggered);
    }

    fn sweep_slices(&mut self, listing: u32) {
        let (dirty, owners) = (&mut self.dirty, &mut self.owners);
        self.entries.retain(|owner, entry| {
            entry.slices.retain(|(name, slice)| {
                let stays = slice.listing == listing;
                if !stays {
                    owners.remove(name);
                    dirty.add(owner.clone(), None);
                }
                stays
            });
            !entry.is_empty()
        });
    }

    /// Uses what an earlier process knew of a kind that cannot be listed. For Services and slices there is nothing.
    fn recall(&mut self, place: usize) {
        if place == 2 && self.cidrs.is_empty() && !self.remembered_cidrs.is_empty() {
            let metadata = Some(ObjectMeta { name: "remembered".to_owned(), ..ObjectMeta::default() });
            let spec = Some(ServiceCidrSpec { cidrs: self.remembered_cidrs.clone() });
            self.put_cidr(ServiceCidr { metadata, spec });
        }
    }

    fn put_cidr(&mut self, cidr: ServiceCidr) {
        let Some(name) = name_of(cidr.metadata.as_ref()) else { return };
        let cidr = ServiceCidr { metadata: None, spec: cidr.spec };
        let listing = self.progress[2].listing;
        let former = self.cidrs.insert(name.clone(), (cidr, listing));
        let new = self.cidrs.get(&name).map(|(cidr, _)| cidr);
        self.dirty.node |= former.as_ref().map(|(cidr, _)| cidr) != new;
    }

    fn remove_cidr(&mut self, name: &ServiceName) {
        self.dirty.node |= self.cidrs.remove(name).is_some();
    }

    fn sweep_cidrs(&mut self, listing: u32) {
        let before = self.cidrs.len();
        self.cidrs.retain(|_, (_, part_of)| *part_of == listing);
        self.dirty.node |= self.cidrs.len() != before;
    }

    /// Returns an equal name that shares memory with the one already kept.
    fn known(&self, name: ServiceName) -> ServiceName {
        self.entries.get_key_value(&name).map_or(name, |(known, _)| known.clone())
    }

    pub(super) fn synced(&self) -> bool {
        SourceKind::ALL.into_iter().all(|kind| self.kind_synced(kind))
    }

    pub(super) fn kind_synced(&self, kind: SourceKind) -> bool {
        match place(kind) {
            Some(place) => self.progress[place].stage == Stage::Listed,
            None => self.node.is_some(),
        }
    }

    /// Number of kept objects of this kind. Slices without a Service are not counted.
    pub(super) fn objects(&self, kind: SourceKind) -> usize {
        match kind {
            SourceKind::Services => self.services,
            SourceKind::EndpointSlices => self.owners.len(),
            SourceKind::ServiceCidrs => self.cidrs.len(),
            SourceKind::Node => usize::from(self.node.as_ref().is_some_and(|node| node.exists)),
        }
    }

    pub(super) fn current_node(&self) -> Option<&NodeView> {
        self.node.as_ref()
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    pub(super) fn take_dirty(&mut self) -> Dirty {
        std::mem::take(&mut self.dirty)
    }

    fn slices_of(entry: &Entry) -> Vec<EndpointSlice> {
        entry.slices.iter().filter_map(|(_, slice)| unpack(slice)).collect()
    }

    /// `None` if the Service has no frontend.
    pub(super) fn view(&self, name: &ServiceName) -> Option<ServiceEndpoints> {
        let entry = self.entries.get(name)?;
        let service = unpack(entry.service.as_ref()?)?;
        view::view_for(&self.proxy_names, &service, &Self::slices_of(entry), self.node.as_ref()?)
    }

    pub(super) fn node_info(&self) -> NodeInfo {
        let nobody = NodeView::default();
        let cidrs = self.cidrs.values().map(|(cidr, _)| cidr);
        let info = view::node_info(self.node.as_ref().unwrap_or(&nobody), cidrs);
        NodeInfo { service_proxy_names: self.proxy_names.clone(), ..info }
    }

    /// `None` if nothing is known of the Service.
    pub(super) fn explain(&self, name: &ServiceName, node_name: &str) -> Option<pb::Explanation> {
        let entry = self.entries.get(name)?;
        let service = entry.service.as_ref().and_then(unpack);
        let nobody = NodeView { name: node_name.to_owned(), ..NodeView::default() };
        let node = self.node.as_ref().unwrap_or(&nobody);
        let mut explanation =
            view::explain_for(&self.proxy_names, service.as_ref(), &Self::slices_of(entry), node);
        explanation.namespace = name.namespace().to_owned();
        explanation.name = name.name().to_owned();
        Some(explanation)
    }

    pub(super) fn bytes(&self) -> usize {
        let of = |entry: &Entry| {
            let slices: usize = entry.slices.iter().map(|(_, slice)| slice.bytes.len()).sum();
            slices + entry.service.as_ref().map_or(0, |service| service.bytes.len())
        };
        self.entries.values().map(of).sum()
    }
}
