//! The programs of iptables and ipset.
//!
//! Owns: which programs are used ([`find`]), and running them ([`Programs`]). In: PATH, the setting of the variant, text.
//! Out: text, or a [`ProgramError`].
//!
//! Programs run in the network namespace of the calling thread. A program that does not end is killed.

use std::{
    env, fmt,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use keelson_proxy::{backend::BackendError, model::Family, options::IptablesVariant};

use crate::{entries, generation::generation, names::Table};

pub mod removal;

/// Where programs are, besides PATH.
const FOLDERS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin"];

/// How long iptables-legacy waits for its lock, as in kube-proxy. iptables-nft has no lock and ignores it.
const LOCK: [&str; 2] = ["-w", "5"];

/// A program that takes longer is killed. A first sync of 10,000 Services takes seconds.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    Legacy,
    Nft,
}

impl Variant {
    pub const ALL: [Self; 2] = [Self::Nft, Self::Legacy];

    const fn suffix(self) -> &'static str {
        match self {
            Self::Legacy => "-legacy",
            Self::Nft => "-nft",
        }
    }

    pub const fn other(self) -> Self {
        match self {
            Self::Legacy => Self::Nft,
            Self::Nft => Self::Legacy,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.suffix()[1..])
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    #[error("{program} is not installed; install the package {package}")]
    Missing { program: String, package: &'static str },
    #[error("cannot run {program}: {reason}")]
    NotRun { program: String, reason: String },
    #[error("{program} did not end within {TIMEOUT:?} and was killed")]
    TimedOut { program: String },
    #[error("{program} failed ({status}): {message}{}", hint(message))]
    Failed { program: String, status: String, message: String },
}

/// Messages of programs that mean a missing capability or kernel feature, with what to do.
const HINTS: [(&str, &str); 8] = [
    ("Permission denied", "the proxy needs CAP_NET_ADMIN"),
    ("must be root", "the proxy needs CAP_NET_ADMIN and root"),
    ("Operation not permitted", "the proxy needs CAP_NET_ADMIN"),
    ("xt_set", "the kernel needs xt_set (CONFIG_NETFILTER_XT_SET)"),
    (
        "Kernel error received: set type not supported",
        "the kernel needs ip_set_hash_ip, _ipport, _ipportip, _netport",
    ),
    ("Cannot open session to kernel", "the kernel needs ip_set (CONFIG_IP_SET)"),
    (
        "by that name",
        "the kernel needs xt_set, xt_statistic, xt_addrtype, xt_conntrack, xt_mark and xt_MASQUERADE",
    ),
    (
        "do you need to insmod",
        "the kernel needs the tables nat, mangle and filter of iptables (iptable_nat, ip6table_nat)",
    ),
];

/// Messages of programs that mean a state of the moment.
const PASSING: [&str; 5] = [
    "holding the xtables lock",
    "Resource temporarily unavailable",
    "Device or resource busy",
    "Cannot allocate memory",
    "No buffer space available",
];

fn hint(message: &str) -> String {
    let found = HINTS.iter().find(|(part, _)| message.contains(part));
    found.map_or_else(String::new, |(_, advice)| format!("; {advice}"))
}

impl ProgramError {
    /// An administrator has to act.
    fn is_fatal(&self) -> bool {
        match self {
            Self::Missing { .. } => true,
            Self::Failed { message, .. } => HINTS.iter().any(|(part, _)| message.contains(part)),
            Self::NotRun { .. } | Self::TimedOut { .. } => false,
        }
    }

    /// Whether a later attempt may succeed on the same node: says nothing about what the node supports.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Missing { .. } => false,
            Self::Failed { message, .. } => PASSING.iter().any(|part| message.contains(part)),
            Self::NotRun { .. } | Self::TimedOut { .. } => true,
        }
    }
}

impl From<ProgramError> for BackendError {
    fn from(error: ProgramError) -> Self {
        Self::new(&error, error.is_fatal())
    }
}

