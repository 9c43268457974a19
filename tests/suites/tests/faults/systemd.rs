//! The service manager's side: notifications, watchdog, sockets that outlive the agent, and the unit files.

use crate::common::{MIB, metric_is};
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Cri;
use keelson_harness::node::Node;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::net::UnixDatagram;

/// The notification socket of systemd.
pub(crate) struct Manager(UnixDatagram);

impl Manager {
    pub(crate) fn start(scratch: &Scratch, agent: &mut Agent) -> Result<Self> {
        let path = scratch.path().join("notify");
        let socket = UnixDatagram::bind(&path).context("cannot listen for notifications")?;
        agent.env("NOTIFY_SOCKET", &path.display().to_string());
        Ok(Self(socket))
    }

    /// Notifications that have arrived and were not read yet.
    pub(crate) fn waiting(&self) -> Vec<String> {
        let mut buffer = vec![0; 4096];
        let next =
            || self.0.try_recv(&mut buffer).ok().map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned());
        std::iter::from_fn(next).collect()
    }

    /// The fields of the next notification that contains this line.
    pub(crate) async fn wait_for_notification(&self, line: &str) -> Result<BTreeMap<String, String>> {
        let mut seen = Vec::new();
        let wait = async {
            loop {
                let mut buffer = vec![0; 4096];
                let length = self.0.recv(&mut buffer).await?;
                let text = String::from_utf8(buffer[..length].to_vec())?;
                if text.lines().any(|have| have == line) {
                    let fields = text.lines().filter_map(|line| line.split_once('='));
                    return Ok(fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect());
                }
                seen.push(text);
            }
        };
        let shown = tokio::time::timeout(PATIENCE, wait).await;
        shown.unwrap_or_else(|_| Err(anyhow!("waited {PATIENCE:?} for {line}; these came: {seen:?}")))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_notifies_systemd_of_ready_watchdog_reload_and_stop() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &Settings::new())?;
    let manager = Manager::start(&node.scratch, &mut agent)?;
    agent.env("WATCHDOG_USEC", "300000");
    agent.start_live().await?;
    let ready = manager.wait_for_notification("READY=1").await?;
    ensure!(ready.get("STATUS").is_some_and(|status| status.contains("containerd.sock")), "{ready:?}");
    // Ready means that it accepts connections, whatever the state of the runtime.
    agent.cri().await?;
    for _ in 0..3 {
        manager.wait_for_notification("WATCHDOG=1").await?;
    }

    agent.configure(&Settings::limit(2))?;
    agent.sighup()?;
    let reloading = manager.wait_for_notification("RELOADING=1").await?;
    let since: u64 = reloading.get("MONOTONIC_USEC").context("Type=notify-reload needs the time")?.parse()?;
    ensure!(since > 0);
    manager.wait_for_notification("READY=1").await?;
    metric_is(&agent, "keelson_image_pull_limit", 2.0).await?;
    agent.configure(&Settings::new().set("pulls.when_full", "maybe"))?;
    agent.sighup()?;
    manager.wait_for_notification("RELOADING=1").await?;
    manager.wait_for_notification("READY=1").await.context("a reload that failed is over too")?;
    manager.wait_for_notification("WATCHDOG=1").await?;

    let ended = tokio::spawn(async move { agent.terminate().await });
    manager.wait_for_notification("STOPPING=1").await?;
    ensure!(ended.await??.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn it_notifies_ready_without_a_runtime() -> Result<()> {
    let scratch = Scratch::new()?;
    let mut agent = Agent::new(&scratch, &no_runtime(&scratch), &Settings::new())?;
    let manager = Manager::start(&scratch, &mut agent)?;
    agent.start_live().await?;
    // Otherwise Before=kubelet.service would wait for a containerd that nothing may wait for.
    manager.wait_for_notification("READY=1").await.map(drop)
}

/// Sockets that are made before the agent and outlive it. The shell puts them where systemd would, and executes the
/// agent, so that the pid is right.
struct Activation {
    cri: UnixListener,
    debug: UnixListener,
}

const SHELL: &str = "exec 3<&0 4<&1 </dev/null >&2; LISTEN_PID=$$ exec \"$@\"";

impl Activation {
    fn new(agent: &Agent) -> Result<Self> {
        let listen =
            |path: &Path| UnixListener::bind(path).with_context(|| format!("cannot listen at {path:?}"));
        Ok(Self { cri: listen(&agent.socket())?, debug: listen(&agent.debug_socket())? })
    }

    fn start(&self, agent: &Agent, names: &str, log: &Path) -> Result<Running> {
        let log = fs::File::options().create(true).append(true).open(log)?;
        let mut command = Command::new("setpriv");
        // Root without capabilities, like in the unit.
        command.args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]);
        command.args(["--pdeathsig", "KILL", "--", "sh", "-c", SHELL, "sh"]);
        command.arg(agent.program()).arg("agent").arg("--config").arg(agent.config());
        command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", names);
        command.stdin(Stdio::from(OwnedFd::from(self.cri.try_clone()?)));
        command.stdout(Stdio::from(OwnedFd::from(self.debug.try_clone()?))).stderr(log);
        Ok(Running(command.spawn().context("cannot start the agent")?))
    }
}

