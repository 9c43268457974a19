//! Owns: what the proxy does to which requests. In: rules, at any moment. Out: the fault for one request, if any.

use super::record::Kind;
use crate::images::BlobDigest;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Which requests a rule is about. Everything that is set must agree; nothing set means every GET and HEAD.
#[derive(Clone, Debug, Default)]
pub struct Match {
    repo: Option<String>,
    kind: Option<Kind>,
    digest: Option<BlobDigest>,
    method: Option<http::Method>,
}

impl Match {
    /// Every request.
    pub fn any() -> Self {
        Self::default()
    }

    /// Requests for a manifest.
    pub fn manifests() -> Self {
        Self { kind: Some(Kind::Manifest), ..Self::default() }
    }

    /// Requests for a layer.
    pub fn layers() -> Self {
        Self { kind: Some(Kind::Layer), ..Self::default() }
    }

    /// Requests for this blob, or for this manifest by its digest.
    pub fn digest(digest: &BlobDigest) -> Self {
        Self { digest: Some(digest.clone()), ..Self::default() }
    }

    /// Only in this repository.
    pub fn repo(mut self, repo: &str) -> Self {
        self.repo = Some(repo.to_owned());
        self
    }

    /// Only with this method.
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

/// What a request asks for.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) method: http::Method,
    pub(super) kind: Kind,
    pub(super) repo: Option<String>,
    pub(super) digest: Option<BlobDigest>,
}

/// What the proxy does to a request. Counts of bytes are of one answer, wherever its range begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answers nothing until the rule is removed; then the request goes on.
    Hang,
    /// Sends this many bytes of the body, then nothing until the rule is removed; then the rest.
    StallAfter(u64),
    /// Sends this many bytes of the body, then breaks the connection.
    ResetAfter(u64),
    /// Answers with this status instead of asking the registry.
    Status {
        /// The code.
        code: u16,
        /// The `Retry-After` header, in seconds.
        retry_after: Option<u32>,
    },
    /// Ignores the `Range` header: the whole content is sent.
    IgnoreRange,
    /// Redirects to a storage server that refuses connections, by a URL that carries [`SIGNATURE`], as registries do
    /// that keep layers in an object store.
    SignedRedirect,
}

/// What signs the URLs of [`Fault::SignedRedirect`].
pub const SIGNATURE: &str = "signature-5e0c91d7";

impl Fault {
    /// Answers with this status.
    pub fn status(code: u16) -> Self {
        Self::Status { code, retry_after: None }
    }
}

/// A rule that is in force; what [`super::RegistryProxy::remove`] takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleId(u64);

#[derive(Debug)]
struct Rule {
    id: RuleId,
    matches: Match,
    fault: Fault,
    /// How many more requests it applies to; `None` is all.
    left: Option<usize>,
    /// Dropped with the rule, which lets go what it holds.
    removed: watch::Sender<()>,
}

/// A fault with the means to learn that its rule was removed.
#[derive(Clone, Debug)]
pub(super) struct Ruling {
    pub(super) fault: Fault,
    removed: watch::Receiver<()>,
}

impl Ruling {
    /// Waits until the rule is removed.
    pub(super) async fn removed(&mut self) {
        // Nothing is ever sent: the error says that the sender, and with it the rule, is gone.
        while self.removed.changed().await.is_ok() {}
    }
}

/// The rules of one proxy.
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
    pub(super) fn judge(&self, request: &Target) -> Option<Ruling> {
        let mut inner = self.lock();
        let at = inner.rules.iter().position(|rule| rule.matches.applies(request))?;
        let rule = &mut inner.rules[at];
        let ruling = Ruling { fault: rule.fault, removed: rule.removed.subscribe() };
        if let Some(left) = &mut rule.left {
            *left -= 1;
            if *left == 0 {
                let spent = inner.rules.remove(at);
                inner.spent.push(spent);
            }
        }
        Some(ruling)
    }
}
