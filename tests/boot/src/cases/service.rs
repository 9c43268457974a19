//! What systemd does with the agent.

use anyhow::{Context as _, Result, ensure};

use crate::node::{DRIVER, Node};

pub(crate) fn sandbox(node: &mut Node) -> Result<String> {
    let agent = node.agent()?;
    let status = node.bash(&format!(
        "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/{agent}/status | tr -s '\\t\\n' '  '"
    ))?;
    for line in ["CapEff: 0000000000000000", "CapBnd: 0000000000000000", "NoNewPrivs: 1", "Seccomp: 2"] {
        ensure!(status.contains(line), "not {line}: {status}");
    }
    let group = "/sys/fs/cgroup/system.slice/keelson.service";
    let limits =
        node.bash(&format!("cat {group}/memory.max {group}/memory.high {group}/pids.max | tr '\\n' ' '"))?;
    ensure!(limits.trim() == "536870912 402653184 256", "other limits of the cgroup: {limits}");
    let score = node.bash(&format!("cat /proc/{agent}/oom_score_adj"))?;
    ensure!(score == "-999", "oom_score_adj is {score}");
    let written =
        node.vm.attempt(&format!("nsenter --target {agent} --mount touch /etc/keelson-was-here"))?;
    ensure!(written.code != 0, "the agent may write to /etc");
    let mode = node.bash("stat -c '%a %U' /var/lib/keelson")?;
    ensure!(mode == "700 root", "the state folder is {mode}");
    let memory = node.bash(&format!("cat {group}/memory.current"))?.parse::<u64>()?;
    Ok(format!("no capabilities, seccomp, memory.max 512 MiB, {} MiB in use", memory >> 20))
}

pub(crate) fn socket_activation(node: &mut Node) -> Result<String> {
    node.bash("systemctl stop keelson.service 2>&1")?;
    node.vm.wait_for("! pgrep -f '^/usr/bin/keelson agent'")?;
    node.bash("test -S /run/keelson/cri.sock")?;
    let answer = node.bash("python3 /mnt/node/wait.py")?;
    ensure!(answer == "answered", "the connection was {answer}");
    node.vm
        .wait_for("systemctl is-active --quiet keelson.service")
        .context("the connection did not start the agent")?;
    // With the sockets stopped, calls are refused and nothing starts.
    node.bash("systemctl stop keelson.service keelson-cri.socket keelson-debug.socket 2>&1")?;
    node.vm.wait_for("! pgrep -f '^/usr/bin/keelson agent'")?;
    ensure!(node.vm.attempt(&format!("{DRIVER} version"))?.code != 0, "a socket is left");
    ensure!(node.show("ActiveState")? == "inactive", "the agent was started without its sockets");
    node.bash(&format!("systemctl start keelson.service && {DRIVER} version"))?;
    Ok("the connection was answered; with stopped sockets it is refused".to_owned())
}

pub(crate) fn watchdog(node: &mut Node) -> Result<String> {
    let hung = node.agent()?;
    let since = node.bash("date +%s")?;
    node.replace(&format!("kill -STOP {hung}"))?;
    node.vm.wait_for(&format!("keelson pulls > /dev/null && ! kill -0 {hung} 2> /dev/null"))?;
    let said = node.bash(&format!(
        "journalctl --no-pager -u keelson.service --since @{since} -g '[Ww]atchdog' -o cat | head -n 1"
    ))?;
    Ok(said)
}

/// Settings that no agent starts with: for longer than systemd tries by default.
pub(crate) fn crash_loop(node: &mut Node) -> Result<String> {
    node.bash("cp /etc/keelson/keelson.toml /var/tmp/keelson.toml && echo '[no_such_section]' >> /etc/keelson/keelson.toml")?;
    node.bash("systemctl kill --signal=KILL --kill-whom=all keelson.service")?;
    node.vm.start("waiting", "python3 /mnt/node/wait.py")?;
    node.vm.wait_for("[ $(systemctl show keelson.service -p NRestarts --value) -ge 12 ]")?;
    ensure!(node.bash("systemctl is-active waiting")? == "active", "the connection did not wait");
    let said = node.bash("journalctl --no-pager -u keelson.service -o cat -g no_such_section | tail -n 1")?;
    ensure!(!said.is_empty(), "the journal does not name the setting");
    let restarts = node.show("NRestarts")?;
    node.bash("cp /var/tmp/keelson.toml /etc/keelson/keelson.toml")?;
    node.vm.wait_for("[ $(systemctl is-active waiting) != active ]")?;
    let answer = node.bash("cat /run/waiting.out")?;
    ensure!(answer == "answered", "the connection that waited was {answer}");
    Ok(format!("{restarts} restarts; then the connection that waited was answered"))
}

/// With three pulls under way, five queued, and calls without a pause (I8).
pub(crate) fn restarts(node: &mut Node) -> Result<String> {
    node.start_registry()?;
    node.start_pulls()?;
    node.start_load()?;
    for _ in 0..3 {
        node.replace("systemctl restart keelson.service")?;
    }
    let main = node.main_pid()?;
    node.replace(&format!("kill -TERM {main}"))?;
    let main = node.main_pid()?;
    node.replace(&format!("kill -KILL {main}"))?;
    let agent = node.agent()?;
    node.replace(&format!("kill -TERM {agent}"))?;
    node.bash("systemctl reload keelson.service")?;
    let calls = node.finish_load()?;
    node.finish_pulls()?;
    node.vm.wait_for("[ $(pgrep -fc '^/usr/bin/keelson agent') = 1 ]")?;
    // Without callers: what the watchdog sends, and the end of the agent itself.
    let agent = node.agent()?;
    node.replace(&format!("kill -KILL {agent}"))?;
    node.replace("systemctl kill --signal=ABRT --kill-whom=main keelson.service")?;
    node.vm.wait_for("[ $(pgrep -fc '^/usr/bin/keelson agent') = 1 ] && keelson pulls > /dev/null")?;
    Ok(format!("{calls} calls and 8 pulls through 6 restarts, none failed, no layer sent twice"))
}
