//! Owns: the faults that the proxy injects. In: rules, at any moment. Out: the fault for one request, if any.

use super::record::Kind;
use crate::images::BlobDigest;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// All fields that are set must match; with none set it matches every GET and HEAD.
#[derive(Clone, Debug, Default)]
pub struct Match {
    repo: Option<String>,
    kind: Option<Kind>,
    digest: Option<BlobDigest>,
    method: Option<http::Method>,
}

impl Match {
    pub fn any() -> Self {
        Self::default()
    }

    pub fn manifests() -> Self {
        Self { kind: Some(Kind::Manifest), ..Self::default() }
    }

    pub fn layers() -> Self {
        Self { kind: Some(Kind::Layer), ..Self::default() }
    }

    /// A blob, or a manifest requested by digest.
    pub fn digest(digest: &BlobDigest) -> Self {
        Self { digest: Some(digest.clone()), ..Self::default() }
    }

    pub fn repo(mut self, repo: &str) -> Self {
        self.repo = Some(repo.to_owned());
        self
    }

    pub fn method(mut self, method: http::Method) -> Self {
        self.method = Some(method);
        self
    }

    pub(super) fn applies(&self, request: &Target) -> bool {
        self.repo.as_ref().is_none_or(|repo| request.repo.as_ref() == Some(repo))
            && self.kind.is_none_or(|kind| request.kind == kind)
            && self.digest.as_ref().is_none_or(|digest| request.digest.as_ref() == Some(digest))
            && self.method.as_ref().is_none_or(|method| request.method == *method)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) method: http::Method,
    pub(super) kind: Kind,
    pub(super) repo: Option<String>,
    pub(super) digest: Option<BlobDigest>,
}

/// Byte counts are of one response, wherever its range begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answers nothing until the rule is removed; then the request continues.
    Hang,
    /// Sends this many bytes of the body, then nothing until the rule is removed; then the rest.
    StallAfter(u64),
    /// Sends this many bytes of the body, then breaks the connection.
    ResetAfter(u64),
    /// Answers with this status instead of asking the registry.
    Status {
        code: u16,
        /// The `Retry-After` header, in seconds.
        retry_after: Option<u32>,
    },
    /// Ignores the `Range` header: the whole content is sent.
    IgnoreRange,
    /// Redirects to a storage server that refuses connections, with a URL that holds [`SIGNATURE`], like registries
    /// that store layers in an object store.
    SignedRedirect,
}

/// Signature in the URLs of [`Fault::SignedRedirect`].
pub const SIGNATURE: &str = "signature-5e0c91d7";

impl Fault {
    pub fn status(code: u16) -> Self {
        Self::Status { code, retry_after: None }
    }
}

/// Argument of [`super::RegistryProxy::remove`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleId(u64);

#[derive(Debug)]
struct Rule {
    id: RuleId,
    matches: Match,
    fault: Fault,
    /// Number of requests it still applies to; `None` is all.
    left: Option<usize>,
    /// Dropped with the rule, which releases the requests it holds.
    removed: watch::Sender<()>,
}

/// A fault, and a receiver that tells when its rule was removed.
#[derive(Clone, Debug)]
pub(super) struct AppliedFault {
    pub(super) fault: Fault,
    removed: watch::Receiver<()>,
}

impl AppliedFault {
    pub(super) async fn removed(&mut self) {
        // Nothing is ever sent: an error means that the sender, and so the rule, is gone.
        while self.removed.changed().await.is_ok() {}
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rules(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    rules: Vec<Rule>,
    /// Rules that have applied often enough, kept because they still hold requests.
    spent: Vec<Rule>,
}

impl Rules {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, matches: Match, fault: Fault, times: Option<usize>) -> RuleId {
        let mut inner = self.lock();
        let id = RuleId(inner.next);
        inner.next += 1;
        inner.rules.push(Rule { id, matches, fault, left: times, removed: watch::Sender::new(()) });
        id
    }

    pub(super) fn remove(&self, id: RuleId) {
        let mut inner = self.lock();
        inner.rules.retain(|rule| rule.id != id);
        inner.spent.retain(|rule| rule.id != id);
    }

    pub(super) fn clear(&self) {
        let mut inner = self.lock();
        inner.rules.clear();
        inner.spent.clear();
    }

    /// The first rule that applies.
    pub(super) fn matching_rule(&self, request: &Target) -> Option<AppliedFault> {
        let mut inner = self.lock();
        let at = inner.rules.iter().position(|rule| rule.matches.applies(request))?;
        let rule = &mut inner.rules[at];
        let applied = AppliedFault { fault: rule.fault, removed: rule.removed.subscribe() };
        if let Some(left) = &mut rule.left {
            *left -= 1;
            if *left == 0 {
                let spent = inner.rules.remove(at);
                inner.spent.push(spent);
            }
        }
        Some(applied)
    }
}
