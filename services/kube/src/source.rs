//! Where the API server is, and by what the agent proves who it is.
//!
//! Owns: [`ClusterSource`], its reading, and the [`Stamp`]s by which a changed file is noticed. In: files, the
//! environment of a pod. Out: a [`kube::Config`] with everything read into it, and the files it came from; or a
//! [`SourceError`], which names the file. What was in a file is never repeated, for it may be a secret.
//!
//! Everything here blocks, and belongs on a thread that may.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use kube::{
    Config,
    config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError, LoadDataError},
};

/// In a pod, these two come from the projected volume of its service account.
const POD_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// Where the address of the API server and the credentials come from.
///
/// The server is dialled directly: a kubeconfig's `proxy-url` is refused, and `HTTPS_PROXY` is not looked at.
/// `insecure-skip-tls-verify` is refused, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterSource {
    /// A kubeconfig file, as the kubelet has one.
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The context to use; `current-context` if none is given.
        context: Option<String>,
    },
    /// The service account of the pod that the agent runs in.
    InCluster,
    /// Address and files one by one.
    Explicit(ExplicitSource),
}

/// A server and the files with which to speak to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExplicitSource {
    /// The server's URL.
    pub server: String,
    /// PEM file with the certificate authorities that sign the server's certificate; the system's if none is given.
    pub ca_file: Option<PathBuf>,
    /// File with a bearer token.
    pub token_file: Option<PathBuf>,
    /// PEM file with the client certificate and what leads from it to the cluster's authority.
    pub client_certificate_file: Option<PathBuf>,
    /// PEM file with its key; may be the same file.
    pub client_key_file: Option<PathBuf>,
}

impl fmt::Display for ClusterSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kubeconfig { path, context: None } => write!(f, "kubeconfig {}", path.display()),
            Self::Kubeconfig { path, context: Some(context) } => {
                write!(f, "kubeconfig {}, context {context}", path.display())
            }
            Self::InCluster => f.write_str("the pod's service account"),
            Self::Explicit(source) => f.write_str(&without_userinfo(&source.server)),
        }
    }
}

/// Why a source cannot be used. Never holds anything out of a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SourceError {
    /// A file cannot be read.
    #[error("cannot read {what} {path}: {reason}")]
    Read {
        /// What the file is.
        what: &'static str,
        /// The file.
        path: String,
        /// The system's reason.
        reason: String,
    },
    /// What was read cannot be used.
    #[error("{source_name}: {reason}")]
    Unusable {
        /// The source, for people.
        source_name: String,
        /// What is wrong, and what to do.
        reason: String,
    },
}

/// A source as it was read.
pub(crate) struct Loaded {
    /// Tokens and certificates are in it, not the paths to them.
    pub(crate) config: Config,
    /// All files that it came from, whether they could be read or not.
    pub(crate) files: Vec<PathBuf>,
    /// A command is run for the credentials, so that they can change without any file changing.
    pub(crate) plugin: bool,
}

/// What is compared to notice that a file changed: inode, length and time of modification. The kubelet's
/// certificate and a pod's token are replaced by moving a symbolic link, which changes the inode behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp(Option<(u64, u64, u64, i64, i64)>);

impl Stamp {
    pub(crate) fn of(path: &Path) -> Self {
        Self(fs::metadata(path).ok().map(|m| (m.dev(), m.ino(), m.len(), m.mtime(), m.mtime_nsec())))
    }
}

/// Reads a source.
///
/// # Errors
/// [`SourceError`] when a file cannot be read or does not hold what it should.
pub(crate) fn load(source: &ClusterSource) -> Result<Loaded, SourceError> {
    let (mut config, mut files) = match source {
        ClusterSource::Kubeconfig { path, context } => kubeconfig(source, path, context.as_deref())?,
        ClusterSource::InCluster => in_cluster(source)?,
        ClusterSource::Explicit(explicit) => explicit_config(source, explicit)?,
    };
    if !matches!(config.cluster_url.scheme_str(), Some("http" | "https"))
        || config.cluster_url.host().is_none()
    {
        return Err(unusable(source, "the server's address has to be https://host:port"));
    }
    let auth = &mut config.auth_info;
    files.extend([&auth.client_certificate, &auth.client_key].into_iter().flatten().map(PathBuf::from));
    // kube keeps a token for a minute and does not trim it; here it is read when its file changes.
    if let Some(path) = auth.token_file.take() {
        let path = PathBuf::from(path);
        if auth.token.is_none() {
            auth.token = Some(read_token(source, &path)?.into());
        }
        files.push(path);
    }
    if config.root_cert.as_ref().is_some_and(Vec::is_empty) {
        return Err(unusable(source, "there is no certificate in what is given as certificate authority"));
    }
    let plugin = config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some();
    Ok(Loaded { config, files, plugin })
}

