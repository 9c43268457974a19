//! Sources of the settings of this process, and `keelson config`.
//!
//! Owns: the flags that select and override settings. In: flags, the environment, files. Out:
//! [`keelson_config::Loaded`], or all errors at once with exit code 2.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand, ValueEnum};
use keelson_config::{Errors, Format, Loaded, Sources};

use crate::{
    node_settings::{self, NodeProblem},
    output,
};

/// Flags of every command that reads settings.
#[derive(Debug, Clone, Args)]
pub(crate) struct SettingsArgs {
    /// Read settings from this file [default: /etc/keelson/keelson.toml, if it exists]; `keelson proxy` also accepts a
    /// KubeProxyConfiguration.
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) config: Option<PathBuf>,
    /// Override one setting, for example pulls.max_parallel_image_pulls=3; can be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", global = true)]
    pub(crate) sets: Vec<String>,
    /// Enable or disable feature gates, for example PerRegistryPullLimit=true; `keelson config gates` lists them.
    #[arg(long, value_name = "NAME=BOOL,...", global = true)]
    pub(crate) feature_gates: Vec<String>,
}

/// Flags of `keelson agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    settings: SettingsArgs,
    /// Serve the Endpoints API on this address: unix:///PATH or tcp://ADDRESS:PORT; can be repeated. Same as --set
    /// endpoints.listen=A,B.
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<String>,
    /// On SIGTERM, let systemd start the next agent while this one finishes its calls. Requires KillMode=process.
    #[arg(long)]
    systemd_handover: bool,
}

impl AgentArgs {
    /// Whether systemd is to start the next agent while this one finishes its calls.
    pub(crate) fn systemd_handover(&self) -> bool {
        self.systemd_handover
    }

    pub(crate) fn settings(self) -> SettingsArgs {
        let mut settings = self.settings;
        if !self.listen.is_empty() {
            settings.sets.push(format!("endpoints.listen={}", self.listen.join(",")));
        }
        settings
    }
}

impl SettingsArgs {
    /// Reads and checks everything. Returns all errors at once, each with its place.
    pub(crate) fn load(&self) -> Result<Loaded, Errors> {
        let hostname = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
        let mut sources = Sources::new(hostname);
        sources.file.clone_from(&self.config);
        sources.env = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("KEELSON_"))
            .collect();
        sources.sets.clone_from(&self.sets);
        sources.feature_gates.clone_from(&self.feature_gates);
        keelson_config::load(&sources)
    }

    /// As [`SettingsArgs::load`], with the checks that only the agent can make. One line per error.
    pub(crate) fn check(&self) -> Result<Loaded, String> {
        let loaded = self.load().map_err(|errors| errors.to_string())?;
        // Also without a cluster: an invalid setting is reported before it is used.
        let Err(wrong) = node_settings::status_policy(&loaded.settings) else { return Ok(loaded) };
        let line = |problem: &NodeProblem| {
            let entry = loaded.entries.iter().find(|entry| entry.key == problem.key);
            let place = entry.map_or_else(|| "default".to_owned(), |entry| entry.origin.to_string());
            format!("{place}: {}: {}", problem.key, problem.error)
        };
        Err(wrong.iter().map(line).collect::<Vec<_>>().join("\n"))
    }

    /// As [`SettingsArgs::check`], but refuses a `KubeProxyConfiguration`, which has no settings of the agent.
    pub(crate) fn check_agent(&self) -> Result<Loaded, String> {
        with_agent_settings(self.check()?)
    }

    /// As [`SettingsArgs::load`], but refuses a `KubeProxyConfiguration`.
    pub(crate) fn load_agent(&self) -> anyhow::Result<Loaded> {
        with_agent_settings(self.load()?).map_err(anyhow::Error::msg)
    }

    /// As [`SettingsArgs::check`]; writes the errors to standard error.
    pub(crate) fn load_or_print_error(&self) -> Result<Loaded, ExitCode> {
        or_print_error(self.check())
    }
}

fn with_agent_settings(loaded: Loaded) -> Result<Loaded, String> {
    match (&loaded.file, &loaded.kube_proxy) {
        (Some(file), Some(_)) => Err(format!(
            "{}: this file is a KubeProxyConfiguration, which only `keelson proxy` reads; use a settings \
             file of Keelson",
            file.display()
        )),
        _ => Ok(loaded),
    }
}

