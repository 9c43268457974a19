//! Owns: the processes that a test starts.
//! In: a command. Out: a running process that writes to a log file and ends with the test in any case; its log is
//! printed if the test fails.

use crate::cgroups;
use crate::util::until;
use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Bytes of a log that are printed when a test fails.
const LOG_TAIL: usize = 16 * 1024;

/// A program that can be started repeatedly.
#[derive(Clone, Debug)]
pub struct Program {
    pub name: String,
    pub path: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    /// The file that stdout and stderr are appended to.
    pub log: PathBuf,
}

impl Program {
    /// One that is never started here: another process runs it.
    pub fn outside(name: &str) -> Self {
        let (path, log) = (PathBuf::from(name), PathBuf::from("/dev/null"));
        Self { name: name.to_owned(), path, args: Vec::new(), env: Vec::new(), log }
    }

    /// Starts it. It gets SIGKILL when this process ends in any way.
    pub fn start(&self) -> Result<Process> {
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.with_context(|| format!("cannot open the log {}", self.log.display()))?;
        let errors = log.try_clone().context("cannot share the log file")?;
        let mut command = bound(&self.path, &self.args);
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        // A separate group: Ctrl-C is for this process, which ends its children in its own order.
        command.stdin(Stdio::null()).stdout(log).stderr(errors).process_group(0);
        let child = spawn(command)
            .with_context(|| format!("cannot start {} ({})", self.name, self.path.display()))?;
        Ok(Process { name: self.name.clone(), log: self.log.clone(), child, ended: None, asked: false })
    }
}

/// Starts a program that writes to the terminal of this process, and ends with it like the others.
pub fn attached(path: &Path, args: &[String]) -> Result<Child> {
    let mut command = bound(path, args);
    command.stdin(Stdio::null());
    spawn(command).with_context(|| format!("cannot start {}", path.display()))
}

/// A program that gets SIGKILL when this process ends: setpriv asks the kernel for it and executes the program, so the
/// pid is the program's.
fn bound(path: &Path, args: &[String]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(path).args(args);
    command
}

/// Starts a command from a thread that lives as long as this process: the parent-death signal is sent when the *thread*
/// that forked ends, and threads of a runtime end at any time.
fn spawn(command: Command) -> io::Result<Child> {
    type Job = (Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let gone = || io::Error::other("the thread that starts processes is gone");
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in queue {
                // The receiver is gone only if the caller has panicked meanwhile.
                let _ = answer.send(command.spawn());
            }
        });
        jobs
    });
    let (answer, result) = mpsc::channel();
    spawner.send((command, answer)).map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}

/// Killed on drop; the end of its log is then printed, which is shown if the test fails.
#[derive(Debug)]
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
    ended: Option<ExitStatus>,
    /// The test made it end: its log is not printed.
    asked: bool,
}

static QUIET: AtomicBool = AtomicBool::new(false);

/// Prints no more logs on drop: for programs with a terminal user interface.
pub fn quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

impl Process {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().with_context(|| format!("cannot wait for {}", self.name))?;
        }
        Ok(self.ended)
    }

    /// Fails if the process has exited.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.ended()? {
            bail!("{} has ended already with {status}; its log ends:\n{}", self.name, self.log_tail());
        }
        let pid = Pid::from_raw(self.child.id().try_into().context("a pid is positive")?);
        kill(pid, signal).with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    pub fn send_sigterm(&mut self) -> Result<()> {
        self.signal(Signal::SIGTERM)?;
        self.asked = true;
        Ok(())
    }

    pub fn kill9(&mut self) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        self.asked = true;
        self.ended = Some(self.child.wait().with_context(|| format!("cannot wait for {}", self.name))?);
        Ok(())
    }

    /// Sends SIGKILL to its whole process group, as systemd does with a control group.
    pub fn kill9_group(&mut self) -> Result<()> {
        let group = Pid::from_raw(self.child.id().try_into().context("a pid is positive")?);
        killpg(group, Signal::SIGKILL).with_context(|| format!("cannot kill the group of {}", self.name))?;
        self.asked = true;
        self.ended = Some(self.child.wait().with_context(|| format!("cannot wait for {}", self.name))?);
        Ok(())
    }

    /// Waits for it to exit by itself.
    pub async fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > until {
                bail!("{} still runs after {timeout:?}; its log ends:\n{}", self.name, self.log_tail());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn terminate(&mut self, timeout: Duration) -> Result<ExitStatus> {
        self.send_sigterm()?;
        self.wait(timeout).await
    }

    pub fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = without_repetitions(&String::from_utf8_lossy(&log));
        let start = (log.len().saturating_sub(LOG_TAIL)..=log.len()).find(|at| log.is_char_boundary(*at));
        log[start.unwrap_or_default()..].to_owned()
    }
}

