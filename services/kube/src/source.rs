//! The address of the API server, and the agent's credentials.
//!
//! Owns: [`ClusterSource`], its reading, the permitted modes of its files, and the [`Stamp`]s that detect a changed
//! file. In: files, the environment of a pod. Out: a [`kube::Config`] with all content read into it, its files, and the
//! identity of the client; or a [`SourceError`], which names the file. The content of a file is never repeated, because
//! it may be secret.
//!
//! Everything here blocks, and must run on a blocking thread.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::{
    Config,
    config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError, LoadDataError, NamedAuthInfo},
};
use secrecy::ExposeSecret as _;

use crate::identity::Credential;

/// In a pod, these two come from the projected volume of its service account.
const POD_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// Source of the API server's address and the credentials.
///
/// The server is dialled directly: a kubeconfig's `proxy-url` is refused, and `HTTPS_PROXY` is ignored.
/// `insecure-skip-tls-verify` is refused, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterSource {
    /// A kubeconfig file, as in the kubelet.
    Kubeconfig {
        path: PathBuf,
        /// The context to use; `None`: `current-context`.
        context: Option<String>,
    },
    /// The service account of the pod that the agent runs in.
    InCluster,
    /// Address and files one by one.
    Explicit(ExplicitSource),
    /// The server of a kubeconfig, with a client certificate that the agent requests and renews.
    Issued {
        /// The kubeconfig, of which only the cluster is used.
        kubeconfig: PathBuf,
        /// PEM file with the certificate and its key.
        certificate: PathBuf,
    },
}

/// A server and the files for its connection.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExplicitSource {
    pub server: String,
    /// PEM file with the certificate authorities of the server's certificate; `None`: those of the system.
    pub ca_file: Option<PathBuf>,
    pub token_file: Option<PathBuf>,
    /// PEM file with the client certificate and its chain.
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
            Self::Issued { kubeconfig, .. } => write!(f, "kubeconfig {}", kubeconfig.display()),
        }
    }
}

/// Never holds any content of a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SourceError {
    #[error("no client certificate in {path} yet")]
    NotIssued { path: String },
    #[error("cannot read {what} {path}: {reason}")]
    Read { what: &'static str, path: String, reason: String },
    /// Every user of the machine could replace the content of the file.
    #[error(
        "the {what} {path} is writable by every user (mode {mode:04o}); not used; run: chmod go-w {path}"
    )]
    WorldWritable { what: &'static str, path: String, mode: u32 },
    #[error("{source_name}: {reason}")]
    Unusable {
        source_name: String,
        /// What is wrong, and what to do.
        reason: String,
    },
}

pub(crate) struct Loaded {
    /// Contains tokens and certificates, not paths to them.
    pub(crate) config: Config,
    /// All files of the source, readable or not.
    pub(crate) files: Vec<PathBuf>,
    /// A command provides the credentials, so that they can change without a changed file.
    pub(crate) plugin: bool,
    pub(crate) credentials: Vec<Credential>,
    /// Files with a secret that users other than the owner may read.
    pub(crate) warnings: Vec<String>,
}

/// Detects a changed file: inode, mode, length and modification time. The kubelet's
/// certificate and a pod's token are replaced by moving a symbolic link, which changes the inode behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp(Option<(u64, u64, u32, u64, i64, i64)>);

impl Stamp {
    pub(crate) fn of(path: &Path) -> Self {
        let metadata = fs::metadata(path).ok();
        Self(metadata.map(|m| (m.dev(), m.ino(), m.mode(), m.len(), m.mtime(), m.mtime_nsec())))
    }
}

/// Reads a source.
pub(crate) fn load(source: &ClusterSource) -> Result<Loaded, SourceError> {
    let mut modes = Modes { in_pod: *source == ClusterSource::InCluster, warnings: Vec::new() };
    let (mut config, mut files) = match source {
        ClusterSource::Kubeconfig { path, context } => {
            kubeconfig(source, path, context.as_deref(), &mut modes)?
        }
        ClusterSource::InCluster => in_cluster(source)?,
        ClusterSource::Explicit(explicit) => explicit_config(source, explicit, &mut modes)?,
        ClusterSource::Issued { kubeconfig: path, certificate } => {
            let (mut config, files) = kubeconfig(source, path, None, &mut modes)?;
            let file = certificate.to_string_lossy().into_owned();
            if matches!(fs::metadata(certificate), Err(err) if err.kind() == io::ErrorKind::NotFound) {
                return Err(SourceError::NotIssued { path: file });
            }
            config.auth_info = AuthInfo {
                client_certificate: Some(file.clone()),
                client_key: Some(file),
                ..AuthInfo::default()
            };
            (config, files)
        }
    };
    if !matches!(config.cluster_url.scheme_str(), Some("http" | "https"))
        || config.cluster_url.host().is_none()
    {
        return Err(unusable(source, "the server's address has to be https://host:port"));
    }
    let auth = &mut config.auth_info;
    files.extend([&auth.client_certificate, &auth.client_key].into_iter().flatten().map(PathBuf::from));
    let mut credentials = Vec::new();
    // kube caches a token for a minute and does not trim it; here it is read when its file changes.
    if let Some(path) = auth.token_file.take() {
        let path = PathBuf::from(path);
        if auth.token.is_none() {
            modes.check("token file", &path, true)?;
            let token = read_token(source, &path)?;
            credentials.push(Credential::of_token(&token, Some(path.clone())));
            auth.token = Some(token.into());
        }
        files.push(path);
    } else if let Some(token) = &auth.token {
        credentials.push(Credential::of_token(token.expose_secret(), None));
    }
    credentials.extend(embed_certificate(auth, &mut modes)?);
    if config.root_cert.as_ref().is_some_and(Vec::is_empty) {
        return Err(unusable(source, "the certificate authority contains no certificate"));
    }
    let plugin = config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some();
    Ok(Loaded { config, files, plugin, credentials, warnings: modes.warnings })
}

