//! A control plane on this machine, whose loopback is 10.0.2.2 in the VM.
//!
//! Owns: etcd and the API server. In: objects as YAML. Out: kubeconfigs for programs in the VM.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use keelson_cluster::kube::{Cluster, Pki};
use keelson_harness::scratch::Scratch;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// This machine's loopback, as QEMU's user network has it.
const LOOPBACK: &str = "10.0.2.2";

#[derive(Debug)]
pub(crate) struct ControlPlane {
    kubectl: PathBuf,
    // Dropped in this order: the processes, their files, what waited for them.
    cluster: Cluster,
    scratch: Scratch,
    runtime: Runtime,
}

impl ControlPlane {
    /// `kubectl`: the program (tests/peers).
    pub(crate) fn start(kubectl: &Path) -> Result<Self> {
        let runtime = Runtime::new()?;
        let scratch = Scratch::new()?;
        let cluster = runtime.block_on(Cluster::start(&scratch))?;
        Ok(Self { kubectl: kubectl.to_owned(), cluster, scratch, runtime })
    }

    pub(crate) fn apply(&self, objects: &str) -> Result<()> {
        let file = self.scratch.path().join("objects");
        fs::write(&file, objects)?;
        let mut kubectl = Command::new(&self.kubectl);
        kubectl.arg("--kubeconfig").arg(self.cluster.admin_kubeconfig()).args(["apply", "-f"]).arg(file);
        let output = kubectl.output().context("cannot start kubectl")?;
        ensure!(output.status.success(), "{kubectl:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Of the administrator, with everything that it refers to.
    pub(crate) fn kubeconfig(&self) -> Result<String> {
        let own = self.cluster.admin_kubeconfig();
        let folder = own.parent().context("a kubeconfig is in a folder")?;
        let encoded = |file: &Path| fs::read(file).map(|bytes| STANDARD.encode(bytes));
        let certificate = encoded(&folder.join("client-current.pem"))?;
        let authority = encoded(Pki::ca_file(self.cluster.pki()))?;
        let user = json!({"client-certificate-data": certificate, "client-key-data": certificate});
        Ok(self.kubeconfig_of(&user, ("certificate-authority-data", &authority)))
    }

    /// The files of a node's kubelet, by the paths at which kubeadm places them; its kubeconfig is at `kubeconfig`.
    pub(crate) fn node_files(&self, name: &str, kubeconfig: &str) -> Result<Vec<(String, String)>> {
        let (certificate, authority) =
            ("/var/lib/kubelet/pki/kubelet-client-current.pem", "/etc/kubernetes/pki/ca.crt");
        let identity = self.runtime.block_on(self.cluster.node(&self.scratch, name))?;
        let user = json!({"client-certificate": certificate, "client-key": certificate});
        Ok(vec![
            (certificate.to_owned(), fs::read_to_string(identity.credential_file())?),
            (authority.to_owned(), fs::read_to_string(Pki::ca_file(self.cluster.pki()))?),
            (kubeconfig.to_owned(), self.kubeconfig_of(&user, ("certificate-authority", authority))),
        ])
    }

    fn kubeconfig_of(&self, user: &Value, (authority, value): (&str, &str)) -> String {
        let server = self.cluster.api.endpoint().replace("127.0.0.1", LOOPBACK);
        let cluster = json!({"server": server, "tls-server-name": "localhost", authority: value});
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        })
        .to_string()
    }
}
