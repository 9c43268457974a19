//! Keeps tests with sockets apart.
//!
//! Owns: [`isolated`] and [`alone`]. In: tests. Out: a network namespace for each, on Linux; needs root.
//!
//! A program that is started has the sockets of every test of the process until it executes, also those that are closed
//! meanwhile: they would still listen. So tests that start programs run alone.

#[cfg(target_os = "linux")]
pub(crate) use self::linux::{alone, isolated};

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        panic::resume_unwind,
        sync::{PoisonError, RwLock},
        thread,
    };

    use nix::sched::{CloneFlags, unshare};

    use crate::{routes::set_loopback_up, testing::in_namespace};

    static PROGRAMS: RwLock<()> = RwLock::new(());

    /// Runs a test that starts no program in a namespace of its own.
    pub(crate) fn isolated(test: impl FnOnce() + Send) {
        let _others_may_run = PROGRAMS.read().unwrap_or_else(PoisonError::into_inner);
        let inside = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace needs root");
            set_loopback_up().unwrap();
            test();
        };
        if let Err(panic) = thread::scope(|scope| scope.spawn(inside).join()) {
            resume_unwind(panic);
        }
    }

    /// Runs a test that starts programs in a namespace of its own, while no other test runs.
    pub(crate) fn alone(test: impl FnOnce() + Send) {
        let _no_other_runs = PROGRAMS.write().unwrap_or_else(PoisonError::into_inner);
        in_namespace(test);
    }
}

/// Other systems have no network namespaces: there, each test has addresses and ports of its own.
#[cfg(not(target_os = "linux"))]
pub(crate) fn isolated(test: impl FnOnce() + Send) {
    test();
}
