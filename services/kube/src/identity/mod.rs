//! The identity and validity of credentials.
//!
//! Owns: reading the validity of a client certificate (X.509) and of a service account's token (JWT), and the time that
//! is left. In: PEM, a token. Out: [`Credential`], which holds nothing secret and may be shown and logged. Signatures
//! are not checked: the results are for people and for renewal in time; the API server decides.

mod jwt;
mod x509;

use std::path::PathBuf;

use tokio::sync::watch;

use crate::answers::bounded;

pub(crate) use jwt::token_claims;
pub(crate) use x509::certificate_facts;

/// Unless it is renewed, a credential counts as expiring in the last tenth of its lifetime: the kubelet renews a
/// certificate at 70 to 90 %, and a pod's token at 80 %.
const NOTICE_SHARE: i64 = 10;
/// Maximum time before its end, in seconds: a month.
const MAX_NOTICE: i64 = 30 * 86_400;
/// Time before its end if the lifetime is not known, in seconds.
const DEFAULT_NOTICE: i64 = 86_400;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CredentialKind {
    ClientCertificate,
    Token,
}

impl CredentialKind {
    /// The name in metrics and in the debug API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ClientCertificate => "client_certificate",
            Self::Token => "token",
        }
    }

    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::ClientCertificate => "client certificate",
            Self::Token => "token",
        }
    }
}

/// A credential in use. Times are Unix seconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    pub kind: CredentialKind,
    /// The file it was read from; `None` if it is part of a kubeconfig.
    pub file: Option<PathBuf>,
    /// The certificate's common name, or the token's subject. Empty if there is none.
    pub user: String,
    /// The node that a service account's token is bound to, directly or through its pod.
    pub bound_node: Option<String>,
    /// When it was issued, or becomes valid.
    pub not_before: Option<i64>,
    /// Expiry in Unix seconds; `None` if it does not expire.
    pub not_after: Option<i64>,
}

/// Remaining validity of a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// It has no readable expiry.
    Unknown,
    Healthy {
        /// Seconds until it expires.
        left: i64,
    },
    /// It expires soon and was not renewed in time.
    Expiring {
        /// Seconds until it expires.
        left: i64,
    },
    Expired {
        /// Seconds since it expired.
        since: i64,
    },
}

impl Validity {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy { .. } => "healthy",
            Self::Expiring { .. } => "expiring",
            Self::Expired { .. } => "expired",
        }
    }
}

impl Credential {
    /// The remaining validity at `now`, in Unix seconds. A credential counts as expiring in the last tenth of its
    /// lifetime, at most 30 days before its end.
    #[must_use]
    pub fn validity(&self, now: i64) -> Validity {
        let Some(end) = self.not_after else { return Validity::Unknown };
        let left = end.saturating_sub(now);
        let lifetime =
            self.not_before.map(|start| end.saturating_sub(start)).filter(|lifetime| *lifetime > 0);
        let due = lifetime.map_or(DEFAULT_NOTICE, |lifetime| (lifetime / NOTICE_SHARE).min(MAX_NOTICE));
        match left {
            ..=0 => Validity::Expired { since: left.saturating_neg() },
            left if left <= due => Validity::Expiring { left },
            left => Validity::Healthy { left },
        }
    }

    /// `client certificate /var/lib/kubelet/pki/kubelet-client-current.pem`.
    #[must_use]
    pub fn label(&self) -> String {
        match &self.file {
            Some(file) => format!("{} {}", self.kind.text(), file.display()),
            None => format!("{} in the kubeconfig", self.kind.text()),
        }
    }

    /// The content of a client certificate in PEM; all unknown if it cannot be read.
    pub(crate) fn of_certificate(pem: &[u8], file: Option<PathBuf>) -> Self {
        let facts = certificate_facts(pem);
        Self {
            kind: CredentialKind::ClientCertificate,
            file,
            user: facts.as_ref().map_or_else(String::new, |facts| bounded(&facts.common_name)),
            bound_node: None,
            not_before: facts.as_ref().map(|facts| facts.not_before),
            not_after: facts.as_ref().map(|facts| facts.not_after),
        }
    }

