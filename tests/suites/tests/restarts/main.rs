//! Planned restarts that callers do not notice (I8), and starts during a kill (I5): the real agent between real
//! callers, a real containerd and a real registry. The tests check what callers, the registry and the runtime see.

mod calls;
#[path = "../pulls/common.rs"]
#[allow(dead_code)] // The suite pulls uses the rest.
mod common;
mod gates;
mod runtime;
mod starts;
mod under_load;

use keelson_harness::agent::Settings;

/// With a limit, and with the default time to wait for a successor.
fn settings(limit: i64) -> Settings {
    Settings::limit(limit).set("agent.handover_timeout", "30s")
}
