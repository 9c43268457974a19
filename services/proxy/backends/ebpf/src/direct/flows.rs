//! Flows that have ended, or were idle for long.
//!
//! Owns: [`FlowSweeper`], and its thread while there is work; for how long a flow may be idle. In: the pinned maps of flows and
//! replies, which the programs write. Out: deletions, so that new flows have room; the number of those that are left.
//!
//! The kernel could forget what was used least recently itself (LRU maps). But then new flows, or packets with forged sources,
//! end connections that are idle, and it searches its lists for 128 elements at once, which single packets wait for
//! (docs/decisions/0084).

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, Map, MapData, MapError};
use nix::time::{ClockId, clock_gettime};

use super::layout::FLOWS;
use crate::{
    kernel::{KernelError, failed_named, found, open_named},
    layout::{DirectFlow, DirectKey, DirectReply, Layout as _, REPLIES},
};

const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// While room is scarce.
const SHORT_INTERVAL: Duration = Duration::from_secs(2);

/// Elements that are deleted after one look at the map, so that they need little memory here.
const AT_ONCE: usize = 16_384;

const UDP: u32 = 17;

pub(crate) const ENDED_BY_CLIENT: u16 = 1;
pub(crate) const ENDED_BY_ENDPOINT: u16 = 2;
const ENDED: u16 = ENDED_BY_CLIENT | ENDED_BY_ENDPOINT;
pub(crate) const RESET: u16 = 4;
pub(crate) const LASTS: u16 = 8;
pub(crate) const ONE_SIDED: u16 = 16;

/// How long a flow may be idle. Where conntrack or kube-proxy have a time for a state, it is theirs. While room is scarce, what may
/// still be needed stays as long, and everything else a sixth of it.
fn may_be_idle(protocol: u32, state: u16, is_scarce: bool) -> Duration {
    let has = |bits: u16| state & bits == bits;
    let lasts = has(LASTS) && !has(RESET) && !has(ENDED) && (protocol == UDP || !has_one_sided_end(state));
    let seconds = if protocol == UDP {
        if has(LASTS) { 120 } else { 30 }
    } else if has(ENDED) {
        // Late packets still find their way.
        30
    } else if has(RESET) {
        // It may have been forged; the next packet of either side ends the state.
        300
    } else if state & ENDED != 0 {
        // The end of the other side may not pass this node; otherwise that side may still send.
        if has_one_sided_end(state) { 120 } else { 3_600 }
    } else if has(LASTS) {
        86_400
    } else {
        60
    };
    Duration::from_secs(if is_scarce && !lasts { seconds / 6 } else { seconds })
}

/// What the endpoint does is not seen.
const fn has_one_sided_end(state: u16) -> bool {
    state & ONE_SIDED != 0 && state & ENDED != 0
}

fn is_over(key: &DirectKey, reply: &DirectReply, now_ns: u64, is_scarce: bool) -> bool {
    let idle = Duration::from_nanos(now_ns.saturating_sub(reply.used_ns));
    idle >= may_be_idle(key.protocol, reply.state, is_scarce)
}

/// What `bpf_ktime_get_coarse_ns` says at a time.
fn nanoseconds(at: Instant) -> Result<u64, KernelError> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map_err(KernelError::Clock)?;
    let at =
        (Duration::from(now) + at.saturating_duration_since(Instant::now())).saturating_sub(at.elapsed());
    Ok(u64::try_from(at.as_nanos()).unwrap_or(u64::MAX))
}

type FlowMap = HashMap<MapData, [u8; 44], [u8; 32]>;

struct FlowMaps {
    flows: FlowMap,
    replies: FlowMap,
}

/// Elements that are left.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FlowCounts {
    pub(crate) flows: usize,
    pub(crate) replies: usize,
}

impl FlowCounts {
    /// More than half of the room is taken.
    fn are_many(self) -> bool {
        self.replies > REPLIES.max_entries as usize / 2
    }
}

