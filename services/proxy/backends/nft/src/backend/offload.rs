//! Offload of established flows: whether each family has it, and the interfaces of its flowtable.
//!
//! Owns: [`Offload`]. In: the node's interfaces, time. Out: transactions of [`Table::sync_devices`]; lines for the state.
//! Nothing here delays a Service: what the kernel refuses is retried, and flows are forwarded as without the flowtable.
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

/// Offload of established flows in one family.
#[derive(Debug, Clone, Default)]
pub(super) enum Offload {
    /// Not asked for.
    #[default]
    Disabled,
    /// Asked for, and the kernel has no flowtables, for this reason.
    Unsupported(String),
    /// The flowtable is there, with the interfaces that match.
    Enabled(Devices),
}

/// Where the interfaces of a flowtable stand.
#[derive(Debug, Clone, Default)]
pub(super) struct Devices {
    /// How many there are to be.
    pub(super) wanted: usize,
    /// Flows of UDP are kept out.
    pub(super) tcp_only: bool,
    /// How many more match, for which there is no room.
    pub(super) left_out: usize,
    /// Why one could not be added or removed.
    pub(super) failure: Option<String>,
    /// How often in a row.
    failures: u32,
    /// When the kernel was last asked for them; none: ask it now.
    asked: Option<Instant>,
}

impl Devices {
    /// Whether the kernel is to be asked for them: after a change, after a failure, and once in a while, because devices
    /// leave the flowtable without anybody's doing.
    fn is_due(&self, now: Instant, sync_period: Duration) -> bool {
        let pause = match self.failures {
            0 => sync_period,
            times => retry_pause(times, sync_period),
        };
        self.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= pause)
    }
}

impl Offload {
    /// What a try of the kernel's flowtables says.
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

    /// For the state; none if it was not asked for.
    #[must_use]
    pub(super) fn in_words(&self) -> Option<String> {
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

    /// The kernel is to be asked at the next tick.
    pub(super) fn distrust(&mut self) {
        if let Self::Enabled(devices) = self {
            devices.asked = None;
        }
    }
}

/// The first names that have room, and how many have none.
fn with_room(mut names: BTreeSet<String>) -> (BTreeSet<String>, usize) {
    match names.iter().nth(DEVICES_MAX).cloned() {
        None => (names, 0),
        Some(first) => {
            let left_out = names.split_off(&first).len();
            (names, left_out)
        }
    }
}

impl NftBackend {
    /// The node's interfaces have changed.
    pub(super) fn set_flowtable_interfaces(&mut self, interfaces: &[Interface]) {
        let (names, left_out) = with_room(matching(&self.flowtable_interfaces, interfaces));
        for state in &mut self.families {
            let Offload::Enabled(devices) = &mut state.offload else { continue };
            if devices.left_out != left_out && left_out > 0 {
                tracing::warn!(
                    left_out,
                    "too many interfaces match proxy.flowtable_interfaces; some are ignored"
                );
            }
            // Even where the names are the same, one may be another interface than before.
            (devices.wanted, devices.left_out, devices.asked) = (names.len(), left_out, None);
            state.table.set_devices(Some(names.clone()));
        }
        self.has_interfaces = true;
    }

    /// Keeps UDP flows out of the flowtable of a family. Whether they were in it before.
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

    /// Brings the interfaces of the flowtable to the kernel, if that is due. What the kernel refuses is retried.
    pub(super) fn sync_devices(&mut self, family: Family, now: Instant) -> Result<(), KernelError> {
        let (sync_period, has_interfaces) = (self.sync_period, self.has_interfaces);
        let (tables, state) = self.open_state(family)?;
        let Offload::Enabled(devices) = &mut state.offload else { return Ok(()) };
        // Interfaces that an earlier run added stay until those of the node are known.
        if !has_interfaces || !devices.is_due(now, sync_period) {
            return Ok(());
        }
        devices.asked = Some(now);
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
    fn what_has_no_room_is_counted() {
        for (count, expected) in [(0, 0), (DEVICES_MAX, 0), (DEVICES_MAX + 1, 1), (DEVICES_MAX + 7, 7)] {
            let names: BTreeSet<String> = (0..count).map(|n| format!("veth{n}")).collect();
            let (kept, left_out) = with_room(names);
            assert_eq!((kept.len(), left_out), (count - expected, expected));
        }
    }

    #[test]
    fn the_kernel_is_asked_after_a_change_after_a_failure_and_once_in_a_while() {
        let (start, period) = (Instant::now(), Duration::from_secs(30));
        let of = |asked, failures| Devices { asked, failures, ..Devices::default() };
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
    fn the_state_says_how_offload_stands() {
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
            assert_eq!(offload.in_words().as_deref(), words);
        }
    }
}
