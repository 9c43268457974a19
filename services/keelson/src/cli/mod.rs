//! The commands that inspect a running agent: `keelson actors | pulls | limit | node | endpoints | state`, and
//! `keelson support-bundle`, which needs none.
//!
//! Owns: their arguments, the connection to the agent, and the format of answers. In: arguments, and the debug API on the
//! agent's unix socket. Out: text or JSON on standard output, errors on standard error, and exit codes: 0 success, 1 failed,
//! 2 wrong usage.

mod actors;
mod args;
mod cleanup;
mod client;
mod doctor;
mod endpoints;
pub(crate) mod format;
mod image_path;
mod limit;
mod node;
mod proxy;
mod pulls;
mod state;
mod support_bundle;
mod table;
#[cfg(test)]
mod testing;
mod watch;
mod watch_endpoints;

use crate::output;
pub(crate) use actors::{ActorsArgs, run_actors};
pub(crate) use args::Output;
use args::exit_with;
pub(crate) use cleanup::{CleanupArgs, run_cleanup};
pub(crate) use doctor::{DoctorArgs, run_doctor};
pub(crate) use endpoints::{EndpointsArgs, run_endpoints};
pub(crate) use image_path::{AttachArgs, BypassArgs, run_attach, run_bypass};
pub(crate) use limit::{LimitArgs, run_limit};
pub(crate) use node::{NodeArgs, run_node};
pub(crate) use proxy::{ProxyArgs, run_proxy};
pub(crate) use pulls::{PullsArgs, run_pulls};
pub(crate) use state::{StateArgs, run_state};
pub(crate) use support_bundle::{SupportBundleArgs, run_support_bundle};
pub(crate) use watch_endpoints::{WatchArgs, run_watch};