pub(crate) fn or_print_error(checked: Result<Loaded, String>) -> Result<Loaded, ExitCode> {
    checked.map_err(|mistakes| {
        output::print_error(&mistakes);
        ExitCode::from(2)
    })
}

/// `keelson config`.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
    #[command(flatten)]
    settings: SettingsArgs,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check file, environment and flags; exit with code 2 if a setting is invalid. Warn about valid settings that are
    /// probably a mistake.
    Check,
    /// Print the effective settings and where each comes from.
    Show {
        /// Output format; toml is a settings file with the origins as comments.
        #[arg(short, long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Print a settings file with every key, its default and its description.
    Example,
    /// List the feature gates.
    Gates,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
    Toml,
}

pub(crate) fn run(args: &ConfigArgs) -> anyhow::Result<ExitCode> {
    let text = match &args.command {
        ConfigCommand::Example => keelson_config::shipped::EXAMPLE.to_owned(),
        ConfigCommand::Gates => keelson_config::list_gates(),
        ConfigCommand::Check => match args.settings.load_or_print_error() {
            Ok(loaded) => checked(&loaded),
            Err(code) => return Ok(code),
        },
        ConfigCommand::Show { output } => match args.settings.load_or_print_error() {
            Ok(loaded) => {
                let format = match output {
                    Output::Table => Format::Table,
                    Output::Json => Format::Json,
                    Output::Toml => Format::Toml,
                };
                keelson_config::render_show(&loaded, format)
            }
            Err(code) => return Ok(code),
        },
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The output of `keelson config check` for valid settings: a line for each warning, then that they are valid.
fn checked(loaded: &Loaded) -> String {
    let mut lines: Vec<String> = match &loaded.kube_proxy {
        // The agent's settings are elsewhere.
        Some(notes) => notes.iter().map(|note| format!("warning: {note}")).collect(),
        None => loaded.settings.warnings().iter().map(|warning| format!("warning: {warning}")).collect(),
    };
    lines.push(match &loaded.file {
        Some(file) => format!("{}: all settings are valid", file.display()),
        None => "no settings file; environment, flags and defaults are valid".to_owned(),
    });
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(sets: &[&str]) -> SettingsArgs {
        let sets = sets.iter().map(|set| (*set).to_owned()).collect();
        SettingsArgs { config: None, sets, feature_gates: Vec::new() }
    }

    #[test]
    fn errors_found_by_the_agent_have_their_place() {
        assert!(args(&["node.eviction_hard=memory.available<1Gi"]).check().is_ok());
        let wrong = args(&["node.eviction_hard=memory", "node.node_ip=x"]).check().expect_err("two mistakes");
        let lines: Vec<&str> = wrong.lines().collect();
        assert_eq!(lines.len(), 2, "{wrong}");
        assert!(lines[0].starts_with("flag --set node.node_ip: node.node_ip: "), "{wrong}");
        assert!(lines[1].starts_with("flag --set node.eviction_hard: node.eviction_hard: "), "{wrong}");
    }

    /// P20: settings without effect are listed, and the agent refuses the file.
    #[test]
    fn p20_check_lists_what_has_no_effect_of_a_kube_proxy_configuration() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.conf");
        let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n\
                    enableProfiling: true\nclusterCidr: x\n";
        std::fs::write(&file, text).expect("written");
        let args = SettingsArgs { config: Some(file.clone()), ..args(&[]) };
        let file = file.display();
        let text = checked(&args.check().expect("valid"));
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let mut expected = [
            format!("warning: {file}:4: enableProfiling has no effect: Keelson has no Go profiles"),
            format!("warning: {file}:5: unknown field \"clusterCidr\" ignored, as by kube-proxy"),
            format!("{file}: all settings are valid"),
        ];
        expected.sort();
        assert_eq!(lines, expected);
        for refused in [
            args.check_agent().expect_err("no settings of the agent"),
            args.load_agent().expect_err("no settings of the agent").to_string(),
        ] {
            assert!(refused.contains("only `keelson proxy` reads"), "{refused}");
        }
    }

    /// I11: warns of settings without a limit, and not of those with one.
    #[test]
    fn check_warns_of_settings_without_a_limit() {
        let check = |set: &str| checked(&args(&[set]).check().expect("valid"));
        let text = check("pulls.max_parallel_image_pulls=0");
        assert!(text.starts_with("warning: pulls.max_parallel_image_pulls: no limit"), "{text}");
        assert!(!check("pulls.max_parallel_image_pulls=3").contains("warning"));
    }
}
