//! A reboot by command, and a power cut.

use anyhow::{Context as _, Result, ensure};

use crate::{
    cases::{kubelet, proxy},
    node::{DRIVER, Node},
};

/// With a kubelet whose pods start through the agent.
pub(crate) fn reboot(node: &mut Node) -> Result<String> {
    kubelet::start(node, &[])?;
    node.bash("keelson attach --restart-kubelet")?;
    kubelet::start_pod(node, "stays", 4)?;
    node.bash("keelson limit 5")?;
    node.vm.reboot()?;
    is_whole(node)?;
    kubelet::runs(node, 4).context("the pod does not run after the boot")?;
    node.bash("keelson doctor pulls")?;
    ensure!(node.bash("keelson limit -o json")?.contains('5'), "the limit was forgotten");
    node.bash("keelson limit --reset")?;
    let order = node.bash(
        "for unit in keelson-cri.socket containerd.service keelson.service; do \
         systemctl show $unit -p ActiveEnterTimestampMonotonic --value; done; \
         for unit in kubelet.service keelson-proxy.service; do \
         systemctl show $unit -p ExecMainStartTimestampMonotonic --value; done | sort -n | head -n 1",
    )?;
    let times: Vec<u64> = order.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(times.is_sorted(), "other order of socket, runtime, agent, kubelet or proxy: {times:?}");
    node.bash("keelson bypass --restart-kubelet")?;
    kubelet::remove(node)?;
    Ok("socket, runtime, agent, and then kubelet and proxy came up in this order; the pod runs again and the Service answers; \
        the limit is the one that was set"
        .to_owned())
}

/// While pulls run, others wait, and the Services change.
pub(crate) fn cut(node: &mut Node) -> Result<String> {
    node.start_registry()?;
    node.start_pulls()?;
    node.start_load()?;
    node.bash(
        "for n in $(seq 20 40); do sed \"s/echo/echo-$n/g; s/10.96.0.10/10.96.1.$n/g\" /etc/keelson/manifests/echo.yaml \
         > /etc/keelson/manifests/echo-$n.yaml; done; keelson limit 6; sleep 3",
    )?;
    let before = node.bash("keelson endpoints | head -n 5; sync -f /etc/keelson")?;
    node.vm.cut_power()?;
    node.vm.power_on()?;
    is_whole(node).with_context(|| format!("before the power cut: {before}"))?;
    ensure!(node.bash("keelson limit -o json")?.contains('6'), "the limit was forgotten");
    node.bash("keelson limit --reset")?;
    let state = node.bash("keelson state")?;
    let damaged = node.bash(
        "journalctl --no-pager -b -u keelson.service -p warning -o cat -g 'store|state|damaged' || true",
    )?;
    // Images whose content the runtime lost are fetched again, all others are there.
    node.start_registry()?;
    node.bash("touch /run/registry/open")?;
    node.bash(&format!("{DRIVER} pulls --timeout 5m --clients 4 127.0.0.1:5999/image{{0..7}}:latest"))?;
    node.bash("rm /etc/keelson/manifests/echo-*.yaml")?;
    ensure!(damaged.is_empty(), "the agent logged problems with its state: {damaged}\n{state}");
    Ok("agent, proxy and rules are there; the limit is the one that was set; the state is not damaged; all images can be pulled".to_owned())
}

fn is_whole(node: &Node) -> Result<()> {
    for unit in ["keelson-cri.socket", "keelson-debug.socket", "keelson.service", "keelson-proxy.service"] {
        node.vm.wait_for(&format!("[ $(systemctl is-active {unit}) = active ]"))?;
    }
    node.bash(&format!("{DRIVER} version"))?;
    proxy::start_pod(node)?;
    node.vm.wait_for(proxy::REACHED).context("the Service does not answer after the boot")
}
