//! Conditions that other processes report through the agent.
//!
//! Owns: [`Externals`], the conditions that are set, their validity, and the cleared ones that must be removed from the
//! Node; the rules for conditions. In: `SetCondition` and `ClearCondition`, records of an earlier process. Out:
//! conditions for the next status; a repeat without a change writes nothing, neither to the API server nor to disk.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    kinds::{CONTESTED, ConditionStatus, ENDPOINTS, PULLS, RETIRED, STATE},
    moment::{Moment, millis},
    settings::check_qualified_name,
};

pub const MAX_CONDITIONS: usize = 32;
/// Maximum length of a type: a prefix of 253 characters, a slash, a name of 63, less one as in the API's schema.
const MAX_TYPE_LEN: usize = 316;
/// API: metav1.Condition.
const MAX_REASON_LEN: usize = 1024;
/// API: metav1.Condition.
const MAX_MESSAGE_LEN: usize = 32_768;
/// Minimum and maximum validity of a report.
const TTL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(366 * 24 * 3600));
/// Minimum time for which a cleared condition is removed from the Node, in milliseconds: a write that seemed to fail
/// may still bring it back.
const CLEARING: i64 = 60_000;

/// Conditions of the kubelet, of cloud providers, and of this and earlier versions of the agent.
const RESERVED: [&str; 11] = [
    "Ready",
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "NetworkUnavailable",
    PULLS,
    ENDPOINTS,
    STATE,
    CONTESTED,
    RETIRED[0],
    RETIRED[1],
];

impl FromStr for ConditionStatus {
    type Err = ConditionRefused;

