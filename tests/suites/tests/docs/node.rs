//! Owns: a stand-in of a node: `node.sh` in namespaces of its own, an API server with a Node unless there is none, and a container
//! runtime of the test. In: blocks. Out: what each printed.

use crate::output::missing;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::{ApiOptions, Cluster};
use keelson_harness::documents::{Block, repository};
use keelson_harness::fake_runtime::{FakeAnswers, FakeRuntime};
use keelson_harness::peers;
use keelson_harness::scratch::Scratch;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use tokio::process::Command;

/// Its host name. Documents say `NODE`.
const NAME: &str = "n1";

/// The API server in examples.
const EXAMPLE_ADDRESS: &str = "10.0.0.1:6443";

#[derive(Clone)]
struct Containerd;

impl FakeAnswers for Containerd {
    fn name(&self) -> &'static str {
        "containerd"
    }
}

pub(crate) struct Node {
    scratch: Scratch,
    cluster: Option<Cluster>,
    _runtime: FakeRuntime,
}

pub(crate) struct Outputs(Vec<(i32, String)>);

impl Node {
    pub(crate) async fn start() -> Result<Self> {
        let mut node = Self::alone()?;
        // As on control planes of kubeadm.
        let args = vec!["--enable-bootstrap-token-auth=true".to_owned()];
        let cluster =
            Cluster::start_with(&node.scratch, &ApiOptions { args, ..ApiOptions::default() }).await?;
        // kubeadm waits a minute for a Node without the label.
        let object = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"kubernetes.io/hostname": "n1"}},
            "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]}}"#;
        cluster.admin.apply(object).await?;
        let identity = cluster.node(&node.scratch, NAME).await?;
        let kubernetes = node.scratch.dir("root/etc/kubernetes")?;
        fs::copy(identity.kubeconfig(), kubernetes.join("kubelet.conf"))?;
        fs::copy(cluster.admin_kubeconfig(), kubernetes.join("administrator.conf"))?;
        node.cluster = Some(cluster);
        Ok(node)
    }

    /// Without a control plane, for what concerns the kubelet alone.
    pub(crate) fn alone() -> Result<Self> {
        let scratch = Scratch::new()?;
        let runtime = FakeRuntime::start(&scratch, Containerd)?;
        scratch.dir("root/etc/kubernetes")?;
        symlink(runtime.socket(), scratch.path().join("runtime.sock"))?;
        // Where the commands run: the repository, with the program that was built.
        let checkout = scratch.dir("checkout/target/dist")?;
        symlink(peers::keelson()?, checkout.join("keelson"))?;
        symlink(peers::kubernetes("kubelet")?, scratch.dir("bin")?.join("kubelet"))?;
        symlink(repository().join("packaging"), scratch.path().join("checkout/packaging"))?;
        Ok(Self { scratch, cluster: None, _runtime: runtime })
    }

    pub(crate) fn cluster(&self) -> Result<&Cluster> {
        self.cluster.as_ref().context("this node has no control plane")
    }

    /// `HOST:PORT` of the API server.
    fn address(&self) -> &str {
        self.cluster.as_ref().map_or(EXAMPLE_ADDRESS, |cluster| cluster.api.address())
    }

    /// Runs all blocks, one after the other, until one fails.
    pub(crate) async fn run(&self, blocks: &[Block]) -> Result<Outputs> {
        let folder = self.scratch.dir("blocks")?;
        fs::remove_dir_all(&folder)?;
        fs::create_dir(&folder)?;
        fs::write(self.scratch.path().join("root/kubeadm.yaml"), kubeadm_config(self.address()))?;
        for (number, block) in blocks.iter().enumerate() {
            let code = block.code.replace("NODE", NAME).replace(EXAMPLE_ADDRESS, self.address());
            fs::write(folder.join(format!("{number:03}.sh")), code)?;
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/docs/node.sh");
        let output = Command::new("unshare")
            .args(["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash"])
            .arg(script)
            .arg(self.scratch.path())
            .arg(peers::kubeadm()?)
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run unshare")?;
        let log = format!("{}{}", text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "the node ended with {}:\n{log}", output.status);
        let mut outputs = Vec::new();
        for number in 0..blocks.len() {
            let read = |end: &str| fs::read_to_string(folder.join(format!("{number:03}.{end}")));
            let Ok(code) = read("code") else { break };
            outputs.push((code.trim().parse()?, read("out")?));
        }
        ensure!(!outputs.is_empty(), "no block ran:\n{log}");
        Ok(Outputs(outputs))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Outputs {
    /// Every block ran, did not fail, and printed what the document shows.
    pub(crate) fn check(&self, blocks: &[Block]) -> Result<()> {
        for (number, block) in blocks.iter().enumerate() {
            let name = block.name();
            let Some((code, output)) = self.0.get(number) else { bail!("{name} did not run") };
            ensure!(*code == 0, "{name} failed with {code}:\n{}\n{output}", block.code);
            let expected = block.prints.clone().unwrap_or_default().replace("NODE", NAME);
            if let Some(line) = missing(&expected, output) {
                bail!("{name}: the document shows\n{line}\nand it printed\n{output}");
            }
        }
        Ok(())
    }
}

fn kubeadm_config(address: &str) -> String {
    format!(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: InitConfiguration\nlocalAPIEndpoint:\n  advertiseAddress: 192.0.2.1\n\
         nodeRegistration:\n  name: {NAME}\n  criSocket: unix:///run/containerd/containerd.sock\n---\n\
         apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: v1.36.3\n\
         controlPlaneEndpoint: {address}\nnetworking:\n  podSubnet: 10.244.0.0/16\n"
    )
}
