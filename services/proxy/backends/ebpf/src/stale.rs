//! Ends UDP sockets that are connected to an endpoint which is gone.
//!
//! Owns: [`Sweeper`], and its thread while there is work. In: sockets and their endpoint. Out: sockets that fail with
//! ECONNABORTED, so that their program makes another; what could not be done.
//!
//! A connected socket sends to the endpoint that it got at connect(), whatever the maps say now. Other sockets ask the
//! programs for each datagram and need nothing. Sockets belong to network namespaces, which a thread must enter.

mod diag;
mod namespaces;

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use keelson_proxy::model::Family;

use self::namespaces::{Entered, NetNamespace};
use crate::layout::{FlowKey, Remote};

/// A socket that may still be connected to `remote`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stale {
    pub(crate) socket: u64,
    pub(crate) remote: Remote,
}

impl From<FlowKey> for Stale {
    fn from(FlowKey { socket, remote }: FlowKey) -> Self {
        Self { socket, remote }
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct SweepStatus {
    /// Since the start of the process.
    pub(crate) destroyed: u64,
    /// Why the last sweep could not look everywhere.
    pub(crate) failure: Option<String>,
    /// Another sweep may find what the last one did not.
    needs_retry: bool,
}

#[derive(Debug, Default, Clone)]
pub(crate) struct Sweeper {
    status: Arc<Mutex<SweepStatus>>,
    is_busy: Arc<AtomicBool>,
}

impl Sweeper {
    pub(crate) fn is_free(&self) -> bool {
        !self.is_busy.load(Ordering::SeqCst)
    }

    pub(crate) fn status(&self) -> SweepStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Works on a thread of its own, because it enters other network namespaces. One sweep at a time.
    pub(crate) fn start(&self, stale: Vec<Stale>) {
        if stale.is_empty() || self.is_busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let sweeper = self.clone();
        let body = move || {
            let swept = sweep(&stale, namespaces::others());
            sweeper.record(swept);
            sweeper.is_busy.store(false, Ordering::SeqCst);
        };
        if let Err(error) = thread::Builder::new().name("stale sockets".to_owned()).spawn(body) {
            let failure = Some(format!("cannot start a thread: {error}"));
            self.record(Swept { destroyed: 0, failure, needs_retry: true });
            self.is_busy.store(false, Ordering::SeqCst);
        }
    }

    /// Whether the last sweep failed in a way that may be over, once.
    pub(crate) fn take_retry(&self) -> bool {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut status.needs_retry)
    }

    pub(crate) fn record(&self, Swept { destroyed, failure, needs_retry }: Swept) {
        if destroyed > 0 {
            tracing::info!(destroyed, "UDP sockets of endpoints that are gone destroyed");
        }
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = failure.as_ref().filter(|reason| status.failure.as_ref() != Some(reason)) {
            tracing::warn!(reason, "UDP sockets may stay connected to endpoints that are gone");
        }
        status.destroyed += destroyed;
        status.failure = failure;
        status.needs_retry = needs_retry;
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Swept {
    pub(crate) destroyed: u64,
    pub(crate) failure: Option<String>,
    /// Another sweep may find what this one did not.
    pub(crate) needs_retry: bool,
}

impl Swept {
    /// What the kernel does not permit or cannot do stays so as long as this process runs.
    fn fail(&mut self, place: &str, error: &io::Error) {
        let is_lasting = matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported);
        let right =
            if error.kind() == io::ErrorKind::PermissionDenied { "; it needs CAP_SYS_ADMIN" } else { "" };
        self.failure = Some(format!("{place}: {error}{right}"));
        self.needs_retry |= !is_lasting;
    }
}

/// Why UDP sockets of pods would stay connected to endpoints that are gone.
pub(crate) fn reason_against() -> Option<String> {
    let reason = namespaces::cannot_enter().or_else(|| diag::probe().err().map(|error| error.to_string()))?;
    Some(format!("UDP sockets of pods would stay connected to endpoints that are gone: {reason}"))
}

/// Looks for the sockets in this network namespace and in others. Leaves the thread in one of them.
fn sweep(stale: &[Stale], others: Vec<NetNamespace>) -> Swept {
    let wanted: HashMap<u64, Remote> = stale.iter().map(|stale| (stale.socket, stale.remote)).collect();
    let families = Family::ALL.into_iter().filter(|family| {
        stale.iter().any(|stale| stale.remote.address.family() == *family || *family == Family::V6)
    });
    // Sockets of IPv6 may have an endpoint of IPv4.
    let families: Vec<Family> = families.collect();
    let mut swept = Swept::default();
    let here = |place: &str, swept: &mut Swept| {
        for family in &families {
            match diag::destroy(*family, &wanted) {
                Ok(destroyed) => swept.destroyed += destroyed,
                Err(error) => swept.fail(place, &error),
            }
        }
    };
    here("this network namespace", &mut swept);
    for namespace in others {
        match namespace.enter() {
            Ok(Entered::Yes) => here(&namespace.to_string(), &mut swept),
            Ok(Entered::Gone) => {}
            Err(error) => {
                swept.fail(&format!("cannot enter {namespace}"), &error);
                if error.kind() == io::ErrorKind::PermissionDenied {
                    break;
                }
            }
        }
    }
    swept
}

#[cfg(test)]
mod tests;
