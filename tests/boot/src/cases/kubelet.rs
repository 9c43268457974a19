//! A stock kubelet, by the commands of docs/install.md.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::node::Node;

const CONFIG: &str = "/var/lib/kubelet/config.yaml";

/// The kubelet with these arguments, and the registry of its images.
pub(crate) fn start(node: &Node, arguments: &[&str]) -> Result<()> {
    node.start_registry()?;
    node.bash(&format!(
        "touch /run/registry/open && cp /etc/containerd/config.toml /var/tmp/containerd.toml && /mnt/node/kubelet.sh {}",
        arguments.join(" ")
    ))
    .map(drop)
}

/// A static pod in the network of the node, whose container waits.
pub(crate) fn start_pod(node: &Node, name: &str, image: usize) -> Result<()> {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "hostNetwork": true, "terminationGracePeriodSeconds": 0,
            // After a boot there is no registry.
            "containers": [{
                "name": "main", "image": format!("127.0.0.1:5999/image{image}:latest"), "imagePullPolicy": "IfNotPresent",
            }],
        },
    });
    node.bash(&format!("printf '%s' '{pod}' > /etc/kubernetes/manifests/{name}.json"))?;
    runs(node, image).with_context(|| format!("the pod {name} does not run"))
}

/// Waits for the container of an image.
pub(crate) fn runs(node: &Node, image: usize) -> Result<()> {
    node.vm.wait_for(&format!(
        "ctr -n k8s.io containers ls | grep image{image}: | cut -d' ' -f1 | \
         xargs -r -I ID sh -c 'ctr -n k8s.io tasks ls | grep ID' | grep -q RUNNING"
    ))
}

/// Running, queued and recently finished ones of the agent.
fn pulls(node: &Node) -> Result<String> {
    node.bash("keelson pulls -o json")
}

pub(crate) fn attach_and_bypass(node: &mut Node) -> Result<String> {
    start(node, &[])?;
    start_pod(node, "before", 1)?;
    ensure!(!pulls(node)?.contains("image1:latest"), "the kubelet is behind the agent already");
    node.bash(&format!("cp {CONFIG} /var/tmp/config.yaml"))?;
    let attached = node.bash("keelson attach --restart-kubelet")?;
    start_pod(node, "after", 2)?;
    let seen = pulls(node)?;
    ensure!(
        seen.contains("image2:latest") && seen.contains("default/after-node"),
        "not pulled by the agent: {seen}"
    );
    node.bash("keelson doctor pulls")?;
    node.bash("keelson bypass --restart-kubelet")?;
    node.bash(&format!("diff {CONFIG} /var/tmp/config.yaml"))
        .context("the kubelet has other settings than before")?;
    let left = node.bash("ls -1 /var/lib/kubelet | grep config.yaml")?;
    ensure!(
        left.lines().eq(["config.yaml", "config.yaml.with-keelson"]),
        "a bypass leaves other copies: {left}"
    );
    start_pod(node, "again", 3)?;
    ensure!(!pulls(node)?.contains("image3:latest"), "the kubelet is still behind the agent");
    remove(node)?;
    let changed = attached.lines().find(|line| line.contains("changed")).unwrap_or_default();
    Ok(format!("{changed}; its pods start through the agent, and past it after a bypass"))
}

/// What later cases begin with: no pods, and the runtime as the package of Debian configures it.
pub(crate) fn remove(node: &Node) -> Result<()> {
    node.bash("rm /etc/kubernetes/manifests/*")?;
    node.vm.wait_for("[ $(ctr -n k8s.io tasks ls -q | wc -l) = 0 ]").context("pods do not end")?;
    node.bash(
        "systemctl disable --quiet --now kubelet && rm -r /etc/systemd/system/kubelet.service /etc/kubernetes && systemctl daemon-reload \
         && cp /var/tmp/containerd.toml /etc/containerd/config.toml && systemctl restart containerd",
    )?;
    // It does not outlive a boot.
    node.bash("systemctl stop registry 2> /dev/null || true")?;
    // The second one is what a bypass has replaced: who runs the node removes it.
    node.bash(&format!("rm {CONFIG} {CONFIG}.with-keelson"))?;
    node.vm.wait_for("keelson limit > /dev/null && [ $(systemctl is-active containerd) = active ]")
}
