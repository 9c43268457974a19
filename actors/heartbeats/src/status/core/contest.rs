//! Reactions to another process that reports for the same node.
//!
//! Owns: when the agent stands back, and how that is reported. In: [`Contention`] of the Lease, changes found by
//! [`super::writers`]. Out: the state of the condition, notes, a pass after a change.

use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::clock::Now;

use super::{Core, Counted, Effect, writers::WriterEvent};
use crate::{
    lease::Contention,
    status::{
        compute::{
            Moment,
            conditions::{self, Contest},
            millis, moment,
        },
        kinds,
        policy::Role,
    },
};

impl Core {
    /// Another process was found to renew the Lease, or has stopped.
    pub(super) fn contended(&mut self, contention: Contention, now: Now, effects: &mut Vec<Effect>) {
        let before = std::mem::replace(&mut self.contention, contention);
        if before == contention {
            return;
        }
        if before == Contention::StandingBack {
            self.repair = self.policy.role == Role::Node;
        }
        if before != Contention::Undecided {
            self.report_early(true, now, effects);
        } else if std::mem::take(&mut self.withheld) {
            self.report_early(false, now, effects);
        }
    }

    /// Whether another process sends the node's heartbeat.
    pub(super) fn stands_back(&self) -> bool {
        self.contention == Contention::StandingBack
    }

    /// Number of condition types with a second writer.
    #[must_use]
    pub(crate) fn contested_conditions(&self) -> usize {
        self.writers.contested()
    }

    /// Two report periods, in milliseconds.
    fn contest_timeout(&self) -> i64 {
        millis(self.policy.report_frequency).saturating_mul(2)
    }

    /// How another process reports for the node; `None`: the Node's condition stands.
    pub(super) fn contest(&self, now: Moment) -> Option<Contest> {
        Some(match self.contention {
            Contention::Undecided => return None,
            Contention::StandingBack => Contest::StandingBack,
            Contention::Contested => Contest::Lease,
            Contention::Uncontested if self.writers.contested() > 0 => Contest::Conditions,
            // The other process reports it while it is running.
            Contention::Uncontested
                if self.writers.is_true_by_another(kinds::CONTESTED, self.contest_timeout(), now) =>
            {
                return None;
            }
            Contention::Uncontested => Contest::None,
        })
    }

    /// Compares the conditions with those last written by this agent.
    pub(super) fn notice_writers(&mut self, base: &Node, now: Now, effects: &mut Vec<Effect>) {
        let kinds: Vec<String> = if self.stands_back() {
            vec![kinds::CONTESTED.to_owned()]
        } else {
            let own = conditions::own(self.policy.role).iter().map(|kind| (*kind).to_owned());
            own.chain(self.externals.kinds().map(str::to_owned)).collect()
        };
        let list = base.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let quiet = self.contest_timeout();
        for news in self.writers.observe(&kinds, list, quiet, moment(now)) {
            let name = &self.policy.node_name;
            let (warn, text) = match news {
                WriterEvent::Foreign(_) => {
                    effects.push(Effect::Count(Counted::ForeignWrite));
                    continue;
                }
                WriterEvent::Contested(kind) => (
                    true,
                    format!(
                        "another process also writes condition {kind} of Node {name}; the agent writes it at \
                         most once per {:?} until the other process stops",
                        self.policy.report_frequency
                    ),
                ),
                WriterEvent::Over(kind) => {
                    (false, format!("no other process writes condition {kind} of Node {name} any longer"))
                }
            };
            effects.push(Effect::Note { warn, text });
        }
    }
}
