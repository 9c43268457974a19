//! E4: the client certificate of role `node`, requested with a bootstrap token and renewed by the agent, with a real
//! API server and the real controllers that approve and sign.

use crate::bound::{furnished, is_held_to_its_node_by_the_authorizer};
use crate::common::{eventually_slow, quick, run};
use crate::runtime::start_ready_runtime;
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use keelson_cluster::kube::{ApiOptions, Cluster, ControllerManager, ControllerOptions, client};
use keelson_cluster::manifests::BOOTSTRAP as MANIFEST;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::fake_runtime::FakeRuntime;
use keelson_harness::scratch::Scratch;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

const BOOTSTRAP_USER: &str = "system:bootstrap:abcdef";

/// Validity of certificates after signing; the signer backdates their beginning by five minutes.
const VALID: Duration = Duration::from_secs(60);

/// A cluster of the test, and an agent with only a bootstrap token.
struct BootstrapEnv {
    agent: Agent,
    cluster: Cluster,
    folder: PathBuf,
    scratch: Scratch,
    _runtime: FakeRuntime,
}

impl BootstrapEnv {
    async fn new(name: &str) -> Result<Self> {
        let scratch = Scratch::new()?;
        let args = vec!["--enable-bootstrap-token-auth=true".to_owned()];
        let cluster = Cluster::start_with(&scratch, &ApiOptions { args, ..ApiOptions::default() }).await?;
        cluster.admin.apply(MANIFEST).await?;
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "bootstrap.kubernetes.io/token",
            "metadata": {"name": "bootstrap-token-abcdef", "namespace": "kube-system"},
            "stringData": {"token-id": "abcdef", "token-secret": "0123456789abcdef",
                "usage-bootstrap-authentication": "true"},
        });
        cluster.admin.apply(&secret.to_string()).await?;
        let bootstrap = scratch.path().join("bootstrap.conf");
        kubeconfig(&cluster, &bootstrap, &json!({"token": "abcdef.0123456789abcdef"}))?;
        let folder = scratch.path().join("pki-of-the-agent");
        let runtime = start_ready_runtime(&scratch)?;
        let settings = settings(name, &scratch)
            .set("kube.bootstrap_kubeconfig", bootstrap.display().to_string())
            .set("kube.certificate_dir", folder.display().to_string());
        let agent = Agent::new(&scratch, &runtime.endpoint(), &settings)?;
        Ok(Self { agent, cluster, folder, scratch, _runtime: runtime })
    }

    async fn signers(&self) -> Result<ControllerManager> {
        let options = ControllerOptions::signing(self.cluster.pki(), VALID)?;
        self.cluster.controllers(&self.scratch, &options).await
    }

    fn file(&self) -> PathBuf {
        self.folder.join("client-current.pem")
    }

    async fn requests(&self) -> Result<Vec<CertificateSigningRequest>> {
        let requests: Api<CertificateSigningRequest> = Api::all(self.cluster.admin.client());
        Ok(requests.list(&ListParams::default()).await?.items)
    }

    async fn metric(&self, name: &str) -> Result<f64> {
        Ok(self.agent.metric(name).await?.unwrap_or_default())
    }

    async fn wait_until_healthy(&self) -> Result<()> {
        eventually_slow("the agent is ready", || async {
            let ready = self.agent.http_get("/readyz?verbose").await?;
            ensure!(ready.status.is_success(), "{}", ready.text());
            Ok(())
        })
        .await
    }
}

fn settings(name: &str, scratch: &Scratch) -> Settings {
    quick()
        .set("agent.node_name", name)
        .set("endpoints.source", "off")
        .set("node.role", "node")
        .set("node.root_dir", scratch.path().display().to_string())
        .set("node.node_ip", "192.0.2.7")
        .set("node.eviction_hard", "memory.available<1Mi,nodefs.available<1Mi")
}

/// Writes a kubeconfig that only its owner may read.
fn kubeconfig(cluster: &Cluster, file: &Path, user: &serde_json::Value) -> Result<()> {
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {
            "server": cluster.api.endpoint(), "certificate-authority": cluster.pki().ca_file()}}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    let mut open = fs::File::options();
    let mut file = open.create(true).truncate(true).write(true).mode(0o600).open(file)?;
    file.write_all(text.to_string().as_bytes()).context("cannot write the kubeconfig")
}

fn mode(path: &Path) -> Result<u32> {
    Ok(fs::metadata(path).with_context(|| path.display().to_string())?.permissions().mode() & 0o7777)
}

