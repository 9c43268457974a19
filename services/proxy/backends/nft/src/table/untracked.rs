//! Flows between pods that conntrack does not see.
//!
//! Owns: when the chain at priority raw is made. In: the wanted [`Base`](crate::ruleset::Base), and the flows that conntrack has. Out:
//! a transaction of its own.
//!
//! A translated flow between pods whose replies go to the pod itself would end with that chain: it is one from before they were
//! masqueraded. So the chain is made once there are none.

use std::time::{Duration, Instant};

use ipnet::IpNet;
use keelson_proxy::backend::Outcome;

use super::{Table, TableState, make_chains};
use crate::{
    chain::Chain,
    kernel::{KernelError, NfTables},
};

/// Pause between two looks at conntrack, which may have a million flows.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Untracking {
    /// The chain exists, or no flow stands against it.
    has_begun: bool,
    looked: Option<Instant>,
    /// Why it has not begun.
    reason: Option<String>,
}

impl Untracking {
    /// `has_chain`: the chain of an earlier run is there.
    pub(super) fn found(has_chain: bool) -> Self {
        Self { has_begun: has_chain, ..Self::default() }
    }
}

impl Table {
    pub(super) fn untracked_chain(&self) -> Option<Chain> {
        (self.untracking.has_begun && self.base.untracked().is_some()).then_some(Chain::RawPrerouting)
    }

    /// The network of the pods between which flows are not tracked, once that is in the kernel.
    pub(crate) fn untracked_net(&self) -> Option<IpNet> {
        self.base.untracked().filter(|_| self.untracking.has_begun && self.state == TableState::Planned)
    }

    /// For people. `None`: flows between pods are tracked, as usual.
    pub(crate) fn untracked_text(&self) -> Option<String> {
        let net = self.base.untracked()?;
        Some(match (&self.untracking.reason, self.untracking.has_begun) {
            (_, true) => format!("TCP and UDP between pods in {net} are not tracked"),
            (Some(reason), false) => format!("TCP and UDP between pods in {net} are still tracked: {reason}"),
            (None, false) => format!("TCP and UDP between pods in {net} are still tracked"),
        })
    }

    /// Makes the chain once no translated flow stands against it.
    ///
    /// # Errors
    /// The kernel rejected it; the next sync compares everything.
    pub(crate) fn maintain_untracked(
        &mut self,
        tables: &mut dyn NfTables,
        now: Instant,
    ) -> Result<Outcome, KernelError> {
        let mut outcome = Outcome::default();
        let Some(net) = self.base.untracked() else {
            // The rules that tell flows apart go, so that it begins anew the next time.
            self.untracking = Untracking::default();
            return Ok(outcome);
        };
        let is_recent =
            self.untracking.looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK_INTERVAL);
        if self.untracking.has_begun || is_recent || self.state != TableState::Planned {
            return Ok(outcome);
        }
        self.untracking.looked = Some(now);
        match tables.translated_flows(self.family(), net) {
            Ok(0) => {}
            Ok(flows) => {
                let reason = format!("flows that were translated before have to end first: {flows}");
                self.untracking.reason = Some(reason);
                return Ok(outcome);
            }
            Err(error) => {
                self.untracking.reason = Some(error.to_string());
                return Ok(outcome);
            }
        }
        let mut changes = Vec::new();
        make_chains(&self.base, &[Chain::RawPrerouting], &mut changes);
        outcome.structure = 1;
        if let Err(error) = self.commit(tables, &changes, &mut outcome) {
            self.invalidate();
            return Err(error);
        }
        tracing::info!(family = %self.family(), pods = %net, "flows between pods are not tracked any more");
        self.untracking = Untracking::found(true);
        Ok(outcome)
    }
}
