//! Selects the backend.
//!
//! Owns: [`select`]. In: `proxy.backend`; for `auto`, what each backend finds on this node. Out: a driver, and the reasons.

use std::{thread, time::Duration};

use keelson_config::{ProxyBackend, Settings};
use keelson_proxy::{
    backend::{Access, BackendError, Driver},
    choice::{Candidate, Choice, Probe, Step, decide},
};

use super::{DRIVERS, driver, options};

/// Attempts to open a backend that fails for a reason that may pass.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Selected {
    pub(super) driver: &'static dyn Driver,
    pub(super) backend: ProxyBackend,
    /// With `auto`.
    pub(super) choice: Option<Choice>,
}

/// `access`: as the backend will be opened. Blocks, with `auto` for some seconds.
pub(super) fn select(settings: &Settings, access: Access) -> anyhow::Result<Selected> {
    let backend = settings.proxy.backend;
    match driver(backend) {
        Some(driver) => Ok(Selected { driver, backend, choice: None }),
        None if backend == ProxyBackend::Auto => choose(settings, access),
        None => anyhow::bail!(
            "this build of keelson has no backend {backend}: it was built without the feature of that name; set another \
             proxy.backend"
        ),
    }
}

fn choose(settings: &Settings, access: Access) -> anyhow::Result<Selected> {
    let candidate = |(_, driver, is_automatic): &(ProxyBackend, &'static dyn Driver, bool)| Candidate {
        name: driver.info().name,
        is_automatic: *is_automatic,
        probe: Probe::Unknown,
        has_rules: has_rules(*driver),
    };
    let mut candidates: Vec<Candidate> = DRIVERS.iter().map(candidate).collect();
    loop {
        match decide(&candidates) {
            Step::Probe(place) => {
                let (backend, driver, _) = DRIVERS[place];
                candidates[place].probe = probe(settings, access, backend, driver)?;
            }
            Step::Chosen(choice) => {
                for rejected in &choice.rejected {
                    tracing::info!(backend = rejected.name, reason = rejected.reason, "backend not chosen");
                }
                tracing::info!(backend = choice.name, "backend chosen");
                let found = DRIVERS.iter().find(|(_, driver, _)| driver.info().name == choice.name);
                let (backend, driver, _) =
                    found.ok_or_else(|| anyhow::anyhow!("no backend {}", choice.name))?;
                return Ok(Selected { driver: *driver, backend: *backend, choice: Some(choice) });
            }
            Step::Failed(error) => return Err(error.into()),
        }
    }
}

/// A backend on this node.
pub(crate) struct BackendProbe {
    pub(crate) name: &'static str,
    pub(crate) is_automatic: bool,
    /// Why it cannot be opened, or why `auto` chooses another one.
    pub(crate) opened: Result<(), String>,
    /// Rules of an earlier run.
    pub(crate) rules: Vec<String>,
    /// Another backend whose rules are a part of its own.
    pub(crate) includes: Option<&'static str>,
}

/// Opens every backend once, to compare: nothing is changed.
pub(crate) fn probe_backends(settings: &Settings) -> Vec<BackendProbe> {
    let is_auto = settings.proxy.backend == ProxyBackend::Auto;
    let opened = |backend: ProxyBackend, driver: &dyn Driver| {
        let options = options::options(settings, backend).map_err(|error| format!("{error:#}"))?;
        driver.open(&options, Access::Compare).map_err(|error| error.to_string())?;
        let against = is_auto.then(|| driver.reason_against(&options)).flatten();
        against.map_or(Ok(()), Err)
    };
    DRIVERS
        .iter()
        .map(|(backend, driver, is_automatic)| BackendProbe {
            name: driver.info().name,
            is_automatic: *is_automatic,
            opened: opened(*backend, *driver),
            rules: driver.find_rules().unwrap_or_default(),
            includes: driver.includes(),
        })
        .collect()
}

/// Without the right to list rules, or the programs that do, there is nothing of it that this process could use.
fn has_rules(driver: &dyn Driver) -> bool {
    match driver.find_rules() {
        Ok(found) => {
            for rules in &found {
                tracing::info!(backend = driver.info().name, rules, "rules of an earlier run found");
            }
            !found.is_empty()
        }
        Err(error) => {
            tracing::debug!(backend = driver.info().name, %error, "cannot look for rules of an earlier run");
            false
        }
    }
}

fn probe(
    settings: &Settings,
    access: Access,
    backend: ProxyBackend,
    driver: &dyn Driver,
) -> anyhow::Result<Probe> {
    let options = options::options(settings, backend)?;
    let mut attempt = 1;
    loop {
        match driver.open(&options, access) {
            Ok(_) => return Ok(driver.reason_against(&options).map_or(Probe::Works, Probe::Unsuitable)),
            Err(error) if error.is_fatal || attempt >= ATTEMPTS => return Ok(fails(&error, attempt)),
            Err(error) => {
                tracing::warn!(backend = driver.info().name, %error, attempt, "cannot open the backend; trying again");
            }
        }
        attempt += 1;
        thread::sleep(PAUSE);
    }
}

fn fails(error: &BackendError, attempts: u32) -> Probe {
    Probe::Fails(match attempts {
        1 => error.to_string(),
        attempts => format!("{error} (tried {attempts} times)"),
    })
}
