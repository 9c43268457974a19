//! The service proxy as a unit.

use std::ops::RangeInclusive;

use anyhow::{Context as _, Result, ensure};

use crate::node::Node;

/// Whether the Service answers a new connection.
pub(crate) const REACHED: &str = "python3 /mnt/node/client.py once > /dev/null 2>&1";

/// Those that systemd gives to units with DynamicUser=.
const DYNAMIC_USERS: RangeInclusive<u32> = 61_184..=65_519;

pub(crate) fn start_pod(node: &Node) -> Result<()> {
    node.bash("/mnt/node/pod.sh")?;
    node.vm.start("echo", "ip netns exec pod python3 /mnt/node/echo.py")
}

pub(crate) fn start(node: &mut Node) -> Result<String> {
    node.bash("install -D -m 644 /mnt/node/echo.yaml -t /etc/keelson/manifests && cat /mnt/node/services.toml >> /etc/keelson/keelson.toml")?;
    node.bash("keelson config check")?;
    start_pod(node)?;
    node.replace("systemctl restart keelson.service")?;
    node.bash("systemctl enable --now keelson-proxy.service 2>&1")?;
    node.vm.wait_for(REACHED).context("the Service does not answer")?;
    node.bash("keelson proxy state")?;
    let pid = node.bash("systemctl show keelson-proxy.service -p MainPID --value")?;
    super::service::has_no_core(node, pid.parse().context("MainPID")?)?;
    // Its name is known to systemd alone on a node without libnss-systemd.
    let user: u32 = node.bash(&format!("stat -c %u /proc/{pid}"))?.parse().context("a user ID")?;
    ensure!(DYNAMIC_USERS.contains(&user), "the proxy is the user {user}");
    let status =
        node.bash(&format!("grep -E '^(CapEff|CapBnd):' /proc/{pid}/status | tr -s '\\t\\n' '  '"))?;
    // CAP_NET_ADMIN is bit 12.
    ensure!(status.matches("0000000000001000").count() == 2, "other capabilities: {status}");
    let written = format!("nsenter --target {pid} --mount sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'");
    ensure!(node.vm.attempt(&written)?.code != 0, "the sandbox lets ip_forward be written");
    let opened = format!("setpriv --reuid {user} --clear-groups -- {} version", crate::node::DRIVER);
    ensure!(node.vm.attempt(&opened)?.code != 0, "the proxy's user may call the runtime");
    Ok("user keelson-proxy, CAP_NET_ADMIN alone; the Service answers".to_owned())
}

pub(crate) fn upgrade(node: &mut Node) -> Result<String> {
    node.bash("rm -f /run/client.stop")?;
    node.vm.start("client", "python3 /mnt/node/client.py")?;
    let pid = || node.bash("systemctl show keelson-proxy.service -p MainPID --value");
    for package in ["keelson-former", "keelson"] {
        let former = pid()?;
        node.bash(&format!("dpkg --force-confold -i /mnt/{package}.deb 2>&1"))?;
        node.vm.wait_for("keelson proxy state > /dev/null && keelson pulls > /dev/null")?;
        ensure!(pid()? != former, "the package did not restart the proxy");
        node.bash(REACHED).context("the Service does not answer after the upgrade")?;
    }
    node.bash(
        "systemctl restart keelson-proxy.service && systemctl kill --signal=KILL keelson-proxy.service",
    )?;
    node.vm.wait_for("keelson proxy state > /dev/null")?;
    node.bash("touch /run/client.stop")?;
    node.vm.wait_for("[ $(systemctl is-active client) != active ]")?;
    let lines = node.bash("cat /run/client.out")?;
    ensure!(lines.ends_with("lines"), "the connection broke: {lines}");
    Ok(format!("one connection through upgrade, downgrade, restart and kill: {lines}"))
}

/// It deletes the tables of all programs.
pub(crate) fn reload_of_nftables(node: &mut Node) -> Result<String> {
    node.bash("systemctl start nftables.service && systemctl reload nftables.service")?;
    node.vm.wait_for(REACHED).context("the Service does not answer")?;
    node.bash("keelson proxy state")?;
    node.bash("journalctl --no-pager -u keelson-proxy.service -o cat -g repair | tail -n 1")
}
