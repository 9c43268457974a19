//! What the runtime can do beyond the CRI, and how calls on these APIs fail.
//!
//! Owns: whether the runtime has containerd's lease and content APIs, detected again for each connection. In: the
//! results of calls on them. Out: [`Capabilities`], a metric, and log lines. Only UNIMPLEMENTED means that an API is
//! missing. Every other error concerns one call: it is counted, and logged once until a call succeeds again.

use std::{
    error::Error as _,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use keelson_pulls::metrics::{ApiFailure, Metrics};
use tonic::{Code, Status};

use super::describe;

/// An API that only containerd has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Leases,
    Content,
}

impl Api {
    fn name(self) -> &'static str {
        match self {
            Self::Leases => "leases",
            Self::Content => "content",
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// The connection that this was learned from.
    connection: u64,
    /// `None`: not known.
    exists: Option<bool>,
    /// The code of the failure that was logged.
    failing: Option<Code>,
}

#[derive(Debug, Default)]
pub(super) struct Apis {
    /// Connections made so far.
    connections: AtomicU64,
    leases: Mutex<State>,
    content: Mutex<State>,
    metrics: Metrics,
}

impl Apis {
    pub(super) fn new(metrics: Metrics) -> Self {
        Self { metrics, ..Self::default() }
    }

    /// Forgets what is known: another runtime may answer on a new connection.
    pub(super) fn connected(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    fn state(&self, api: Api) -> MutexGuard<'_, State> {
        let state = match api {
            Api::Leases => &self.leases,
            Api::Content => &self.content,
        };
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = self.connections.load(Ordering::Relaxed);
        if state.connection != connection {
            (state.connection, state.exists) = (connection, None);
        }
        state
    }

    /// `None`: not known yet.
    pub(super) fn exists(&self, api: Api) -> Option<bool> {
        self.state(api).exists
    }

    /// Records the result of a call and returns it.
    pub(super) fn called<T>(&self, api: Api, result: Result<T, Status>) -> Result<T, Status> {
        let mut state = self.state(api);
        match &result {
            Ok(_) => {
                state.exists = Some(true);
                if state.failing.take().is_some() {
                    tracing::info!(api = api.name(), "API of the container runtime answers again");
                }
            }
            Err(status) if status.code() == Code::Unimplemented => state.exists = Some(false),
            // The runtime probe reports that the runtime is away.
            Err(status) if status.source().is_some() || status.code() == Code::Unavailable => {}
            Err(status) => {
                let failure = ApiFailure { api: api.name(), code: code_name(status.code()) };
                self.metrics.runtime_api_errors.get_or_create(&failure).inc();
                if state.failing.replace(status.code()) != Some(status.code()) {
                    let (api, reason) = (api.name(), describe(status));
                    tracing::warn!(
                        api,
                        reason,
                        code = failure.code,
                        "call of a container runtime API failed"
                    );
                }
            }
        }
        result
    }
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
