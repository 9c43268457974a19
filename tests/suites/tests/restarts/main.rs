//! Planned restarts that callers do not notice (I8), and starts in the instant of a kill (I5): the real agent between
//! real callers, a real containerd and a real registry. What is asserted is what callers, the registry and the runtime
//! see.

mod calls;
#[path = "../pulls/rig.rs"]
#[allow(dead_code)]
mod rig;
mod runtime;
mod starts;
mod under_load;

use keelson_harness::agent::Settings;

/// With a limit, and with the time to wait for a successor that agents have by default.
fn settings(limit: i64) -> Settings {
    Settings::limit(limit).set("agent.handover_timeout", "30s")
}
