//! Owns: the commands of docs/rollout.md, each run as it is written. In: how a command begins. Out: what it printed, and an error
//! if a command was never run.

use super::{NODE, OneNode};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_harness::command::{CommandOutput, run};
use keelson_harness::documents::{command_blocks, repository};
use keelson_harness::peers;
use std::cell::Cell;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use tokio::process::Command;

const DOCUMENT: &str = "docs/rollout.md";

/// The operator's registry in the document.
const REGISTRY: &str = "registry.your.domain";

/// Commands that need a control plane that kubeadm made. The suite `docs` has what they do.
const NOT_HERE: &str = "kubeadm upgrade ";

#[derive(Debug)]
pub(super) struct Rollout {
    commands: Vec<DocumentedCommand>,
    registry: String,
    kubeconfig: PathBuf,
    /// Where they run, as in a checkout.
    folder: PathBuf,
    /// `PATH`
    programs: String,
}

#[derive(Debug)]
struct DocumentedCommand {
    text: String,
    has_run: Cell<bool>,
}

impl Rollout {
    pub(super) fn new(node: &OneNode) -> Result<Self> {
        let mut commands = Vec::new();
        for block in command_blocks(DOCUMENT)? {
            commands.extend(block.commands().into_iter().filter(|text| !text.starts_with(NOT_HERE)));
        }
        let image = format!("{REGISTRY}/keelson:");
        for tag in commands.iter().filter_map(|text| text.split_once(&image)).map(|(_, tag)| tag) {
            let version = env!("CARGO_PKG_VERSION");
            ensure!(
                tag.split_whitespace().next() == Some(version),
                "{DOCUMENT} names another image than that of {version}: {tag}"
            );
        }
        let folder = node.operator.manifests.clone();
        symlink(repository().join("packaging"), folder.join("packaging"))
            .context("cannot link to packaging")?;
        let mut programs = std::env::var("PATH").context("there is no PATH")?;
        for program in [peers::kubernetes("kubectl")?, peers::chart_tool("helm")?, peers::keelson()?] {
            let at = program.parent().context("a program is in a folder")?;
            programs = format!("{}:{programs}", at.display());
        }
        Ok(Self {
            commands: commands
                .into_iter()
                .map(|text| DocumentedCommand { text, has_run: Cell::new(false) })
                .collect(),
            registry: node.operator.registry.address().to_owned(),
            kubeconfig: node.operator.kubeconfig.clone(),
            folder,
            programs,
        })
    }

    /// Runs the only command that begins so, which must succeed.
    pub(super) async fn run(&self, begins: &str) -> Result<CommandOutput> {
        let found: Vec<_> = self.commands.iter().filter(|command| command.text.starts_with(begins)).collect();
        let [command] = *found else {
            bail!("{DOCUMENT} has {} commands that begin with {begins:?}, and not one", found.len())
        };
        command.has_run.set(true);
        let mut bash = Command::new("bash");
        bash.arg("-euo").arg("pipefail").arg("-c");
        bash.arg(command.text.replace("NODE", NODE).replace(REGISTRY, &self.registry));
        bash.current_dir(&self.folder).env("KUBECONFIG", &self.kubeconfig).env("PATH", &self.programs);
        run(bash).await?.success().with_context(|| format!("{DOCUMENT}: {}", command.text))
    }

    /// Fails if the document has a command that was not run.
    pub(super) fn is_complete(&self) -> Result<()> {
        let left: Vec<_> = self.commands.iter().filter(|command| !command.has_run.get()).collect();
        ensure!(left.is_empty(), "commands of {DOCUMENT} were not run: {left:?}");
        Ok(())
    }
}