impl FlowMaps {
    fn open(folder: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            flows: open_named(folder, FLOWS.name, Map::HashMap)?,
            replies: open_named(folder, REPLIES.name, Map::HashMap)?,
        })
    }

    fn sweep(&mut self, now: Instant, is_scarce: bool) -> Result<FlowCounts, KernelError> {
        let now = nanoseconds(now)?;
        let replies = delete(&mut self.replies, REPLIES.name, |replies, key| {
            let reply = found(replies.get(&key, 0))?.map(DirectReply::from_bytes);
            Ok(reply.is_some_and(|reply| is_over(&DirectKey::from_bytes(key), &reply, now, is_scarce)))
        })?;
        let flows = delete(&mut self.flows, FLOWS.name, |flows, key| {
            let Some(flow) = found(flows.get(&key, 0))?.map(DirectFlow::from_bytes) else { return Ok(false) };
            let key = DirectKey::from_bytes(key);
            let back = DirectKey { other: flow.endpoint, ..key };
            // Replies show another address of a Service by now, or none.
            let reply = found(self.replies.get(&back.to_bytes(), 0))?;
            Ok(reply.is_none_or(|reply| DirectReply::from_bytes(reply).service != key.other))
        })?;
        Ok(FlowCounts { flows, replies })
    }
}

/// Deletes elements, and returns how many others there are. Programs go on to write: what comes or goes meanwhile may be
/// missed, and is looked at in the next sweep.
fn delete(
    map: &mut FlowMap,
    name: &'static str,
    is_over: impl Fn(&FlowMap, [u8; 44]) -> Result<bool, MapError>,
) -> Result<usize, KernelError> {
    let failed = failed_named("read", name);
    loop {
        let (mut over, mut others) = (Vec::new(), 0);
        // The kernel begins again when the key at hand is deleted meanwhile.
        for key in map.keys().take(2 * REPLIES.max_entries as usize) {
            match key.and_then(|key| Ok((key, is_over(map, key)?))) {
                Ok((key, true)) => over.push(key),
                Ok((_, false)) => others += 1,
                Err(error) => return Err(failed(error)),
            }
            if over.len() == AT_ONCE {
                break;
            }
        }
        for key in &over {
            // It may have been used again.
            if is_over(map, *key).map_err(&failed)? {
                found(map.remove(key)).map_err(&failed)?;
            }
        }
        if over.len() < AT_ONCE {
            return Ok(others);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct FlowSweeper {
    counts: Arc<Mutex<FlowCounts>>,
    is_busy: Arc<AtomicBool>,
    next: Option<Instant>,
}

impl FlowSweeper {
    /// After the last sweep.
    pub(crate) fn counts(&self) -> FlowCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// On a thread of its own, because full maps take some tenths of a second. `folder`: that of the pins.
    pub(crate) fn start_if_due(&mut self, folder: PathBuf, now: Instant) {
        if self.next.is_some_and(|next| now < next) || self.is_busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let is_scarce = self.counts().are_many();
        self.next = Some(now + if is_scarce { SHORT_INTERVAL } else { SWEEP_INTERVAL });
        let (counts, is_busy) = (self.counts.clone(), self.is_busy.clone());
        let body = move || {
            match FlowMaps::open(&folder).and_then(|mut maps| maps.sweep(now, is_scarce)) {
                Ok(left) => *counts.lock().unwrap_or_else(PoisonError::into_inner) = left,
                Err(error) => tracing::warn!(%error, "cannot delete ended flows of direct return"),
            }
            is_busy.store(false, Ordering::SeqCst);
        };
        if let Err(error) = thread::Builder::new().name("direct flows".to_owned()).spawn(body) {
            tracing::warn!(%error, "cannot start a thread that deletes ended flows of direct return");
            self.is_busy.store(false, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_long_flows_may_be_idle() {
        // The second time is that while room is scarce.
        for (protocol, state, seconds) in [
            (6, 0, [60, 10]),
            (6, LASTS, [86_400, 86_400]),
            (6, LASTS | ONE_SIDED, [86_400, 86_400]),
            (6, LASTS | ENDED_BY_CLIENT, [3_600, 3_600]),
            (6, LASTS | ENDED_BY_ENDPOINT, [3_600, 3_600]),
            (6, LASTS | ENDED_BY_CLIENT | ONE_SIDED, [120, 20]),
            (6, LASTS | ENDED_BY_CLIENT | ENDED_BY_ENDPOINT, [30, 5]),
            (6, LASTS | ENDED_BY_CLIENT | ENDED_BY_ENDPOINT | RESET, [30, 5]),
            (6, LASTS | RESET, [300, 50]),
            (6, RESET, [300, 50]),
            (17, 0, [30, 5]),
            (17, ONE_SIDED, [30, 5]),
            (17, LASTS, [120, 120]),
        ] {
            let times = [false, true].map(|is_scarce| may_be_idle(protocol, state, is_scarce).as_secs());
            assert_eq!(times, seconds, "protocol {protocol}, state {state}");
        }
    }
}
