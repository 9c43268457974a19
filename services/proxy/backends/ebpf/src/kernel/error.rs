//! What can fail in the kernel, and what to do about it.
//!
//! Owns: [`KernelError`]. In: errors of aya and of files. Out: sentences for the log and for `keelson proxy state`.

use std::{io, path::PathBuf};

use aya::{
    EbpfError,
    maps::MapError,
    programs::{ProgramError, links::LinkError},
    sys::SyscallError,
};
use keelson_proxy::backend::BackendError;

use crate::layout::MapName;

#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    #[error(
        "this build of keelson has no eBPF programs, because clang was missing when it was built; use another proxy.backend, or \
         build it with clang"
    )]
    NotBuilt,
    #[error(
        "no BPF file system is mounted, which keeps programs and maps over a restart; run `mount -t bpf bpf /sys/fs/bpf`"
    )]
    NoBpfMount,
    #[error("no cgroup v2 is mounted, where programs are attached; mount it, or set proxy.ebpf_cgroup")]
    NoCgroupMount,
    #[error("{path} is not a folder of cgroup v2: {reason}; set proxy.ebpf_cgroup to one")]
    Cgroup { path: PathBuf, reason: String },
    #[error(
        "this is not the first network namespace of the machine, and {path} has the sockets of all of them; set \
         proxy.ebpf_cgroup to the cgroup of this one"
    )]
    OtherSockets { path: PathBuf },
    #[error(
        "the kernel does not permit eBPF: {0}; the backend ebpf needs CAP_BPF and CAP_NET_ADMIN in the first user namespace"
    )]
    NotPermitted(String),
    #[error("the kernel refuses the program {program}: {reason}; the backend ebpf needs Linux 6.1 or newer")]
    Program { program: &'static str, reason: String },
    #[error("cannot load the eBPF programs: {0}")]
    Load(String),
    #[error("cannot attach {program} to the cgroup {cgroup}: {reason}")]
    Attach { program: &'static str, cgroup: PathBuf, reason: String },
    #[error("cannot {action} the map {map}: {reason}", map = map.as_str())]
    Map { action: &'static str, map: MapName, reason: String },
    /// The plan leaves service ports out before; so these are another program's elements, or the kernel has no memory even
    /// after a while.
    #[error("the map {map} has no room for another element; the next sync compares all elements", map = map.as_str())]
    Full { map: MapName },
    #[error("the maps in {0} were removed by another program; the next sync makes them again")]
    MapsRemoved(PathBuf),
    #[error("cannot {action} {path}: {error}; the backend ebpf keeps programs and maps there")]
    ReadOnly { action: &'static str, path: PathBuf, error: io::Error },
    #[error("cannot {action} the map {map}: {reason}")]
    NamedMap { action: &'static str, map: &'static str, reason: String },
    #[error("cannot attach {program} to the device {device}: {reason}")]
    Device { program: &'static str, device: String, reason: String },
    #[error(
        "cannot attach {program} to the device {device}: another XDP program is attached; remove it, or set \
         proxy.ebpf_direct_return_hook to \"tc\""
    )]
    DeviceBusy { program: &'static str, device: String },
    #[error(
        "proxy.ebpf_direct_return_nodes and the networks of pods have {count} networks, and the programs of direct return know \
         {max}; list networks of nodes instead of their addresses"
    )]
    Networks { count: usize, max: usize },
    #[error("cannot list the filters of devices (rtnetlink): {0}")]
    Filters(io::Error),
    #[error("cannot list the devices of this node (rtnetlink): {0}")]
    Links(io::Error),
    #[error("cannot read the clock (CLOCK_MONOTONIC_COARSE): {0}")]
    Clock(nix::Error),
    #[error("cannot {action} {path}: {error}")]
    File { action: &'static str, path: PathBuf, error: io::Error },
    #[error("the backend was opened to print; it cannot write maps")]
    Print,
}

/// First words of the lines that end the log of the verifier.
const STATISTICS: [&str; 3] = ["verification time", "stack depth", "processed"];

impl KernelError {
    /// An administrator has to act.
    pub(crate) const fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::NotBuilt
                | Self::NoBpfMount
                | Self::NoCgroupMount
                | Self::Cgroup { .. }
                | Self::OtherSockets { .. }
                | Self::NotPermitted(_)
                | Self::Program { .. }
                | Self::ReadOnly { .. }
                | Self::Networks { .. }
        )
    }

    pub(crate) fn file(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                Self::NotPermitted(format!("cannot {action} {}: {error}", path.display()))
            }
            io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly { action, path, error },
            _ => Self::File { action, path, error },
        }
    }

    pub(crate) fn map(action: &'static str, map: MapName, error: &MapError) -> Self {
        match error {
            MapError::SyscallError(SyscallError { io_error, .. }) if is_full(io_error) => Self::Full { map },
            MapError::SyscallError(SyscallError { io_error, call }) if is_refused(io_error) => {
                Self::NotPermitted(format!("{call}: {io_error}"))
            }
            error => Self::Map { action, map, reason: chain(error) },
        }
    }

    /// The memory of a map cannot be mapped.
    pub(crate) fn memory(action: &'static str, map: MapName, error: &io::Error) -> Self {
        match is_refused(error) {
            true => Self::NotPermitted(format!("mmap of the map {}: {error}", map.as_str())),
            false => Self::Map { action, map, reason: error.to_string() },
        }
    }

    pub(crate) fn load(error: &EbpfError) -> Self {
        match error {
            EbpfError::MapError(MapError::CreateError { io_error, name }) if is_refused(io_error) => {
                Self::NotPermitted(format!("cannot create the map {name}: {io_error}"))
            }
            error => Self::Load(chain(error)),
        }
    }

    pub(crate) fn program(program: &'static str, error: &ProgramError) -> Self {
        match error {
            // The log is long; the last lines before its statistics say why.
            ProgramError::LoadError { io_error, verifier_log } => {
                let log = verifier_log.to_string();
                let is_statistic = |line: &&str| STATISTICS.iter().any(|first| line.starts_with(first));
                let lines: Vec<&str> = log.lines().rev().skip_while(is_statistic).take(3).collect();
                let last = lines.into_iter().rev().collect::<Vec<_>>().join("; ");
                match is_refused(io_error) {
                    true if last.is_empty() => {
                        Self::NotPermitted(format!("cannot load {program}: {io_error}"))
                    }
                    // Without the capability, it refuses what it accepts otherwise.
                    true => Self::NotPermitted(format!(
                        "cannot load {program}: {io_error} ({last}); the verifier may need CAP_PERFMON or CAP_SYS_ADMIN besides"
                    )),
                    false => Self::Program { program, reason: format!("{io_error} ({last})") },
                }
            }
            error => Self::Program { program, reason: chain(error) },
        }
    }

    pub(super) fn attach(program: &'static str, cgroup: &std::path::Path, error: &ProgramError) -> Self {
        match error {
            ProgramError::SyscallError(SyscallError { io_error, call }) if is_refused(io_error) => {
                Self::NotPermitted(format!("{call} of {program} at {}: {io_error}", cgroup.display()))
            }
            error => Self::Attach { program, cgroup: cgroup.to_owned(), reason: chain(error) },
        }
    }

    pub(crate) fn link(path: &std::path::Path, error: &LinkError) -> Self {
        let error = io::Error::other(chain(error));
        Self::File { action: "open the link", path: path.to_owned(), error }
    }
}

impl From<KernelError> for BackendError {
    fn from(error: KernelError) -> Self {
        Self::new(&error, error.is_fatal())
    }
}

fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// E2BIG from a map that has all its elements, ENOSPC from such a trie, ENOMEM without memory.
fn is_full(error: &io::Error) -> bool {
    [nix::libc::E2BIG, nix::libc::ENOSPC, nix::libc::ENOMEM]
        .iter()
        .any(|code| error.raw_os_error() == Some(*code))
}

/// An error with its causes: those of aya say little without.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