struct Running(Child);

impl Running {
    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn live(agent: &Agent) -> Result<()> {
    eventually(PATIENCE, "the agent lives", || async { agent.http_get("/livez").await?.success().map(drop) })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_sockets_from_systemd_a_restart_refuses_no_connection() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 2, MIB).await?;
    let agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &Settings::limit(1))?;
    let log = node.scratch.path().join("activated.log");
    let sockets = Activation::new(&agent)?;

    // Before its first start: the connection waits.
    let first = tokio::spawn({
        let (cri, name) = (Cri::connect(&agent.socket()).await?, node.name(&images[0]));
        async move { cri.pull_image(&name).await }
    });
    let mut running = sockets.start(&agent, "cri:debug", &log)?;
    first.await?.context("a call from before the start")?;
    live(&agent).await?;

    for round in 0..3 {
        running.kill()?;
        let mut calls = Vec::new();
        for _ in 0..10 {
            let cri = Cri::connect(&agent.socket()).await.context("refused while the agent was away")?;
            calls.push(tokio::spawn(async move { cri.version().await }));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        ensure!(calls.iter().all(|call| !call.is_finished()), "no process answers");
        running = sockets.start(&agent, "cri:debug", &log)?;
        for call in calls {
            call.await?.with_context(|| format!("a call from before start {round}"))?;
        }
        live(&agent).await?;
    }
    agent.cri().await?.pull_image(&node.name(&images[1])).await?;
    debug_answers(&agent).await?;

    // It did not make the files: they stay after a graceful stop.
    let pid = nix::unistd::Pid::from_raw(running.0.id().try_into()?);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
    eventually(PATIENCE, "it ends", || {
        let ended = running.0.try_wait();
        async move {
            match ended? {
                Some(status) if status.success() => Ok(()),
                Some(status) => bail!("it ended with {status}"),
                None => bail!("it still runs"),
            }
        }
    })
    .await?;
    ensure!(agent.socket().exists() && agent.debug_socket().exists());

    // Sockets are matched by name, not by order.
    fs::remove_file(agent.socket())?;
    fs::remove_file(agent.debug_socket())?;
    let swapped = Activation::new(&agent)?;
    let swapped = Activation { cri: swapped.debug, debug: swapped.cri };
    let _running = swapped.start(&agent, "debug:cri", &log)?;
    agent.cri().await?.version().await?;
    debug_answers(&agent).await
}

async fn debug_answers(agent: &Agent) -> Result<()> {
    use keelson_proto::debug::debug_client::DebugClient;
    let endpoint = format!("unix://{}", agent.debug_socket().display());
    let mut client = DebugClient::new(tonic::transport::Endpoint::from_shared(endpoint)?.connect().await?);
    let version = client.get_version(keelson_proto::debug::GetVersionRequest {}).await?.into_inner();
    ensure!(version.node_name == "node", "{version:?}");
    Ok(())
}

/// A unit file as (section, key, value), in order.
fn unit(name: &str) -> Result<Vec<(String, String, String)>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
    let mut section = String::new();
    let mut entries = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.to_owned();
        } else {
            let (key, value) =
                line.split_once('=').with_context(|| format!("{name}: {line:?} is no setting"))?;
            entries.push((section.clone(), key.to_owned(), value.to_owned()));
        }
    }
    Ok(entries)
}

