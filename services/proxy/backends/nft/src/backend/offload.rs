//! Offload of established flows: whether each family supports it, and the interfaces of its flowtable.
//!
//! Owns: [`Offload`]. In: the node's interfaces, time. Out: transactions of [`Table::sync_devices`]; lines for the
//! state. Nothing here delays a Service: what the kernel refuses is retried, and flows are forwarded as without the
//! flowtable.
//!
//! [`Table::sync_devices`]: crate::table::Table::sync_devices

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use keelson_proxy::{
    addresses::{Interface, matching},
    model::Family,
    sync::retry_pause,
};

use super::NftBackend;
use crate::{flowtable::DEVICES_MAX, kernel::KernelError};

#[derive(Debug, Clone, Default)]
pub(super) enum Offload {
    /// Not configured.
    #[default]
    Disabled,
    /// Configured, but the kernel has no flowtables, for this reason.
    Unsupported(String),
    /// The flowtable exists, with the matching interfaces.
    Enabled(Devices),
}

#[derive(Debug, Clone, Default)]
pub(super) struct Devices {
    pub(super) wanted: usize,
    /// UDP flows are kept out.
    pub(super) tcp_only: bool,
    /// Number of further matching interfaces, for which there is no room.
    pub(super) left_out: usize,
    pub(super) failure: Option<String>,
    failures: u32,
    /// When the interfaces were last read from the kernel; `None`: read them now.
    last_read: Option<Instant>,
}

impl Devices {
    /// Whether to read the interfaces: after a change, after a failure, and once per sync period, because devices may
    /// leave the flowtable without a notification.
    fn is_due(&self, now: Instant, sync_period: Duration) -> bool {
        let pause = match self.failures {
            0 => sync_period,
            times => retry_pause(times, sync_period),
        };
        self.last_read.is_none_or(|last_read| now.saturating_duration_since(last_read) >= pause)
    }
}

impl Offload {
    /// `tried`: result of probing the kernel's flowtables.
    pub(super) fn of_try(family: Family, tried: Result<(), KernelError>) -> Self {
        match tried {
            Ok(()) => Self::Enabled(Devices::default()),
            Err(error) => {
                tracing::warn!(
                    %family, %error,
                    "the kernel has no flowtables for this family; established flows are not offloaded"
                );
                Self::Unsupported(error.to_string())
            }
        }
    }

    /// For the state; `None` if not configured.
    #[must_use]
    pub(super) fn status_text(&self) -> Option<String> {
        match self {
            Self::Disabled => None,
            Self::Unsupported(reason) => Some(format!("disabled: {reason}")),
            Self::Enabled(Devices { failure: Some(reason), .. }) => Some(format!("failing: {reason}")),
            Self::Enabled(Devices { wanted, left_out, tcp_only, .. }) => {
                let protocols = if *tcp_only { "enabled for TCP" } else { "enabled" };
                let left_out = match left_out {
                    0 => String::new(),
                    more => format!(", ignored: {more}"),
                };
                Some(format!("{protocols} (interfaces: {wanted}{left_out})"))
            }
        }
    }

    /// Makes the next tick read the interfaces.
    pub(super) fn invalidate(&mut self) {
        if let Self::Enabled(devices) = self {
            devices.last_read = None;
        }
    }
}

/// The first names that have room, and the number of the others.
fn limit_devices(mut names: BTreeSet<String>) -> (BTreeSet<String>, usize) {
    match names.iter().nth(DEVICES_MAX).cloned() {
        None => (names, 0),
        Some(first) => {
            let left_out = names.split_off(&first).len();
            (names, left_out)
        }
    }
}

impl NftBackend {
    pub(super) fn set_flowtable_interfaces(&mut self, interfaces: &[Interface]) {
        let (names, left_out) = limit_devices(matching(&self.flowtable_interfaces, interfaces));
        for state in &mut self.families {
            let Offload::Enabled(devices) = &mut state.offload else { continue };
            if devices.left_out != left_out && left_out > 0 {
                tracing::warn!(
                    left_out,
                    "too many interfaces match proxy.flowtable_interfaces; some are ignored"
                );
            }
            // Even with the same names, an interface may have been created again.
            (devices.wanted, devices.left_out, devices.last_read) = (names.len(), left_out, None);
            state.table.set_devices(Some(names.clone()));
        }
        self.has_interfaces = true;
    }

