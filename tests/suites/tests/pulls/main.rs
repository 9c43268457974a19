//! Image pulls through the real agent, with a real containerd or CRI-O and a real registry.
//!
//! Owns: checks of the agent's guarantees about pulls. In: the `keelson` program and the components that the harness
//! starts. Out: nothing. Results are measured outside the agent: at the registry (the proxy before it), at the runtime
//! (its log, its content, its leases) and at the callers. The agent's own view only tells that a request has arrived,
//! and has its own tests. The numbers in the names of tests are those of the list of cases for image pulls.
//!
//! No test waits for a time to pass where it can wait for an event: a registry that holds its responses keeps pulls
//! running for as long as a test needs them to.

mod chain;
mod clients;
mod common;
mod crio;
mod errors;
mod leaving;
mod limit;
mod live;
mod option;
mod present;
mod progress;
mod reentry;
mod registries;
mod reject;
mod scripted;
mod secrets;
mod sharing;
mod signed_urls;
mod stall;
mod v1alpha2;
mod waiting;
