//! Owns: which test runs the commands of which document, and which commands none does. In: the documents. Out: blocks to run.

use anyhow::{Context as _, Result, ensure};
use keelson_harness::documents::{Block, all_blocks, command_blocks, documents, repository};
use std::collections::BTreeSet;
use std::fs;

/// Documents whose blocks one test runs, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Story {
    Installation,
    Kubeadm,
    /// The agent is taken out without its program.
    ByHand,
    Operation,
    Release,
    /// Another test takes the commands from the document: see [`ELSEWHERE`].
    Elsewhere,
}

/// In the order in which a user runs them.
const STORIES: [(&str, Story); 12] = [
    ("docs/install.md", Story::Installation),
    ("docs/upgrade-rollback-uninstall.md", Story::Installation),
    ("docs/kubeadm.md", Story::Kubeadm),
    ("docs/pulls.md", Story::ByHand),
    ("docs/heartbeats.md", Story::Operation),
    ("docs/endpoints.md", Story::Operation),
    ("docs/proxy.md", Story::Operation),
    ("docs/ebpf.md", Story::Operation),
    ("docs/support.md", Story::Operation),
    // Ends with the removal.
    ("packaging/README.md", Story::Operation),
    ("docs/release.md", Story::Release),
    ("docs/rollout.md", Story::Elsewhere),
];

/// Documents of [`Story::Elsewhere`], and what runs their commands: a text in a file.
const ELSEWHERE: [(&str, Evidence); 1] = [(
    "docs/rollout.md",
    // `make cluster-check`; it fails if a command of the document was not run.
    Evidence { file: "tests/cluster/src/one_node/rollout.rs", text: "\"docs/rollout.md\"" },
)];

#[derive(Debug, Clone, Copy)]
struct Evidence {
    file: &'static str,
    text: &'static str,
}

/// A command that the test of its document leaves out.
struct NotRun {
    document: &'static str,
    /// How it begins.
    command: &'static str,
    reason: &'static str,
    /// What shows the same: a text in a file.
    shown_by: Evidence,
}

const fn not_run(
    (document, command): (&'static str, &'static str),
    reason: &'static str,
    (file, text): (&'static str, &'static str),
) -> NotRun {
    NotRun { document, command, reason, shown_by: Evidence { file, text } }
}

const ITSELF: &str = "runs all tests, and so this one";
const SUITE: &str = "is a part of make test, which runs it in another way";
const FUZZ: &str = "builds the program anew for libFuzzer and runs for minutes, as make fuzz does";
const CONTROL_PLANE: &str =
    "needs a control plane that kubeadm made, as pods; that kubeadm has the phase is a test of its own";
const PACKAGE: &str = "needs the package; dpkg installs and purges the same file in make packages-check";

const NOT_RUN: [NotRun; 25] = [
    not_run(
        ("README.md", "make run"),
        "runs until Ctrl-C; a test runs its program",
        ("tests/demo/tests/demo.rs", "async fn every_image_is_pulled_despite_a_kill_and_nothing_is_left"),
    ),
    not_run(
        ("README.md", "make cluster"),
        "runs until Ctrl-C; make cluster-check starts the same cluster",
        (".ci/run", "cluster-check"),
    ),
    not_run(("README.md", "make check"), ITSELF, (".ci/run", "step \"format\"")),
    not_run(("README.md", "make test"), ITSELF, (".ci/run", "step \"test\" make --no-print-directory test")),
    not_run(("CONTRIBUTING.md", "make check"), ITSELF, (".ci/run", "step \"format\"")),
    not_run(
        ("CONTRIBUTING.md", "cargo test --workspace --lib coordinator::core "),
        SUITE,
        ("actors/pulls/src/coordinator/core/table_tests.rs", "#[test]"),
    ),
    not_run(
        ("CONTRIBUTING.md", "cargo build --workspace --bins --tests --examples"),
        ITSELF,
        ("scripts/test.sh", "build --workspace --bins --tests --examples"),
    ),
    not_run(
        ("CONTRIBUTING.md", "cargo test --workspace --test pulls "),
        SUITE,
        ("tests/suites/tests/pulls/main.rs", "mod limit;"),
    ),
    not_run(
        ("CONTRIBUTING.md", "cargo test --workspace --test pulls -- limit::v2"),
        SUITE,
        ("tests/suites/tests/pulls/limit.rs", "on_both_runtimes!"),
    ),
    not_run(
        ("CONTRIBUTING.md", "make test"),
        ITSELF,
        (".ci/run", "step \"test\" make --no-print-directory test"),
    ),
    not_run(
        ("CONTRIBUTING.md", "scripts/test.sh -E 'binary(faults)'"),
        SUITE,
        ("tests/suites/tests/faults/main.rs", "mod "),
    ),
    not_run(("fuzz/README.md", "mkdir -p fuzz/corpus"), FUZZ, ("scripts/fuzz.sh", "fuzz/corpus/$target")),
    not_run(
        ("fuzz/README.md", "RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none pull_request fuzz/corpus"),
        FUZZ,
        ("scripts/fuzz.sh", "run --sanitizer none"),
    ),
    not_run(
        ("fuzz/README.md", "RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none image_name fuzz/corpus"),
        FUZZ,
        ("scripts/fuzz.sh", "run --sanitizer none"),
    ),
    not_run(
        ("fuzz/README.md", "RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none pull_request fuzz/artifacts"),
        "needs an input that breaks a target, and none is known",
        ("scripts/fuzz.sh", "fuzz/artifacts"),
    ),
    not_run(
        ("docs/performance.md", "cargo test --workspace --test flowtable"),
        "measures for minutes, on a kernel with flowtables",
        ("services/proxy/backends/nft/tests/flowtable/measure.rs", "fn measure()"),
    ),
    not_run(
        ("docs/release.md", "make packages packages-check boot-check"),
        "builds for minutes and boots a machine; the first two are a part of .ci/run",
        (".ci/run", "tests/packages/run.sh"),
    ),
    not_run(("docs/kubeadm.md", "kubeadm upgrade apply"), CONTROL_PLANE, ADDON),
    not_run(("docs/rollout.md", "kubeadm upgrade apply"), CONTROL_PLANE, ADDON),
    not_run(
        ("docs/rollout.md", "kubeadm upgrade node"),
        "is run by another test, on a node without a control plane",
        ADDON,
    ),
    not_run(
        ("docs/proxy.md", "iptables -t mangle"),
        "is run with clients and endpoints by another test, which takes it from the document",
        TRANSPARENT,
    ),
    not_run(("docs/proxy.md", "ip rule add fwmark"), "is of the same block", TRANSPARENT),
    not_run(("docs/proxy.md", "ip route add local"), "is of the same block", TRANSPARENT),
    not_run(("packaging/README.md", "apt install"), PACKAGE, ("tests/packages/deb.sh", "dpkg -i")),
    not_run(("packaging/README.md", "apt purge"), PACKAGE, ("tests/packages/deb.sh", "dpkg -P")),
];