/// The programs of one family, or what a test has in their place.
pub trait Programs: Send {
    /// The rules of a table.
    fn save(&mut self, table: Table) -> Result<String, ProgramError>;
    fn restore(&mut self, input: &str) -> Result<(), ProgramError>;
    fn save_sets(&mut self) -> Result<String, ProgramError>;
    fn restore_sets(&mut self, input: &str) -> Result<(), ProgramError>;
    /// Names of sets, and numbers of entries.
    fn count_sets(&mut self) -> Result<Vec<(String, usize)>, ProgramError>;
    /// Whether sections of the input should have few chains.
    fn prefers_small_sections(&self) -> bool;
    /// A number that changes with every change of rules; `None`: the kernel does not count them.
    fn generation(&self) -> Option<u32>;
    /// Removes our chains of the other variant, if its programs are installed.
    fn remove_other_variant(&mut self, removed: &mut dyn FnMut(String)) -> Result<(), ProgramError>;
    fn duplicate(&self) -> Box<dyn Programs>;
}

#[derive(Debug, Clone)]
pub struct Installed {
    family: Family,
    pub variant: Variant,
    save: PathBuf,
    restore: PathBuf,
    /// Looked for when it is used.
    ipset: Option<PathBuf>,
}

impl Installed {
    /// Whether the kernel has the table nat and lets us change it. Changes nothing.
    fn try_table(&self) -> Result<(), ProgramError> {
        let arguments = ["--test", "--noflush", LOCK[0], LOCK[1]];
        run(&self.restore, &arguments, Some("*nat\nCOMMIT\n")).map(|_| ())
    }

    /// The rules of all tables that exist. Loads no kernel module.
    pub fn save_all(&self) -> Result<String, ProgramError> {
        run(&self.save, &[], None)
    }

    fn ipset(&self) -> Result<&Path, ProgramError> {
        self.ipset
            .as_deref()
            .ok_or_else(|| ProgramError::Missing { program: "ipset".into(), package: "ipset" })
    }
}

impl Programs for Installed {
    fn save(&mut self, table: Table) -> Result<String, ProgramError> {
        run(&self.save, &["-t", table.as_str()], None)
    }

    fn restore(&mut self, input: &str) -> Result<(), ProgramError> {
        run_bound(&self.restore, &["--noflush", LOCK[0], LOCK[1]], input)
    }

    fn save_sets(&mut self) -> Result<String, ProgramError> {
        run(self.ipset()?, &["save"], None)
    }

    fn restore_sets(&mut self, input: &str) -> Result<(), ProgramError> {
        if entries::change(self.family, input) {
            return Ok(());
        }
        run_bound(self.ipset()?, &["restore", "-exist"], input)
    }

    fn count_sets(&mut self) -> Result<Vec<(String, usize)>, ProgramError> {
        let listed = run(self.ipset()?, &["list", "-terse"], None)?;
        let (mut counts, mut name) = (Vec::new(), String::new());
        for line in listed.lines() {
            if let Some(set) = line.strip_prefix("Name: ") {
                set.clone_into(&mut name);
            } else if let Some(entries) = line.strip_prefix("Number of entries: ") {
                counts.push((name.clone(), entries.trim().parse().unwrap_or(0)));
            }
        }
        Ok(counts)
    }

    fn prefers_small_sections(&self) -> bool {
        self.variant == Variant::Nft
    }

    fn generation(&self) -> Option<u32> {
        if self.variant == Variant::Nft { generation() } else { None }
    }

    fn remove_other_variant(&mut self, removed: &mut dyn FnMut(String)) -> Result<(), ProgramError> {
        match installed(self.family, self.variant.other()) {
            Ok(mut other) => removal::remove_chains(&mut other, self.family, removed),
            Err(_) => Ok(()),
        }
    }

    fn duplicate(&self) -> Box<dyn Programs> {
        Box::new(self.clone())
    }
}

