//! SIGHUP: reads the settings again.
//!
//! Owns: applying live settings, and reporting those that need a restart. In: the same sources as at the
//! start. Out: new settings for the parts. Invalid settings change nothing.

use std::sync::Arc;

use keelson_config::Settings;

use super::{logs::Filter, running::Running, systemd};
use crate::settings::SettingsArgs;

pub(super) fn reload(args: &SettingsArgs, running: &mut Running, filter: &Filter) {
    systemd::reloading(false);
    if let Err(error) = take_over(args, running, filter) {
        tracing::error!(error, "cannot reload the settings; keeping the current ones");
    }
    systemd::reloading(true);
}

fn take_over(args: &SettingsArgs, running: &mut Running, filter: &Filter) -> Result<(), String> {
    let mut loaded = args.check_agent()?;
    let before = running.loaded.borrow().settings.clone();
    let changes = before.diff(&loaded.settings);
    if changes.is_empty() {
        tracing::info!("settings reloaded; no change");
        return Ok(());
    }
    let settings = before.with_live_of(&loaded.settings)?;
    for change in &changes.live {
        tracing::info!(key = change.key, old = %change.old, new = %change.new, "setting changed");
    }
    // The proxy's settings do not concern the agent.
    for change in changes.needs_restart.iter().filter(|change| !change.key.starts_with("proxy.")) {
        tracing::warn!(key = change.key, old = %change.old, new = %change.new, "changed setting takes effect \
                                                                                at the next start");
    }
    if settings.agent.log != before.agent.log {
        filter.set(&settings.agent.log).map_err(|error| format!("{error:#}"))?;
    }
    log_warnings(&settings);
    running.pulls.configure(&settings);
    // Only effective values are shown: keys that need a restart keep their old entry.
    let shown = running.loaded.borrow().clone();
    for entry in loaded.entries.iter_mut().filter(|entry| !entry.live) {
        if let Some(old) = shown.entries.iter().find(|old| old.key == entry.key) {
            *entry = old.clone();
        }
    }
    loaded.settings = Arc::new(settings);
    running.loaded.send_replace(Arc::new(loaded));
    Ok(())
}

/// Logs which settings are valid but probably a mistake.
pub(super) fn log_warnings(settings: &Settings) {
    for warning in settings.warnings() {
        tracing::warn!(key = warning.key, warning = warning.message, "valid setting is probably a mistake");
    }
}
