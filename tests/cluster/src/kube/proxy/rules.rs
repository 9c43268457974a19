//! Owns: the faults that the proxy injects. In: rules, at any moment. Out: the fault for one request, if any.

use http::Method;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// All fields that are set must match; with none set it matches every request.
#[derive(Clone, Default)]
pub struct ApiMatch {
    method: Option<Method>,
    #[expect(clippy::type_complexity, reason = "a test gives any closure")]
    path: Option<Arc<dyn Fn(&str) -> bool + Send + Sync>>,
}

impl fmt::Debug for ApiMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiMatch").field("method", &self.method).finish_non_exhaustive()
    }
}

impl ApiMatch {
    pub fn any() -> Self {
        Self::default()
    }

    /// Requests whose path with query contains `part`, such as `/leases/` or `watch=true`.
    pub fn path(part: &str) -> Self {
        let part = part.to_owned();
        Self::path_if(move |path| path.contains(&part))
    }

    pub fn path_if(is_so: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { path: Some(Arc::new(is_so)), ..Self::default() }
    }

    pub fn method(mut self, method: Method) -> Self {
        self.method = Some(method);
        self
    }

    fn applies(&self, method: &Method, path: &str) -> bool {
        self.method.as_ref().is_none_or(|wanted| wanted == method)
            && self.path.as_ref().is_none_or(|is_so| is_so(path))
    }
}

#[derive(Clone, Debug)]
pub enum ApiFault {
    /// Nothing: exempts requests from the rules after this one.
    Pass,
    /// Answers with a `Status` object instead of asking the API server.
    Status {
        code: u16,
        /// The reason in the object, such as `TooManyRequests`.
        reason: String,
        /// Headers of the response, such as `Retry-After`.
        headers: Vec<(String, String)>,
    },
    /// Answers with this code and text instead of asking the API server, like a proxy or a captive portal in its place.
    Text {
        code: u16,
        /// The body, with the content type of JSON.
        body: String,
    },
    Delay(Duration),
    /// Holds the request until the rule is removed; then it continues.
    Hold,
    /// Never answers, without asking the API server: the request is lost.
    Swallow,
    /// Passes the request on and never answers: the response is lost.
    LoseAnswer,
    /// Closes the connection instead of asking the API server.
    Close,
    /// Passes the request on and closes the connection instead of answering.
    CloseAfter,
}

impl ApiFault {
    pub fn status(code: u16) -> Self {
        let reason = match code {
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "NotFound",
            409 => "Conflict",
            410 => "Expired",
            429 => "TooManyRequests",
            500 => "InternalError",
            503 => "ServiceUnavailable",
            504 => "Timeout",
            _ => "Unknown",
        };
        Self::Status { code, reason: reason.to_owned(), headers: Vec::new() }
    }

    /// Answers with success and a text that is no object.
    pub fn garbage(body: &str) -> Self {
        Self::Text { code: 200, body: body.to_owned() }
    }

    /// Answers with this status and a `Retry-After` in seconds.
    pub fn retry_after(code: u16, seconds: u32) -> Self {
        match Self::status(code) {
            Self::Status { code, reason, .. } => {
                let headers = vec![("retry-after".to_owned(), seconds.to_string())];
                Self::Status { code, reason, headers }
            }
            other => other,
        }
    }
}

/// Argument of [`super::ApiProxy::remove`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiRule(u64);

#[derive(Debug)]
struct Rule {
    id: ApiRule,
    matches: ApiMatch,
    fault: ApiFault,
    /// Number of requests it still applies to; `None` is all.
    left: Option<usize>,
    hits: usize,
    /// Dropped with the rule, which releases the requests it holds.
    removed: watch::Sender<()>,
}

/// A fault, and a receiver that tells when its rule was removed.
#[derive(Clone, Debug)]
pub(super) struct AppliedFault {
    pub(super) fault: ApiFault,
    removed: watch::Receiver<()>,
}

impl AppliedFault {
    pub(super) async fn removed(&mut self) {
        // Nothing is ever sent: an error means that the sender, and so the rule, is gone.
        while self.removed.changed().await.is_ok() {}
    }
}

#[derive(Debug, Default)]
pub(super) struct Rules(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    rules: Vec<Rule>,
}

impl Rules {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, matches: ApiMatch, fault: ApiFault, times: Option<usize>) -> ApiRule {
        let mut inner = self.lock();
        let id = ApiRule(inner.next);
        inner.next += 1;
        inner.rules.push(Rule { id, matches, fault, left: times, hits: 0, removed: watch::Sender::new(()) });
        id
    }

    pub(super) fn remove(&self, id: ApiRule) {
        self.lock().rules.retain(|rule| rule.id != id);
    }

    pub(super) fn clear(&self) {
        self.lock().rules.clear();
    }

    /// Number of requests that a rule that is still there has applied to.
    pub(super) fn hits(&self, id: ApiRule) -> usize {
        self.lock().rules.iter().find(|rule| rule.id == id).map_or(0, |rule| rule.hits)
    }

    /// The first rule that applies. One that has applied often enough stays for the requests it holds.
    pub(super) fn matching_rule(&self, method: &Method, path: &str) -> Option<AppliedFault> {
        let mut inner = self.lock();
        let rule = inner
            .rules
            .iter_mut()
            .find(|rule| rule.left.is_none_or(|left| left > 0) && rule.matches.applies(method, path))?;
        rule.hits += 1;
        rule.left = rule.left.map(|left| left - 1);
        Some(AppliedFault { fault: rule.fault.clone(), removed: rule.removed.subscribe() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_matching_rule_that_is_not_used_up_applies() {
        let rules = Rules::default();
        let once = rules.add(ApiMatch::path("/leases/").method(Method::PUT), ApiFault::status(409), Some(1));
        rules.add(ApiMatch::path("/leases/a"), ApiFault::Pass, None);
        rules.add(ApiMatch::any(), ApiFault::Close, None);
        let matching_rule = |method, path| rules.matching_rule(&method, path).map(|applied| applied.fault);
        assert!(matches!(matching_rule(Method::PUT, "/leases/a"), Some(ApiFault::Status { code: 409, .. })));
        assert!(matches!(matching_rule(Method::PUT, "/leases/a"), Some(ApiFault::Pass)));
        assert!(matches!(matching_rule(Method::PUT, "/leases/b"), Some(ApiFault::Close)));
        assert_eq!(rules.hits(once), 1);
        rules.clear();
        assert!(matching_rule(Method::GET, "/").is_none());
    }
}