/// The programs that the setting chooses, if the kernel supports them.
///
/// # Errors
/// Of the first variant; or it may pass, and then no other variant is tried.
pub fn find(family: Family, wanted: IptablesVariant) -> Result<Installed, ProgramError> {
    let candidates: Vec<Variant> = match wanted {
        IptablesVariant::Legacy => vec![Variant::Legacy],
        IptablesVariant::Nft => vec![Variant::Nft],
        IptablesVariant::Auto => {
            let first = plain_variant(family).unwrap_or(Variant::Nft);
            vec![first, first.other()]
        }
    };
    let attempt = |variant| {
        let programs = installed(family, variant)?;
        programs.try_table().map(|()| programs)
    };
    first_supported(candidates, attempt).unwrap_or_else(|| Err(missing(family)))
}

/// The first result that is no error. Rules in another variant would not replace those of an earlier run, so a failure
/// that may pass ends the search. `None`: there are no candidates.
fn first_supported<T>(
    candidates: Vec<Variant>,
    mut attempt: impl FnMut(Variant) -> Result<T, ProgramError>,
) -> Option<Result<T, ProgramError>> {
    let mut first_error = None;
    for variant in candidates {
        match attempt(variant) {
            Ok(found) => return Some(Ok(found)),
            Err(error) if error.is_passing() => return Some(Err(error)),
            Err(error) => first_error = Some(first_error.unwrap_or(error)),
        }
    }
    first_error.map(Err)
}

/// The programs of a variant.
pub fn installed(family: Family, variant: Variant) -> Result<Installed, ProgramError> {
    let base = base_name(family);
    let path = |what: &str| {
        let named = find_program(&format!("{base}{}-{what}", variant.suffix()));
        named.or_else(|| {
            find_program(&format!("{base}-{what}")).filter(|_| plain_variant(family) == Some(variant))
        })
    };
    match (path("save"), path("restore")) {
        (Some(save), Some(restore)) => {
            Ok(Installed { family, variant, save, restore, ipset: find_program("ipset") })
        }
        _ => Err(ProgramError::Missing {
            program: format!("{base}{}-restore", variant.suffix()),
            package: "iptables",
        }),
    }
}

fn missing(family: Family) -> ProgramError {
    ProgramError::Missing { program: format!("{}-restore", base_name(family)), package: "iptables" }
}

