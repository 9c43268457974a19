//! Owns: the certificate authority of one cluster.
//! In: the subject of a certificate. Out: keys and certificates, and the files that servers and clients read.
//!
//! The authority's own key stays in memory, unless a controller signs with it.

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Its certificates are valid at any time that a test sets a program's clock to.
pub struct Pki {
    ca_file: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl fmt::Debug for Pki {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pki").field("ca_file", &self.ca_file).finish_non_exhaustive()
    }
}

pub struct Pair {
    pub certificate: rcgen::Certificate,
    pub key: KeyPair,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").finish_non_exhaustive()
    }
}

impl Pair {
    /// Certificate and key as PEM in one text, as a kubelet stores them.
    pub fn pem(&self) -> String {
        format!("{}{}", self.certificate.pem(), self.key.serialize_pem())
    }
}

impl Pki {
    /// Makes an authority and writes its certificate to `ca.crt` in the folder.
    pub fn new(folder: &Path) -> Result<Self> {
        Self::with_key(folder, new_key()?)
    }

    /// The authority of this key again, such as the one of a cluster outside of a virtual machine: what one signs, the
    /// other accepts.
    pub(super) fn of(folder: &Path, key: &str) -> Result<Self> {
        Self::with_key(folder, KeyPair::from_pem(key).context("not the key of an authority")?)
    }

    fn with_key(folder: &Path, key: KeyPair) -> Result<Self> {
        let mut params = params("keelson-tests", None, Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let issuer = CertifiedIssuer::self_signed(params, key).context("cannot sign the authority itself")?;
        let ca_file = folder.join("ca.crt");
        fs::write(&ca_file, issuer.pem()).with_context(|| format!("cannot write {}", ca_file.display()))?;
        Ok(Self { ca_file, issuer })
    }

    pub fn ca_file(&self) -> &Path {
        &self.ca_file
    }

    pub(super) fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Writes the authority's key beside its certificate, for the controller that signs certificates, and returns the
    /// file.
    pub fn signing_key(&self) -> Result<PathBuf> {
        let file = self.ca_file.with_extension("key");
        write_secret(&file, &self.key())?;
        Ok(file)
    }

    /// A certificate for a server on loopback.
    pub fn server(&self) -> Result<Pair> {
        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc", "10.96.0.1"];
        let mut params = params("server", None, names.map(str::to_owned).into())?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(&params)
    }

    /// A certificate with which the API server identifies a client as this user of this group.
    pub fn client(&self, user: &str, group: &str) -> Result<Pair> {
        let mut params = params(user, Some(group), Vec::new())?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    /// The same, valid for `valid` from now on.
    pub fn client_for(&self, user: &str, group: &str, valid: Duration) -> Result<Pair> {
        let mut params = params(user, Some(group), Vec::new())?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.not_after = (SystemTime::now() + valid).into();
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Result<Pair> {
        let key = new_key()?;
        let certificate = params.signed_by(&key, &self.issuer).context("cannot sign a certificate")?;
        Ok(Pair { certificate, key })
    }

    /// TLS for a server on loopback with HTTP/2 and HTTP/1.1.
    pub fn server_tls(&self) -> Result<Arc<ServerConfig>> {
        let pair = self.server()?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![pair.certificate.der().clone()], key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// TLS for a client without a certificate that trusts only this authority.
    pub fn client_tls(&self) -> Result<ClientConfig> {
        let mut roots = RootCertStore::empty();
        let own: &CertificateDer<'static> = self.issuer.der();
        roots.add(own.clone())?;
        Ok(ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth())
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// ECDSA, P-256.
pub(super) fn new_key() -> Result<KeyPair> {
    KeyPair::generate().context("cannot make a key")
}

fn params(name: &str, group: Option<&str>, alternatives: Vec<String>) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(alternatives).context("not a name for a certificate")?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

/// Writes a file that only its owner may read, atomically: a reader finds the old text or the new one.
pub(super) fn write_secret(path: &Path, text: &str) -> Result<()> {
    let fresh = path.with_extension("new");
    let written = || -> std::io::Result<()> {
        let mut file =
            fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(&fresh)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&fresh, path)
    };
    written().with_context(|| format!("cannot write {}", path.display()))
}