fn kubeconfig(
    source: &ClusterSource,
    path: &Path,
    context: Option<&str>,
) -> Result<(Config, Vec<PathBuf>), SourceError> {
    let document = Kubeconfig::read_from(path).map_err(|err| kubeconfig_error(source, &err))?;
    let mut files = vec![path.to_owned()];
    let context = context.map(str::to_owned);
    let cluster = used_cluster(&document, context.as_ref());
    if let Some(cluster) = cluster {
        files.extend(cluster.certificate_authority.as_ref().map(PathBuf::from));
        if cluster.insecure_skip_tls_verify == Some(true) {
            return Err(unusable(
                source,
                "insecure-skip-tls-verify is not supported, for it gives the credentials to whoever answers; \
                 give certificate-authority",
            ));
        }
        if cluster.proxy_url.as_ref().is_some_and(|url| !url.is_empty()) {
            return Err(unusable(
                source,
                "proxy-url is not supported; give an address of the API server that can be reached directly",
            ));
        }
    }
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    // The future is ready at once: kube reads no file in it that is not read synchronously.
    let loading = std::pin::pin!(Config::from_custom_kubeconfig(document, &options));
    let config = futures_util::FutureExt::now_or_never(loading)
        .ok_or_else(|| unusable(source, "reading it did not end"))?
        .map_err(|err| kubeconfig_error(source, &err))?;
    Ok((config, files))
}

fn used_cluster<'a>(document: &'a Kubeconfig, context: Option<&String>) -> Option<&'a kube::config::Cluster> {
    let name = context.or(document.current_context.as_ref())?;
    let context = document.contexts.iter().find(|c| &c.name == name)?.context.as_ref()?;
    document.clusters.iter().find(|c| c.name == context.cluster)?.cluster.as_ref()
}

fn in_cluster(source: &ClusterSource) -> Result<(Config, Vec<PathBuf>), SourceError> {
    let mut config = Config::incluster().map_err(|err| {
        unusable(source, format!("{err}; outside of a pod give a kubeconfig, or server and files"))
    })?;
    // The file is read anew here when it changes, so that kube need not.
    config.root_cert_file = None;
    Ok((config, vec![PathBuf::from(POD_TOKEN), PathBuf::from(POD_CA)]))
}

fn explicit_config(
    source: &ClusterSource,
    explicit: &ExplicitSource,
) -> Result<(Config, Vec<PathBuf>), SourceError> {
    let url = explicit
        .server
        .parse::<http::Uri>()
        .map_err(|err| unusable(source, format!("the server's address is not a URL: {err}")))?;
    let mut config = Config::new(url);
    let mut files = Vec::new();
    if let Some(path) = &explicit.ca_file {
        let pem = fs::read(path).map_err(|err| unreadable("certificate authority", path, &err))?;
        config.root_cert = Some(certificates(&pem));
        files.push(path.clone());
    }
    let text = |path: &Option<PathBuf>| path.as_ref().map(|p| p.to_string_lossy().into_owned());
    config.auth_info = AuthInfo {
        token_file: text(&explicit.token_file),
        client_certificate: text(&explicit.client_certificate_file),
        client_key: text(&explicit.client_key_file),
        ..AuthInfo::default()
    };
    Ok((config, files))
}

/// The certificates in `pem`, in DER; what is none is passed over.
fn certificates(pem: &[u8]) -> Vec<Vec<u8>> {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).map(|der| der.to_vec()).collect()
}

fn read_token(source: &ClusterSource, path: &Path) -> Result<String, SourceError> {
    let text = fs::read_to_string(path).map_err(|err| unreadable("token file", path, &err))?;
    let token = text.trim();
    if token.is_empty() || token.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(unusable(source, format!("there is no token in {}", path.display())));
    }
    Ok(token.to_owned())
}

pub(crate) fn unusable(source: &ClusterSource, reason: impl Into<String>) -> SourceError {
    SourceError::Unusable { source_name: source.to_string(), reason: reason.into() }
}

fn unreadable(what: &'static str, path: &Path, err: &io::Error) -> SourceError {
    SourceError::Read { what, path: path.display().to_string(), reason: err.to_string() }
}

/// kube's error without what it may quote: a YAML error shows the lines around it, with the tokens in them.
pub(crate) fn kubeconfig_error(source: &ClusterSource, err: &KubeconfigError) -> SourceError {
    match err {
        KubeconfigError::ReadConfig(err, path) => unreadable("kubeconfig", path, err),
        KubeconfigError::Parse(_) => unusable(source, "it is not a kubeconfig in YAML"),
        KubeconfigError::CurrentContextNotSet => {
            unusable(source, "it has no current-context; give a context")
        }
        KubeconfigError::LoadContext(name) => unusable(source, format!("it has no context {name}")),
        KubeconfigError::LoadClusterOfContext(name) => unusable(source, format!("it has no cluster {name}")),
        KubeconfigError::MissingClusterUrl => unusable(source, "its cluster has no server"),
        KubeconfigError::LoadCertificateAuthority(err) => data_error(source, "certificate-authority", err),
        KubeconfigError::LoadClientCertificate(err) => data_error(source, "client-certificate", err),
        KubeconfigError::LoadClientKey(err) => data_error(source, "client-key", err),
        KubeconfigError::ParseCertificates(_) => unusable(source, "its certificate-authority is not PEM"),
        KubeconfigError::ParseClusterUrl(err) => unusable(source, format!("its server is not a URL: {err}")),
        _ => unusable(source, "it cannot be used"),
    }
}

fn data_error(source: &ClusterSource, what: &'static str, err: &LoadDataError) -> SourceError {
    match err {
        LoadDataError::ReadFile(err, path) => unreadable(what, path, err),
        LoadDataError::DecodeBase64(_) => unusable(source, format!("its {what}-data is not base64")),
        LoadDataError::NoBase64DataOrFile => unusable(source, format!("{what} is missing")),
    }
}

/// A URL without what may stand before its `@`.
pub(crate) fn without_userinfo(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    if scheme.is_empty() { format!("{host}{path}") } else { format!("{scheme}://{host}{path}") }
}

#[cfg(test)]
mod tests;
