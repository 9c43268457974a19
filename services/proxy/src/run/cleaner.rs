//! Cleaning conntrack after changes of UDP endpoints.
//!
//! Owns: a thread of its own, so that a listing of a hundred thousand flows delays no rule. In: what
//! there shall be, the newest only. Out: flows deleted. Source: kube-proxy's conntrack reconciler (service-semantics 4).

use std::{
    io,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use crate::{
    conntrack::{UdpFrontends, clean},
    metrics::ProxyMetrics,
    model::Family,
};

/// Listings come no closer than this: what comes meanwhile is done with the next one.
const PAUSE: Duration = Duration::from_millis(100);

/// What one family's flows are held against.
type Wanted = (Family, UdpFrontends);

/// Tells the thread what there shall be. It ends with the last of these.
#[derive(Debug, Clone)]
pub(super) struct Cleaner(Sender<Wanted>);

impl Cleaner {
    /// The newest of each family counts.
    pub(super) fn clean(&self, family: Family, frontends: UdpFrontends) {
        if self.0.send((family, frontends)).is_err() {
            tracing::error!("the thread that cleans conntrack is gone");
        }
    }
}

/// Starts the thread, in the network namespace of the caller.
pub(super) fn start(metrics: ProxyMetrics) -> io::Result<Cleaner> {
    let (sender, receiver) = channel();
    thread::Builder::new().name("conntrack".to_owned()).spawn(move || work(&receiver, &metrics))?;
    Ok(Cleaner(sender))
}

fn work(receiver: &Receiver<Wanted>, metrics: &ProxyMetrics) {
    while let Ok(first) = receiver.recv() {
        thread::sleep(PAUSE);
        let mut newest: [Option<UdpFrontends>; 2] = [None, None];
        for (family, frontends) in std::iter::once(first).chain(receiver.try_iter()) {
            newest[family as usize] = Some(frontends);
        }
        for (family, frontends) in Family::ALL.into_iter().zip(newest) {
            if let Some(frontends) = frontends.filter(|frontends| !frontends.is_empty()) {
                clean_family(family, &frontends, metrics);
            }
        }
    }
}

fn clean_family(family: Family, frontends: &UdpFrontends, metrics: &ProxyMetrics) {
    let begun = Instant::now();
    match clean(family, frontends) {
        Ok(cleaned) => {
            metrics.conntrack_cleaned(family, begun.elapsed(), cleaned.deleted);
            if cleaned.failed > 0 {
                metrics.conntrack_failed(family, cleaned.failed);
            }
            if let Some(error) = cleaned.error {
                tracing::warn!(%family, %error, failed = cleaned.failed, "stale UDP flows could not be deleted");
            }
            if cleaned.deleted > 0 {
                tracing::debug!(%family, deleted = cleaned.deleted, "UDP flows to endpoints that are gone were deleted");
            }
        }
        Err(error) => {
            metrics.conntrack_failed(family, 1);
            tracing::warn!(%family, %error, "stale UDP flows could not be cleaned; the next change of endpoints tries again");
        }
    }
}
