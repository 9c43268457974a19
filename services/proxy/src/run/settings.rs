//! Applies the settings of conntrack.
//!
//! Owns: when they are written: at the start, and again every `sync_period` while one is refused, for instance because
//! the kernel has not loaded conntrack yet. In: [`ConntrackOptions`]. Out: values in the kernel, the result of each in
//! [`Shared`], and one event per refusal. As in kube-proxy, an applied value is not checked again: an administrator may
//! change it later.

use std::{sync::Arc, time::Duration};

use nix::unistd::{SysconfVar, sysconf};

use super::Shared;
use crate::conntrack::{ConntrackOptions, ProcSys, Setting, WantedSysctl, apply};

/// Retries until every setting has its value.
pub(super) async fn apply_settings(shared: Arc<Shared>, options: ConntrackOptions, retry: Duration) {
    let mut pending = options.wanted(cpus());
    let sysctls = ProcSys(options.sysctl_dir);
    while !pending.is_empty() {
        let (wanted, kernel) = (pending.clone(), sysctls.clone());
        // Resizing the hash table may take the kernel some time.
        let Ok(settings) = tokio::task::spawn_blocking(move || apply(&wanted, &kernel)).await else { return };
        pending.retain(|wanted| is_refused(wanted, &settings));
        record(&shared, settings);
        tokio::time::sleep(retry).await;
    }
}

fn is_refused(wanted: &WantedSysctl, settings: &[Setting]) -> bool {
    settings.iter().any(|setting| setting.name == wanted.name && setting.refused.is_some())
}

/// Keeps the last result of each setting and reports new refusals.
fn record(shared: &Shared, settings: Vec<Setting>) {
    let mut refusals = Vec::new();
    {
        let mut status = shared.status();
        for setting in settings {
            let known = status.conntrack.iter_mut().find(|known| known.name == setting.name);
            if setting.refused.is_some() && known.as_ref().is_none_or(|known| **known != setting) {
                refusals.push(setting.to_string());
            }
            match known {
                Some(known) => *known = setting,
                None => status.conntrack.push(setting),
            }
        }
    }
    for text in refusals {
        tracing::warn!(setting = text, "cannot apply a conntrack setting");
        shared.record_event(format!("conntrack: {text}"));
    }
    shared.changed();
}

/// Number of online CPUs of the machine, regardless of this process's limits. Source: `detectNumCPU` of kube-proxy.
fn cpus() -> usize {
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    online.and_then(|count| usize::try_from(count).ok()).filter(|count| *count > 0).unwrap_or(1)
}
