//! Handling of panics in the agent and the proxy.
//!
//! Owns: the exit code after a panic. In: a panic on any thread. Out: for the proxy, the reason in the
//! log and on standard error, and exit code 70 (sysexits: an internal error), so that it is restarted; for the agent,
//! a log line and a count: the job that panicked is restarted, and only the main thread ends the process.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::Arc,
};

use keelson_actor_system::supervise;

use crate::output;

pub(super) const EXIT: i32 = 70;

/// For the proxy. Must be called before any thread starts.
pub(crate) fn end_the_process() {
    supervise::end_on_panic(Arc::new(|reason| end(reason)));
}

/// For the agent: runs `main`, records every panic, and ends the process if `main` itself panics.
pub(super) fn run<T>(main: impl FnOnce() -> T) -> T {
    supervise::record_panics();
    match catch_unwind(AssertUnwindSafe(main)) {
        Ok(ended) => ended,
        Err(payload) => end(&supervise::panic_text(&*payload)),
    }
}

fn end(reason: &str) -> ! {
    tracing::error!(reason, "panic; exiting so that the service manager restarts the process");
    output::print_error(&format!(
        "keelson: panic; exiting so that the service manager restarts the process: {reason}"
    ));
    process::exit(EXIT);
}