const fn base_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// The variant of the program without a suffix: the one that other programs of the node run.
fn plain_variant(family: Family) -> Option<Variant> {
    let program = find_program(&format!("{}-restore", base_name(family)))?;
    let version = run(&program, &["-V"], None).ok()?;
    // Before 1.8 there was only legacy, and the version did not name it.
    Some(if version.contains("nf_tables") { Variant::Nft } else { Variant::Legacy })
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(FOLDERS.map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Runs a program that changes the kernel. It is killed when this process is: otherwise it could make its changes after the next
/// process has read the rules.
fn run_bound(program: &Path, arguments: &[&str], input: &str) -> Result<(), ProgramError> {
    run_command(program, bound(program).args(arguments), Some(input), TIMEOUT).map(drop)
}

/// `setpriv` of util-linux sets the signal, if it is installed. The signal follows the end of the calling thread, which
/// waits for the program.
fn bound(program: &Path) -> Command {
    static SETPRIV: OnceLock<Option<PathBuf>> = OnceLock::new();
    const SIGNAL: [&str; 2] = ["--pdeathsig", "KILL"];
    let setpriv = SETPRIV.get_or_init(|| {
        let found = find_program("setpriv")?;
        // That of BusyBox cannot do it.
        let path = found.to_str()?;
        run(&found, &[SIGNAL[0], SIGNAL[1], path, "--version"], None).is_ok().then_some(found)
    });
    match setpriv {
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(SIGNAL).arg(program);
            command
        }
        None => Command::new(program),
    }
}

/// Runs a program to its end and returns its output.
fn run(program: &Path, arguments: &[&str], input: Option<&str>) -> Result<String, ProgramError> {
    run_for(program, arguments, input, TIMEOUT)
}

fn run_for(
    program: &Path,
    arguments: &[&str],
    input: Option<&str>,
    timeout: Duration,
) -> Result<String, ProgramError> {
    run_command(program, Command::new(program).args(arguments), input, timeout)
}

/// `program`: for errors.
fn run_command(
    program: &Path,
    command: &mut Command,
    input: Option<&str>,
    timeout: Duration,
) -> Result<String, ProgramError> {
    let name = || program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let not_run = |error: std::io::Error| ProgramError::NotRun { program: name(), reason: error.to_string() };
    let end = Instant::now() + timeout;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(not_run)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // A program that ends early says why.
            stdin.map(|mut pipe| pipe.write_all(input.unwrap_or_default().as_bytes()))
        });
        let errors = scope.spawn(move || stderr.map(read_all).unwrap_or_default());
        scope.spawn(move || sender.send(stdout.map(read_all).unwrap_or_default()));
        let output = receiver.recv_timeout(timeout);
        let status = if output.is_ok() { wait_until(&mut child, end) } else { None };
        let Some(status) = status else {
            // Its pipes close, which ends the threads.
            let _ended = child.kill().and_then(|()| child.wait());
            return Err(ProgramError::TimedOut { program: name() });
        };
        let (output, errors) = (output.unwrap_or_default(), errors.join().unwrap_or_default());
        if status.success() {
            return Ok(output);
        }
        let message = errors.lines().filter(|line| !line.starts_with("Try `")).collect::<Vec<_>>().join("; ");
        Err(ProgramError::Failed { program: name(), status: status.to_string(), message })
    })
}