/// Reads client certificate and key into `auth`. One file for both is read once, so that certificate and key match
/// while the file is replaced.
fn embed_certificate(auth: &mut AuthInfo, modes: &mut Modes) -> Result<Option<Credential>, SourceError> {
    let read = |what: &'static str, path: &Path| fs::read(path).map_err(|err| unreadable(what, path, &err));
    let file = auth.client_certificate.as_ref().map(PathBuf::from);
    let mut from_file = None;
    if let (None, Some(path)) = (&auth.client_certificate_data, &file) {
        let pem = read("client-certificate", path)?;
        auth.client_certificate_data = Some(BASE64_STANDARD.encode(&pem));
        from_file = Some(pem);
    }
    if let (None, Some(path)) = (&auth.client_key_data, &auth.client_key) {
        let path = Path::new(path);
        modes.check("client key", path, true)?;
        let pem = match &from_file {
            Some(pem) if file.as_deref() == Some(path) => BASE64_STANDARD.encode(pem),
            _ => BASE64_STANDARD.encode(read("client-key", path)?),
        };
        auth.client_key_data = Some(pem.into());
    }
    Ok(match (&auth.client_certificate_data, from_file) {
        (_, Some(pem)) => Some(Credential::of_certificate(&pem, file)),
        (Some(data), None) => {
            let pem = BASE64_STANDARD.decode(data).unwrap_or_default();
            Some(Credential::of_certificate(&pem, None))
        }
        (None, None) => None,
    })
}

/// Checks which users may read and write the files.
struct Modes {
    /// Kubernetes chooses the mode of a pod's token, and only the pod can access the file.
    in_pod: bool,
    warnings: Vec<String>,
}

impl Modes {
    /// Checks the mode of one file. A missing file is reported when it is read.
    fn check(&mut self, what: &'static str, path: &Path, is_secret: bool) -> Result<(), SourceError> {
        let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
        let mode = metadata.mode() & 0o7777;
        let shown = path.display();
        if mode & 0o002 != 0 {
            return Err(SourceError::WorldWritable { what, path: shown.to_string(), mode });
        }
        if is_secret && !self.in_pod && mode & 0o044 != 0 {
            self.warnings.push(format!(
                "the {what} {shown} is readable by users other than its owner (mode {mode:04o}); run: chmod \
                 600 {shown}"
            ));
        }
        Ok(())
    }
}

fn kubeconfig(
    source: &ClusterSource,
    path: &Path,
    context: Option<&str>,
    modes: &mut Modes,
) -> Result<(Config, Vec<PathBuf>), SourceError> {
    let document = Kubeconfig::read_from(path).map_err(|err| kubeconfig_error(source, &err))?;
    // It may name a program to run: a user who can write it can act as the agent.
    modes.check("kubeconfig", path, document.auth_infos.iter().any(has_secret))?;
    let mut files = vec![path.to_owned()];
    let context = context.map(str::to_owned);
    let cluster = used_cluster(&document, context.as_ref());
    if let Some(cluster) = cluster {
        if let Some(path) = cluster.certificate_authority.as_ref().map(PathBuf::from) {
            modes.check("certificate authority", &path, false)?;
            files.push(path);
        }
        if cluster.insecure_skip_tls_verify == Some(true) {
            return Err(unusable(
                source,
                "insecure-skip-tls-verify is not supported, because the credentials would be sent to an \
                 unverified server; set certificate-authority",
            ));
        }
        if cluster.proxy_url.as_ref().is_some_and(|url| !url.is_empty()) {
            return Err(unusable(
                source,
                "proxy-url is not supported; set an address of the API server that is reachable directly",
            ));
        }
    }
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    // The future is ready at once: in it kube reads files synchronously only.
    let loading = std::pin::pin!(Config::from_custom_kubeconfig(document, &options));
    let config = futures_util::FutureExt::now_or_never(loading)
        .ok_or_else(|| unusable(source, "reading it timed out"))?
        .map_err(|err| kubeconfig_error(source, &err))?;
    Ok((config, files))
}

