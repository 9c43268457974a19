//! Removes the rules of those that served the node before: another backend of Keelson, or a kube-proxy.
//!
//! Owns: [`TakeOver`], what is left to take over and when it is tried. In: whether the own rules are in effect, time, a
//! [`Remover`]. Out: [`TakenOver`] events.
//!
//! The own rules come first: until they are in effect, the former ones serve. Established connections go on, because
//! conntrack keeps their translation, and no rule is asked again. (docs/decisions/0066)
//!
//! Backends that another process runs in this network namespace are left alone, and so is everything that may belong to a
//! proxy beside this one: rules do not say whose Services they serve.

use std::time::{Duration, Instant};

use crate::{
    backend::{BackendError, Driver, RuleOwner},
    leftovers::{self, Places, ServerOwner},
    model::Family,
    sync::retry_pause,
};

/// Attempts to remove rules of one owner. Later, they are only reported.
const ATTEMPTS: u32 = 5;

/// Interval of looking whether connections through virtual servers have ended.
const WAIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Former {
    /// A backend of Keelson, by its name.
    Backend(&'static str),
    KubeProxy,
}

impl Former {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Backend(name) => name,
            Self::KubeProxy => "kube-proxy",
        }
    }
}

/// What an attempt has done.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Removed {
    pub removed: Vec<String>,
    /// What could not be removed, and why.
    pub failed: Vec<String>,
    /// Why nothing may be removed yet.
    pub waits: Option<String>,
}

pub trait Remover {
    /// Whether another process runs the backend in this network namespace.
    fn runs(&self, backend: &'static str) -> bool;

    /// May take seconds.
    fn remove(&mut self, former: Former) -> Removed;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TakenOver {
    Done {
        former: Former,
        removed: Vec<String>,
    },
    /// It is tried again, or `gives_up`.
    Failed {
        former: Former,
        failed: Vec<String>,
        gives_up: bool,
    },
    Waits {
        former: Former,
        reason: String,
    },
    /// The rules serve the Services of another process.
    Beside {
        former: Former,
    },
}

#[derive(Debug)]
struct Task {
    former: Former,
    failures: u32,
    next: Option<Instant>,
    /// Reported as waiting.
    waits: bool,
}

#[derive(Debug)]
pub struct TakeOver {
    tasks: Vec<Task>,
    sync_period: Duration,
}

impl TakeOver {
    #[must_use]
    pub fn new(formers: impl IntoIterator<Item = Former>, sync_period: Duration) -> Self {
        let task = |former| Task { former, failures: 0, next: None, waits: false };
        Self { tasks: formers.into_iter().map(task).collect(), sync_period }
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Does what is due. `is_in_effect`: the own rules of every family have been in effect.
    pub fn advance(&mut self, is_in_effect: bool, now: Instant, remover: &mut dyn Remover) -> Vec<TakenOver> {
        let mut events = Vec::new();
        if !is_in_effect {
            return events;
        }
        let period = self.sync_period;
        self.tasks.retain_mut(|task| {
            if task.next.is_some_and(|next| now < next) {
                return true;
            }
            if let Former::Backend(name) = task.former
                && remover.runs(name)
            {
                events.push(TakenOver::Beside { former: task.former });
                return false;
            }
            let stays = task.attempted(remover.remove(task.former), now, period, &mut events);
            stays && task.failures < ATTEMPTS
        });
        events
    }
}

impl Task {
    /// Whether to try again.
    fn attempted(
        &mut self,
        done: Removed,
        now: Instant,
        period: Duration,
        events: &mut Vec<TakenOver>,
    ) -> bool {
        let former = self.former;
        if let Some(reason) = done.waits {
            self.next = Some(now + WAIT);
            if !std::mem::replace(&mut self.waits, true) {
                events.push(TakenOver::Waits { former, reason });
            }
            return true;
        }
        if !done.removed.is_empty() {
            events.push(TakenOver::Done { former, removed: done.removed });
        }
        if done.failed.is_empty() {
            return false;
        }
        self.failures += 1;
        self.next = Some(now + retry_pause(self.failures, period));
        let gives_up = self.failures >= ATTEMPTS;
        events.push(TakenOver::Failed { former, failed: done.failed, gives_up });
        true
    }
}

/// Whether another process runs the backend in this network namespace.
#[cfg(target_os = "linux")]
#[must_use]
pub fn is_running(backend: &'static str) -> bool {
    crate::instance::runs(backend)
}

/// Whether another process runs the backend: other systems do not tell.
#[cfg(not(target_os = "linux"))]
#[must_use]
pub fn is_running(_: &'static str) -> bool {
    false
}

/// The drivers of the node.
pub struct NodeRemover {
    pub own: &'static dyn Driver,
    pub all: Vec<&'static dyn Driver>,
    pub places: Places,
    /// Rules of a kube-proxy have been found, or may exist and cannot be listed.
    pub has_kube_proxy: bool,
}

impl std::fmt::Debug for NodeRemover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeRemover").field("places", &self.places).finish_non_exhaustive()
    }
}

impl NodeRemover {
    fn remove_by(&self, driver: &dyn Driver, owner: RuleOwner, done: &mut Removed) {
        let removed = &mut done.removed;
        let mut note = |object| removed.push(object);
        if let Err(error) = driver.retire_rules(self.own, owner, &mut note) {
            done.failed.push(format!("rules of {}: {error}", driver.info().name));
        }
    }

