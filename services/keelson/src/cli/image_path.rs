//! `keelson attach` and `keelson bypass`: the agent in the image path of the kubelet, and out of it.
//!
//! Owns: the order of checks, edits and restart. In: settings, the kubelet's files. Out: edited files with a copy of each, a
//! diff, exit codes. `bypass` needs no agent and no valid settings.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, bail};
use clap::Args;
use keelson_config::{DEFAULT_FILE, Settings};

use crate::{
    doctor::{Outcome, before_attach, check_lines, probe},
    kubelet::{
        Kubelet, Options, Sockets,
        diff::diff,
        edit::{self, Direction, Edit, Plan},
        files, find,
    },
    output::{print, print_error},
    settings::{SettingsArgs, or_print_error},
};

/// Flags of both commands.
#[derive(Debug, Args)]
pub(crate) struct KubeletArgs {
    /// Print what would change without changing it.
    #[arg(long)]
    dry_run: bool,
    /// Restart the kubelet (systemctl restart kubelet); attach does so only if a file was changed. Pods keep running.
    #[arg(long, conflicts_with = "dry_run")]
    restart_kubelet: bool,
    /// Configuration file of the kubelet [default: that of its --config, or /var/lib/kubelet/config.yaml].
    #[arg(long, value_name = "FILE")]
    kubelet_config: Option<PathBuf>,
    /// Drop-in directory of the kubelet, as its --config-dir [default: that of its --config-dir].
    #[arg(long, value_name = "DIR")]
    kubelet_config_dir: Option<PathBuf>,
    /// Look for the kubelet's files below this directory, for example the node's root directory in a pod.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

impl KubeletArgs {
    fn options(&self) -> Options {
        Options {
            root: self.root.clone().unwrap_or_default(),
            config: self.kubelet_config.clone(),
            config_dir: self.kubelet_config_dir.clone(),
            ..Options::default()
        }
    }
}

/// Put the agent into the image path of the kubelet.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson attach --dry-run            show what would change\n  \
    keelson attach --restart-kubelet    put the agent into the image path\n\n\
    Refused unless the container runtime and the agent answer and the agent has a limit on parallel\n\
    image pulls. Sets imageServiceEndpoint to the agent, and turns the kubelet's own queue off:\n\
    serializeImagePulls false, registryPullQPS 0, no maxParallelImagePulls. Writes to the kubelet's\n\
    drop-in directory if it has one (--config-dir), otherwise to its configuration file; flags in files\n\
    count more and are changed, too. A copy of each file is kept beside it as FILE.before-keelson, from\n\
    which `keelson bypass` restores the values.")]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    kubelet: KubeletArgs,
    #[command(flatten)]
    settings: SettingsArgs,
}

/// Take the agent out of the image path of the kubelet, whether it runs or not.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson bypass --restart-kubelet    take the agent out now\n  \
    keelson bypass --dry-run            show what would change\n\n\
    Needs no agent and no valid settings. Restores the values that `keelson attach` found. Without them\n\
    the keys are removed, and the kubelet's defaults apply. Keys that were changed since then keep their\n\
    values. A copy of each file is kept beside it as FILE.with-keelson.")]
pub(crate) struct BypassArgs {
    #[command(flatten)]
    kubelet: KubeletArgs,
    #[command(flatten)]
    settings: SettingsArgs,
}

