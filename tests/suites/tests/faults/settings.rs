//! Starts that must be refused with a helpful message, and without side effects.

use crate::common::pid_behind;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::containerd::Kind;
use keelson_harness::node::Node;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, http_get};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Starts an agent that must refuse to run, and returns its exit code and its error output.
pub(crate) async fn refused(agent: &mut Agent) -> Result<(Option<i32>, String)> {
    let from = agent.log().map_or(0, |log| log.len());
    let status = agent.start_refused().await?;
    let message = agent.log()?.split_off(from);
    ensure!(!status.success(), "it exited with success and printed:\n{message}");
    ensure!(!message.contains("panic"), "{message}");
    Ok((status.code(), message))
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_settings_exit_with_code_2_and_list_all_errors() -> Result<()> {
    let scratch = Scratch::new()?;
    let wrong = Settings::new()
        .set("pulls.when_full", "maybe")
        .set("pulls.max_parallel_image_pulls", -3)
        .set("pulls.max_paralel", 3)
        .set("cri.hold_timeout", "soon")
        .set("cri.socket_mode", "0666")
        .set("kubelet.enabled", true);
    let mut agent = Agent::new(&scratch, "tcp://127.0.0.1:1", &wrong)?;
    agent.env("KELSON_IGNORED", "not ours");
    agent.env("KEELSON_PULLS__STALL_TIMEOUT", "never");
    agent.arg("--set");
    agent.arg("debug.http=everywhere");
    let (code, message) = refused(&mut agent).await?;
    ensure!(code == Some(2), "exit code {code:?}: {message}");
    for mistake in [
        "when_full",
        "maybe",
        "max_parallel_image_pulls",
        "-3",
        "max_paralel",
        "hold_timeout",
        "soon",
        "socket_mode",
        "0666",
        "kubelet",
        "runtime_endpoint",
        "tcp://127.0.0.1:1",
        "KEELSON_PULLS__STALL_TIMEOUT",
        "never",
        "debug.http",
        "everywhere",
        "keelson.toml",
    ] {
        ensure!(message.contains(mistake), "{mistake:?} is not in:\n{message}");
    }
    ensure!(!message.contains("KELSON_IGNORED"), "{message}");
    ensure!(!agent.state_dir().exists() && !agent.socket().exists(), "nothing was touched");

    fs::write(agent.config(), "[pulls\nwhen_full = ")?;
    let (code, message) = refused(&mut agent).await?;
    ensure!(code == Some(2) && message.contains("keelson.toml"), "exit code {code:?}: {message}");
    fs::remove_file(agent.config())?;
    let (code, message) = refused(&mut agent).await?;
    ensure!(code == Some(2) && message.contains("keelson.toml"), "exit code {code:?}: {message}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_with_the_same_sockets_is_refused_and_the_first_continues() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 5, 1 << 10).await?;
    let mut first = node.agent(&Settings::new()).await?;
    let pid = first.pid().context("it runs")?.to_string();
    let cases = [("cri.listen", first.endpoint(), vec!["another agent (pid", "cri.sock"])];
    let cri = first.cri().await?;
    for ((key, value, words), image) in cases.into_iter().zip(&images) {
        let settings = Settings::new().set(key, value.as_str());
        let mut second = Agent::new(&node.scratch, &node.runtime.endpoint(), &settings)?;
        let (_, message) = refused(&mut second).await?;
        for word in words {
            ensure!(message.contains(word), "{key}: {word:?} is not in:\n{message}");
        }
        // The running agent lost neither its sockets nor its state.
        cri.pull_image(&node.name(image)).await?;
        first.cri().await?.version().await?;
        ensure!(pid_behind(&first.debug_socket()).await?.to_string() == pid);
        http_get(&first.url()).await?;
    }
    ensure!(first.terminate().await?.success());
    ensure!(!first.socket().exists() && !first.debug_socket().exists(), "it takes its sockets along");
    Ok(())
}

fn inode(path: &Path) -> Result<u64> {
    Ok(fs::symlink_metadata(path)?.ino())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_socket_is_replaced_and_a_foreign_file_is_not() -> Result<()> {
    let scratch = Scratch::new()?;
    let mut agent = Agent::new(&scratch, &no_runtime(&scratch), &Settings::new())?;
    agent.start_live().await?;
    agent.kill9()?;
    let stale = (inode(&agent.socket())?, inode(&agent.debug_socket())?);
    agent.start_live().await?;
    agent.cri().await.context("the new socket answers")?;
    let new = (inode(&agent.socket())?, inode(&agent.debug_socket())?);
    ensure!(stale.0 != new.0 && stale.1 != new.1, "the sockets are new ones");
    ensure!(agent.terminate().await?.success());

    let path = agent.socket();
    fs::write(&path, "precious")?;
    let (_, message) = refused(&mut agent).await?;
    ensure!(message.contains(&path.display().to_string()) && message.contains("not a socket"), "{message}");
    ensure!(fs::read(&path)? == b"precious", "the existing file is unchanged");
    fs::remove_file(&path)?;
    fs::create_dir(&path)?;
    refused(&mut agent).await?;
    ensure!(path.is_dir());
    fs::remove_dir(&path)?;

    // I22: the debug socket is a job, which is retried.
    let path = agent.debug_socket();
    fs::write(&path, "precious")?;
    agent.start_live().await?;
    let ready = agent.http_get("/readyz").await?.text();
    ensure!(ready.contains("DebugSocket") && ready.contains("not a socket"), "{ready}");
    ensure!(fs::read(&path)? == b"precious", "the existing file is unchanged");
    fs::remove_file(&path)?;
    eventually(PATIENCE, "the debug socket is made", || async {
        Ok(tokio::net::UnixStream::connect(&path).await.map(drop)?)
    })
    .await?;
    ensure!(agent.terminate().await?.success());
    agent.start_live().await?;
    let left: Vec<_> = fs::read_dir(agent.socket().parent().context("a folder")?)?.flatten().collect();
    let names: Vec<_> = left.iter().map(|entry| entry.file_name()).collect();
    // Created as `NAME.PROCESS` before they are renamed.
    let is_temporary = |name: &str| {
        name.rsplit_once(".sock.").is_some_and(|(_, end)| end.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let temporary = names.iter().filter(|name| is_temporary(&name.to_string_lossy())).count();
    ensure!(temporary == 0, "refused starts leave nothing behind: {names:?}");
    Ok(())
}