    /// With the last rule of iptables that needs conntrack, the kernel stops to translate.
    fn preserve_translation(&self, family: Family) {
        if self.own.keeps_translation() {
            return;
        }
        for driver in &self.all {
            if let Err(error) = driver.preserve_translation(family) {
                tracing::warn!(%family, %error, "cannot keep the translation of established connections; they may end");
            }
        }
    }

    fn remove_kube_proxy(&self) -> Removed {
        let connections =
            leftovers::virtual_connections(&self.places, leftovers::INTERFACE, ServerOwner::Other);
        if connections > 0 {
            return self.waits_for(connections, self.release_from_kube_proxy());
        }
        let mut done = Removed::default();
        if self.has_kube_proxy {
            // Chains of iptables first: some are in tables of nftables, and only iptables changes them.
            let prepare = |family| self.preserve_translation(family);
            let leftovers::Removal { removed, failed, notes } =
                leftovers::remove_after(&self.places, &prepare);
            done.removed = removed;
            done.failed = failed;
            for note in notes {
                tracing::info!(note, "rules of a kube-proxy not removed");
            }
        }
        for driver in &self.all {
            self.remove_by(*driver, RuleOwner::KubeProxy, &mut done);
        }
        done
    }

    /// Rules that translate come before virtual servers, and virtual servers before sockets.
    fn release_from_kube_proxy(&self) -> Result<(), BackendError> {
        if self.own.keeps_translation() {
            return Ok(());
        }
        leftovers::serve_by_sockets(ServerOwner::Other).map_err(|error| BackendError::new(&error, false))?;
        let prepare = |family| self.preserve_translation(family);
        for removed in leftovers::remove_chains(&self.places, &prepare).removed {
            tracing::info!(removed, "rules of a kube-proxy removed");
        }
        Ok(())
    }

    /// `released`: what let the own rules, or sockets, decide about new connections meanwhile. Without it sockets would never do.
    fn waits_for(&self, connections: usize, released: Result<(), BackendError>) -> Removed {
        let mut done = Removed::default();
        match released {
            Err(error) if !self.own.keeps_translation() => {
                done.failed.push(format!("rules for new connections: {error}"));
            }
            released => {
                if let Err(error) = released {
                    tracing::warn!(%error, "cannot remove rules for new connections");
                }
                done.waits = Some(format!("{connections} connections through virtual servers would be lost"));
            }
        }
        done
    }

    fn remove_backend(&self, driver: &dyn Driver) -> Removed {
        let connections = driver.virtual_connections();
        if driver.info().has_chains && driver.find_rules().is_ok_and(|found| !found.is_empty()) {
            Family::ALL.into_iter().for_each(|family| self.preserve_translation(family));
        }
        if connections > 0 {
            let from = driver.info().name;
            let mut note =
                |object| tracing::info!(from, removed = object, "rule for new connections removed");
            return self.waits_for(connections, driver.release_new_connections(self.own, &mut note));
        }
        let mut done = Removed::default();
        self.remove_by(driver, RuleOwner::Keelson, &mut done);
        done
    }
}

impl Remover for NodeRemover {
    fn runs(&self, backend: &'static str) -> bool {
        is_running(backend)
    }

    fn remove(&mut self, former: Former) -> Removed {
        match former {
            Former::KubeProxy => self.remove_kube_proxy(),
            Former::Backend(name) => {
                let driver = self.all.iter().find(|driver| driver.info().name == name);
                driver.map_or_else(Removed::default, |driver| self.remove_backend(*driver))
            }
        }
    }
}

#[cfg(test)]
mod tests;
