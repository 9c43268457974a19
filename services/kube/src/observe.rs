//! Observations of requests for metrics.
//!
//! Owns: [`RequestSeen`] and the hook that receives it. In: the end of each request. Out: the binary's
//! `rest_client_requests_total` and `rest_client_request_duration_seconds`.

use std::{fmt, sync::Arc, time::Duration};

use keelson_actor_system::cluster::ApiErrorKind;

/// A request that has ended: answered (for a watch: its headers) or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestSeen {
    /// The HTTP method, which is also the label `verb` of client-go's duration metric.
    pub method: &'static str,
    /// The resource, in the plural and with its subresource: `leases`, `nodes`, `nodes/status`, `pods`,
    /// `services`, `endpointslices`, `servicecidrs`.
    pub resource: &'static str,
    /// The status code; `None` without an answer.
    pub status: Option<u16>,
    pub error: Option<ApiErrorKind>,
    /// From the call to the end of the answer; for a watch, and a list that precedes one, to the end of its headers.
    pub duration: Duration,
    /// `host:port` of the server; empty if the credentials were never readable.
    pub host: String,
}

impl RequestSeen {
    /// The label `code`: the status code, or `<error>` without an answer, as in client-go.
    #[must_use]
    pub fn code(&self) -> String {
        self.status.map_or_else(|| "<error>".to_owned(), |code| code.to_string())
    }
}

/// Called for each request, on the task that made the request; must not block.
#[derive(Clone)]
pub struct RequestObserver(Arc<dyn Fn(&RequestSeen) + Send + Sync>);

impl RequestObserver {
    #[must_use]
    pub fn new(seen: impl Fn(&RequestSeen) + Send + Sync + 'static) -> Self {
        Self(Arc::new(seen))
    }

    pub(crate) fn seen(&self, request: &RequestSeen) {
        (self.0)(request);
    }
}

impl Default for RequestObserver {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl fmt::Debug for RequestObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RequestObserver")
    }
}
