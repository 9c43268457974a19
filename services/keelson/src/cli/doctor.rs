//! `keelson doctor [PART...]`.
//!
//! In: settings, the node. Out: one line per check, and what to do. Exit code 1 if a check has failed.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use keelson_config::Loaded;

use super::args::Output;
use crate::{
    doctor::{Check, Part, Report, check, probe},
    kubelet::Options,
    output::{json, print},
    settings::SettingsArgs,
};

/// Check this node before the agent or the proxy is started, and after; change nothing.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson doctor                 check everything that is configured\n  \
    keelson doctor pulls           check what image pulls need, and the kubelet's configuration\n  \
    keelson doctor proxy           check what the service proxy needs, before it is started\n  \
    keelson doctor -o json | jq '.sections[].checks[] | select(.outcome == \"failed\")'\n\n\
    Works with and without a running agent. Reads files, the kernel, the container runtime, and the API\n\
    server with the credentials of the settings. The exit code is 1 if a check failed.")]
pub(crate) struct DoctorArgs {
    /// Parts to check [default: all; proxy only if it is on this node].
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// Look for the kubelet's files below this directory, for example the node's root directory in a pod.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    settings: SettingsArgs,
}

pub(crate) async fn run_doctor(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    let report = match args.settings.check_agent() {
        Ok(loaded) => examine(&args, loaded).await,
        Err(problems) => invalid(&problems),
    };
    match args.output {
        Output::Json => print(&json(&report)?)?,
        Output::Table => print(&report.text())?,
    }
    Ok(if report.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn examine(args: &DoctorArgs, loaded: Loaded) -> Report {
    let parts = if args.parts.is_empty() { Part::ALL.to_vec() } else { args.parts.clone() };
    let request = probe::Request {
        settings: loaded.settings,
        wants_proxy: args.parts.contains(&Part::Proxy),
        parts: parts.clone(),
        kubelet: Options { root: args.root.clone().unwrap_or_default(), ..Options::default() },
    };
    check(&probe::gather(request).await, &parts)
}

/// Nothing else is known without settings.
fn invalid(problems: &str) -> Report {
    let failed = |problem: &str| Check::failed("settings", problem, "keelson config check");
    let mut checks: Vec<Check> = problems.lines().map(failed).collect();
    checks.push(Check::skipped("all other checks", "the settings are not valid"));
    let mut report = Report::default();
    report.add(Part::Agent, checks);
    report
}

#[cfg(test)]
mod tests {
    use super::{super::testing::parsed, *};

    #[test]
    fn invalid_settings_are_a_failed_check_each() {
        let args: DoctorArgs =
            parsed(&["--set", "pulls.x=1", "--set", "agent.log_format=x"]).expect("parses");
        let problems = args.settings.check_agent().expect_err("two mistakes");
        let report = invalid(&problems);
        assert!(report.has_failed());
        assert_eq!(report.text().matches("FAILED").count(), 2, "{}", report.text());
    }

    #[test]
    fn parts_are_words() {
        let args: DoctorArgs = parsed(&["pulls", "proxy"]).expect("parses");
        assert_eq!(args.parts, [Part::Pulls, Part::Proxy]);
        assert!(parsed::<DoctorArgs>(&["pods"]).is_err());
    }
}
