//! A panic ends the process.
//!
//! Owns: the panic hook. In: a panic on any thread. Out: its reason in the log and on standard error,
//! and exit code 70, so that systemd starts the agent again from its durable state. An actor that
//! panicked would otherwise be gone while the rest of the process went on without it.

use std::{backtrace::Backtrace, process};

use crate::cli;

/// sysexits: an internal error.
pub(super) const EXIT: i32 = 70;

pub(super) fn end_the_process() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        if keelson_storage::panic_is_guarded() {
            // The storage turns these into errors.
            tracing::warn!(thread, %panic, "a panic within the state store");
            return;
        }
        let backtrace = Backtrace::capture();
        tracing::error!(thread, %panic, %backtrace, "panic: the agent ends, to be started again");
        cli::complain(&format!("keelson: panic on thread {thread}: {panic}"));
        process::exit(EXIT);
    }));
}

/// What the supervisor does with an actor that keeps failing.
pub(super) fn fatal(reason: &str) {
    tracing::error!(reason, "the agent ends, to be started again");
    cli::complain(&format!("keelson: {reason}"));
    process::exit(EXIT);
}
