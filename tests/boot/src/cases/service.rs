//! What systemd does with the agent.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

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
    has_time_to_stop(node)?;
    has_no_core(node, agent)?;
    has_no_core(node, node.main_pid()?)?;
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

/// There are secrets in the memory of agents and proxies.
pub(crate) fn has_no_core(node: &Node, pid: u32) -> Result<()> {
    let limit = node.bash(&format!("grep 'Max core file size' /proc/{pid}/limits | tr -s ' '"))?;
    ensure!(limit.starts_with("Max core file size 0 0"), "process {pid} may leave a core file: {limit}");
    Ok(())
}

/// By the settings that the package brings: drop-ins of this check are left out.
fn has_time_to_stop(node: &Node) -> Result<()> {
    let settings: Value = serde_json::from_str(&node.bash("keelson config show -o json")?)?;
    let seconds = |text: &str| -> Result<u64> {
        text.trim_end_matches('s').parse().with_context(|| format!("not a number of seconds: {text:?}"))
    };
    let setting = |name: &str| seconds(settings["settings"][name]["value"].as_str().unwrap_or_default());
    let agent = setting("agent.handover_timeout")? + setting("agent.drain_timeout")?;
    let stop = seconds(&node.show("TimeoutStopUSec")?)?;
    ensure!(agent < stop, "the agent may take {agent} s to stop, and systemd kills it after {stop} s");
    Ok(())
}

/// A stop returns at once, and the agent ends when the pull has.
fn stop_during_a_pull(node: &Node) -> Result<String> {
    node.start_registry()?;
    let agent = node.agent()?;
    // An image that no earlier case has pulled.
    node.vm
        .start("pull", &format!("{DRIVER} pulls --timeout 5m --clients 1 127.0.0.1:5999/image7:latest"))?;
    node.vm
        .wait_for("keelson pulls -o json | grep -Eq '\"running\": ?1[,}]?'")
        .context("the pull does not run")?;
    let stop = "began=$(date +%s%N); systemctl stop keelson.service 2> /dev/null; echo $((($(date +%s%N) - began) / 1000000))";
    let took = node.bash(stop)?;
    // Most of it is the start of systemctl on a machine that is busy; the pull does not end before it may.
    ensure!(took.parse::<u64>()? < 30_000, "the stop took {took} ms");
    ensure!(node.show("ActiveState")? == "inactive", "the unit is not stopped");
    node.bash(&format!("sleep 2; kill -0 {agent} && [ $(systemctl is-active pull) = active ]"))
        .context("the agent did not continue the pull")?;
    node.bash("touch /run/registry/open")?;
    node.vm.wait_for("[ $(systemctl is-active pull) != active ]")?;
    let result = node.bash("cat /run/pull.out")?;
    ensure!(result.contains("\"ok\":true"), "the pull failed: {result}");
    node.vm.wait_for("! pgrep -f '^/usr/bin/keelson agent'").context("the agent does not end")?;
    ensure!(node.show("ActiveState")? == "inactive", "the agent was started again");
    Ok(format!("a stop took {took} ms, and a pull ended well after it"))
}

/// By a drop-in for the socket unit, and back.
pub(crate) fn moved_socket(node: &mut Node) -> Result<String> {
    let folder = "/etc/systemd/system/keelson-cri.socket.d";
    let moved = "[Socket]\\nListenStream=\\nListenStream=/run/keelson/moved.sock\\n";
    let stop = "systemctl stop keelson.service keelson-cri.socket keelson-debug.socket 2>&1";
    let start = "systemctl daemon-reload && systemctl start keelson.service";
    node.replace(&format!("{stop} && mkdir {folder} && printf '{moved}' > {folder}/moved.conf && {start}"))?;
    node.bash(&format!("{} version", DRIVER.replace("cri.sock", "moved.sock")))?;
    node.bash("! test -e /run/keelson/cri.sock").context("the former socket is left")?;
    node.replace(&format!("{stop} && rm -r {folder} && {start}"))?;
    node.bash(&format!("{DRIVER} version && ! test -e /run/keelson/moved.sock"))?;
    ensure!(
        node.vm.attempt("systemctl restart keelson-cri.socket 2>&1")?.code != 0,
        "a socket can be restarted while its service runs"
    );
    node.replace(&format!("{stop} && {start}"))?;
    node.bash(&format!("{DRIVER} version"))?;
    Ok("the agent answers at the other path alone, and at the first one again".to_owned())
}

pub(crate) fn socket_activation(node: &mut Node) -> Result<String> {
    let stopped = stop_during_a_pull(node)?;
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
    Ok(format!("{stopped}; a connection was answered, and with stopped sockets refused"))
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
