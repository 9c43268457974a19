//! The shipped units under a systemd that is process 1 of its own namespaces (I8): restarts, stops and kills under a load of CRI
//! calls and of running and queued pulls. `make systemd-check` runs it; it writes to `/etc` and `/run` and refuses to run elsewhere.

use anyhow::{Context as _, Result, bail, ensure};
use keelson_tests::containerd::Kind;
use keelson_tests::cri::{Cri, Pull};
use keelson_tests::images::{Image, ImageSpec, TINY};
use keelson_tests::load::{FailedCall, Load};
use keelson_tests::node::Node;
use keelson_tests::proxy::{Fault, Match};
use keelson_tests::util::{PATIENCE, eventually, until};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tonic::Status;

const SOCKET: &str = "/run/keelson/cri.sock";
const UNITS: [&str; 3] = ["keelson-cri.socket", "keelson-debug.socket", "keelson.service"];
const RESTARTS: usize = 6;

fn systemctl(args: &[&str]) -> Result<String> {
    let run = Command::new("systemctl").args(args).output().context("cannot run systemctl")?;
    ensure!(run.status.success(), "systemctl {args:?}: {}", String::from_utf8_lossy(&run.stderr));
    Ok(String::from_utf8(run.stdout)?.trim().to_owned())
}

fn main_pid() -> Result<i32> {
    Ok(systemctl(&["show", "keelson", "--property=MainPID", "--value"])?.parse()?)
}

/// Processes of the unit by what they were started as: agents and stand-ins.
fn processes() -> Result<(Vec<i32>, Vec<i32>)> {
    let (mut agents, mut stand_ins) = (Vec::new(), Vec::new());
    let group = "/sys/fs/cgroup/system.slice/keelson.service/cgroup.procs";
    for pid in fs::read_to_string(group).unwrap_or_default().lines() {
        let Ok(line) = fs::read_to_string(format!("/proc/{pid}/cmdline")) else { continue };
        match line.split('\0').nth(1) {
            Some("agent") => agents.push(pid.parse()?),
            Some("stand-in") => stand_ins.push(pid.parse()?),
            _ => {}
        }
    }
    Ok((agents, stand_ins))
}

fn kill(pid: i32, signal: nix::sys::signal::Signal) -> Result<()> {
    Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal)?)
}

/// Waits until systemd follows another main process than `former`, of a service that is active.
async fn replaced(former: i32) -> Result<()> {
    eventually(PATIENCE, "systemd starts the next agent", || async {
        let state = systemctl(&["show", "keelson", "--property=ActiveState", "--value"])?;
        let main = main_pid()?;
        ensure!(state == "active" && main != former && main != 0, "{state}, main process {main}");
        ensure!(processes()?.1 == [main], "the main process is not the only stand-in");
        Ok(())
    })
    .await
}

struct Stage {
    node: Node,
    cri: Cri,
}

impl Stage {
    async fn start() -> Result<Self> {
        ensure!(
            fs::read_to_string("/proc/1/comm")?.trim() == "systemd"
                && Path::new("/run/keelson-check").exists(),
            "this check writes to /etc and runs below tests/systemd/run.sh only: make systemd-check"
        );
        let node = Node::start(Kind::V2).await?;
        let settings = format!(
            "[cri]\nruntime_endpoint = \"{}\"\n[pulls]\nmax_parallel_image_pulls = 2\n",
            node.containerd.endpoint()
        );
        fs::write("/etc/keelson/keelson.toml", settings)?;
        systemctl(&[&["start"], &UNITS[..]].concat())?;
        let cri = Cri::ready(Path::new(SOCKET)).await?;
        Ok(Self { node, cri })
    }

    /// Starts a pull of each, in a task of its own, whose layers the registry holds back.
    async fn begin(&self, images: &[Image]) -> Result<Vec<JoinHandle<Result<String, Status>>>> {
        for image in images {
            self.node.proxy.rule(Match::layers().repo(&image.repo), Fault::Hang);
        }
        let mut going = Vec::new();
        for image in images {
            let (cri, pull) = (self.cri.clone(), Pull::new(&self.node.name(image)));
            going.push(tokio::spawn(async move { cri.pull(&pull).await }));
        }
        until("two pulls run", || self.node.proxy.records().active_repos().len() == 2).await?;
        Ok(going)
    }
}

