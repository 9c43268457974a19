//! The client certificate of role `node`: request, approval, renewal.
//!
//! Owns: the loop with the schedule of [`super::plan`]. In: the certificate on disk, the API server. Out: a newer
//! certificate on disk, which every connection reads by itself, and the health of the renewal. The key never leaves the
//! machine.

use std::{path::PathBuf, time::Duration};

use keelson_actor_system::{
    clock::unix_ms,
    cluster::{ApiError, ApiErrorKind, JobHealth},
};
use keelson_kube::{
    ApiServer, CertificateError, ClientKey, IssuedValidity, NodeRequest, RequestState, issued_validity,
};
use tokio::time::Instant;

use super::{
    Credentials,
    files::CertificateFiles,
    now_unix,
    plan::{self, RequestCredentials, Step},
};

/// Maximum wait for a request before it is retried, as in the kubelet.
const APPROVAL: Duration = Duration::from_secs(15 * 60);
/// The first and the longest interval of checks of a request.
const POLL: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// A request that is pending for longer is reported.
const SLOW: Duration = Duration::from_secs(10);
/// Minimum time between two certificates: one that is valid for minutes may be due for renewal when it is issued.
const REST: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum RenewalError {
    #[error("{0}")]
    Api(#[from] ApiError),
    #[error(
        "the API server does not accept the credentials of {kubeconfig} (HTTP 401); a bootstrap token may have \
         expired: write a new one into the file"
    )]
    Bootstrap { kubeconfig: String },
    #[error("{0}")]
    Certificate(#[from] CertificateError),
    #[error("cannot write to {folder}: {error}")]
    Disk { folder: String, error: std::io::Error },
    #[error("certificate signing request {name} was denied: {reason}")]
    Refused { name: String, reason: String },
    #[error("certificate signing request {name} was not signed within 15 min; {ADVICE}")]
    Late { name: String },
    #[error("the certificate issued for {name} is for another node")]
    Another { name: String },
}

/// What an operator can do about a pending request.
const ADVICE: &str =
    "list requests with kubectl get csr and approve it with kubectl certificate approve NAME";

/// Cheap to clone.
#[derive(Clone)]
pub(in crate::agent) struct Renewal {
    pub(in crate::agent) node: String,
    pub(in crate::agent) files: CertificateFiles,
    /// `kube.bootstrap_kubeconfig`.
    pub(in crate::agent) kubeconfig: PathBuf,
    /// With its credentials.
    pub(in crate::agent) bootstrap: ApiServer,
    /// With the certificate that is to be replaced.
    pub(in crate::agent) current: ApiServer,
    pub(in crate::agent) credentials: Credentials,
}

/// Keeps the certificate valid until the arbiter ends.
pub(super) async fn run(renewal: Renewal) {
    let (mut failures, mut refused) = (0, false);
    let mut drawn: Option<(IssuedValidity, f64)> = None;
    loop {
        let validity = renewal.held();
        if drawn.map(|(of, _)| of) != validity {
            drawn = validity.map(|validity| (validity, rand::random()));
        }
        let draw = drawn.map_or(0.0, |(_, draw)| draw);
        let by = match plan::next_step(validity, refused, draw, now_unix()) {
            Step::Wait(wait) => {
                tokio::time::sleep(wait).await;
                continue;
            }
            Step::Request(by) => by,
        };
        match renewal.request(by).await {
            Ok(validity) => {
                (failures, refused) = (0, false);
                renewal.credentials.renewed("success");
                renewal.health(JobHealth::Healthy);
                tracing::info!(
                    file = %renewal.files.current().display(),
                    expires = super::utc(validity.not_after),
                    "client certificate issued"
                );
                tokio::time::sleep(REST).await;
            }
            Err(error) => {
                failures += 1;
                // The bootstrap credentials may have permissions that the certificate has lost.
                refused = by == RequestCredentials::Current
                    && matches!(&error, RenewalError::Api(error) if error.kind == ApiErrorKind::Unauthorized);
                renewal.credentials.renewed("error");
                let reason = format!("cannot get a client certificate: {error}");
                tracing::warn!(%error, failures, "cannot get a client certificate; retrying");
                renewal.fails(reason);
                tokio::time::sleep(plan::pause(failures, rand::random())).await;
            }
        }
    }
}