const ADDON: (&str, &str) =
    ("tests/suites/tests/docs/kubeadm.rs", "fn o8_the_kube_proxy_addon_drops_the_patch");

const TRANSPARENT: (&str, &str) = (
    "services/proxy/backends/userspace/src/backend/tests/transparent.rs",
    "fn endpoints_see_the_client_with_the_documented_rules",
);

impl NotRun {
    fn is(&self, document: &str, command: &str) -> bool {
        self.document == document && command.starts_with(self.command)
    }
}

/// The blocks of a story, in order, without the commands that are not run.
pub(crate) fn blocks_of(story: Story) -> Result<Vec<Block>> {
    let mut all = Vec::new();
    for (document, _) in STORIES.into_iter().filter(|(_, of)| *of == story) {
        for mut block in command_blocks(document)? {
            for command in block.commands() {
                if NOT_RUN.iter().any(|not_run| not_run.is(document, &command)) {
                    block.code = block.code.replacen(&format!("{command}\n"), "", 1);
                }
            }
            if !block.commands().is_empty() {
                all.push(block);
            }
        }
    }
    ensure!(!all.is_empty(), "{story:?} has no commands");
    Ok(all)
}

fn has(evidence: Evidence) -> Result<bool> {
    let path = repository().join(evidence.file);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.contains(evidence.text))
}

#[test]
fn every_command_of_every_document_is_run_or_has_a_reason() -> Result<()> {
    let mut used = BTreeSet::new();
    let mut blocks = 0;
    for document in documents()? {
        let is_run = STORIES.iter().any(|(name, _)| *name == document);
        for block in all_blocks(&document)? {
            ensure!(
                LANGUAGES.contains(&&*block.language),
                "{}: a block of {:?} is not known here; commands are `sh`, or `console` with their output",
                block.name(),
                block.language
            );
            if block.language != "sh" {
                continue;
            }
            blocks += 1;
            for command in block.commands() {
                let not_run = NOT_RUN.iter().enumerate().filter(|(_, it)| it.is(&document, &command));
                let not_run: Vec<usize> = not_run.map(|(number, _)| number).collect();
                ensure!(
                    is_run || !not_run.is_empty(),
                    "{}: no test runs {command:?}: add the document to STORIES, or the command to NOT_RUN with a reason",
                    block.name()
                );
                used.extend(not_run);
            }
        }
    }
    ensure!(blocks > 40, "only {blocks} blocks of commands were found");
    for (number, not_run) in NOT_RUN.iter().enumerate() {
        let NotRun { document, command, reason, shown_by } = not_run;
        ensure!(
            used.contains(&number),
            "{document} has no command {command:?}, which is not run because it {reason}"
        );
        ensure!(has(*shown_by)?, "{document}: {command:?} is not shown by {shown_by:?}");
    }
    Ok(())
}

/// Besides commands: output, settings, programs and figures.
const LANGUAGES: [&str; 10] =
    ["", "console", "ini", "mermaid", "python", "rust", "sh", "text", "toml", "yaml"];

#[test]
fn every_story_elsewhere_is_told_there() -> Result<()> {
    for (document, _) in STORIES.into_iter().filter(|(_, story)| *story == Story::Elsewhere) {
        let (_, evidence) =
            ELSEWHERE.into_iter().find(|(name, _)| *name == document).with_context(|| document.to_owned())?;
        ensure!(has(evidence)?, "{document} is not run by {evidence:?}");
    }
    Ok(())
}
