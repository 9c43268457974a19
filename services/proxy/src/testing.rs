//! Helpers for tests with the kernel, in this crate and in those of backends.

use std::{process::Command, thread};

use nix::sched::{CloneFlags, unshare};

/// Runs `test` on a thread in a new network namespace with the loopback interface up. Programs and threads that it
/// starts are in the namespace, too. Needs root. The namespace ends with the last of them.
pub(crate) fn in_namespace<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace needs root");
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
        assert!(up.expect("the program ip (package iproute2)").success());
        test()
    };
    match thread::scope(|scope| scope.spawn(inside).join()) {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