/// Whether a user of a kubeconfig has a secret in the file itself.
fn has_secret(user: &NamedAuthInfo) -> bool {
    user.auth_info.as_ref().is_some_and(|auth| {
        auth.token.is_some()
            || auth.password.is_some()
            || auth.client_key_data.is_some()
            || auth.auth_provider.is_some()
    })
}

fn used_cluster<'a>(document: &'a Kubeconfig, context: Option<&String>) -> Option<&'a kube::config::Cluster> {
    let name = context.or(document.current_context.as_ref())?;
    let context = document.contexts.iter().find(|c| &c.name == name)?.context.as_ref()?;
    document.clusters.iter().find(|c| c.name == context.cluster)?.cluster.as_ref()
}

fn in_cluster(source: &ClusterSource) -> Result<(Config, Vec<PathBuf>), SourceError> {
    let mut config = Config::incluster().map_err(|err| {
        unusable(source, format!("{err}; outside a pod, set kubeconfig, or server and credential files"))
    })?;
    // The file is read here when it changes, so kube must not read it.
    config.root_cert_file = None;
    Ok((config, vec![PathBuf::from(POD_TOKEN), PathBuf::from(POD_CA)]))
}

fn explicit_config(
    source: &ClusterSource,
    explicit: &ExplicitSource,
    modes: &mut Modes,
) -> Result<(Config, Vec<PathBuf>), SourceError> {
    let url = explicit
        .server
        .parse::<http::Uri>()
        .map_err(|err| unusable(source, format!("the server's address is not a URL: {err}")))?;
    let mut config = Config::new(url);
    let mut files = Vec::new();
    if let Some(path) = &explicit.ca_file {
        modes.check("certificate authority", path, false)?;
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

/// The certificates in `pem`, in DER; invalid ones are skipped.
fn certificates(pem: &[u8]) -> Vec<Vec<u8>> {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).map(|der| der.to_vec()).collect()
}

fn read_token(source: &ClusterSource, path: &Path) -> Result<String, SourceError> {
    let text = fs::read_to_string(path).map_err(|err| unreadable("token file", path, &err))?;
    let token = text.trim();
    if token.is_empty() || token.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(unusable(source, format!("{} contains no token", path.display())));
    }
    Ok(token.to_owned())
}

pub(crate) fn unusable(source: &ClusterSource, reason: impl Into<String>) -> SourceError {
    SourceError::Unusable { source_name: source.to_string(), reason: reason.into() }
}

fn unreadable(what: &'static str, path: &Path, err: &io::Error) -> SourceError {
    SourceError::Read { what, path: path.display().to_string(), reason: err.to_string() }
}

/// kube's error without quotations: a YAML error shows the lines around it, with their tokens.
pub(crate) fn kubeconfig_error(source: &ClusterSource, err: &KubeconfigError) -> SourceError {
    match err {
        KubeconfigError::ReadConfig(err, path) => unreadable("kubeconfig", path, err),
        KubeconfigError::Parse(_) => unusable(source, "not a kubeconfig in YAML"),
        KubeconfigError::CurrentContextNotSet => {
            unusable(source, "it has no current-context; set kube.context")
        }
        KubeconfigError::LoadContext(name) => unusable(source, format!("it has no context {name}")),
        KubeconfigError::LoadClusterOfContext(name) => unusable(source, format!("it has no cluster {name}")),
        KubeconfigError::MissingClusterUrl => unusable(source, "its cluster has no server"),
        KubeconfigError::LoadCertificateAuthority(err) => data_error(source, "certificate-authority", err),
        KubeconfigError::LoadClientCertificate(err) => data_error(source, "client-certificate", err),
        KubeconfigError::LoadClientKey(err) => data_error(source, "client-key", err),
        KubeconfigError::ParseCertificates(_) => unusable(source, "its certificate-authority is not PEM"),
        KubeconfigError::ParseClusterUrl(err) => unusable(source, format!("its server is not a URL: {err}")),
        _ => unusable(source, "it is not usable"),
    }
}

fn data_error(source: &ClusterSource, what: &'static str, err: &LoadDataError) -> SourceError {
    match err {
        LoadDataError::ReadFile(err, path) => unreadable(what, path, err),
        LoadDataError::DecodeBase64(_) => unusable(source, format!("its {what}-data is not base64")),
        LoadDataError::NoBase64DataOrFile => unusable(source, format!("{what} is missing")),
    }
}

/// Removes the userinfo before the `@` of a URL.
pub(crate) fn without_userinfo(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    if scheme.is_empty() { format!("{host}{path}") } else { format!("{scheme}://{host}{path}") }
}

#[cfg(test)]
mod tests;