fn value<'a>(unit: &'a [(String, String, String)], key: &str) -> Result<&'a str> {
    let found = unit.iter().find(|(_, have, _)| have == key);
    found.map(|(_, _, value)| value.as_str()).with_context(|| format!("the unit has no {key}"))
}

#[test]
fn the_unit_files_agree_with_the_defaults() -> Result<()> {
    let defaults =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/keelson.toml"))?;
    let service = unit("keelson.service")?;
    ensure!(value(&service, "Type")? == "notify-reload" || value(&service, "Type")? == "notify");
    // Both are needed: without KillMode=process systemd would kill an agent that hands over.
    ensure!(value(&service, "ExecStart")?.ends_with("/keelson agent --systemd-handover"));
    ensure!(value(&service, "KillMode")? == "process");
    // The agent notifies the watchdog, and the main process is its stand-in.
    ensure!(value(&service, "NotifyAccess")? == "all");
    ensure!(value(&service, "Restart")? == "always");
    ensure!(value(&service, "StateDirectory")? == "keelson");
    ensure!(defaults.contains("#state_dir = \"/var/lib/keelson\""));
    let seconds = |text: &str| -> Result<u64> { Ok(text.trim_end_matches('s').parse()?) };
    let drain = defaults.lines().find_map(|line| line.strip_prefix("#drain_timeout = "));
    let drain = seconds(drain.context("no drain_timeout")?.trim_matches('"'))?;
    ensure!(seconds(value(&service, "TimeoutStopSec")?)? > drain, "systemd must not kill what still drains");
    ensure!(value(&service, "Before")?.contains("kubelet.service"));
    // I14: a process that the watchdog aborts leaves no credentials in a core file.
    for name in ["keelson.service", "keelson-proxy.service"] {
        ensure!(value(&unit(name)?, "LimitCORE")? == "0", "{name}");
    }
    let sysusers = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/keelson.sysusers.conf"),
    )?;
    let mut groups =
        BTreeSet::from([value(&unit("keelson-proxy.service")?, "SupplementaryGroups")?.to_owned()]);
    for (name, descriptor, mode) in
        [("keelson-cri.socket", "cri", "0660"), ("keelson-debug.socket", "debug", "0660")]
    {
        let socket = unit(name)?;
        let path = value(&socket, "ListenStream")?;
        ensure!(
            defaults.contains(&format!("#listen = \"unix://{path}\"")),
            "{name}: {path} is not the default"
        );
        ensure!(value(&socket, "FileDescriptorName")? == descriptor);
        ensure!(value(&socket, "SocketMode")? == mode);
        // I12: users with read access are not in the group of those who are root through the CRI.
        let group = value(&socket, "SocketGroup")?;
        ensure!(
            group != "root" && sysusers.lines().any(|line| line == format!("g {group} -")),
            "{name}: {group}"
        );
        ensure!(groups.insert(group.to_owned()), "{name}: {group} is the group of another socket too");
        ensure!(value(&socket, "Service")? == "keelson.service");
        ensure!(value(&service, "Sockets")?.contains(name));
    }
    Ok(())
}

/// I11: the installed settings are valid and set a limit.
#[tokio::test(flavor = "multi_thread")]
async fn the_installed_settings_limit_pulls() -> Result<()> {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let installed = packaging.join("keelson.toml");
    let (packages, steps) = (packaging.join("packages.sh"), packaging.join("../docs/install.md"));
    for (file, installs) in [
        (packages, "install -D -m 0644 packaging/keelson.toml \"$root/etc/keelson/keelson.toml\""),
        (steps, "install -D -m 0644 packaging/keelson.toml /etc/keelson/keelson.toml"),
    ] {
        ensure!(
            fs::read_to_string(&file)?.contains(installs),
            "{}: another file is installed",
            file.display()
        );
    }
    let check = |settings: &Path| {
        let run = Command::new(keelson_harness::peers::keelson()?)
            .args(["config", "check", "--config"])
            .arg(settings)
            .output()?;
        ensure!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        Ok(String::from_utf8(run.stdout)?)
    };
    let message = check(&installed)?;
    ensure!(!message.contains("warning"), "{message}");
    let defaults = check(&packaging.join("../config/keelson.toml"))?;
    ensure!(defaults.contains("warning: pulls.max_parallel_image_pulls: no limit"), "{defaults}");
    Ok(())
}

