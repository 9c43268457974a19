//! The commands that inspect a running agent: `keelson actors | pulls | limit | node | endpoints | state`.
//!
//! Owns: their arguments, the connection to the agent, and the format of answers. In: arguments, and the debug API on the
//! agent's unix socket. Out: text or JSON on standard output, errors on standard error, and exit codes: 0 success, 1 failed,
//! 2 wrong usage.

mod actors;
mod args;
mod cleanup;
mod client;
mod endpoints;
mod format;
mod limit;
mod node;
mod proxy;
mod pulls;
mod state;
mod table;
#[cfg(test)]
mod testing;
mod watch;
mod watch_endpoints;

use crate::output;
pub(crate) use crate::output::{print, print_error};
pub(crate) use actors::{ActorsArgs, run_actors};
use args::{Output, exit_with};
pub(crate) use cleanup::{CleanupArgs, run_cleanup};
pub(crate) use endpoints::{EndpointsArgs, run_endpoints};
pub(crate) use limit::{LimitArgs, run_limit};
pub(crate) use node::{NodeArgs, run_node};
pub(crate) use proxy::{ProxyInspectCommand, run_proxy_inspect};
pub(crate) use pulls::{PullsArgs, run_pulls};
pub(crate) use state::{StateArgs, run_state};
pub(crate) use watch_endpoints::{WatchArgs, run_watch};
