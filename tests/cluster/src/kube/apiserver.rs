//! Owns: a kube-apiserver of the test. In: an etcd, a certificate authority, flags that a test may add.
//! Out: its endpoint, its audit log, and control of its process.

use super::audit::{AuditEvent, AuditLog};
use super::client::Admin;
use super::pki::{Pki, new_key, write_secret};
use anyhow::{Context as _, Result};
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::{Program, pause};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::free_port;
use nix::sys::signal::Signal;
use serde_json::json;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Nodes with two static tokens each, which an API server reads only at its start.
    pub token_nodes: Vec<String>,
    pub audit_bodies: bool,
    /// etcd is new enough for streaming lists; otherwise agents have to list.
    pub streaming_lists: bool,
    /// Appended to the flags of the harness, which they override.
    pub args: Vec<String>,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            token_nodes: vec!["node".to_owned()],
            audit_bodies: false,
            streaming_lists: true,
            args: Vec::new(),
        }
    }
}

const PROBE: Duration = Duration::from_secs(5);

/// With the Node and RBAC authorizers and NodeRestriction. Killed on drop.
#[derive(Debug)]
pub struct ApiServer {
    endpoint: String,
    audit_log: Mutex<AuditLog>,
    daemon: Daemon,
    /// A client that may read `/readyz`.
    probe: Admin,
}

/// The static tokens of a node; either identifies it.
pub(super) fn static_tokens(node: &str) -> [String; 2] {
    [1, 2].map(|n| format!("keelson-tests-{node}-{n}"))
}

impl ApiServer {
    /// Starts one below `scratch` and waits until it is ready. `probe` makes a client for its endpoint.
    pub(super) async fn start<F>(
        scratch: &Scratch,
        etcd: &str,
        pki: &Pki,
        options: &ApiOptions,
        probe: impl FnOnce(String) -> F,
    ) -> Result<Self>
    where
        F: Future<Output = Result<Admin>>,
    {
        let port = free_port()?;
        let folder = scratch.dir(&format!("apiserver-{port}"))?;
        let endpoint = format!("https://127.0.0.1:{port}");
        write_files(&folder, pki, options)?;
        let program = Program {
            name: "kube-apiserver".to_owned(),
            path: peers::control_plane("kube-apiserver")?,
            args: flags(&folder, port, etcd, pki.ca_file(), options),
            env: Vec::new(),
            log: folder.join("apiserver.log"),
        };
        let probe = probe(endpoint.clone()).await?;
        let audit_log = Mutex::new(AuditLog::new(folder.join("audit.log")));
        let mut server = Self { endpoint, audit_log, daemon: Daemon::new(program), probe };
        server.start_again().await?;
        Ok(server)
    }

    /// One that another process has started and stops.
    pub(super) fn outside(scratch: &Scratch, endpoint: &str, probe: Admin) -> Self {
        let audit_log = Mutex::new(AuditLog::new(scratch.path().join("audit.log")));
        let daemon = Daemon::new(Program::outside("kube-apiserver"));
        Self { endpoint: endpoint.to_owned(), audit_log, daemon, probe }
    }

    /// `https://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> &str {
        self.endpoint.trim_start_matches("https://")
    }

    pub fn arg(&mut self, arg: &str) {
        self.daemon.arg(arg);
    }

    /// Starts it without waiting for readiness, with the same port and data as before.
    pub fn start_unready(&mut self) -> Result<()> {
        self.daemon.spawn()
    }

    pub async fn start_again(&mut self) -> Result<()> {
        self.start_unready()?;
        self.ready().await
    }

    pub async fn ready(&mut self) -> Result<()> {
        let probe = &self.probe;
        self.daemon
            .ready(|| async move {
                // A connection to a server that is starting may never be answered.
                let answer = tokio::time::timeout(PROBE, get(probe, "/readyz")).await;
                answer.context("/readyz does not answer")?.map(drop)
            })
            .await
    }

    /// Stops it with SIGSTOP and waits until every thread has stopped: the kernel still accepts connections for it, and
    /// nothing answers.
    pub async fn pause(&mut self) -> Result<()> {
        pause(self.daemon.process()?.pid()).await
    }

    pub fn resume(&mut self) -> Result<()> {
        self.daemon.process()?.signal(Signal::SIGCONT)
    }

    /// The requests that match `filter`, of all its runs. An entry is written before the client receives its response.
    pub fn audit(&self, filter: impl Fn(&AuditEvent) -> bool) -> Result<Vec<AuditEvent>> {
        let mut log = self.audit_log.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(log.read()?.iter().filter(|event| filter(event)).cloned().collect())
    }

    /// The response to an administrator for a path such as `/metrics`.
    pub async fn get(&self, path: &str) -> Result<String> {
        get(&self.probe, path).await
    }
}

daemon_life!(ApiServer);

async fn get(admin: &Admin, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Vec::new()).context("not a path")?;
    admin.client().request_text(request).await.with_context(|| format!("GET {path}"))
}

fn write_files(folder: &Path, pki: &Pki, options: &ApiOptions) -> Result<()> {
    let serving = pki.server()?;
    write_secret(&folder.join("tls.key"), &serving.key.serialize_pem())?;
    write_secret(&folder.join("tls.crt"), &serving.certificate.pem())?;
    let accounts = new_key()?;
    write_secret(&folder.join("accounts.key"), &accounts.serialize_pem())?;
    write_secret(&folder.join("accounts.pub"), &accounts.public_key_pem())?;

    let mut tokens = String::new();
    for node in &options.token_nodes {
        for token in static_tokens(node) {
            writeln!(tokens, "{token},system:node:{node},{token},\"system:nodes\"")?;
        }
    }
    write_secret(&folder.join("tokens.csv"), &tokens)?;

    let level = if options.audit_bodies { "Request" } else { "Metadata" };
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy",
        "omitStages": ["RequestReceived"], "rules": [{"level": level}],
    });
    let file = folder.join("audit-policy.yaml");
    fs::write(&file, policy.to_string()).with_context(|| format!("cannot write {}", file.display()))
}

fn flags(folder: &Path, port: u16, etcd: &str, ca: &Path, options: &ApiOptions) -> Vec<String> {
    let at = folder.display();
    let mut args = vec![
        format!("--etcd-servers={etcd}"),
        format!("--secure-port={port}"),
        "--bind-address=127.0.0.1".to_owned(),
        "--advertise-address=127.0.0.1".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        format!("--cert-dir={at}"),
        format!("--tls-cert-file={at}/tls.crt"),
        format!("--tls-private-key-file={at}/tls.key"),
        format!("--client-ca-file={}", ca.display()),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-signing-key-file={at}/accounts.key"),
        format!("--service-account-key-file={at}/accounts.pub"),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/12".to_owned(),
        "--allow-privileged=true".to_owned(),
        // Otherwise a graceful shutdown waits a whole minute for watches that do not end.
        "--shutdown-watch-termination-grace-period=1s".to_owned(),
        format!("--audit-policy-file={at}/audit-policy.yaml"),
        format!("--audit-log-path={at}/audit.log"),
        // Written before the response is sent, and never into a second file (megabytes).
        "--audit-log-mode=blocking".to_owned(),
        "--audit-log-maxsize=100000".to_owned(),
    ];
    if !options.token_nodes.is_empty() {
        args.push(format!("--token-auth-file={at}/tokens.csv"));
    }
    args.extend(options.args.iter().cloned());
    args
}