/// From a bootstrap token to a node that renews its certificate by itself.
#[test]
fn e4_a_node_requests_its_certificate_and_renews_it() -> Result<()> {
    run(async {
        let name = "bootstrapped";
        let mut env = BootstrapEnv::new(name).await?;
        let _signers = env.signers().await?;
        env.agent.start_live().await?;
        env.cluster.admin.await_condition(name, "Ready", "True").await?;
        env.wait_until_healthy().await?;
        ensure!(mode(&env.file())? == 0o600 && mode(&env.folder)? == 0o700, "others may read it");
        let first = fs::read_to_string(env.file())?;
        let node = env.agent.json("/debug/node").await?;
        ensure!(node["credentials"][0]["user"] == format!("system:node:{name}"), "{node}");
        let end = env
            .metric("keelson_kube_credentials_expiration_timestamp_seconds{kind=\"client_certificate\"}")
            .await?;
        ensure!(end > 1.7e9, "it ends at {end}");

        eventually_slow("the certificate was renewed", || async {
            ensure!(fs::read_to_string(env.file())? != first, "it is the first one");
            let renewals = env.metric("keelson_kube_certificate_renewals_total{result=\"success\"}").await?;
            ensure!(renewals >= 2.0, "{renewals}");
            Ok(())
        })
        .await?;
        env.wait_until_healthy().await?;
        // The first with the bootstrap token, every later one with the previous certificate; nothing was refused.
        let user = format!("system:node:{name}");
        let asked = env.cluster.api.audit(|event| event.user == user || event.user == BOOTSTRAP_USER)?;
        let refused: Vec<_> = asked.iter().filter(|event| matches!(event.code, Some(401 | 403))).collect();
        ensure!(refused.is_empty(), "{refused:#?}");
        let mut by = asked
            .iter()
            .filter(|event| event.is_for("create", "certificatesigningrequests"))
            .map(|event| event.user.as_str());
        ensure!(by.next() == Some(BOOTSTRAP_USER), "{asked:#?}");
        let later: Vec<_> = by.collect();
        ensure!(!later.is_empty() && later.iter().all(|by| *by == user), "{later:?}");
        let left: Vec<_> =
            fs::read_dir(&env.folder)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
        ensure!(left.iter().all(|name| name != "client-current.pem.new"), "{left:?}");

        // No line of a key is in any other file.
        let key = fs::read_to_string(env.file())?;
        let key: Vec<_> =
            key.split("PRIVATE KEY-----").nth(1).context("a key")?.lines().map(str::to_owned).collect();
        let message = [
            env.agent.log()?,
            env.agent.http_get("/metrics").await?.text(),
            env.agent.http_get("/debug/node").await?.text(),
        ];
        for line in key.iter().filter(|line| line.len() > 40) {
            ensure!(!message.iter().any(|text| text.contains(line.as_str())), "a key was shown");
        }

        // Credentials of this kind reach no other node either.
        furnished(&env.cluster, name).await?;
        furnished(&env.cluster, "other").await?;
        let by_file = env.scratch.path().join("issued.conf");
        kubeconfig(
            &env.cluster,
            &by_file,
            &json!({"client-certificate": env.file(), "client-key": env.file()}),
        )?;
        eventually_slow("the Node authorizer knows the pod", || async {
            is_held_to_its_node_by_the_authorizer(&client(&by_file).await?, name, "other").await
        })
        .await
    })
}

/// A request that waits for approval is reported and is kept over a restart, and a denied one is replaced.
#[test]
fn e4_a_pending_request_is_reported_and_survives_a_restart() -> Result<()> {
    run(async {
        let name = "patient";
        let mut env = BootstrapEnv::new(name).await?;
        env.agent.start_live().await?;
        let request = eventually_slow("there is one request, reported as pending", || async {
            let requests = env.requests().await?;
            let [request] = requests.as_slice() else { anyhow::bail!("{} requests", requests.len()) };
            let request = request.metadata.name.clone().context("a name")?;
            let ready = env.agent.http_get("/readyz?verbose").await?.text();
            let line = ready
                .lines()
                .find(|line| line.starts_with("[-]credentials failed"))
                .context("not reported")?;
            ensure!(line.contains(&request) && line.contains("kubectl certificate approve"), "{line}");
            Ok(request)
        })
        .await?;
        env.agent.kill9()?;
        env.agent.start_live().await?;
        eventually_slow("the request is asked for again", || async {
            let asked = env.cluster.api.audit(|event| {
                event.user == BOOTSTRAP_USER && event.is_for("create", "certificatesigningrequests")
            })?;
            let codes: Vec<_> = asked.iter().map(|event| event.code).collect();
            ensure!(codes.first() == Some(&Some(201)) && codes.last() == Some(&Some(409)), "{codes:?}");
            Ok(())
        })
        .await?;
        ensure!(env.requests().await?.len() == 1, "another request was made");

        let denied = json!({"status": {"conditions": [
            {"type": "Denied", "status": "True", "reason": "NotYet", "message": "ask again"}]}});
        let requests: Api<CertificateSigningRequest> = Api::all(env.cluster.admin.client());
        let patched = requests.patch_approval(&request, &PatchParams::default(), &Patch::Merge(denied)).await;
        patched.context("cannot deny the request")?;
        eventually_slow("another request is made, with its reason", || async {
            ensure!(env.requests().await?.len() == 2, "there is no other");
            let log = env.agent.log()?;
            ensure!(log.contains("it was denied: NotYet: ask again"), "it is not in the log");
            Ok(())
        })
        .await?;
        let failed = env.metric("keelson_kube_certificate_renewals_total{result=\"error\"}").await?;
        ensure!(failed >= 1.0, "it is not counted");

        let _signers = env.signers().await?;
        env.cluster.admin.await_condition(name, "Ready", "True").await?;
        env.wait_until_healthy().await
    })
}

/// A bootstrap token that has expired is named as the one cause, and a new one in the file is used.
#[test]
fn e4_a_refused_bootstrap_token_is_reported_once() -> Result<()> {
    run(async {
        let mut env = BootstrapEnv::new("expired").await?;
        let bootstrap = env.scratch.path().join("bootstrap.conf");
        kubeconfig(&env.cluster, &bootstrap, &json!({"token": "abcdef.ffffffffffffffff"}))?;
        env.agent.start_live().await?;
        eventually_slow("the token is reported", || async {
            let node = env.agent.json("/debug/node").await?;
            let reason = node["reason"].as_str().context("a reason")?;
            let cause = format!("does not accept the credentials of {}", bootstrap.display());
            ensure!(reason.matches("client certificate").count() == 2 && reason.contains(&cause), "{reason}");
            Ok(())
        })
        .await?;
        kubeconfig(&env.cluster, &bootstrap, &json!({"token": "abcdef.0123456789abcdef"}))?;
        eventually_slow("the new token is used", || async {
            ensure!(env.requests().await?.len() == 1, "no request");
            Ok(())
        })
        .await
    })
}
