//! Read and write access through the debug socket (I12).

use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::node::Node;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;

/// A user without rights here, with the group of the socket.
const LOOKER: &str = "64999";

/// Runs a command of the program as a user who is in the group of the agent's sockets and is not root.
async fn as_looker(program: &Path, agent: &Agent, command: &[&str]) -> Result<Output> {
    let mut run = tokio::process::Command::new("setpriv");
    run.args(["--reuid", LOOKER, "--regid", "0", "--clear-groups", "--"]);
    run.arg(program).args(command);
    run.args(["--socket", &format!("unix://{}", agent.debug_socket().display())]);
    run.kill_on_drop(true).output().await.context("cannot run setpriv")
}

/// I12: the group of the socket may read; the limit and conditions may be changed by root and `debug.control_users`.
#[tokio::test(flavor = "multi_thread")]
async fn the_group_of_the_socket_has_read_access_only() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    std::fs::set_permissions(node.scratch.path(), Permissions::from_mode(0o755))?;
    let agent = node.agent(&Settings::limit(3)).await?;
    // The folder of the build may be closed to other users.
    let program = node.scratch.path().join("keelson");
    std::fs::copy(agent.program(), &program)?;
    let message = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    for look in [&["pulls"][..], &["actors"], &["limit"], &["state"]] {
        let output = as_looker(&program, &agent, look).await?;
        ensure!(output.status.success(), "keelson {look:?}: {}", message(&output));
    }
    let change = ["limit", "7"];
    let refused = as_looker(&program, &agent, &change).await?;
    ensure!(
        !refused.status.success() && message(&refused).contains("read access only"),
        "{}",
        message(&refused)
    );
    let condition = ["node", "set-condition", "X", "True", "--reason", "R"];
    let refused = as_looker(&program, &agent, &condition).await?;
    ensure!(
        !refused.status.success() && message(&refused).contains("read access only"),
        "{}",
        message(&refused)
    );
    drop(agent);

    let agent = node.agent(&Settings::limit(3).set("debug.control_users", LOOKER)).await?;
    let output = as_looker(&program, &agent, &change).await?;
    ensure!(output.status.success(), "{}", message(&output));
    Ok(())
}