    /// Keeps UDP flows out of the flowtable of a family. Returns whether they were allowed before.
    pub(super) fn offload_tcp_only(&mut self, family: Family) -> bool {
        let state = &mut self.families[family as usize];
        let Offload::Enabled(devices) = &mut state.offload else { return false };
        if !devices.tcp_only {
            devices.tcp_only = true;
            state.table.set_tcp_only();
            return true;
        }
        false
    }

    /// Syncs the interfaces of the flowtable, if due. What the kernel refuses is retried.
    pub(super) fn sync_devices(&mut self, family: Family, now: Instant) -> Result<(), KernelError> {
        let (sync_period, has_interfaces) = (self.sync_period, self.has_interfaces);
        let (tables, state) = self.open_state(family)?;
        let Offload::Enabled(devices) = &mut state.offload else { return Ok(()) };
        // Interfaces that an earlier run added stay until the node's interfaces are known.
        if !has_interfaces || !devices.is_due(now, sync_period) {
            return Ok(());
        }
        devices.last_read = Some(now);
        let (transactions, failure) = match state.table.sync_devices(tables) {
            Ok(done) => {
                if done.changed > 0 {
                    tracing::debug!(
                        %family,
                        changed = done.changed,
                        interfaces = devices.wanted,
                        "flowtable interfaces changed"
                    );
                }
                (done.transactions, done.refused)
            }
            Err(error) => (0, Some(error)),
        };
        let failure = failure.map(|error| error.to_string());
        if let Some(error) = failure.as_ref().filter(|_| devices.failure != failure) {
            tracing::warn!(%family, error, "cannot update the flowtable interfaces; retrying");
        }
        devices.failures = if failure.is_some() { devices.failures.saturating_add(1) } else { 0 };
        devices.failure = failure;
        self.count_transactions(family, transactions);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_beyond_the_limit_are_counted() {
        for (count, expected) in [(0, 0), (DEVICES_MAX, 0), (DEVICES_MAX + 1, 1), (DEVICES_MAX + 7, 7)] {
            let names: BTreeSet<String> = (0..count).map(|n| format!("veth{n}")).collect();
            let (kept, left_out) = limit_devices(names);
            assert_eq!((kept.len(), left_out), (count - expected, expected));
        }
    }

    #[test]
    fn interfaces_are_read_after_changes_after_failures_and_periodically() {
        let (start, period) = (Instant::now(), Duration::from_secs(30));
        let of = |last_read, failures| Devices { last_read, failures, ..Devices::default() };
        for (devices, after, due) in [
            (of(None, 0), 0, true),
            (of(Some(start), 0), 29, false),
            (of(Some(start), 0), 30, true),
            (of(Some(start), 1), 0, false),
            (of(Some(start), 1), 1, true),
            (of(Some(start), 3), 3, false),
            (of(Some(start), 3), 4, true),
            (of(Some(start), 99), 29, false),
            (of(Some(start), 99), 30, true),
        ] {
            assert_eq!(
                devices.is_due(start + Duration::from_secs(after), period),
                due,
                "{devices:?} {after}"
            );
        }
    }

    #[test]
    fn status_text_of_offload() {
        let enabled = |wanted, left_out, failure: Option<&str>| {
            let failure = failure.map(str::to_owned);
            Offload::Enabled(Devices { wanted, left_out, failure, ..Devices::default() })
        };
        let tcp = Offload::Enabled(Devices { wanted: 3, tcp_only: true, ..Devices::default() });
        for (offload, words) in [
            (Offload::Disabled, None),
            (Offload::Unsupported("no flowtables".into()), Some("disabled: no flowtables")),
            (enabled(3, 0, None), Some("enabled (interfaces: 3)")),
            (enabled(1024, 2, None), Some("enabled (interfaces: 1024, ignored: 2)")),
            (enabled(3, 0, Some("EBUSY")), Some("failing: EBUSY")),
            (tcp, Some("enabled for TCP (interfaces: 3)")),
        ] {
            assert_eq!(offload.status_text().as_deref(), words);
        }
    }
}
