//! From one package to the next, and back.

use anyhow::{Context as _, Result, ensure};

use crate::node::Node;

pub(crate) fn upgrade(node: &mut Node) -> Result<String> {
    node.bash("echo '# changed here' >> /etc/keelson/keelson.toml")?;
    node.bash("keelson limit 4")?;
    let current = version(node)?;
    // Begins with the former one, so that this version is an upgrade.
    node.replace("dpkg --force-confold -i /mnt/keelson-former.deb 2>&1")?;
    let former = version(node)?;
    ensure!(current != former, "both packages have version {current}");
    node.bash("keelson limit 3")?;
    node.start_registry()?;
    node.start_pulls()?;
    node.start_load()?;
    node.bash("rm -f /run/connect.stop")?;
    node.vm.start("connect", "python3 /mnt/node/connect.py")?;
    let sockets = sockets(node)?;
    for (package, wanted) in [("keelson", &current), ("keelson-former", &former), ("keelson", &current)] {
        node.replace(&format!("dpkg --force-confold -i /mnt/{package}.deb 2>&1"))?;
        node.vm.wait_for("keelson pulls > /dev/null")?;
        let installed = version(node)?;
        ensure!(installed == *wanted, "{installed} is installed instead of {wanted}");
        let agent = node.agent()?;
        node.bash(&format!("cmp /proc/{agent}/exe /usr/bin/keelson"))
            .context("the agent is another program")?;
    }
    let after = self::sockets(node)?;
    ensure!(sockets == after, "other sockets after the upgrades: {after} instead of {sockets}");
    node.bash("touch /run/connect.stop")?;
    node.vm.wait_for("[ $(systemctl is-active connect) != active ]")?;
    let connections = node.bash("cat /run/connect.out")?;
    ensure!(connections.ends_with("connections"), "a connection was refused: {connections}");
    let calls = node.finish_load()?;
    node.finish_pulls()?;
    node.bash("grep -q '# changed here' /etc/keelson/keelson.toml").context("the settings were replaced")?;
    Ok(format!(
        "{former} to {current} to {former} to {current}: {calls} calls, {connections} and 8 pulls, none failed, no layer \
         sent twice; the sockets are the same"
    ))
}

fn version(node: &Node) -> Result<String> {
    node.bash("dpkg-query -W -f '${Version}' keelson")
}

/// What an upgrade leaves as it is: units, files, and since when they are there.
fn sockets(node: &Node) -> Result<String> {
    node.bash(
        "systemctl show keelson-cri.socket keelson-debug.socket -p Id -p ActiveState -p ActiveEnterTimestampMonotonic; \
         stat -c '%n %i' /run/keelson/*.sock",
    )
}
