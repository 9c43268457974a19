//! kube-proxy of an API server, which Keelson replaces by the commands of docs/install.md, and the way back.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    documents::succeed,
    proxy::{REACHED, start_pod},
};
use crate::{control_plane::ControlPlane, documents, node::Node};

const KUBECONFIG: &str = "/etc/kubernetes/admin.conf";
pub(super) const SETTINGS: &str = "/etc/keelson/keelson.toml";
/// As before this case.
pub(super) const FORMER_SETTINGS: &str = "/var/tmp/keelson.toml";

pub(crate) fn replace_and_go_back(node: &mut Node) -> Result<String> {
    let control_plane = control_plane(node)?;
    start_pod(node)?;
    start_kube_proxy(node)?;
    node.bash("rm -f /run/client.stop")?;
    node.vm.start("client", "python3 /mnt/node/client.py")?;
    replace(node)?;
    go_back(node)?;
    node.bash("touch /run/client.stop")?;
    node.vm.wait_for("[ $(systemctl is-active client) != active ]")?;
    let lines = node.bash("cat /run/client.out")?;
    ensure!(lines.ends_with("lines"), "the connection broke: {lines}");
    remove(node)?;
    drop(control_plane);
    Ok(format!(
        "the doctor names kube-proxy, its table is gone and comes back; one connection all the time: {lines}"
    ))
}

/// An API server with this node and a Service.
pub(super) fn control_plane(node: &Node) -> Result<ControlPlane> {
    let control_plane = ControlPlane::start(&node.kubectl)?;
    let object = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": node.bash("hostname")?},
        "spec": {"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "10.0.2.15"}]},
    });
    control_plane.apply(&object.to_string())?;
    control_plane.apply(include_str!("../../node/echo.yaml"))?;
    control_plane.apply(include_str!("../../node/kube-proxy.yaml"))?;
    let kubeconfig = control_plane.kubeconfig()?;
    node.bash(&format!("mkdir -p /etc/kubernetes && printf '%s' '{kubeconfig}' > {KUBECONFIG}"))?;
    Ok(control_plane)
}

fn start_kube_proxy(node: &Node) -> Result<()> {
    let options = "--proxy-mode nftables --cluster-cidr 10.244.0.0/16";
    node.vm.start("kube-proxy", &format!("/mnt/kube-proxy --kubeconfig {KUBECONFIG} {options}"))?;
    node.vm.wait_for("nft list table ip kube-proxy 2> /dev/null | grep -q 10.96.0.10")?;
    node.bash(REACHED).map(drop).context("the Service does not answer through kube-proxy")
}

fn replace(node: &Node) -> Result<()> {
    let settings =
        format!("[kube]\\nkubeconfig = \"{KUBECONFIG}\"\\n[proxy]\\ncluster_cidr = [\"10.244.0.0/16\"]\\n");
    node.bash(&format!("cp {SETTINGS} {FORMER_SETTINGS} && printf '\\n{settings}' >> {SETTINGS}"))?;
    node.replace("systemctl restart keelson.service")?;
    node.bash("keelson doctor heartbeats endpoints")?;
    let beside = node.vm.attempt("keelson doctor proxy")?;
    ensure!(
        beside.code != 0 && beside.stdout.contains("FAILED   kube-proxy"),
        "the doctor does not see kube-proxy: {}",
        beside.stdout
    );
    node.bash(&format!("/mnt/kubectl --kubeconfig {KUBECONFIG} label node node keelson.dev/proxy=host"))?;
    node.bash("systemctl stop kube-proxy && systemctl enable --now keelson-proxy.service 2>&1")?;
    node.vm.wait_for("keelson proxy state > /dev/null").context("the proxy does not sync")?;
    node.bash(REACHED).context("the Service does not answer through Keelson")?;
    node.vm.wait_for("! nft list table ip kube-proxy 2> /dev/null").context("kube-proxy's table is left")?;
    node.bash("keelson doctor proxy").map(drop)
}

/// By the runbooks. kube-proxy is a unit here: starting it is what its DaemonSet does when the label is gone.
fn go_back(node: &Node) -> Result<()> {
    let (_, back) = documents::taking_out()?;
    for line in back {
        succeed(node, &line)?;
        node.bash(REACHED).with_context(|| format!("the Service does not answer after {}", line.command))?;
        if line.command.contains("label") {
            start_kube_proxy(node)?;
        }
    }
    let left = node.bash("nft list tables")?;
    ensure!(!left.contains("keelson"), "rules are left: {left}");
    Ok(())
}

/// What later cases begin with: no API server, and no rules.
fn remove(node: &Node) -> Result<()> {
    node.bash("systemctl stop kube-proxy echo && nft delete table ip kube-proxy && nft delete table ip6 kube-proxy && ip netns delete pod")?;
    node.replace(&format!(
        "cp {FORMER_SETTINGS} {SETTINGS} && rm -r /etc/kubernetes && systemctl restart keelson.service"
    ))
}
