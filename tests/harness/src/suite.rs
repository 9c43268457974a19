//! Owns: suites whose tests share a peer that is too expensive to start for each of them. In: tests. Out: one runtime,
//! a time limit for each test, a peer that lives for as long as a test uses it, and all tests of a suite in one
//! process.

use crate::util::patience;
use anyhow::{Context as _, Result, anyhow, ensure};
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};
use std::{env, fs};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

/// Timeout of a test; far above what one takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(900);

/// The exit code of libtest after failed tests.
const SOME_FAILED: i32 = 101;

/// Runs a test on the one runtime of the process: clients belong to the runtime that they were created on.
pub fn run<T>(test: impl Future<Output = Result<T>>) -> Result<T> {
    static RUNTIME: LazyLock<std::io::Result<Runtime>> = LazyLock::new(Runtime::new);
    let runtime = RUNTIME.as_ref().map_err(|error| anyhow!("there is no runtime: {error}"))?;
    let started = Instant::now();
    let timeout = TEST_TIMEOUT * patience();
    let outcome = runtime.block_on(async { tokio::time::timeout(timeout, test).await });
    eprintln!("took {:.1} s", started.elapsed().as_secs_f64());
    outcome.unwrap_or_else(|_| Err(anyhow!("the test has not ended after {timeout:?}")))
}

/// A peer that tests of one process share. The first test that asks starts it; it ends with the last one that uses it.
#[derive(Debug)]
pub struct Shared<T>(Mutex<Weak<T>>);

impl<T> Shared<T> {
    #[allow(clippy::new_without_default)] // For statics.
    pub const fn new() -> Self {
        Self(Mutex::const_new(Weak::new()))
    }

    pub async fn get<F: Future<Output = Result<T>>>(&self, start: impl FnOnce() -> F) -> Result<Arc<T>> {
        let mut shared = self.0.lock().await;
        if let Some(shared) = shared.upgrade() {
            return Ok(shared);
        }
        let started = Arc::new(start().await?);
        *shared = Arc::downgrade(&started);
        Ok(started)
    }
}

fn program() -> Result<PathBuf> {
    env::current_exe().context("cannot tell where this program is")
}

/// A suite as one test, because nextest runs each test in a separate process. Does nothing outside nextest. When
/// nextest retries it, only the tests that failed are repeated, so that nextest reports them as flaky.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// The test that calls this, which is left out.
    pub test: &'static str,
    /// Number of tests that run at the same time.
    pub threads: u32,
    /// Parts of the names of tests that are left out.
    pub skip: &'static [&'static str],
    /// What is set unless the environment has it.
    pub env: &'static [(&'static str, &'static str)],
}

impl Suite {
    pub fn run(self) -> Result<()> {
        let mut command = Command::new(program()?);
        let missing = self.env.iter().copied().filter(|(name, _)| env::var_os(name).is_none());
        command.env_remove("NEXTEST").envs(missing);
        self.run_as(command, &[])
    }

    /// The same by a program that runs its arguments in another place, such as a virtual machine. `known`: tests that fail
    /// there, which is no failure; but it is one if they pass.
    pub fn run_by(self, mut runner: Command, known: &[&str]) -> Result<()> {
        runner.arg("env").args(self.env.iter().map(|(name, value)| format!("{name}={value}")));
        let passed =
            env::vars().filter(|(name, _)| name == "KEELSON_PEERS" || name.starts_with("KEELSON_TEST_"));
        runner.args(passed.map(|(name, value)| format!("{name}={value}"))).arg(program()?);
        self.run_as(runner, known)
    }

    fn run_as(self, mut command: Command, known: &[&str]) -> Result<()> {
        let Ok(run) = env::var("NEXTEST_RUN_ID") else { return Ok(()) };
        let program = program()?;
        let name = program.file_stem().context("a program has a name")?.display().to_string();
        let failures = program.with_file_name(format!("{name}-{}-{run}.failed", self.test));
        // The console of a virtual machine is a terminal.
        command.args(["--color", "never", "--test-threads", &self.threads.to_string()]);
        match fs::read_to_string(&failures) {
            Ok(failed) => {
                command.arg("--exact").args(failed.lines());
            }
            Err(_) => {
                for skip in [&["in_one_process"], self.skip].concat() {
                    command.args(["--skip", skip]);
                }
                // Parts of names, for one who looks at a few of them.
                command.args(env::var("KEELSON_TEST_ONLY").unwrap_or_default().split_whitespace());
            }
        }
        self.forward_output(command, failures, known)
    }

    /// Passes the output of the tests through, and records which of them failed.
    fn forward_output(self, mut command: Command, failures: PathBuf, known: &[&str]) -> Result<()> {
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start the suite")?;
        let mut results = Results::default();
        for line in BufReader::new(child.stdout.take().context("a piped stdout")?).lines() {
            let line = line.context("cannot read what the suite writes")?;
            results.note(&line, known);
            eprintln!("{line}");
        }
        let status = child.wait().context("cannot wait for the suite")?;
        let Results { failed, failed_as_known, passed_though_known } = results;
        if failed.is_empty() {
            // Usually it does not exist.
            let _ = fs::remove_file(&failures);
        } else {
            fs::write(&failures, &failed).context("cannot note which tests failed")?;
        }
        // With another code the suite did not come to its end.
        let has_ended = status.success() || (failed_as_known > 0 && status.code() == Some(SOME_FAILED));
        ensure!(failed.is_empty() && has_ended, "{}: {status}; these tests failed:\n{failed}", self.test);
        ensure!(
            passed_though_known.is_empty(),
            "{}: these tests were known to fail here and have passed:\n{passed_though_known}",
            self.test
        );
        Ok(())
    }
}

/// Names of tests, a line each.
#[derive(Debug, Default, PartialEq)]
struct Results {
    failed: String,
    failed_as_known: usize,
    passed_though_known: String,
}

impl Results {
    /// Notes a line of the output of libtest.
    fn note(&mut self, line: &str, known: &[&str]) {
        let Some((name, result)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... "))
        else {
            return;
        };
        let add = |names: &mut String| {
            names.push_str(name);
            names.push('\n');
        };
        match (result, known.contains(&name)) {
            ("FAILED", false) => add(&mut self.failed),
            ("FAILED", true) => self.failed_as_known += 1,
            ("ok", true) => add(&mut self.passed_though_known),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_failures_are_none_unless_they_pass() {
        let mut results = Results::default();
        let lines = [
            "running 4 tests",
            "test a::b ... FAILED",
            "test c ... ok",
            "test d ... FAILED",
            "test e ... ok",
        ];
        lines.iter().for_each(|line| results.note(line, &["d", "e", "not run"]));
        let (failed, passed_though_known) = ("a::b\n".to_owned(), "e\n".to_owned());
        assert_eq!(results, Results { failed, failed_as_known: 1, passed_though_known });
    }
}
