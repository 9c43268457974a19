//! Checks of a node before and after the agent is put to use: `keelson doctor`.
//!
//! Owns: the checks ([`check`]) and their report. In: [`Facts`], which [`probe`] gathers. Out: a [`Report`]. The checks are
//! functions of facts; probes read files, sockets, the kernel and the API server, and change nothing.

mod agent;
mod endpoints;
pub(crate) mod facts;
mod heartbeats;
pub(crate) mod probe;
mod proxy;
mod pulls;
mod report;
#[cfg(test)]
mod testing;

pub(crate) use facts::Facts;
pub(crate) use pulls::before_attach;
pub(crate) use report::{Check, Outcome, Part, Report, lines as check_lines};

/// The checks of these parts, in the order of the report.
pub(crate) fn check(facts: &Facts, parts: &[Part]) -> Report {
    let mut report = Report::default();
    for part in Part::ALL.into_iter().filter(|part| parts.contains(part)) {
        let checks = match part {
            Part::Agent => agent::checks(facts),
            Part::Pulls => pulls::checks(facts),
            Part::Heartbeats => heartbeats::checks(facts),
            Part::Endpoints => endpoints::checks(facts),
            Part::Proxy => proxy::checks(facts),
        };
        report.add(part, checks);
    }
    report
}
