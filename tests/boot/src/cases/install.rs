//! The package on a node that has a container runtime and nothing else.

use anyhow::{Result, ensure};

use crate::node::Node;

/// The files of the root before the package, for the comparison at the end.
pub(crate) const BEFORE: &str = "/var/tmp/before";
/// Prints every file and folder of the root, without what belongs to others.
pub(crate) const FILES: &str = "find / -xdev \\( -path /var/tmp -o -path /var/lib/dpkg -o -path /var/log -o -path /var/lib/containerd \
    -o -path /var/cache -o -path /root -o -path /tmp -o -path /var/lib/systemd -o -path /mnt \\) -prune -o -print | sort";

/// An administrator's drop-in. The emulated machine is 20 to 30 times slower than its processor: a successor that takes a fifth of a second
/// elsewhere does not start in the default 5 s.
const DROP_IN: &str = "[Service]\\nEnvironment=KEELSON_AGENT__HANDOVER_TIMEOUT=90s\\n";

pub(crate) fn install(node: &mut Node) -> Result<String> {
    node.vm.power_on()?;
    let folder = "/etc/systemd/system/keelson.service.d";
    node.bash(&format!("mkdir {folder} && printf '{DROP_IN}' > {folder}/emulated.conf"))?;
    node.bash(&format!("{FILES} > {BEFORE}"))?;
    node.bash("DEBIAN_FRONTEND=noninteractive dpkg -i /mnt/keelson.deb 2>&1")?;
    let running = node.bash("systemctl list-units --no-legend --state=active 'keelson*' | wc -l")?;
    ensure!(running == "0", "units run after the installation");
    let enabled = node.bash("systemctl is-enabled keelson.service keelson-proxy.service || true")?;
    ensure!(!enabled.contains("enabled"), "units are enabled: {enabled}");
    node.bash("getent group keelson keelson-cri keelson-inspect")?;
    node.bash("keelson config check")?;
    let limit = node.bash("keelson config show | grep -E 'max_parallel_image_pulls'")?;
    ensure!(limit.contains('3'), "the installed settings have no limit: {limit}");
    node.bash("systemd-analyze verify keelson.service keelson-proxy.service keelson-cri.socket keelson-debug.socket 2>&1")?;
    node.bash("keelson --version")
}

pub(crate) fn enable(node: &mut Node) -> Result<String> {
    node.bash("systemctl enable --now keelson-cri.socket keelson-debug.socket keelson.service 2>&1")?;
    node.vm.wait_for("keelson pulls > /dev/null")?;
    let version = node.bash(&format!("{} version", crate::node::DRIVER))?;
    ensure!(version.contains("containerd"), "the runtime does not answer through the agent: {version}");
    let status = node.show("StatusText")?;
    ensure!(status.contains("containerd"), "the status does not name the runtime: {status}");
    Ok(format!("status: {status}"))
}

pub(crate) fn groups(node: &mut Node) -> Result<String> {
    node.bash("useradd --groups keelson-inspect looker && useradd other")?;
    node.bash("runuser -u looker -- keelson pulls")?;
    refused(node, "runuser -u looker -- keelson limit 50")?;
    refused(node, "runuser -u other -- keelson pulls")?;
    refused(node, &format!("runuser -u looker -- {} version", crate::node::DRIVER))?;
    ensure!(node.bash("keelson limit -o json")?.contains('3'), "the limit has changed");
    node.bash("userdel looker && userdel other")?;
    node.bash("stat -c '%n %U:%G %a' /run/keelson/*.sock | tr '\\n' ' '")
}

fn refused(node: &Node, command: &str) -> Result<()> {
    let output = node.vm.attempt(command)?;
    ensure!(output.code != 0, "{command} is not refused: {}", output.stdout);
    Ok(())
}