    /// The content of a bearer token; all unknown if it is not a JWT.
    pub(crate) fn of_token(token: &str, file: Option<PathBuf>) -> Self {
        let claims = token_claims(token).unwrap_or_default();
        Self {
            kind: CredentialKind::Token,
            file,
            user: bounded(&claims.subject),
            bound_node: claims.node.map(|node| bounded(&node)),
            not_before: claims.issued_at,
            not_after: claims.expires_at,
        }
    }
}

/// The credentials that a connection uses, and problems with their files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CredentialsInUse {
    /// Empty before the first read, and with a plugin, whose answers are not examined.
    pub credentials: Vec<Credential>,
    /// Files with a secret that users other than the owner may read: sentences with the command that repairs it.
    pub warnings: Vec<String>,
    /// Why the last read failed; the credentials are then those of the last successful one.
    pub error: Option<String>,
}

/// Receives the credentials from the connections that share it. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct CredentialsObserver(watch::Sender<CredentialsInUse>);

impl CredentialsObserver {
    /// The credentials that any of the connections read last.
    #[must_use]
    pub fn in_use(&self) -> CredentialsInUse {
        self.0.borrow().clone()
    }

    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<CredentialsInUse> {
        self.0.subscribe()
    }

    pub(crate) fn read(&self, credentials: Vec<Credential>, warnings: Vec<String>) {
        self.set(CredentialsInUse { credentials, warnings, error: None });
    }

    pub(crate) fn failed(&self, error: String) {
        let in_use = self.in_use();
        self.set(CredentialsInUse { error: Some(error), ..in_use });
    }

    fn set(&self, new: CredentialsInUse) {
        self.0.send_if_modified(|old| {
            let is_news = *old != new;
            *old = new;
            is_news
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(not_before: Option<i64>, not_after: Option<i64>) -> Credential {
        Credential {
            kind: CredentialKind::Token,
            file: None,
            user: String::new(),
            bound_node: None,
            not_before,
            not_after,
        }
    }

    /// E4: when a credential counts as expiring.
    #[test]
    fn e4_the_last_tenth_of_a_lifetime_is_expiring() {
        let (hour, year) = (3_600, 365 * 86_400);
        for (start, end, now, expected) in [
            (None, None, 0, Validity::Unknown),
            (Some(0), Some(hour), 0, Validity::Healthy { left: hour }),
            (Some(0), Some(hour), hour - 361, Validity::Healthy { left: 361 }),
            (Some(0), Some(hour), hour - 360, Validity::Expiring { left: 360 }),
            (Some(0), Some(hour), hour - 1, Validity::Expiring { left: 1 }),
            (Some(0), Some(hour), hour, Validity::Expired { since: 0 }),
            (Some(0), Some(hour), hour + 5, Validity::Expired { since: 5 }),
            // A tenth of a year is more than a month.
            (Some(0), Some(year), year - MAX_NOTICE - 1, Validity::Healthy { left: MAX_NOTICE + 1 }),
            (Some(0), Some(year), year - MAX_NOTICE, Validity::Expiring { left: MAX_NOTICE }),
            // Without a lifetime, or with an invalid one.
            (None, Some(year), year - DEFAULT_NOTICE - 1, Validity::Healthy { left: DEFAULT_NOTICE + 1 }),
            (None, Some(year), year - DEFAULT_NOTICE, Validity::Expiring { left: DEFAULT_NOTICE }),
            (Some(year), Some(hour), 0, Validity::Expiring { left: hour }),
            (Some(0), Some(i64::MAX), i64::MIN, Validity::Healthy { left: i64::MAX }),
        ] {
            assert_eq!(credential(start, end).validity(now), expected, "{start:?} {end:?} at {now}");
        }
    }
}