impl Renewal {
    /// The validity of the certificate on disk, if it is usable.
    fn held(&self) -> Option<IssuedValidity> {
        let file = self.files.current();
        let pem = match self.files.read_current() {
            Ok(pem) => pem?,
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "cannot read the client certificate");
                return None;
            }
        };
        match issued_validity(&pem, &self.node) {
            Ok(Some(validity)) => Some(validity),
            Ok(None) => {
                tracing::warn!(file = %file.display(), node = self.node, "the client certificate is for \
                                                                          another node");
                None
            }
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "cannot use the client certificate");
                None
            }
        }
    }

    async fn request(&self, by: RequestCredentials) -> Result<IssuedValidity, RenewalError> {
        let api = match by {
            RequestCredentials::Bootstrap => &self.bootstrap,
            RequestCredentials::Current => &self.current,
        };
        let key = self.key()?;
        let request = key.request(&self.node)?;
        match api.request_certificate(&request).await {
            Err(error) if by == RequestCredentials::Bootstrap && error.kind == ApiErrorKind::Unauthorized => {
                return Err(RenewalError::Bootstrap { kubeconfig: self.kubeconfig.display().to_string() });
            }
            other => other?,
        }
        let pem = self.answer(api, &request).await?;
        let whole = format!("{}{}", ended(pem), key.to_pem());
        let checked = issued_validity(&whole, &self.node);
        let validity = checked
            .map_err(RenewalError::from)
            .and_then(|validity| validity.ok_or(RenewalError::Another { name: request.name }))
            // The same request would return the same certificate.
            .inspect_err(|_| self.files.remove_pending())?;
        self.files.write_current(&whole).map_err(|error| self.disk(error))?;
        self.files.remove_pending();
        Ok(validity)
    }

    /// The key of a request that was not answered, or a new one that is on disk.
    fn key(&self) -> Result<ClientKey, RenewalError> {
        if let Some(key) = self.files.read_pending().and_then(|pem| ClientKey::from_pem(&pem).ok()) {
            return Ok(key);
        }
        let key = ClientKey::generate()?;
        self.files.write_pending(&key.to_pem()).map_err(|error| self.disk(error))?;
        Ok(key)
    }

    async fn answer(&self, api: &ApiServer, request: &NodeRequest) -> Result<String, RenewalError> {
        let (begun, mut pause) = (Instant::now(), POLL.0);
        while begun.elapsed() < APPROVAL {
            match api.certificate_request(&request.name).await? {
                RequestState::Issued(pem) => return Ok(pem),
                RequestState::Refused(reason) => {
                    self.files.remove_pending();
                    return Err(RenewalError::Refused { name: request.name.clone(), reason });
                }
                RequestState::Pending => {}
            }
            if begun.elapsed() > SLOW {
                self.fails(format!(
                    "certificate signing request {} is not signed yet; {ADVICE}",
                    request.name
                ));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL.1);
        }
        Err(RenewalError::Late { name: request.name.clone() })
    }

    fn disk(&self, error: std::io::Error) -> RenewalError {
        let file = self.files.current();
        let folder = file.parent().unwrap_or(&file).display().to_string();
        RenewalError::Disk { folder, error }
    }

    fn fails(&self, reason: String) {
        let since = match &*self.credentials.renewal.borrow() {
            JobHealth::Failing { since_unix_ms, .. } => *since_unix_ms,
            JobHealth::Pending | JobHealth::Healthy => unix_ms(),
        };
        self.health(JobHealth::Failing { reason, since_unix_ms: since, refused: false });
    }

    fn health(&self, health: JobHealth) {
        self.credentials.renewal.send_replace(health);
    }
}

/// Ensures a final line break.
fn ended(mut pem: String) -> String {
    if !pem.ends_with('\n') {
        pem.push('\n');
    }
    pem
}
