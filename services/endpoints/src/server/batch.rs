//! The messages that lead a caller from one state to the next.
//!
//! Owns: [`Batch`], the ordered messages of one snapshot, and [`Frames`], messages as gRPC frames.
//! In: a snapshot, and which Services of it to send. Out: as many messages at a time as fit a chunk: a caller that
//! does not read costs its snapshot and a chunk, not a copy of the state.

use std::{collections::btree_set, ops::Bound, sync::Arc};

use bytes::{Bytes, BytesMut};
use keelson_endpoint_publisher::{Changes, Published, ServiceName};
use keelson_proto::endpoints::{ServiceName as WireName, WatchItem, watch_item};
use keelson_serve::grpc::frame;
use prost::Message as _;

use super::filter::Filter;

/// Bytes of a full chunk; its last message may exceed them, usually within 64 KiB. A larger chunk means fewer system
/// calls for a full state, and a longer wait for others while it is written.
pub(super) const CHUNK: usize = 60 * 1024;

/// A published item cannot be decoded.
#[derive(Debug, thiserror::Error)]
#[error("cannot decode the item of Service {name} to apply RequiredEndpointConditions")]
pub(super) struct BrokenItem {
    name: ServiceName,
    source: prost::DecodeError,
}

/// Messages, each with its gRPC prefix.
#[derive(Debug, Default)]
pub(super) struct Frames {
    out: BytesMut,
    items: u64,
}

impl Frames {
    fn push(&mut self, message: &[u8]) {
        frame::append(&mut self.out, message);
        self.items += 1;
    }

    fn full(&self) -> bool {
        self.out.len() >= CHUNK
    }

    pub(super) fn items(&self) -> u64 {
        self.items
    }

    pub(super) fn into_bytes(self) -> Bytes {
        self.out.freeze()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// Everything, for a caller that requested it.
    Full,
    /// Everything, for a caller whose state is too old to compute its changes.
    Reset,
    /// The changes, which may be only those of freshness.
    Delta,
}

#[derive(Debug)]
enum Rest {
    /// Every Service after this one; `None`: from the first.
    All(Option<ServiceName>),
    /// These: set if they are in the snapshot, else deleted.
    Changed(btree_set::IntoIter<ServiceName>),
    None,
}

/// The messages that bring a caller to the state of one snapshot.
#[derive(Debug)]
pub(super) struct Batch {
    state: Arc<Published>,
    extent: Extent,
    first: Vec<Vec<u8>>,
    rest: Rest,
    last: Option<Vec<u8>>,
}

impl Batch {
    /// `first`, every Service, `last`.
    pub(super) fn full(
        state: Arc<Published>,
        extent: Extent,
        first: Vec<Vec<u8>>,
        last: Option<Vec<u8>>,
    ) -> Self {
        Self { state, extent, first, rest: Rest::All(None), last }
    }

    /// `first`, the Services that changed, `last`.
    pub(super) fn delta(
        state: Arc<Published>,
        first: Vec<Vec<u8>>,
        changes: Changes,
        last: Option<Vec<u8>>,
    ) -> Self {
        let rest = Rest::Changed(changes.services.into_iter());
        Self { state, extent: Extent::Delta, first, rest, last }
    }

    pub(super) fn state(&self) -> &Published {
        &self.state
    }

    pub(super) fn extent(&self) -> Extent {
        self.extent
    }

    /// Adds the next messages to `frames` until they are full; true when there are no more.
    ///
    /// # Errors
    /// An item has to be filtered and cannot be decoded; the batch cannot continue.
    pub(super) fn fill(&mut self, filter: &Filter, frames: &mut Frames) -> Result<bool, BrokenItem> {
        for message in self.first.drain(..) {
            frames.push(&message);
        }
        match &mut self.rest {
            Rest::All(after) => {
                let from = after.take().map_or(Bound::Unbounded, Bound::Excluded);
                let all = self.state.services.range((from, Bound::Unbounded));
                for (name, item) in all.filter(|(_, item)| filter.selects(item)) {
                    push(name, &item.message, filter, frames)?;
                    if frames.full() {
                        *after = Some(name.clone());
                        return Ok(false);
                    }
                }
            }
            Rest::Changed(names) => {
                for name in names {
                    match self.state.services.get(&name) {
                        Some(item) if filter.selects(item) => push(&name, &item.message, filter, frames)?,
                        // It is gone, or has become another proxy's.
                        _ => frames.push(&deleted(&name)),
                    }
                    if frames.full() {
                        return Ok(false);
                    }
                }
            }
            Rest::None => {}
        }
        self.rest = Rest::None;
        if let Some(last) = self.last.take() {
            frames.push(&last);
        }
        Ok(true)
    }
}

fn push(name: &ServiceName, message: &[u8], filter: &Filter, frames: &mut Frames) -> Result<(), BrokenItem> {
    let message = filter.apply(message).map_err(|source| BrokenItem { name: name.clone(), source })?;
    frames.push(&message);
    Ok(())
}

fn deleted(name: &ServiceName) -> Vec<u8> {
    let name = WireName { namespace: name.namespace().to_owned(), name: name.name().to_owned() };
    WatchItem { item: Some(watch_item::Item::Delete(name)) }.encode_to_vec()
}
