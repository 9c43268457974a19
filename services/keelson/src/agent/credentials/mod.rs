//! The agent's credentials for the API server: identity, validity and files.
//!
//! Owns: [`Credentials`], their display and metrics; the job that logs warnings about them; and, with
//! `kube.bootstrap_kubeconfig`, the job that requests and renews the client certificate ([`renewal`]). In: what the
//! connections read. Out: a check, metrics, `keelson node`, log lines. Nothing secret passes through here.

mod files;
mod plan;
mod renewal;

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use keelson_actor_system::cluster::JobHealth;
use keelson_debug::Check;
use keelson_kube::{Credential, CredentialsInUse, CredentialsObserver, Validity};
use keelson_proto::node as pb;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::sync::watch;

use super::jobs::{self, Job};
pub(super) use files::{CertificateFiles, certificate_file};
pub(super) use renewal::Renewal;

const JOB: &str = "Credentials";
/// Name of the check in `/readyz`.
pub(super) const CHECK: &str = "credentials";
/// Interval of checks of the remaining validity while the credentials do not change.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RenewalResult {
    result: &'static str,
}

/// The known credentials. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Credentials {
    pub(super) observer: CredentialsObserver,
    renewal: Arc<watch::Sender<JobHealth>>,
    expiry: Family<Kind, Gauge>,
    renewals: Family<RenewalResult, Counter>,
}

impl Default for Credentials {
    fn default() -> Self {
        let (renewal, _) = watch::channel(JobHealth::Healthy);
        Self {
            observer: CredentialsObserver::default(),
            renewal: Arc::new(renewal),
            expiry: Family::default(),
            renewals: Family::default(),
        }
    }
}

/// A problem of the credentials.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Finding {
    Expired(String),
    Expiring(String),
    Mode(String),
}

impl Finding {
    fn text(&self) -> &str {
        match self {
            Self::Expired(text) | Self::Expiring(text) | Self::Mode(text) => text,
        }
    }
}

fn now_unix() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Current and imminent problems; `now` is in Unix seconds. A text does not change until the kind of finding changes.
fn findings(in_use: &CredentialsInUse, now: i64) -> Vec<Finding> {
    let of = |credential: &Credential| {
        let end = credential.not_after.map(utc).unwrap_or_default();
        let label = credential.label();
        match credential.validity(now) {
            Validity::Expired { .. } => {
                Some(Finding::Expired(format!("the {label} expired at {end}; renew it")))
            }
            Validity::Expiring { .. } => Some(Finding::Expiring(format!(
                "the {label} expires at {end} and has not been renewed; renew it"
            ))),
            Validity::Healthy { .. } | Validity::Unknown => None,
        }
    };
    let mut found: Vec<Finding> = in_use.credentials.iter().filter_map(of).collect();
    found.extend(in_use.warnings.iter().cloned().map(Finding::Mode));
    found.sort();
    found
}

/// `2026-01-02T03:04:05Z`.
fn utc(unix: i64) -> String {
    let since = Duration::from_secs(u64::try_from(unix).unwrap_or_default());
    // Times after the year 9999 cannot be formatted; certificates have none.
    let time = UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH);
    let mut text = String::new();
    match std::fmt::write(&mut text, format_args!("{}", humantime::format_rfc3339_seconds(time))) {
        Ok(()) => text,
        Err(_) => "an unknown time".to_owned(),
    }
}

impl Credentials {
    /// Readiness: fails while the credentials cannot be read or have expired; otherwise the message names what needs
    /// attention.
    pub(super) fn check(&self) -> Check {
        let in_use = self.observer.in_use();
        let renewal = match &*self.renewal.borrow() {
            JobHealth::Failing { reason, .. } => Some(reason.clone()),
            JobHealth::Pending | JobHealth::Healthy => None,
        };
        let found = findings(&in_use, now_unix());
        let broken = in_use.error.is_some() || found.iter().any(|found| matches!(found, Finding::Expired(_)));
        let texts = found.iter().map(|found| found.text().to_owned());
        let notes: Vec<String> = in_use.error.into_iter().chain(renewal).chain(texts).collect();
        Check {
            name: CHECK.into(),
            ok: !broken,
            message: if notes.is_empty() { "ok".into() } else { notes.join("; ") },
            since_unix_ms: 0,
        }
    }

