//! How the agent and the proxy treat panics.
//!
//! Owns: the exit code of a process that cannot go on. In: a panic on any thread. Out: for the proxy, the reason in the
//! log and on standard error, and exit code 70 (sysexits: an internal error), so that it is started again; for the agent,
//! a log line and a count: the job that panicked is restarted, and only the main thread ends the process.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::Arc,
};

use keelson_actor_system::supervise;

use crate::output;

/// See the module.
pub(super) const EXIT: i32 = 70;

/// For the proxy: call it before any thread starts.
pub(crate) fn end_the_process() {
    supervise::end_on_panic(Arc::new(|reason| end(reason)));
}

/// For the agent: runs `main`, with every panic recorded, and ends the process if `main` itself panics.
pub(super) fn run<T>(main: impl FnOnce() -> T) -> T {
    supervise::record_panics();
    match catch_unwind(AssertUnwindSafe(main)) {
        Ok(ended) => ended,
        Err(payload) => end(&supervise::panic_text(&*payload)),
    }
}

fn end(reason: &str) -> ! {
    tracing::error!(reason, "panic; exiting so that the service manager restarts the process");
    output::complain(&format!(
        "keelson: panic; exiting so that the service manager restarts the process: {reason}"
    ));
    process::exit(EXIT);
}
