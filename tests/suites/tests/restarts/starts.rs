//! Starts beside an agent that runs, that is being killed, or whose successor fails.

use crate::{
    common::{TestEnv, all_succeed},
    settings,
};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::containerd::Kind;
use keelson_harness::images::TINY;
use std::{os::unix::process::ExitStatusExt as _, path::PathBuf};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

fn handover_socket(env: &TestEnv) -> PathBuf {
    let mut path = env.agent.socket().into_os_string();
    path.push(".handover");
    path.into()
}

async fn send_frame(stream: &mut UnixStream, frame: &str) -> Result<()> {
    stream.write_all(&u32::try_from(frame.len())?.to_be_bytes()).await?;
    Ok(stream.write_all(frame.as_bytes()).await?)
}

async fn receive_frame(stream: &mut UnixStream) -> Result<String> {
    let length = stream.read_u32().await?;
    let mut frame = vec![0; length as usize];
    stream.read_exact(&mut frame).await?;
    Ok(String::from_utf8(frame)?)
}

/// Takes over as a new agent does, up to the state.
async fn take(env: &TestEnv) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(handover_socket(env)).await?;
    send_frame(&mut stream, r#"{"hello":{"version":1,"pid":1}}"#).await?;
    let status = receive_frame(&mut stream).await?;
    ensure!(status.contains(r#""is_stopping":true"#), "{status}");
    send_frame(&mut stream, r#""take""#).await?;
    let state = receive_frame(&mut stream).await?;
    ensure!(state.contains(r#""state""#), "{state}");
    Ok(stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_an_agent_started_during_a_kill_starts() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    for _ in 0..10 {
        // The kernel tears down the old process while the new one starts.
        env.agent.kill9_and_start().await?;
    }
    env.agent.cri().await?.version().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_a_second_agent_is_refused_when_the_first_one_stays() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    let ended = env.agent.start_refused().await?;
    ensure!(!ended.success(), "{ended}");
    let log = env.agent.log()?;
    ensure!(log.contains("another agent (pid") && log.contains("stop it or set cri.listen"), "{log}");
    env.agent.cri().await?.version().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_garbage_on_the_handover_socket_is_ignored() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    for garbage in [&b"\xff\xff\xff\xff"[..], b"\0\0\0\x02{}", b"GET / HTTP/1.1\r\n\r\n", b""] {
        let mut stream = UnixStream::connect(handover_socket(&env)).await?;
        stream.write_all(garbage).await?;
    }
    // An agent that is not stopping hands over nothing, whatever is requested.
    let mut stream = UnixStream::connect(handover_socket(&env)).await?;
    send_frame(&mut stream, r#"{"hello":{"version":1,"pid":1}}"#).await?;
    ensure!(receive_frame(&mut stream).await?.contains(r#""is_stopping":false"#));
    // It may have closed the connection before the request.
    let taken = async {
        send_frame(&mut stream, r#""take""#).await?;
        receive_frame(&mut stream).await
    };
    ensure!(taken.await.is_err(), "it gives nothing away");
    env.agent.replace().await?;
    env.agent.cri().await?.version().await?;
    let metrics = env.agent.http_get("/metrics").await?.success()?;
    let line = "keelson_handovers_total{result=\"taken_over\"} 1";
    ensure!(metrics.text().contains(line), "{}", metrics.text());
    // A store that is still being opened is no failure.
    let log = env.agent.log()?;
    ensure!(!log.contains("cannot write the journal"), "{log}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_a_successor_killed_during_the_hand_over_fails_no_call() -> Result<()> {
    // The next one has as much time as the first, however late that one came.
    let mut env = TestEnv::start(Kind::V2, &settings(1).set("agent.drain_timeout", "0s")).await?;
    let images = env.node.push_many("dies", 3, TINY).await?;
    let holds = env.hold_each(&images);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..1]).await?;
    env.agent.sigterm()?;
    // Two in a row take over everything and exit before they serve.
    for attempt in 0..2 {
        let dies = keelson_harness::util::eventually(
            keelson_harness::util::PATIENCE,
            "the agent hands over",
            || async { take(&env).await.with_context(|| format!("attempt {attempt}")) },
        )
        .await?;
        drop(dies);
    }
    let mut old = env.agent.start_successor().await?;
    env.wait_for_pulls("all callers wait", |pulls| {
        pulls.running == 1 && pulls.queued == 2 && pulls.callers == 2
    })
    .await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed(going, &images).await?;
    ensure!(old.wait(keelson_harness::util::PATIENCE).await?.success());
    env.idle().await
}

/// The response of an agent that stops to a successor of another version, up to the end of the stream.
async fn greeted(env: &TestEnv, version: u32) -> Result<String> {
    let mut stream = UnixStream::connect(handover_socket(env)).await?;
    send_frame(&mut stream, &format!(r#"{{"hello":{{"version":{version},"pid":1,"new_field":[]}}}}"#))
        .await?;
    let status = receive_frame(&mut stream).await?;
    ensure!(status.contains(r#""is_stopping":true"#), "{status}");
    let taken = async {
        send_frame(&mut stream, r#""take""#).await?;
        receive_frame(&mut stream).await
    };
    ensure!(taken.await.is_err(), "it gives no state to another version");
    Ok(status)
}

/// I8: with a successor, and then with a predecessor, of an older and of a newer version the agent behaves as without
/// one: it drains, keeps the queue in the journal, and the next one waits until its predecessor has exited.
#[tokio::test(flavor = "multi_thread")]
async fn i8_another_version_of_the_hand_over_means_a_plain_restart() -> Result<()> {
    for version in [0, 2] {
        let settings = settings(1).set("agent.handover_timeout", "2s").set("agent.drain_timeout", "1m");
        let mut env = TestEnv::start(Kind::V2, &settings).await?;
        let images = env.node.push_many("version", 2, TINY).await?;
        let holds = env.hold_each(&images);
        let mut going = env.begin_in_order(&images).await?;
        env.wait_for_active(&images[..1]).await?;
        env.agent.sigterm()?;
        let status =
            keelson_harness::util::eventually(keelson_harness::util::PATIENCE, "the agent stops", || async {
                greeted(&env, version).await
            })
            .await?;
        ensure!(status.contains(r#""version":1"#), "{status}");
        // It drains: the queued caller gets a retryable error, the running pull continues to its end.
        let queued = going.pop().context("two pulls")?.await?;
        ensure!(queued.is_err_and(|status| status.code() == tonic::Code::Unavailable), "refused");
        for hold in holds {
            env.node.proxy.remove(hold);
        }
        all_succeed(going, &images[..1]).await?;
        ensure!(env.agent.end().await?.success());

        // A predecessor of that version, which is slow to stop.
        let socket = handover_socket(&env);
        let listener = tokio::net::UnixListener::bind(&socket)?;
        let (asked, mut questions) = tokio::sync::mpsc::unbounded_channel();
        let predecessor = tokio::spawn(async move {
            let status = format!(r#"{{"status":{{"version":{version},"pid":1,"is_stopping":true}}}}"#);
            while let Ok((mut stream, _)) = listener.accept().await {
                let hello = receive_frame(&mut stream).await?;
                send_frame(&mut stream, &status).await?;
                let more = receive_frame(&mut stream).await;
                let _ = asked.send((hello, more.is_ok()));
            }
            anyhow::Ok(())
        });
        let starts = env.agent.start_again();
        let ends = async {
            for _ in 0..20 {
                let (hello, asks) = questions.recv().await.context("the agent looks again and again")?;
                ensure!(hello.contains(r#""version":1"#) && !asks, "{hello}: it asks for nothing");
            }
            predecessor.abort();
            std::fs::remove_file(&socket)?;
            anyhow::Ok(())
        };
        let (started, ended) = tokio::join!(starts, ends);
        ended?;
        started?;
        let metrics = env.agent.http_get("/metrics").await?.success()?;
        let line = "keelson_handovers_total{result=\"other_version\"} 1";
        ensure!(metrics.text().contains(line), "{}", metrics.text());
        env.cri = env.agent.cri().await?;
        // The queued pull was in the journal: it continues, with its caller or without.
        all_succeed([env.begin(&images[1])], &images[1..]).await?;
        env.idle().await?;
    }
    Ok(())
}

/// Starts the agent again as the unit does, and returns systemd's socket and the process ID of its stand-in. systemd is told of it with READY: it
/// accepts no main process of a service that stops.
async fn start_managed(env: &mut TestEnv) -> Result<(tokio::net::UnixDatagram, String)> {
    let path = env.node.scratch.path().join("notify");
    let manager = tokio::net::UnixDatagram::bind(&path)?;
    env.agent.env("NOTIFY_SOCKET", &path.display().to_string());
    env.agent.arg("--systemd-handover");
    env.agent.kill9()?;
    env.agent.start_again().await?;
    let stand_in = notifications(&manager, "MAINPID").await?;
    Ok((manager, stand_in))
}

/// The next line with the prefix `key=` that the agent sends to its service manager.
async fn notifications(manager: &tokio::net::UnixDatagram, key: &str) -> Result<String> {
    let mut buffer = [0; 4096];
    tokio::time::timeout(keelson_harness::util::PATIENCE, async {
        loop {
            let length = manager.recv(&mut buffer).await?;
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if let Some(value) = text.lines().find_map(|line| line.strip_prefix(&format!("{key}="))) {
                return anyhow::Ok(value.to_owned());
            }
        }
    })
    .await
    .with_context(|| format!("the manager did not receive {key}"))?
}

fn is_stopped(pid: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut states = tasks.map(|task| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default());
    states.all(|stat| stat.contains(") T "))
}

fn runs(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_systemd_sees_the_main_process_end_while_the_agent_serves_on() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    let (_manager, stand_in) = start_managed(&mut env).await?;
    env.cri = env.agent.cri().await?;
    env.cri.version().await?;
    let images = env.node.push_many("systemd", 1, TINY).await?;
    let hold = env.hold(&images[0]);
    let going = env.begin(&images[0]);
    env.wait_for_callers(1).await?;
    let agent = env.agent.pid().context("it runs")?.to_string();

    ensure!(stand_in != agent);
    let main = nix::unistd::Pid::from_raw(stand_in.parse()?);
    nix::sys::signal::kill(main, nix::sys::signal::Signal::SIGTERM)?;
    keelson_harness::util::until("the stand-in ends", || !runs(&stand_in)).await?;
    ensure!(runs(&agent), "the agent serves on");
    // As systemd starts the service again.
    let mut old = env.agent.start_successor().await?;
    env.node.proxy.remove(hold);
    all_succeed([going], &images).await?;
    ensure!(old.wait(keelson_harness::util::PATIENCE).await?.success());
    Ok(())
}

/// What systemd's watchdog sends reaches the stand-in only. An agent that is stopped does not take SIGABRT, and would keep its
/// sockets from every successor.
#[tokio::test(flavor = "multi_thread")]
async fn i9_the_watchdog_ends_an_agent_that_does_not_react_to_any_signal() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    let (_manager, stand_in) = start_managed(&mut env).await?;
    let agent = env.agent.pid().context("it runs")?;
    let send = |pid: &str, signal| -> Result<()> {
        Ok(nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.parse()?), signal)?)
    };
    let agent = agent.to_string();
    send(&agent, nix::sys::signal::Signal::SIGSTOP)?;
    // Before it has stopped it would take SIGABRT.
    keelson_harness::util::until("the agent is stopped", || is_stopped(&agent)).await?;
    send(&stand_in, nix::sys::signal::Signal::SIGABRT)?;
    let status = env.agent.end().await?;
    ensure!(status.signal() == Some(9), "only SIGKILL ends it: {status}");
    env.agent.start_again().await?;
    env.agent.cri().await?.version().await?;
    Ok(())
}