/// A log without lines that differ from an earlier one in numbers only. The last lines are kept.
fn without_repetitions(log: &str) -> String {
    let mut seen = HashSet::new();
    let lines: Vec<&str> = log.lines().collect();
    let last = lines.len().saturating_sub(20);
    let mut kept = String::new();
    let mut left_out = 0;
    for (number, line) in lines.into_iter().enumerate() {
        if !seen.insert(line.replace(|character: char| character.is_ascii_digit(), "")) && number < last {
            left_out += 1;
            continue;
        }
        if left_out > 0 {
            kept += &format!("... {left_out} repeated lines\n");
            left_out = 0;
        }
        kept += line;
        kept.push('\n');
    }
    kept
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // An error here means that it exited at this moment.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        // Tests end with an error more often than with a panic, so `panicking` cannot tell; the output of a test that
        // succeeds is not shown.
        if !self.asked && !QUIET.load(Ordering::Relaxed) {
            eprintln!(
                "---- end of the log of {} ({}) ----\n{}",
                self.name,
                self.log.display(),
                self.log_tail()
            );
        }
    }
}

/// Programs that may keep running after the process that started them has exited.
const DETACHED_PROGRAMS: [&str; 17] = [
    "containerd-shim-runc-v2",
    "containerd-shim",
    "runc",
    "containerd",
    "docker-registry",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubelet",
    "keelson",
    "crio",
    "conmon",
    "chromedriver",
    "chromium",
    "chrome_crashpad_handler",
];

/// Kills processes that outlive their parent and name something below `folder` in their command line, and their
/// children: shims that a runtime leaves behind, the containers under them, and browsers whose driver was killed.
pub fn kill_processes_below(folder: &Path) {
    let own = std::process::id();
    let needle = folder.as_os_str().as_encoded_bytes();
    let all = all_processes();
    let mut to_kill: HashSet<u32> = all
        .iter()
        .filter(|(pid, _)| *pid != own)
        .filter(|(pid, _)| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
            let program =
                String::from_utf8_lossy(program.rsplit(|byte| *byte == b'/').next().unwrap_or_default());
            DETACHED_PROGRAMS.contains(&&*program)
                && line.split(|byte| *byte == 0).any(|arg| names(arg, needle))
        })
        .map(|(pid, _)| *pid)
        .collect();
    // Only shims have children that do not name the folder; a parent is always older, but pids wrap, so repeat until
    // nothing is added.
    loop {
        let children: Vec<_> =
            all.iter().filter(|(pid, parent)| to_kill.contains(parent) && !to_kill.contains(pid)).collect();
        if children.is_empty() {
            break;
        }
        to_kill.extend(children.iter().map(|(pid, _)| *pid));
    }
    let cgroups = cgroups::of(to_kill.iter().copied());
    for pid in &to_kill {
        if let Ok(pid) = i32::try_from(*pid) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    // They are not our children: wait until their entries are gone or zombies, so that mounts are free.
    let until = Instant::now() + Duration::from_secs(5);
    while to_kill.iter().any(|pid| runs(*pid)) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    cgroups::remove(cgroups);
}

pub fn is_program(pid: u32, program: &str) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let called = Path::new(&*String::from_utf8_lossy(first)).ends_with(program);
    called && runs(pid)
}

/// Whether an argument names `folder` or something in it, but not a folder whose name only has the same prefix.
fn names(arg: &[u8], folder: &[u8]) -> bool {
    arg.windows(folder.len())
        .enumerate()
        .any(|(at, part)| part == folder && matches!(arg.get(at + folder.len()), None | Some(b'/')))
}

/// Pid and parent pid of every process.
fn all_processes() -> Vec<(u32, u32)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| Some((pid, stat(pid)?.1)))
        .collect()
}

fn stat(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold any character.
    let mut rest = stat.rsplit_once(')')?.1.split_whitespace();
    Some((rest.next()?.chars().next()?, rest.next()?.parse().ok()?))
}

pub fn runs(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| state != 'Z')
}

pub fn resident_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("cannot read its memory")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    line.split_whitespace().next().and_then(|number| number.parse().ok()).context("VmRSS is no number")
}

/// Sends SIGSTOP and waits until every thread has stopped.
pub async fn pause(pid: u32) -> Result<()> {
    kill(Pid::from_raw(pid.try_into()?), Signal::SIGSTOP)
        .with_context(|| format!("cannot stop process {pid}"))?;
    until("every thread has stopped", || threads_stopped(pid)).await
}

fn threads_stopped(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().all(|thread| {
        // A thread that has exited meanwhile has no status.
        let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        status.lines().find(|line| line.starts_with("State:")).is_none_or(|line| line.contains("T (stopped)"))
    })
}

#[cfg(test)]
mod tests {
    use super::without_repetitions;

    #[test]
    fn repeated_lines_of_a_log_are_left_out_but_the_last_ones() {
        let mut log = "0 started\n".to_owned();
        for number in 1..=40 {
            log += &format!("{number} no node \"a\"\n");
        }
        let shown = without_repetitions(&log);
        assert!(
            shown.starts_with("0 started\n1 no node \"a\"\n... 19 repeated lines\n21 no node"),
            "{shown}"
        );
        assert!(shown.ends_with("40 no node \"a\"\n"), "{shown}");
    }
}
