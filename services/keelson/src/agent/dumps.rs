//! No core dumps: queued pulls have credentials in memory.
//!
//! Owns: the two settings of the process that keep its memory off the disk. In: nothing. Out: a process that leaves no
//! core file, regardless of its parent and of how it ends (systemd's watchdog aborts it, which would leave one).

use nix::sys::{
    prctl::set_dumpable,
    resource::{Resource, setrlimit},
};

/// Disables core dumps of this process. `RLIMIT_CORE` is inherited by children and respected by systemd-coredump. The
/// dumpable attribute (prctl(2)) also applies if the kernel pipes dumps to another program, and prevents other
/// processes without `CAP_SYS_PTRACE` from reading this one's memory.
pub(super) fn forbid() {
    let forbidden = setrlimit(Resource::RLIMIT_CORE, 0, 0).and_then(|()| set_dumpable(false));
    if let Err(error) = forbidden {
        tracing::warn!(%error, "cannot disable core dumps");
    }
}
