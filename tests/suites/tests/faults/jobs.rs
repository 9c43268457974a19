//! I9 and I22: jobs beside the CRI fail separately, are reported, and are retried; the CRI path is checked end to end.

use crate::common::start_pull;
use crate::fake::GatedRuntime;
use crate::systemd::Manager;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, free_port, until};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

const EXAMPLE: &str = "registry.example/good-app:1";

/// A runtime whose pulls wait, and an agent of it that is not started yet.
fn prepared(settings: &Settings) -> Result<(Scratch, GatedRuntime, Agent)> {
    let scratch = Scratch::new()?;
    let runtime = GatedRuntime::start(&scratch)?;
    let agent = Agent::new(&scratch, &runtime.endpoint(), settings)?;
    Ok((scratch, runtime, agent))
}

#[tokio::test(flavor = "multi_thread")]
async fn i22_used_ports_disable_their_jobs_until_they_are_free() -> Result<()> {
    let scratch = Scratch::new()?;
    let runtime = GatedRuntime::start(&scratch)?;
    let port = free_port()?;
    let endpoints = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let settings = Settings::limit(3)
        .set("endpoints.manifests", scratch.dir("manifests")?.display().to_string())
        .set("endpoints.listen", vec![format!("tcp://127.0.0.1:{port}")]);
    let mut agent = Agent::new(&scratch, &runtime.endpoint(), &settings)?;
    let page = agent.url().trim_start_matches("http://").to_owned();
    let page = TcpListener::bind(page)?;
    let (socket, log) = (agent.socket(), agent.log_file());

    // While the page cannot listen, a pull begins.
    let begin = async {
        let cri = eventually(PATIENCE, "the CRI socket serves", || async {
            let cri = Cri::connect(&socket).await?;
            cri.version().await?;
            Ok(cri)
        })
        .await?;
        let pull = start_pull(&cri, Pull::new(EXAMPLE));
        until("the pull runs", || runtime.pulls() == 1).await?;
        until("the log names the setting", || {
            fs::read_to_string(&log).is_ok_and(|log| log.contains("debug.http"))
        })
        .await?;
        drop(page);
        Ok::<_, anyhow::Error>((cri, pull))
    };
    let (started, begun) = tokio::join!(agent.start_live(), begin);
    started?;
    let (cri, pull) = begun?;

    // The page is served, and shows which other job fails, why, and when it is retried.
    let ready = agent.http_get("/readyz").await?.text();
    for word in ["EndpointsServer", "endpoints.listen", "next try in"] {
        ensure!(ready.contains(word), "{word:?} is not in {ready}");
    }
    let metrics = agent.http_get("/metrics").await?.text();
    for line in ["keelson_job_up{job=\"EndpointsServer\"} 0", "keelson_job_up{job=\"DebugHttp\"} 1"] {
        ensure!(metrics.lines().any(|have| have == line), "{line} is not in {metrics}");
    }
    let actors = agent.json("/debug/actors").await?;
    ensure!(actors.to_string().contains("failing"), "{actors}");
    cri.version().await?;
    drop(endpoints);
    eventually(PATIENCE, "the Endpoints API listens", || async {
        let ready = agent.http_get("/readyz").await?.text();
        ensure!(!ready.contains("EndpointsServer"), "{ready}");
        tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        Ok(())
    })
    .await?;
    runtime.open();
    pull.await??;
    ensure!(agent.terminate().await?.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i22_a_used_debug_socket_is_retried_until_it_is_free() -> Result<()> {
    let (_scratch, _runtime, mut agent) = prepared(&Settings::new())?;
    let other = std::os::unix::net::UnixListener::bind(agent.debug_socket())?;
    agent.start_live().await?;
    agent.cri().await?.version().await?;
    let ready = agent.http_get("/readyz").await?.text();
    ensure!(ready.contains("DebugSocket") && ready.contains("next try in"), "{ready}");
    drop(other);
    eventually(PATIENCE, "the debug socket is the agent's", || async {
        let ready = agent.http_get("/readyz").await?.text();
        ensure!(!ready.contains("DebugSocket"), "{ready}");
        Ok(())
    })
    .await?;
    tokio::net::UnixStream::connect(agent.debug_socket()).await?;
    ensure!(agent.terminate().await?.success());
    ensure!(!agent.debug_socket().exists(), "it takes its socket along");
    Ok(())
}

/// One thread of a process, stopped by a tracer; it continues on drop.
struct Stopped {
    go: Option<mpsc::Sender<()>>,
    tracer: Option<JoinHandle<()>>,
}

impl Stopped {
    fn thread(pid: u32, name: &str) -> Result<Self> {
        let thread = fs::read_dir(format!("/proc/{pid}/task"))?
            .filter_map(Result::ok)
            .find(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name))
            .with_context(|| format!("no thread is called {name}"))?;
        let thread = Pid::from_raw(thread.file_name().to_string_lossy().parse()?);
        let (go, wait) = mpsc::channel();
        let (stopped, seen) = mpsc::channel();
        // All requests of a tracer must come from one thread.
        let tracer = std::thread::spawn(move || {
            let stop = || -> Result<()> {
                ptrace::seize(thread, ptrace::Options::empty())?;
                ptrace::interrupt(thread)?;
                waitpid(thread, Some(WaitPidFlag::__WALL))?;
                Ok(())
            };
            let _ = stopped.send(stop());
            let _ = wait.recv();
            let _ = ptrace::detach(thread, None);
        });
        let this = Self { go: Some(go), tracer: Some(tracer) };
        seen.recv()??;
        Ok(this)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        drop(self.go.take());
        if let Some(tracer) = self.tracer.take() {
            let _ = tracer.join();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_livez_fails_while_the_thread_of_the_cri_is_stuck() -> Result<()> {
    let (_scratch, _runtime, mut agent) = prepared(&Settings::new())?;
    agent.start_live().await?;
    let pid = agent.pid().context("it runs")?;
    let stopped = Stopped::thread(pid, "cri")?;
    eventually(PATIENCE, "/livez fails", || async {
        let live = agent.http_get("/livez").await?;
        ensure!(live.status == 500 && live.text().contains("cri-socket"), "{} {}", live.status, live.text());
        Ok(())
    })
    .await?;
    drop(stopped);
    eventually(PATIENCE, "/livez succeeds", || async { agent.http_get("/livez").await?.success().map(drop) })
        .await?;
    agent.cri().await?.version().await?;
    Ok(())
}

/// I9: systemd's watchdog is not notified while the CRI thread is stuck, so that systemd restarts the agent.
#[tokio::test(flavor = "multi_thread")]
async fn i9_the_watchdog_is_not_fed_while_the_thread_of_the_cri_is_stuck() -> Result<()> {
    let (scratch, _runtime, mut agent) = prepared(&Settings::new())?;
    let manager = Manager::start(&scratch, &mut agent)?;
    // Notified every 100 ms.
    agent.env("WATCHDOG_USEC", "300000");
    agent.start_live().await?;
    manager.wait_for_notification("WATCHDOG=1").await?;
    let stopped = Stopped::thread(agent.pid().context("it runs")?, "cri")?;
    until("the agent notices", || agent.log().is_ok_and(|log| log.contains("CRI path does not answer")))
        .await?;
    let before = manager.waiting();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let output = manager.waiting();
    ensure!(output.is_empty(), "fed anyway: {output:?}, before: {before:?}");
    drop(stopped);
    manager.wait_for_notification("WATCHDOG=1").await?;
    agent.cri().await?.version().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_pulls_pass_through_while_the_coordinator_is_stuck() -> Result<()> {
    let settings = Settings::limit(1).set("cri.decision_timeout", "1s");
    let (_scratch, runtime, mut agent) = prepared(&settings)?;
    agent.start_live().await?;
    let cri = agent.cri().await?;
    let slow = start_pull(&cri, Pull::new("registry.example/good-slow:1"));
    until("a pull runs", || runtime.pulls() == 1).await?;
    let stopped = Stopped::thread(agent.pid().context("it runs")?, "pulls")?;
    let passed = start_pull(&cri, Pull::new(EXAMPLE));
    until("the pull has passed through, beyond the limit", || runtime.pulls() == 2).await?;
    cri.version().await?;
    let metrics = agent.http_get("/metrics").await?.text();
    let line = "keelson_image_pulls_passed_through_total{reason=\"no_decision\"} 1";
    ensure!(metrics.lines().any(|have| have == line), "{metrics}");
    let ready = agent.http_get("/readyz").await?.text();
    ensure!(ready.contains("without admission"), "{ready}");
    let live = agent.http_get("/livez").await?;
    ensure!(live.status == 500 && live.text().contains("PullCoordinator"), "{}", live.text());
    drop(stopped);
    eventually(PATIENCE, "decisions are possible again", || async {
        agent.http_get("/livez").await?.success()?;
        let ready = agent.http_get("/readyz").await?.text();
        ensure!(!ready.contains("without admission"), "{ready}");
        Ok(())
    })
    .await?;
    runtime.open();
    slow.await??;
    passed.await??;
    ensure!(runtime.pulls() == 2, "the late coordinator has not started the pull again");
    let list = agent.pulls_json().await?;
    ensure!(list["passed_through"].as_u64() == Some(1) || list.to_string().contains("passed"), "{list}");
    Ok(())
}
