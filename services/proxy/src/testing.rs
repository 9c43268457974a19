//! What tests of the kernel share.
//!
//! Owns: a network namespace for a test. In: what to do within. Out: nothing that stays.

use std::{fs::File, process::Command, thread};

use nix::sched::{CloneFlags, setns};

/// A namespace of this process's tests alone; it goes with the value.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Self {
        let name = format!("kp-{name}-{}", std::process::id());
        ip(&["netns", "add", &name]);
        Self(name)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A test that failed has said so already.
        Command::new("ip").args(["netns", "delete", &self.0]).status().ok();
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().expect("the program ip (package iproute2)");
    assert!(
        output.status.success(),
        "ip {arguments:?} (needs root): {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs `test` on a thread within a new network namespace, whose loopback interface is up. Programs that it starts are
/// within as well.
pub(crate) fn in_namespace(name: &str, test: impl FnOnce() + Send) {
    let namespace = Namespace::new(name);
    ip(&["-n", &namespace.0, "link", "set", "lo", "up"]);
    let handle = File::open(format!("/run/netns/{}", namespace.0)).expect("the namespace");
    thread::scope(|scope| {
        let inside = scope.spawn(move || {
            setns(handle, CloneFlags::CLONE_NEWNET).expect("this thread enters the namespace");
            test();
        });
        if let Err(panic) = inside.join() {
            std::panic::resume_unwind(panic);
        }
    });
}
