//! Owns: users of the API server, and the files with their credentials.
//! In: the certificate authority, or the API that issues tokens. Out: kubeconfig files and the files they name, as on a
//! node, and their rotation.

use super::client::{Admin, Bound};
use super::pki::{Pki, write_secret};
use anyhow::{Context as _, Result, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
enum Credential {
    /// The file holds certificate and key and is a link to the latest, as in a kubelet's folder.
    Certificate { pki: Arc<Pki>, group: String },
    /// One of the tokens that the API server has read from a file.
    StaticToken { tokens: [String; 2] },
    /// A token of a service account, from the TokenRequest API.
    ServiceAccount { admin: Admin, namespace: String, name: String, bound: Option<Bound> },
}

/// A user of the API server with a separate kubeconfig file.
#[derive(Debug)]
pub struct Identity {
    user: String,
    folder: PathBuf,
    ca: PathBuf,
    credential: Credential,
    /// Number of credentials so far.
    generation: usize,
    vias: usize,
}

impl Identity {
    pub(super) async fn certificate(
        folder: PathBuf,
        server: &str,
        pki: &Arc<Pki>,
        user: &str,
        group: &str,
    ) -> Result<Self> {
        let credential = Credential::Certificate { pki: pki.clone(), group: group.to_owned() };
        Self::new(folder, server, pki, user.to_owned(), credential).await
    }

    pub(super) async fn static_token(
        folder: PathBuf,
        server: &str,
        pki: &Pki,
        user: &str,
        tokens: [String; 2],
    ) -> Result<Self> {
        Self::new(folder, server, pki, user.to_owned(), Credential::StaticToken { tokens }).await
    }

    /// A service account, which must exist, with tokens that are bound to `bound`.
    pub(super) async fn service_account(
        folder: PathBuf,
        server: &str,
        pki: &Pki,
        admin: &Admin,
        (namespace, name): (&str, &str),
        bound: Option<Bound>,
    ) -> Result<Self> {
        let (admin, namespace, name) = (admin.clone(), namespace.to_owned(), name.to_owned());
        let user = format!("system:serviceaccount:{namespace}:{name}");
        Self::new(folder, server, pki, user, Credential::ServiceAccount { admin, namespace, name, bound })
            .await
    }

    async fn new(
        folder: PathBuf,
        server: &str,
        pki: &Pki,
        user: String,
        credential: Credential,
    ) -> Result<Self> {
        let ca = pki.ca_file().to_owned();
        let mut identity = Self { user, folder, ca, credential, generation: 0, vias: 0 };
        identity.rotate().await?;
        identity.write_kubeconfig(&identity.kubeconfig(), server)?;
        Ok(identity)
    }

    /// The user name in the audit log.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The kubeconfig file for the API server itself.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// A kubeconfig file with the same credentials for another address of the API server (`https://127.0.0.1:PORT`). A
    /// proxy that terminates TLS ([`super::ApiProxy`]) passes tokens on, but not certificates.
    pub fn kubeconfig_via(&mut self, server: &str) -> Result<PathBuf> {
        self.vias += 1;
        let file = self.folder.join(format!("kubeconfig-{}", self.vias));
        self.write_kubeconfig(&file, server)?;
        Ok(file)
    }

    /// The file with the credential: a certificate with its key, or a token. [`Identity::rotate`] replaces it.
    pub fn credential_file(&self) -> PathBuf {
        self.folder.join(match self.credential {
            Credential::Certificate { .. } => "client-current.pem",
            Credential::StaticToken { .. } | Credential::ServiceAccount { .. } => "token",
        })
    }

    /// Replaces the credential on disk by another of the same user: a new key with a new certificate, the other static
    /// token, or a new token of the service account. The old one stays valid.
    pub async fn rotate(&mut self) -> Result<()> {
        let current = self.credential_file();
        match &self.credential {
            Credential::Certificate { pki, group } => {
                let pem = pki.client(&self.user, group)?.pem();
                return self.take_certificate(&pem);
            }
            Credential::StaticToken { tokens } => {
                write_secret(&current, &tokens[self.generation % tokens.len()])?;
            }
            Credential::ServiceAccount { admin, namespace, name, bound } => {
                write_secret(&current, &admin.token(namespace, name, bound.as_ref()).await?)?;
            }
        }
        self.generation += 1;
        Ok(())
    }

    /// The same, with a certificate that is valid for `valid`. Fails for a user without certificates.
    pub fn rotate_for(&mut self, valid: Duration) -> Result<()> {
        let Credential::Certificate { pki, group } = &self.credential else {
            bail!("{} shows no certificate", self.user);
        };
        let pem = pki.client_for(&self.user, group, valid)?.pem();
        self.take_certificate(&pem)
    }

    fn take_certificate(&mut self, pem: &str) -> Result<()> {
        let current = self.credential_file();
        let file = self.folder.join(format!("client-{}.pem", self.generation));
        write_secret(&file, pem)?;
        let link = current.with_extension("link");
        symlink(&file, &link)
            .and_then(|()| fs::rename(&link, &current))
            .with_context(|| format!("cannot link {} to {}", current.display(), file.display()))?;
        self.generation += 1;
        Ok(())
    }

    /// A client with the present credential of this user.
    pub async fn client(&self) -> Result<kube::Client> {
        client(&self.kubeconfig()).await
    }

    fn write_kubeconfig(&self, file: &Path, server: &str) -> Result<()> {
        let credential = self.credential_file();
        let user = match self.credential {
            Credential::Certificate { .. } => {
                json!({"client-certificate": credential, "client-key": credential})
            }
            Credential::StaticToken { .. } | Credential::ServiceAccount { .. } => {
                json!({"tokenFile": credential})
            }
        };
        write_secret(file, &kubeconfig(server, &self.ca, &user).to_string())
    }
}

fn kubeconfig(server: &str, ca: &Path, user: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": ca}}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    })
}

/// A client with a kubeconfig file. It retries nothing: a test must see every refusal.
pub async fn client(file: &Path) -> Result<kube::Client> {
    let read = Kubeconfig::read_from(file).with_context(|| format!("cannot read {}", file.display()))?;
    let config = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
    let mut config = config.with_context(|| format!("{} is of no use", file.display()))?;
    config.default_retry = false;
    kube::Client::try_from(config).context("cannot make a client")
}

pub fn refused<T>(outcome: kube::Result<T>, code: u16) -> Result<()> {
    match outcome {
        Ok(_) => bail!("it was allowed instead of being refused with {code}"),
        Err(kube::Error::Api(status)) if status.code == code => Ok(()),
        Err(other) => Err(other).with_context(|| format!("refused, but not with {code}")),
    }
}