    fn from_str(text: &str) -> Result<Self, ConditionRefused> {
        let found = Self::ALL.into_iter().find(|status| status.name() == text);
        found.ok_or_else(|| ConditionRefused::Status { status: text.chars().take(64).collect() })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConditionRefused {
    #[error("the condition {kind} belongs to the kubelet or the agent; use another type")]
    Reserved { kind: String },
    #[error(
        "{kind:?} is not a valid condition type, such as KernelDeadlock or example.com/KernelDeadlock: {wrong}"
    )]
    Type { kind: String, wrong: String },
    #[error("{status:?} is not a condition status; use True, False or Unknown")]
    Status { status: String },
    #[error(
        "a reason must be one word in CamelCase of at most 1024 letters, digits, '_', ',' and ':', beginning \
         with a letter and ending with a letter, a digit or '_'"
    )]
    Reason,
    #[error("the message has {characters} characters; the maximum is 32768")]
    Message { characters: usize },
    #[error("the TTL must be at least 1 s and at most 366 days, or 0 for no expiry")]
    Ttl,
    #[error("{MAX_CONDITIONS} conditions are already set, which is the maximum; clear one first")]
    TooMany,
    #[error("the condition {kind} is not set")]
    Unknown { kind: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalCondition {
    /// Unique among the conditions.
    pub kind: String,
    pub status: ConditionStatus,
    /// In CamelCase.
    pub reason: String,
    pub message: String,
    /// Validity of the report; after that the status is Unknown. `None`: unlimited.
    pub ttl: Option<Duration>,
}

impl ExternalCondition {
    /// # Errors
    /// The rule of the API that is broken, or that the type is reserved.
    fn check(&self) -> Result<(), ConditionRefused> {
        let kind = || self.kind.chars().take(MAX_TYPE_LEN).collect();
        if RESERVED.contains(&self.kind.as_str()) {
            return Err(ConditionRefused::Reserved { kind: kind() });
        }
        if self.kind.len() > MAX_TYPE_LEN {
            let wrong = format!("it has more than {MAX_TYPE_LEN} characters");
            return Err(ConditionRefused::Type { kind: kind(), wrong });
        }
        check_qualified_name(&self.kind).map_err(|wrong| ConditionRefused::Type { kind: kind(), wrong })?;
        if !is_reason(&self.reason) {
            return Err(ConditionRefused::Reason);
        }
        let characters = self.message.chars().count();
        if characters > MAX_MESSAGE_LEN {
            return Err(ConditionRefused::Message { characters });
        }
        if self.ttl.is_some_and(|ttl| ttl < TTL.0 || ttl > TTL.1) {
            return Err(ConditionRefused::Ttl);
        }
        Ok(())
    }
}

fn is_reason(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.len() <= MAX_REASON_LEN
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.ends_with(word)
        && text.chars().all(|c| word(c) || matches!(c, ',' | ':'))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionView {
    pub kind: String,
    /// Unknown when its reporter has been silent for too long.
    pub status: ConditionStatus,
    /// In CamelCase.
    pub reason: String,
    pub message: String,
    pub ttl: Option<Duration>,
    /// Time of the last report, Unix milliseconds by the present wall clock.
    pub heard_unix_ms: i64,
}

/// The record on disk, keyed by its type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExternalRecord {
    status: ConditionStatus,
    reason: String,
    message: String,
    ttl_ms: Option<u64>,
    /// It must be removed from the Node.
    cleared: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct External {
    record: ExternalRecord,
    /// When it was last set or cleared.
    last_report: Moment,
}

impl External {
    fn is_silent(&self, now: Moment) -> bool {
        let ttl = self.record.ttl_ms.map(|ttl| i64::try_from(ttl).unwrap_or(i64::MAX));
        ttl.is_some_and(|ttl| now.saturating_sub(self.last_report) >= ttl)
    }

    fn view(&self, kind: &str, now: Moment, unix_ms: i64) -> ConditionView {
        let record = &self.record;
        let ttl = record.ttl_ms.map(Duration::from_millis);
        let heard_unix_ms = unix_ms.saturating_sub(now.saturating_sub(self.last_report));
        let (status, reason, message) = if self.is_silent(now) {
            let message = format!(
                "no report for more than the TTL of {:?}; the last report was {}, {}",
                ttl.unwrap_or_default(),
                record.status,
                record.reason
            );
            (ConditionStatus::Unknown, "ReporterSilent".to_owned(), message)
        } else {
            (record.status, record.reason.clone(), record.message.clone())
        };
        ConditionView { kind: kind.to_owned(), status, reason, message, ttl, heard_unix_ms }
    }
}

/// A change on disk: the type, and the record or `None` to delete it.
pub type ExternalWrite = (String, Option<ExternalRecord>);

#[derive(Debug, Clone, Default)]
pub(super) struct Externals(BTreeMap<String, External>);

impl Externals {
    /// Those of an earlier process. A report is valid as if it had been made now.
    pub(super) fn restore(records: impl IntoIterator<Item = ExternalWrite>, now: Moment) -> Self {
        let good =
            |(kind, record): ExternalWrite| Some((kind, External { record: record?, last_report: now }));
        Self(records.into_iter().filter_map(good).collect())
    }

    /// Adds those of an earlier process that are unknown here, as far as there is room. Returns the number added, and
    /// the writes.
    pub(super) fn adopt(&mut self, records: Vec<ExternalWrite>, now: Moment) -> (usize, Vec<ExternalWrite>) {
        let (mut adopted, mut dropped) = (0, Vec::new());
        for (kind, record) in records {
            let Some(record) = record.filter(|_| !self.0.contains_key(&kind)) else { continue };
            if self.is_full() {
                dropped.push((kind, None));
            } else {
                self.0.insert(kind, External { record, last_report: now });
                adopted += 1;
            }
        }
        (adopted, dropped)
    }

    fn is_full(&self) -> bool {
        let live = self.0.values().filter(|external| !external.record.cleared).count();
        live >= MAX_CONDITIONS || self.0.len() >= 4 * MAX_CONDITIONS
    }

    /// Returns what has to be written, `None` for a repeat.
    ///
    /// # Errors
    /// The report is invalid, of a reserved type, or exceeds the maximum number.
    pub(super) fn set(
        &mut self,
        condition: ExternalCondition,
        now: Moment,
    ) -> Result<Option<ExternalWrite>, ConditionRefused> {
        condition.check()?;
        let known = self.0.get(&condition.kind);
        let live = self.0.values().filter(|external| !external.record.cleared).count();
        // Those that are being removed from the Node count too, but less.
        let full = live >= MAX_CONDITIONS || (known.is_none() && self.0.len() >= 4 * MAX_CONDITIONS);
        if full && known.is_none_or(|known| known.record.cleared) {
            return Err(ConditionRefused::TooMany);
        }
        let record = ExternalRecord {
            status: condition.status,
            reason: condition.reason,
            message: condition.message,
            ttl_ms: condition.ttl.map(|ttl| u64::try_from(millis(ttl)).unwrap_or_default()),
            cleared: false,
        };
        let news = known.is_none_or(|known| known.record != record);
        let write = news.then(|| (condition.kind.clone(), Some(record.clone())));
        self.0.insert(condition.kind, External { record, last_report: now });
        Ok(write)
    }

    /// Every type that is set, or must be removed from the Node.
    pub(super) fn kinds(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn has(&self, kind: &str) -> bool {
        self.0.get(kind).is_some_and(|external| !external.record.cleared)
    }

    /// Removes a condition from the Node with the next status.
    ///
    /// # Errors
    /// It is not set.
    pub(super) fn clear(&mut self, kind: &str, now: Moment) -> Result<ExternalWrite, ConditionRefused> {
        match self.0.get_mut(kind) {
            Some(external) if !external.record.cleared => {
                external.record.cleared = true;
                external.last_report = now;
                Ok((kind.to_owned(), Some(external.record.clone())))
            }
            _ => Err(ConditionRefused::Unknown { kind: kind.chars().take(MAX_TYPE_LEN).collect() }),
        }
    }

    /// Returns what has to be written.
    pub(super) fn clear_all(&mut self, now: Moment) -> Vec<ExternalWrite> {
        let live = self.0.iter().filter(|(_, external)| !external.record.cleared);
        let kinds: Vec<String> = live.map(|(kind, _)| kind.clone()).collect();
        kinds.iter().filter_map(|kind| self.clear(kind, now).ok()).collect()
    }

    /// Forgets conditions that were cleared and are gone from the Node. Returns what has to be written.
    pub(super) fn forget(&mut self, is_there: impl Fn(&str) -> bool, now: Moment) -> Vec<ExternalWrite> {
        let done = |kind: &str, external: &External| {
            external.record.cleared && now.saturating_sub(external.last_report) >= CLEARING && !is_there(kind)
        };
        let gone: Vec<String> =
            self.0.iter().filter(|(kind, of)| done(kind, of)).map(|(kind, _)| kind.clone()).collect();
        self.0.retain(|kind, _| !gone.contains(kind));
        gone.into_iter().map(|kind| (kind, None)).collect()
    }

    pub(super) fn views(&self, now: Moment, unix_ms: i64) -> Vec<ConditionView> {
        let live = self.0.iter().filter(|(_, external)| !external.record.cleared);
        live.map(|(kind, external)| external.view(kind, now, unix_ms)).collect()
    }

    pub(super) fn cleared(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, external)| external.record.cleared).map(|(kind, _)| kind.as_str())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::status) fn condition(kind: &str, status: ConditionStatus) -> ExternalCondition {
        ExternalCondition {
            kind: kind.into(),
            status,
            reason: "AllIsWell".into(),
            message: "m".into(),
            ttl: None,
        }
    }

    #[test]
    fn conditions_invalid_for_the_api_are_refused() {
        let good = || condition("example.com/KernelDeadlock", ConditionStatus::False);
        let mut externals = Externals::default();
        let long = "x".repeat(MAX_MESSAGE_LEN + 1);
        for (wrong, expected) in [
            (ExternalCondition { kind: "Ready".into(), ..good() }, "belongs to the kubelet"),
            (ExternalCondition { kind: "ImagePullsStalled".into(), ..good() }, "belongs to the kubelet"),
            (ExternalCondition { kind: "ImagePullsFlowing".into(), ..good() }, "belongs to the kubelet"),
            (ExternalCondition { kind: String::new(), ..good() }, "1 to 63 letters"),
            (ExternalCondition { kind: "two words".into(), ..good() }, "1 to 63 letters"),
            (ExternalCondition { kind: "Ex/X".into(), ..good() }, "DNS subdomain"),
            (ExternalCondition { kind: format!("{}/x", "a.".repeat(200)), ..good() }, "316"),
            (ExternalCondition { reason: String::new(), ..good() }, "CamelCase"),
            (ExternalCondition { reason: "1st".into(), ..good() }, "CamelCase"),
            (ExternalCondition { reason: "Ends:".into(), ..good() }, "CamelCase"),
            (ExternalCondition { reason: "Two words".into(), ..good() }, "CamelCase"),
            (ExternalCondition { reason: "x".repeat(1025), ..good() }, "CamelCase"),
            (ExternalCondition { message: long, ..good() }, "32769"),
            (ExternalCondition { ttl: Some(Duration::ZERO), ..good() }, "at least 1 s"),
            (ExternalCondition { ttl: Some(Duration::MAX), ..good() }, "at least 1 s"),
        ] {
            let error = externals.set(wrong, 0).expect_err(expected).to_string();
            assert!(error.contains(expected) && error.len() < 1000, "{error:?} says {expected:?}");
        }
        assert!("true".parse::<ConditionStatus>().is_err());
        assert_eq!("Unknown".parse(), Ok(ConditionStatus::Unknown));
        assert!(externals.set(good(), 0).is_ok());
        assert!(externals.set(ExternalCondition { reason: "A".into(), ..good() }, 0).is_ok());
        assert!(externals.set(ExternalCondition { reason: "A:b,c_d_".into(), ..good() }, 0).is_ok());
    }

    #[test]
    fn a_repeat_is_not_written() {
        let mut externals = Externals::default();
        let good = || condition("X", ConditionStatus::False);
        assert!(externals.set(good(), 0).expect("taken").is_some());
        assert!(externals.set(good(), 1000).expect("taken").is_none());
        let other = ExternalCondition { message: "other".into(), ..good() };
        assert!(externals.set(other, 2000).expect("taken").is_some());
    }

    #[test]
    fn the_number_of_conditions_is_limited() {
        let mut externals = Externals::default();
        for n in 0..MAX_CONDITIONS {
            externals.set(condition(&format!("C{n}"), ConditionStatus::True), 0).expect("taken");
        }
        let one_more = || condition("X", ConditionStatus::True);
        assert_eq!(externals.set(one_more(), 0), Err(ConditionRefused::TooMany));
        assert!(externals.set(condition("C0", ConditionStatus::False), 0).is_ok());
        externals.clear("C1", 0).expect("was there");
        assert!(externals.set(one_more(), 0).is_ok());
        assert_eq!(externals.set(condition("C1", ConditionStatus::True), 0), Err(ConditionRefused::TooMany));
        let mut taken = |n: &usize| {
            let kind = format!("Turn{n}");
            externals
                .clear("X", 0)
                .is_ok_and(|_| externals.set(condition(&kind, ConditionStatus::True), 0).is_ok())
                && externals.clear(&kind, 0).is_ok_and(|_| externals.set(one_more(), 0).is_ok())
        };
        assert!((0..1000).take_while(&mut taken).count() < 4 * MAX_CONDITIONS, "memory is bounded");
    }

    /// I4: late records do not replace what is known, and the bound holds.
    #[test]
    fn i4_conditions_read_late_are_added_up_to_the_limit() {
        let of = |kind: &str| {
            let mut one = Externals::default();
            one.set(condition(kind, ConditionStatus::True), 0).expect("taken").expect("news")
        };
        let mut externals = Externals::default();
        externals.set(condition("A", ConditionStatus::False), 0).expect("taken");
        assert_eq!(externals.adopt(vec![of("A"), of("B"), ("C".to_owned(), None)], 5), (1, Vec::new()));
        let views = externals.views(5, 0);
        let shown: Vec<_> = views.iter().map(|view| (view.kind.as_str(), view.status)).collect();
        assert_eq!(shown, [("A", ConditionStatus::False), ("B", ConditionStatus::True)]);
        let many: Vec<_> = (0..MAX_CONDITIONS).map(|n| of(&format!("C{n}"))).collect();
        let (added, dropped) = externals.adopt(many, 6);
        assert_eq!((added, dropped.len()), (MAX_CONDITIONS - 2, 2));
        assert!(dropped.iter().all(|(_, record)| record.is_none()), "their records go");
    }

    #[test]
    fn a_silent_reporter_makes_its_condition_unknown_until_the_next_report() {
        let mut externals = Externals::default();
        let report = || ExternalCondition {
            ttl: Some(Duration::from_secs(60)),
            ..condition("X", ConditionStatus::True)
        };
        externals.set(report(), 0).expect("taken");
        let status = |externals: &Externals, now| {
            let view = externals.views(now, 0).remove(0);
            (view.status, view.reason)
        };
        assert_eq!(status(&externals, 59_999), (ConditionStatus::True, "AllIsWell".into()));
        assert_eq!(status(&externals, 60_000), (ConditionStatus::Unknown, "ReporterSilent".into()));
        assert_eq!(externals.views(60_000, 0)[0].message, externals.views(90_000, 0)[0].message, "no ages");
        assert!(externals.set(report(), 70_000).expect("taken").is_none());
        assert_eq!(status(&externals, 70_000).0, ConditionStatus::True);
    }

    #[test]
    fn a_cleared_condition_is_kept_until_it_is_removed_from_the_node() {
        let mut externals = Externals::default();
        assert!(externals.clear("X", 0).is_err());
        externals.set(condition("X", ConditionStatus::True), 0).expect("taken");
        let write = externals.clear("X", 10).expect("was there");
        assert!(externals.clear("X", 10).is_err(), "once");
        let mut restored = Externals::restore([write], 100_000);
        assert_eq!((restored.views(100_000, 0), restored.cleared().count()), (Vec::new(), 1));
        assert!(restored.forget(|_| true, 200_000).is_empty(), "it is still there");
        assert!(restored.forget(|_| false, 100_001).is_empty(), "a late write may bring it back");
        assert_eq!(restored.forget(|_| false, 200_000), [("X".to_owned(), None)]);
        assert_eq!(restored.cleared().count(), 0);
    }
}
