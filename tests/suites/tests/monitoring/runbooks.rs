//! The queries that the runbooks show, by promtool against a real Prometheus.
//!
//! Owns: nothing. In: `docs/runbooks.md`, a Prometheus with data of a node. Out: errors that name the line.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use keelson_harness::peers;
use keelson_harness::util::eventually_slow;
use tokio::process::Command;

use crate::files;

const RUNBOOKS: &str = "docs/runbooks.md";
const BEGINS: &str = "$ promtool ";

/// Waits until each query has a result. The machine's shell removes quotes and comments.
pub(crate) async fn queries_have_results(prometheus: &str) -> Result<()> {
    let promtool = peers::system("promtool", "prometheus")?;
    let text = std::fs::read_to_string(files::path(RUNBOOKS))?;
    let commands: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(BEGINS)).collect();
    ensure!(!commands.is_empty(), "{RUNBOOKS} has no queries");
    for command in commands {
        let concrete = command.replace("http://PROMETHEUS", prometheus);
        ensure!(concrete != command, "{command} asks no Prometheus");
        let script = format!("{} {concrete}", promtool.display());
        eventually_slow(&format!("a result of {command}"), || async {
            let output = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).output().await;
            let output = output.context("cannot start sh")?;
            let (result, problem) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            ensure!(output.status.success(), "{}: {problem}", output.status);
            // `NAME{LABELS} => VALUE @[TIME]`, a line each.
            ensure!(result.contains("=>"), "no result: {result}{problem}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}
