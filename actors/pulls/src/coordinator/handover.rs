//! The state that an agent hands over to the agent that replaces it.
//!
//! Owns: the types of the hand-over of image pulls. In: the core of the stopping agent. Out: JSON on the hand-over
//! socket only, never on disk: it holds the salt of credential IDs and the replies of runtimes. Fields are only ever
//! added, with defaults (decision 0019).

use bytes::Bytes;
use keelson_proto::Code;
use serde::{Deserialize, Serialize};

use super::record::{KeptLease, PullRecord};
use crate::{
    request::{CredentialsId, CredentialsSalt, PullId},
    runtime::{PullReply, WireStatus},
};

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HandedState {
    /// State folder ID: lease names contain it.
    pub owner: String,
    /// In no particular order; see [`PullRecord::order`].
    pub pulls: Vec<HandedPull>,
    /// Leases of pulls that ended without success.
    pub leases: Vec<KeptLease>,
    /// Set by hand.
    pub limit: Option<u32>,
    /// Makes equal credentials have equal IDs in both processes.
    #[serde(default)]
    pub salt: Option<CredentialsSalt>,
    /// Set if the stopping agent has not read the journal: it may hold records that `pulls` and `leases` lack.
    #[serde(default)]
    pub unread: Option<UnreadJournal>,
    /// The runtime is known to ignore namespaces, so pulls may have callers of several.
    #[serde(default)]
    pub ignores_namespace: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadJournal {
    /// The limit was changed, so the journal's is outdated.
    #[serde(default)]
    pub limit_changed: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HandedPull {
    pub record: PullRecord,
    /// Set while the stopping agent (or one before it) waits for the runtime.
    #[serde(default)]
    pub running: Option<RunningPull>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunningPull {
    pub credentials: Option<CredentialsId>,
    /// It runs in the present lane.
    #[serde(default)]
    pub present: bool,
}

/// The end, in the stopping agent, of a pull that was handed over while it ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedEnd {
    /// [`PullRecord::id`].
    pub pull: u64,
    pub how: HandedOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HandedOutcome {
    Answered(HandedReply),
    /// The successor has to pull it; its callers are being sent there.
    Returned,
    /// It has no callers left in the stopping agent.
    Cancelled,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedReply {
    message: Option<Vec<u8>>,
    code: i32,
    text: String,
    details: Vec<u8>,
    metadata: Vec<(String, Vec<u8>)>,
}

impl std::fmt::Debug for HandedReply {
    /// Neither text nor metadata is shown: a runtime may quote what it was given.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandedReply").field("code", &self.code).finish_non_exhaustive()
    }
}

impl From<&PullReply> for HandedReply {
    fn from(reply: &PullReply) -> Self {
        let metadata = reply.metadata.iter().map(|(name, value)| (name.clone(), value.to_vec())).collect();
        let (message, code, text, details) = match &reply.result {
            Ok(message) => (Some(message.to_vec()), Code::Ok, String::new(), Vec::new()),
            Err(status) => (None, status.code, status.message.clone(), status.details.to_vec()),
        };
        Self { message, code: code as i32, text, details, metadata }
    }
}

impl From<HandedReply> for PullReply {
    fn from(reply: HandedReply) -> Self {
        let result = match reply.message {
            Some(message) => Ok(Bytes::from(message)),
            None => Err(WireStatus {
                code: Code::from_i32(reply.code),
                message: reply.text,
                details: reply.details.into(),
            }),
        };
        let metadata = reply.metadata.into_iter().map(|(name, value)| (name, Bytes::from(value))).collect();
        Self { result, metadata }
    }
}

impl HandedState {
    /// Updates the state after one of its running pulls ended, for a later successor.
    pub fn apply(&mut self, end: &HandedEnd) {
        match end.how {
            HandedOutcome::Answered(_) | HandedOutcome::Cancelled => {
                self.pulls.retain(|pull| pull.record.id != end.pull);
            }
            HandedOutcome::Returned => {
                for pull in self.pulls.iter_mut().filter(|pull| pull.record.id == end.pull) {
                    pull.running = None;
                }
            }
        }
    }

    #[must_use]
    pub fn running(&self) -> usize {
        self.pulls.iter().filter(|pull| pull.running.is_some()).count()
    }

    pub(super) fn running_pulls(&self) -> Vec<(PullId, RunningPull)> {
        let running = |pull: &HandedPull| Some((PullId(pull.record.id), pull.running.clone()?));
        self.pulls.iter().filter_map(running).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::RecordState;

    fn record(id: u64) -> PullRecord {
        PullRecord { attempts: 1, state: RecordState::Running, ..PullRecord::queued(id, "r.io/a") }
    }

    #[test]
    fn replies_travel_unchanged() {
        let fine = PullReply {
            result: Ok(Bytes::from_static(b"\x0a\x01x")),
            metadata: vec![("x-trace".into(), Bytes::from_static(b"\x80y"))],
        };
        let failed = PullReply::status(Code::NotFound, "no such image");
        for reply in [fine, failed] {
            let text = serde_json::to_string(&HandedReply::from(&reply)).expect("written");
            let back: HandedReply = serde_json::from_str(&text).expect("read");
            assert_eq!(PullReply::from(back), reply);
        }
    }

    #[test]
    fn a_later_successor_gets_the_state_after_the_ends() {
        let running = Some(RunningPull { credentials: None, present: false });
        let pulls =
            (1..=3).map(|id| HandedPull { record: record(id), running: running.clone() }).collect::<Vec<_>>();
        let mut state = HandedState { pulls, ..HandedState::default() };
        state.apply(&HandedEnd { pull: 1, how: HandedOutcome::Cancelled });
        state.apply(&HandedEnd { pull: 2, how: HandedOutcome::Returned });
        assert_eq!((state.pulls.len(), state.running()), (2, 1));
        assert_eq!(state.running_pulls()[0].0, PullId(3));
    }
}
