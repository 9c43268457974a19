//! The last case: the packages are removed, and nothing of them is left.

use anyhow::{Result, ensure};

use crate::{
    cases::install::{BEFORE, FILES},
    node::Node,
};

pub(crate) fn uninstall(node: &mut Node) -> Result<String> {
    node.bash("systemctl disable --now keelson-proxy.service 2>&1 && keelson proxy cleanup")?;
    let rules = node.bash("nft list tables; iptables-save; ip6tables-save")?;
    ensure!(!rules.to_lowercase().contains("keelson"), "rules are left: {rules}");
    node.bash("systemctl disable --now keelson.service keelson-cri.socket keelson-debug.socket 2>&1")?;
    node.vm.wait_for("! pgrep -f '^/usr/bin/keelson'")?;
    node.bash("keelson cleanup --state")?;
    node.bash("rm -r /etc/keelson/manifests")?;
    node.bash("dpkg --purge keelson 2>&1")?;
    let left = node.bash(&format!("{FILES} | diff {BEFORE} - | grep '^>' | grep -v '/run/' || true"))?;
    let ours: Vec<&str> = left.lines().filter(|line| line.contains("keelson")).collect();
    ensure!(ours.is_empty(), "files are left: {ours:?}");
    // systemctl fails if there are none.
    let units = node.bash("systemctl list-unit-files --no-legend 'keelson*' || true; systemctl list-units --all --no-legend 'keelson*'; ls -d /run/keelson* 2> /dev/null || true")?;
    ensure!(units.is_empty(), "units or sockets are left: {units}");
    let leases = node.bash("ctr -n k8s.io leases ls | grep -c keelson || true")?;
    ensure!(leases == "0", "leases are left in the runtime: {leases}");
    Ok("no file, unit, socket, rule or lease".to_owned())
}
