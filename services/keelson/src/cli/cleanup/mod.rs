//! `keelson cleanup`: removes what the agent left in the runtime and at the API server.
//!
//! Owns: the order of removal and the report. In: settings; no running agent is needed. Out: deleted leases of the
//! runtime, the agent's Lease and conditions at the API server, with `--state` sockets and state folder; one line per
//! object, and exit code 1 if one could not be removed.

mod cluster;
mod report;
mod state;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use keelson_config::Settings;
use keelson_cri::runtime::{CleanupError, LeaseCleaner};

use super::args::Output;
use crate::{
    kubelet::{self, Options, Sockets},
    output::{json, print, print_error},
    settings::{SettingsArgs, or_print_error},
};
use report::{Outcome, Report};

/// Remove the agent's leases from the container runtime and its objects from the API server.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson cleanup --dry-run      show what would be removed\n  \
    keelson cleanup                remove them; stop the agent first\n  \
    keelson cleanup --state        also remove the sockets and the state directory\n\n\
    Deletes the containerd leases of every agent that used this runtime; their content belongs to no image.\n\
    Deletes the agent's Lease and node conditions at the API server with the credentials of the settings,\n\
    including conditions of earlier versions and conditions set with `keelson node set-condition`, which the\n\
    state directory records. `keelson proxy cleanup` removes the rules of the service proxy. Accounts and\n\
    permissions belong to the cluster: kubectl delete -f the manifests that were applied. Refused while the\n\
    kubelet uses the agent (`keelson bypass` first). The exit code is 1 if an object could not be removed.")]
pub(crate) struct CleanupArgs {
    /// Print what would be removed without removing it.
    #[arg(long)]
    dry_run: bool,
    /// Also remove the sockets and the state directory (agent.state_dir).
    #[arg(long)]
    state: bool,
    /// Clean up even if an agent is running, or the kubelet uses it. Running pulls fail or restart.
    #[arg(long)]
    force: bool,
    /// Look for the kubelet's files below this directory, for example the node's root directory in a pod.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    settings: SettingsArgs,
}

pub(crate) async fn run_cleanup(args: CleanupArgs) -> anyhow::Result<ExitCode> {
    let loaded = match or_print_error(args.settings.check_agent()) {
        Ok(loaded) => loaded,
        Err(code) => return Ok(code),
    };
    let settings = &loaded.settings;
    if !args.force
        && !args.dry_run
        && let Some(found) = state::running_agent(settings).await
    {
        print_error(&format!(
            "keelson: {found}; stop it (systemctl stop keelson.service keelson-cri.socket keelson-debug.socket) or use --force"
        ));
        return Ok(ExitCode::FAILURE);
    }
    if !args.force
        && !args.dry_run
        && let Some(found) = kubelet_in_path(settings, args.root.as_deref())
    {
        print_error(&format!(
            "keelson: {found}, and could not pull images without it; run keelson bypass --restart-kubelet first, or use --force"
        ));
        return Ok(ExitCode::FAILURE);
    }
    let mut report = Report::new(args.dry_run);
    clean_runtime(settings, &mut report).await;
    cluster::clean(settings, &mut report).await;
    if args.state {
        state::clean(settings, &mut report);
    }
    match args.output {
        Output::Json => print(&json(&report)?)?,
        Output::Table => print(&report.text())?,
    }
    Ok(if report.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A sentence about the kubelet's file that leads to the agent.
fn kubelet_in_path(settings: &Settings, root: Option<&Path>) -> Option<String> {
    let options = Options { root: root.map(Path::to_owned).unwrap_or_default(), ..Options::default() };
    let sockets = Sockets(vec![settings.cri.listen.path().to_owned()]);
    let (key, value) = kubelet::find(&options).uses(&sockets).into_iter().next()?;
    Some(format!("the kubelet uses the agent ({} in {})", key.name(), value.from.display()))
}

async fn clean_runtime(settings: &Settings, report: &mut Report) {
    const KIND: &str = "containerd lease";
    let cleaner = LeaseCleaner::new(settings.cri.runtime_endpoint.path().to_owned());
    let leases = match cleaner.list().await {
        Ok(leases) => leases,
        Err(error @ CleanupError::NoLeases { .. }) => {
            return report.add(KIND, "", Outcome::Skipped, error.to_string());
        }
        Err(error) => return report.add(KIND, "", Outcome::Failed, error.to_string()),
    };
    for lease in leases {
        let size = lease.bytes.map(|bytes| format!(", {}", super::format::bytes(bytes))).unwrap_or_default();
        let detail = format!("owner {}{size}", lease.owner);
        report
            .remove(KIND, &lease.id, detail, async || {
                cleaner.delete(&lease.id).await.map_err(|error| error.to_string())
            })
            .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// P20: its settings are not those of the agent whose runtime, API server and folders are cleaned up.
    #[tokio::test]
    async fn p20_a_kube_proxy_configuration_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.conf");
        let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        std::fs::write(&file, text).expect("written");
        let args = CleanupArgs {
            dry_run: true,
            state: true,
            force: false,
            root: None,
            output: Output::Json,
            settings: SettingsArgs { config: Some(file), sets: Vec::new(), feature_gates: Vec::new() },
        };
        assert_eq!(run_cleanup(args).await.expect("standard output"), ExitCode::from(2));
    }
}