fn read_all(mut pipe: impl std::io::Read) -> String {
    let mut bytes = Vec::new();
    let _read = pipe.read_to_end(&mut bytes);
    // The rules of many Services are large: no second copy.
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Waits for a program that has closed its output.
fn wait_until(child: &mut std::process::Child, end: Instant) -> Option<ExitStatus> {
    let mut pause = Duration::from_micros(200);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => thread::sleep(pause),
            _ => return None,
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, input: Option<&str>, timeout: Duration) -> Result<String, ProgramError> {
        run_for(Path::new("/bin/sh"), &["-c", script], input, timeout)
    }

    #[test]
    fn large_input_and_output_pass() {
        let input = "line\n".repeat(200_000);
        assert_eq!(shell("cat", Some(&input), TIMEOUT).unwrap().len(), input.len());
        assert_eq!(shell("exit 0", Some(&input), TIMEOUT), Ok(String::new()), "input is not read");
    }

    #[test]
    fn failures_say_what_and_why() {
        let error = shell("echo 'Set xt_set is missing' >&2; exit 2", None, TIMEOUT).unwrap_err();
        assert!(error.is_fatal());
        let text = error.to_string();
        assert!(
            text.starts_with("sh failed (exit status: 2): Set xt_set is missing; the kernel needs"),
            "{text}"
        );
        let error = run(Path::new("/nonexistent/iptables-restore"), &[], None).unwrap_err();
        assert!(error.to_string().starts_with("cannot run iptables-restore: "), "{error}");
    }

    /// Messages of the programs of iptables 1.8.9.
    #[test]
    fn a_passing_failure_chooses_no_other_variant() {
        let failed = |message: &str| ProgramError::Failed {
            program: "iptables-nft-restore".into(),
            status: "exit status: 4".into(),
            message: message.into(),
        };
        let lock = "Another app is currently holding the xtables lock; still 1s 0us time ahead to have a chance to \
                    grab the lock...; Another app is currently holding the xtables lock. Stopped waiting after 5s.";
        let no_table = "iptables-restore v1.8.9 (legacy): iptables-restore: unable to initialize table 'nat'";
        let insmod = "can't initialize iptables table `nat': Table does not exist (do you need to insmod?)";
        for (error, passes) in [
            (failed(lock), true),
            (ProgramError::TimedOut { program: "iptables-nft-restore".into() }, true),
            (ProgramError::NotRun { program: "iptables-nft-restore".into(), reason: "EAGAIN".into() }, true),
            (failed("Could not fetch rule set generation id: Resource temporarily unavailable"), true),
            (failed("Could not fetch rule set generation id: Permission denied"), false),
            (failed(no_table), false),
            (failed(insmod), false),
            (missing(Family::V6), false),
        ] {
            assert_eq!(error.is_passing(), passes, "{error}");
            assert!(!(error.is_passing() && error.is_fatal()), "{error}");
            let mut tried = Vec::new();
            let found = first_supported(vec![Variant::Nft, Variant::Legacy], |variant| {
                tried.push(variant);
                if variant == Variant::Nft { Err(error.clone()) } else { Ok(variant) }
            });
            match passes {
                true => assert_eq!((found, tried.len()), (Some(Err(error)), 1)),
                false => assert_eq!((found, tried.len()), (Some(Ok(Variant::Legacy)), 2)),
            }
        }
        assert!(failed(insmod).is_fatal() && failed(insmod).to_string().contains("ip6table_nat"));
        let both = first_supported(vec![Variant::Nft, Variant::Legacy], |variant| {
            Err::<(), _>(failed(variant.suffix()))
        });
        assert_eq!(both, Some(Err(failed("-nft"))), "the error of the first one");
    }

    /// A change of endpoints starts no program.
    #[test]
    fn entries_need_no_program() {
        crate::testing::in_namespace(|| {
            let mut programs = Installed {
                family: Family::V4,
                variant: Variant::Nft,
                save: PathBuf::new(),
                restore: PathBuf::new(),
                ipset: None,
            };
            let create = "create KEELSON-4-DROP hash:ip,port family inet";
            let missing = ProgramError::Missing { program: "ipset".into(), package: "ipset" };
            assert_eq!(programs.restore_sets(create), Err(missing.clone()));
            run(&find_program("ipset").unwrap(), &["restore"], Some(create)).unwrap();
            let entry = "KEELSON-4-DROP 10.0.0.1,tcp:80\n";
            for command in ["add", "add", "del", "del"] {
                assert_eq!(programs.restore_sets(&format!("{command} {entry}")), Ok(()));
            }
            assert_eq!(programs.restore_sets("add KEELSON-4-REJECT 10.0.0.1,tcp:80\n"), Err(missing));
        });
    }

    /// As with the process, the signal comes when the thread ends.
    #[test]
    fn a_program_that_changes_the_kernel_ends_with_its_caller() {
        use std::os::unix::process::ExitStatusExt as _;
        assert!(find_program("setpriv").is_some(), "util-linux is not installed");
        let started = thread::spawn(|| {
            let mut command = bound(Path::new("/bin/sh"));
            command.args(["-c", "echo ready; read -r line"]);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            // The signal is set by now.
            let mut ready = [0; 5];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
            child
        });
        // Its input stays open, so nothing else ends it.
        let mut child = started.join().unwrap();
        let stdin = child.stdin.take();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        drop(stdin);
        assert_eq!(
            run_bound(Path::new("/bin/sh"), &["-c", "read -r line && test $line = go"], "go\n"),
            Ok(())
        );
    }

    #[test]
    fn a_hung_program_is_killed() {
        let begun = Instant::now();
        let short = Duration::from_millis(200);
        assert!(matches!(shell("exec sleep 30", None, short), Err(ProgramError::TimedOut { .. })));
        // It closes its output, and does not end.
        assert!(matches!(
            shell("exec >/dev/null 2>&1; exec sleep 30", None, short),
            Err(ProgramError::TimedOut { .. })
        ));
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