/// What failed, by method and status.
fn summary(failures: &[FailedCall]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for failed in failures {
        let what = format!("{} {}: {}", failed.call, failed.error.code, failed.error.message);
        *counts.entry(what).or_default() += 1;
    }
    counts
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs systemd as process 1: make systemd-check"]
async fn i8_callers_do_not_notice_restarts_by_systemd() -> Result<()> {
    use nix::sys::signal::Signal;
    let stage = Stage::start().await?;
    let small = stage.node.push(&[ImageSpec::single("systemd/load", 4096)], None).await?;
    let name = stage.node.name(&small[0]);
    stage.cri.pull_image(&name).await?;
    let images = stage.node.push_many("systemd", 8, TINY).await?;
    let going = stage.begin(&images).await?;
    let load = Load::start(&format!("unix://{SOCKET}"), 200, 2, &name).await?;

    for restart in 0..RESTARTS {
        let former = main_pid()?;
        let since = Instant::now();
        systemctl(&["restart", "keelson"])?;
        eprintln!("systemctl restart {restart} took {:?}", since.elapsed());
        replaced(former).await?;
        let (agents, stand_ins) = processes()?;
        eprintln!("  agents {agents:?}, stand-ins {stand_ins:?}");
        ensure!(!agents.is_empty() && stand_ins.len() == 1);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    for (signal, what) in [(Signal::SIGTERM, "SIGTERM"), (Signal::SIGKILL, "SIGKILL")] {
        let former = main_pid()?;
        kill(former, signal)?;
        replaced(former).await?;
        eprintln!("{what} of the main process: replaced; agents {:?}", processes()?.0);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // The newest agent itself, as somebody does who looks for it with ps.
    let former = main_pid()?;
    let agent = processes()?.0.into_iter().max().context("no agent")?;
    kill(agent, Signal::SIGTERM)?;
    replaced(former).await?;
    eprintln!("SIGTERM of the agent: replaced; agents {:?}", processes()?.0);

    systemctl(&["reload", "keelson"])?;
    ensure!(!load.has_ended(), "the load ended by itself");
    let report = load.stop().await?;
    eprintln!("load: {:?}; failures {:?}", report.result, summary(&report.failures));
    ensure!(report.failures.is_empty(), "{} of {} calls failed", report.failures.len(), report.result.calls);
    ensure!(going.iter().all(|call| !call.is_finished()), "a pull ended though its layers are held back");
    stage.node.proxy.clear_rules();
    for (call, image) in going.into_iter().zip(&images) {
        if let Err(status) = call.await? {
            bail!("the pull of {} failed: {status}", image.repo);
        }
        let fetches = stage.node.proxy.records().most_fetches(image);
        ensure!(fetches == 1.0, "{} was sent {fetches} times", image.repo);
    }
    ensure!(stage.node.proxy.records().max_concurrent_repos() <= 2, "the limit was exceeded");
    until("one agent is left", || processes().is_ok_and(|(agents, _)| agents.len() == 1)).await?;
    stop_and_kill(&stage).await
}

/// `kill -9` of the agent, and `systemctl stop` of service and sockets.
async fn stop_and_kill(stage: &Stage) -> Result<()> {
    let former = main_pid()?;
    let agent = processes()?.0.into_iter().max().context("no agent")?;
    kill(agent, nix::sys::signal::Signal::SIGKILL)?;
    replaced(former).await?;
    stage.cri.version().await.or(Cri::ready(Path::new(SOCKET)).await?.version().await)?;
    eprintln!("SIGKILL of the agent: systemd started the next one");
    let since = Instant::now();
    systemctl(&[&["stop"], &UNITS[..]].concat())?;
    eprintln!("systemctl stop took {:?}; left {:?}", since.elapsed(), processes()?);
    until("the agent drains and ends", || processes().is_ok_and(|left| left == (Vec::new(), Vec::new())))
        .await?;
    eprintln!("after systemctl stop the last process ended within {:?}", since.elapsed());
    Ok(())
}