pub(crate) async fn run_attach(args: AttachArgs) -> anyhow::Result<ExitCode> {
    let loaded = match or_print_error(args.settings.check_agent()) {
        Ok(loaded) => loaded,
        Err(code) => return Ok(code),
    };
    let settings = loaded.settings;
    let options = args.kubelet.options();
    let facts = probe::gather_for_attach(settings.clone(), options).await;
    let checks = before_attach(&facts);
    print(check_lines(&checks).trim_end())?;
    if checks.iter().any(|check| check.outcome == Outcome::Failed) {
        print_error("keelson: the kubelet is not changed because a check failed");
        return Ok(ExitCode::FAILURE);
    }
    refuse_unreadable(&facts.kubelet)?;
    if !facts.kubelet.exists() {
        bail!(
            "there is no kubelet: {} does not exist; name its file with --kubelet-config",
            facts.kubelet.config.display()
        );
    }
    let plan = edit::attach(&facts.kubelet, &format!("unix://{}", settings.cri.listen.path().display()))?;
    if plan.edits.is_empty() {
        print("the agent is in the image path; nothing to change")?;
    }
    carry_out(Direction::Attach, &plan, &args.kubelet)?;
    if !plan.edits.is_empty() && !args.kubelet.dry_run {
        take_effect(Direction::Attach, &args.kubelet)?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_bypass(args: &BypassArgs) -> anyhow::Result<ExitCode> {
    let (sockets, settings) = known_sockets(args);
    let kubelet = find(&args.kubelet.options());
    refuse_unreadable(&kubelet)?;
    if !kubelet.exists() {
        print(&format!("there is no kubelet: {} does not exist", kubelet.config.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = settings.map(|settings| settings.cri.runtime_endpoint.to_string());
    let plan = edit::bypass(&kubelet, &sockets, runtime.as_deref())?;
    if plan.edits.is_empty() && kubelet.uses(&sockets).is_empty() {
        print("the agent is not in the image path; nothing to change")?;
    }
    carry_out(Direction::Bypass, &plan, &args.kubelet)?;
    if args.kubelet.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    remove_copies(&kubelet)?;
    if !is_out(&args.kubelet, &sockets)? {
        return Ok(ExitCode::FAILURE);
    }
    // A kubelet that runs may be older than its files.
    if !plan.edits.is_empty() || args.kubelet.restart_kubelet {
        take_effect(Direction::Bypass, &args.kubelet)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Also of files that were not changed: the former values are not needed later.
fn remove_copies(kubelet: &Kubelet) -> anyhow::Result<()> {
    for source in kubelet.sources.iter().filter(|source| source.saved.is_some()) {
        let copy = files::saved(&source.path);
        files::remove(&copy).with_context(|| format!("cannot remove {}; remove it", copy.display()))?;
    }
    Ok(())
}

/// A file that was not read may have the keys that count.
fn refuse_unreadable(kubelet: &Kubelet) -> anyhow::Result<()> {
    match kubelet.errors.first() {
        Some(error) => bail!("{error}; run as root"),
        None => Ok(()),
    }
}

/// What is left that leads to the agent: a unit, which is not changed.
fn is_out(args: &KubeletArgs, sockets: &Sockets) -> anyhow::Result<bool> {
    let left = find(&args.options()).uses(sockets);
    for (key, value) in &left {
        print_error(&format!("keelson: {} is still the agent's in {}", key.name(), value.from.display()));
    }
    Ok(left.is_empty())
}

/// Also with settings that cannot be read: the default, and what the file seems to say.
fn known_sockets(args: &BypassArgs) -> (Sockets, Option<std::sync::Arc<Settings>>) {
    let mut sockets = vec![Settings::default().cri.listen.path().to_owned()];
    match args.settings.load_agent() {
        Ok(loaded) => {
            sockets.push(loaded.settings.cri.listen.path().to_owned());
            (Sockets(sockets), Some(loaded.settings))
        }
        Err(_) => {
            print_error(
                "keelson: the settings cannot be read (keelson config check says why); continuing without them",
            );
            let file = args.settings.config.clone().unwrap_or_else(|| DEFAULT_FILE.into());
            sockets.extend(fs::read_to_string(file).ok().and_then(|text| listen_line(&text)));
            (Sockets(sockets), None)
        }
    }
}

/// `cri.listen` of a file that is no valid TOML.
fn listen_line(text: &str) -> Option<PathBuf> {
    let section = text.split("[cri]").nth(1)?;
    let lines = section.lines().take_while(|line| !line.trim_start().starts_with('['));
    let value = lines
        .into_iter()
        .find_map(|line| line.trim_start().strip_prefix("listen")?.trim_start().strip_prefix('='))?;
    let path = value.split(['"', '\'']).nth(1)?;
    Some(path.strip_prefix("unix://").unwrap_or(path).into())
}

fn carry_out(direction: Direction, plan: &Plan, args: &KubeletArgs) -> anyhow::Result<()> {
    for edit in &plan.edits {
        print(&shown(edit, args.dry_run))?;
    }
    for note in &plan.notes {
        print_error(&format!("keelson: {note}"));
    }
    if !args.dry_run {
        files::apply(direction, &plan.edits)?;
    }
    Ok(())
}

fn take_effect(direction: Direction, args: &KubeletArgs) -> anyhow::Result<()> {
    match args.restart_kubelet {
        true => restart(direction, args.root.as_deref())?,
        false => print("restart the kubelet for this to take effect: systemctl restart kubelet")?,
    }
    Ok(())
}

fn shown(edit: &Edit, is_dry_run: bool) -> String {
    let verb = match (&edit.before, &edit.after, is_dry_run) {
        (None, _, false) => "created",
        (None, _, true) => "would create",
        (_, None, false) => "removed",
        (_, None, true) => "would remove",
        (_, _, false) => "changed",
        (_, _, true) => "would change",
    };
    let (before, after) =
        (edit.before.as_deref().unwrap_or_default(), edit.after.as_deref().unwrap_or_default());
    format!("{verb} {}\n{}", edit.path.display(), diff(before, after))
}

fn restart(direction: Direction, root: Option<&Path>) -> anyhow::Result<()> {
    let status = Command::new("systemctl").args(["restart", "kubelet"]).status();
    let status = status.context("cannot run systemctl; restart the kubelet yourself")?;
    if !status.success() {
        let hint = match direction {
            Direction::Attach => "; to go back: keelson bypass --restart-kubelet",
            Direction::Bypass => "",
        };
        let root = root.map(|root| format!(" (files below {})", root.display())).unwrap_or_default();
        bail!("systemctl restart kubelet failed ({status}){root}; see journalctl -u kubelet{hint}");
    }
    print("restarted the kubelet")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// O5: settings that cannot be read are no reason to stay in the path.
    #[test]
    fn o5_the_socket_of_a_broken_settings_file() {
        for (text, expected) in [
            ("[cri]\nlisten = \"unix:///x/cri.sock\"\n[pulls\n", Some("/x/cri.sock")),
            ("[pulls]\nlisten = \"unix:///x\"\n", None),
            ("[cri]\n[debug]\nlisten = 'unix:///x'\n", None),
            ("[cri]\nlisten=unix\n", None),
            ("", None),
        ] {
            assert_eq!(listen_line(text), expected.map(PathBuf::from), "{text}");
        }
    }

    /// A copy that stays would be restored by a later bypass, and fail `keelson doctor`.
    #[test]
    fn a_bypass_without_a_change_removes_copies() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |path: &str| folder.path().join(path);
        fs::create_dir_all(at("var/lib/kubelet")).expect("makes");
        fs::write(at("var/lib/kubelet/config.yaml"), "registryPullQPS: 9\n").expect("writes");
        fs::write(at("var/lib/kubelet/config.yaml.before-keelson"), "registryPullQPS: 5\n").expect("writes");
        fs::write(at("keelson.toml"), "").expect("writes");
        let bypass = |is_dry_run: bool| {
            let args = BypassArgs {
                kubelet: KubeletArgs {
                    dry_run: is_dry_run,
                    restart_kubelet: false,
                    kubelet_config: None,
                    kubelet_config_dir: None,
                    root: Some(folder.path().into()),
                },
                settings: SettingsArgs {
                    config: Some(at("keelson.toml")),
                    sets: Vec::new(),
                    feature_gates: Vec::new(),
                },
            };
            run_bypass(&args).expect("bypasses");
            at("var/lib/kubelet/config.yaml.before-keelson").exists()
        };
        assert!(bypass(true));
        assert!(!bypass(false));
        let text = fs::read_to_string(at("var/lib/kubelet/config.yaml")).expect("reads");
        assert_eq!(text, "registryPullQPS: 9\n");
    }

    #[test]
    fn a_dry_run_says_would() {
        let edit = |before: Option<&str>, after: Option<&str>| Edit {
            path: "/f".into(),
            before: before.map(Into::into),
            after: after.map(Into::into),
            saves: true,
        };
        assert_eq!(shown(&edit(Some("a\n"), Some("b\n")), true), "would change /f\n-a\n+b\n");
        assert_eq!(shown(&edit(None, Some("b\n")), false), "created /f\n+b\n");
        assert_eq!(shown(&edit(Some("a\n"), None), false), "removed /f\n-a\n");
    }
}