    /// For `keelson node`.
    pub(super) fn show(&self) -> (Vec<pb::Credential>, Vec<String>) {
        let (in_use, now) = (self.observer.in_use(), now_unix());
        let ms = |seconds: Option<i64>| seconds.unwrap_or_default().saturating_mul(1_000);
        let shown = in_use.credentials.iter().map(|credential| pb::Credential {
            kind: credential.kind.name().into(),
            file: credential.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default(),
            user: credential.user.clone(),
            bound_node: credential.bound_node.clone().unwrap_or_default(),
            not_before_unix_ms: ms(credential.not_before),
            expires_unix_ms: ms(credential.not_after),
            state: credential.validity(now).name().into(),
        });
        let mut warnings = in_use.warnings.clone();
        if let JobHealth::Failing { reason, .. } = &*self.renewal.borrow() {
            warnings.push(reason.clone());
        }
        (shown.collect(), warnings)
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "keelson_kube_credentials_expiration_timestamp_seconds",
            "Expiry time of the credential in use, in Unix seconds",
            self.expiry.clone(),
        );
        registry.register(
            "keelson_kube_certificate_renewals",
            "Client certificate requests, by result",
            self.renewals.clone(),
        );
    }

    /// Logs each warning once, until the arbiter ends.
    async fn watch(self) {
        let mut seen = self.observer.subscribe();
        let mut warned = BTreeSet::new();
        loop {
            let in_use = seen.borrow_and_update().clone();
            self.count(&in_use);
            let found: BTreeSet<Finding> = findings(&in_use, now_unix()).into_iter().collect();
            for new in found.difference(&warned) {
                tracing::warn!(finding = new.text(), "credentials need attention");
            }
            warned = found;
            let _ = tokio::time::timeout(LOOK_INTERVAL, seen.changed()).await;
        }
    }

    fn count(&self, in_use: &CredentialsInUse) {
        self.expiry.clear();
        for credential in &in_use.credentials {
            if let Some(end) = credential.not_after {
                self.expiry.get_or_create(&Kind { kind: credential.kind.name() }).set(end);
            }
        }
    }

    fn renewed(&self, result: &'static str) {
        self.renewals.get_or_create(&RenewalResult { result }).inc();
    }
}

/// Starts the jobs on a thread of their own. Returns the thread and the job that shows them.
pub(super) fn build(
    credentials: Credentials,
    renewal: Option<Renewal>,
    changes: watch::Sender<u64>,
) -> (actix::ArbiterHandle, Job) {
    let job = Job::new(JOB, changes);
    let arbiter = jobs::arbiter(c"credentials").handle();
    job.keep_on(&arbiter, 0, |_| {}, move || credentials.clone().watch());
    if let Some(renewal) = renewal {
        job.keep_on(&arbiter, 1, |_| {}, move || renewal::run(renewal.clone()));
    }
    (arbiter, job)
}

#[cfg(test)]
mod tests {
    use keelson_kube::CredentialKind;

    use super::*;

    fn token(not_before: i64, not_after: i64) -> Credential {
        Credential {
            kind: CredentialKind::Token,
            file: Some("/etc/keelson/token".into()),
            user: "system:serviceaccount:kube-system:keelson-agent".into(),
            bound_node: Some("a".into()),
            not_before: Some(not_before),
            not_after: Some(not_after),
        }
    }

    /// E4: the findings for each state of the credentials.
    #[test]
    fn e4_credentials_that_end_or_are_readable_are_found() {
        let in_use = |credentials, warnings| CredentialsInUse { credentials, warnings, error: None };
        let healthy = in_use(vec![token(0, 3_600)], vec![]);
        assert_eq!(findings(&healthy, 0), []);
        let text = |finding: &str| finding.to_owned();
        assert_eq!(
            findings(&healthy, 3_500),
            [Finding::Expiring(text(
                "the token /etc/keelson/token expires at 1970-01-01T01:00:00Z and has not been renewed; renew it"
            ))]
        );
        let readable = in_use(vec![token(0, 3_600)], vec!["others can read it".into()]);
        assert_eq!(
            findings(&readable, 3_600),
            [
                Finding::Expired(text(
                    "the token /etc/keelson/token expired at 1970-01-01T01:00:00Z; renew it"
                )),
                Finding::Mode(text("others can read it")),
            ]
        );
        let far = in_use(vec![token(0, i64::MAX)], vec![]);
        assert_eq!(findings(&far, i64::MAX - 1).len(), 1);
    }
}
