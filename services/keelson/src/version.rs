//! `keelson version`: what this program is, and what was built into it.
//!
//! Owns: [`Build`], made from what `build.rs` passes to the compiler, and its text. In: nothing of the machine or of a running agent.
//! Out: text and JSON for reports of problems and for packages.

use std::process::ExitCode;

use clap::Args;
use keelson_config::Gate;
use serde::Serialize;

use crate::{
    build_info,
    cli::Output,
    output::{json, print},
    proxy,
};

/// Show the version, commit, compiler and parts of this program.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson version\n  \
    keelson version -o json | jq -r .commit")]
pub(crate) struct VersionArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

pub(crate) fn run(args: &VersionArgs) -> anyhow::Result<ExitCode> {
    let build = Build::of_this_program();
    print(&match args.output {
        Output::Table => build.describe(),
        Output::Json => json(&build)?,
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Names of the fields are an interface.
#[derive(Debug, Serialize)]
struct Build {
    version: &'static str,
    /// `None`: built without git.
    commit: Option<&'static str>,
    /// As rustc names it.
    target: &'static str,
    compiler: &'static str,
    /// Values of `proxy.backend`.
    backends: Vec<&'static str>,
    feature_gates: Vec<GateDefault>,
}

#[derive(Debug, Serialize)]
struct GateDefault {
    name: &'static str,
    stage: String,
    default: bool,
}

impl Build {
    fn of_this_program() -> Self {
        let feature_gates = Gate::ALL.iter().map(|gate| {
            let spec = gate.spec();
            GateDefault { name: spec.name, stage: spec.stage.to_string(), default: spec.stage.default_on() }
        });
        Self {
            version: build_info::VERSION,
            commit: Some(env!("KEELSON_BUILD_COMMIT")).filter(|commit| !commit.is_empty()),
            target: env!("KEELSON_BUILD_TARGET"),
            compiler: env!("KEELSON_BUILD_COMPILER"),
            backends: proxy::backend_names().collect(),
            feature_gates: feature_gates.collect(),
        }
    }

    fn describe(&self) -> String {
        let gates: Vec<_> =
            self.feature_gates.iter().map(|gate| format!("{}={}", gate.name, gate.default)).collect();
        format!(
            "Version:   {}\nCommit:    {}\nTarget:    {}\nCompiler:  {}\nBackends:  {}\nGates:     {}\n",
            self.version,
            self.commit.unwrap_or("unknown (built without git)"),
            self.target,
            self.compiler,
            self.backends.join(", "),
            gates.join("\n           "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_every_part_and_says_when_there_was_no_git() {
        let build = Build {
            version: "0.1.0",
            commit: Some("0123456789abcdef0123456789abcdef01234567"),
            target: "x86_64-unknown-linux-gnu",
            compiler: "rustc 1.95.0",
            backends: vec!["nft", "ipvs"],
            feature_gates: vec![
                GateDefault { name: "One", stage: "BETA".into(), default: true },
                GateDefault { name: "Other", stage: "ALPHA".into(), default: false },
            ],
        };
        let expected = "\
Version:   0.1.0
Commit:    0123456789abcdef0123456789abcdef01234567
Target:    x86_64-unknown-linux-gnu
Compiler:  rustc 1.95.0
Backends:  nft, ipvs
Gates:     One=true
           Other=false
";
        assert_eq!(build.describe(), expected);
        let text = Build { commit: None, ..build }.describe();
        assert!(text.contains("\nCommit:    unknown (built without git)\n"), "{text}");
    }

    #[test]
    fn this_program_knows_its_build() {
        let build = Build::of_this_program();
        assert!(build.version.starts_with(|first: char| first.is_ascii_digit()), "{}", build.version);
        assert!(build.compiler.starts_with("rustc "), "{}", build.compiler);
        assert_eq!(build.backends, ["ebpf", "nft", "ipvs", "iptables", "userspace"]);
        assert_eq!(build.feature_gates.len(), Gate::ALL.len());
        // A commit is told as a whole or not at all.
        assert!(build.commit.is_none_or(|commit| commit.len() == 40), "{:?}", build.commit);
    }
}