/// I14: with any way of starting it, the agent leaves no core file.
#[tokio::test(flavor = "multi_thread")]
async fn the_agent_leaves_no_core_file() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let agent = node.agent(&Settings::new()).await?;
    let pid = agent.pid().context("the agent runs")?;
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let core =
        limits.lines().find(|line| line.starts_with("Max core file size")).context("no limit of cores")?;
    let values: Vec<&str> = core.split_whitespace().skip(4).take(2).collect();
    ensure!(values == ["0", "0"], "{core}");
    Ok(())
}

/// Every value of a key that may occur several times.
fn values<'a>(unit: &'a [(String, String, String)], key: &str) -> Vec<&'a str> {
    unit.iter().filter(|(_, have, _)| have == key).map(|(_, _, value)| value.as_str()).collect()
}

#[test]
fn the_unit_of_the_proxy_is_hardened_and_agrees_with_the_defaults() -> Result<()> {
    let defaults =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/keelson.toml"))?;
    let (agent, proxy) = (unit("keelson.service")?, unit("keelson-proxy.service")?);
    ensure!(value(&proxy, "ExecStart")? == "/usr/bin/keelson proxy --backend nft");
    ensure!(value(&proxy, "Restart")? == "always" && value(&proxy, "Type")? == "notify");
    ensure!(value(&proxy, "After")?.contains("keelson.service"));
    for key in ["Requires", "BindsTo", "Requisite", "ExecStopPost", "ExecStop"] {
        ensure!(
            values(&proxy, key).is_empty(),
            "it continues without the agent, and its rules without it: {key}"
        );
    }
    // A separate user with one capability, and with access to what it needs.
    ensure!(value(&proxy, "DynamicUser")? == "yes" && value(&proxy, "User")? != "root");
    for key in ["CapabilityBoundingSet", "AmbientCapabilities"] {
        ensure!(values(&proxy, key) == ["CAP_NET_ADMIN"], "{key}");
    }
    let group = value(&proxy, "SupplementaryGroups")?;
    let let_in = unit("keelson-endpoints-group.conf")?;
    let socket = value(&let_in, "ExecStartPost")?
        .strip_prefix(&format!("-+/usr/bin/chgrp {group} "))
        .context("the group of the agent's socket is another")?;
    ensure!(defaults.contains(&format!("#listen = [\"unix://{socket}\"]")), "{socket} is not the default");
    let folder = value(&proxy, "RuntimeDirectory")?;
    ensure!(
        defaults.contains(&format!("#listen = \"unix:///run/{folder}/proxy.sock\"")),
        "{folder} is not the default"
    );
    // The hardening of the agent applies to the proxy too.
    let hardening = |key: &str| {
        ["Protect", "Private", "Restrict", "SystemCall"].iter().any(|begin| key.starts_with(begin))
            || ["LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges", "RemoveIPC", "UMask"]
                .contains(&key)
    };
    for (_, key, _) in agent.iter().filter(|(section, key, _)| section == "Service" && hardening(key)) {
        let (theirs, ours) = (values(&agent, key), values(&proxy, key));
        ensure!(theirs == ours, "{key} is {theirs:?} for the agent and {ours:?} for the proxy");
    }
    Ok(())
}

#[test]
fn systemd_analyze_accepts_the_units() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.dir("units")?;
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let services = ["keelson.service", "keelson-proxy.service"];
    for name in services.into_iter().chain(["keelson-cri.socket", "keelson-debug.socket"]) {
        // The program need not be installed on the test machine.
        let text = fs::read_to_string(packaging.join(name))?.replace("/usr/bin/keelson", "/bin/true");
        fs::write(folder.join(name), text)?;
    }
    let drop_in = folder.join("keelson.service.d");
    fs::create_dir(&drop_in)?;
    fs::copy(packaging.join("keelson-endpoints-group.conf"), drop_in.join("10-endpoints-group.conf"))?;
    for name in services {
        let mut verify = Command::new("systemd-analyze");
        verify
            .args(["verify", "--man=no"])
            .arg(folder.join(name))
            .env("SYSTEMD_UNIT_PATH", format!("{}:", folder.display()));
        let output = match verify.output() {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("there is no systemd-analyze here: the units are checked by the other tests only");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success() && !message.contains("keelson"), "{name}: {message}");
    }
    Ok(())
}
