//! How the agent ends itself.
//!
//! Owns: the exit code of an agent that cannot go on. In: a panic on any thread, or an actor that keeps
//! failing. Out: the reason in the log and on standard error, and exit code 70 (sysexits: an internal
//! error), so that systemd starts the agent again from its durable state.

use std::{process, sync::Arc};

use keelson_actors::supervise::{self, Fatal};

use crate::cli;

/// See the module.
pub(super) const EXIT: i32 = 70;

/// To be called before any actor starts.
pub(crate) fn end_the_process() {
    supervise::end_on_panic(fatal());
}

/// Says why, and ends.
pub(super) fn fatal() -> Fatal {
    Arc::new(|reason| {
        tracing::error!(reason, "the agent ends, to be started again");
        cli::complain(&format!("keelson: the agent ends, to be started again: {reason}"));
        process::exit(EXIT);
    })
}
