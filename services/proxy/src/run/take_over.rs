//! Takes over from the backend or the kube-proxy that served this node before.
//!
//! Owns: [`TakeOverTask`]. In: the state of the sync loop; the backends of the program. Out: removals, in the log, the
//! events, the state and the metrics.

use std::time::{Duration, Instant};

use super::{cleaner::Cleaner, shared::Shared};
use crate::{
    backend::{Driver, Observer},
    leftovers::{self, Places},
    model::Family,
    takeover::{Former, NodeRemover, TakeOver, TakenOver, is_running},
};

pub(super) struct TakeOverTask {
    own: &'static dyn Driver,
    all: Vec<&'static dyn Driver>,
    service_proxy_name: String,
    sync_period: Duration,
    /// `None` until the own rules are in effect.
    tasks: Option<(TakeOver, NodeRemover)>,
}

/// Whose rules may be removed. `own`: this backend, and the one that it includes. `name`: of this proxy; `published`: those for which the agent publishes Services to proxies
/// beside each other.
///
/// Rules do not say whose Services they serve. Where proxies run side by side, rules of another backend may belong to one
/// that restarts at this moment; and a kube-proxy serves the Services without a name.
fn formers(own: &[&str], all: &[&'static str], name: &str, published: &[String]) -> Vec<Former> {
    let mut formers = Vec::new();
    if name.is_empty() && published.is_empty() {
        formers.extend(all.iter().filter(|other| !own.contains(other)).map(|other| Former::Backend(other)));
    }
    if name.is_empty() {
        formers.push(Former::KubeProxy);
    }
    formers
}

/// Whether rules of a kube-proxy may exist. `is_known`: some were found when the proxy started; `is_unlistable`: there may be
/// some that only programs of iptables list.
fn may_have_kube_proxy(own: &dyn Driver, is_known: bool, is_unlistable: bool) -> bool {
    // A backend with chains finds those of others when it reads its own, and nothing has been read at the start.
    is_known || is_unlistable || own.info().has_chains || !own.keeps_translation()
}

impl TakeOverTask {
    pub(super) fn new(
        own: &'static dyn Driver,
        all: Vec<&'static dyn Driver>,
        service_proxy_name: String,
        sync_period: Duration,
    ) -> Self {
        Self { own, all, service_proxy_name, sync_period, tasks: None }
    }

    /// Returns whether everything has been taken over. May take seconds.
    pub(super) fn advance(
        &mut self,
        shared: &Shared,
        observer: &mut dyn Observer,
        cleaner: &Cleaner,
    ) -> bool {
        let (is_in_effect, published) = {
            let sync = shared.sync();
            (sync.has_synced() && sync.is_current(), sync.node().service_proxy_names.clone())
        };
        if !is_in_effect && self.tasks.is_none() {
            return false;
        }
        let (take_over, remover) = match &mut self.tasks {
            Some(tasks) => tasks,
            None => {
                let tasks = self.begin(shared, &published);
                self.tasks.insert(tasks)
            }
        };
        let events = take_over.advance(is_in_effect, Instant::now(), remover);
        let is_done = take_over.is_done();
        let removed = events.iter().any(|event| matches!(event, TakenOver::Done { .. }));
        events.iter().for_each(|event| record(shared, self.own.info().name, event));
        if removed {
            shared.look_for_other_proxies(observer);
            // Until now, the former rules may have translated flows to endpoints that no longer serve.
            Family::ALL.into_iter().for_each(|family| cleaner.clean(family));
        }
        is_done
    }

    fn stay_beside(&self, published: &[String]) -> bool {
        !self.service_proxy_name.is_empty() || !published.is_empty()
    }

    /// Rules of backends that no process runs: of a proxy that restarts, or of a backend that is no longer used. The latter
    /// still decide.
    fn record_rules_that_stay(&self, shared: &Shared, own: &[&str]) {
        let others = self.all.iter().filter(|driver| !own.contains(&driver.info().name));
        for (name, rules) in rules_without_a_process(others.copied(), is_running) {
            tracing::warn!(
                backend = self.own.info().name,
                other = name,
                rules,
                "rules of another backend stay"
            );
            shared.record_event(rules_that_stay(name, &rules));
        }
    }

    fn begin(&self, shared: &Shared, published: &[String]) -> (TakeOver, NodeRemover) {
        let own: Vec<&str> = std::iter::once(self.own.info().name).chain(self.own.includes()).collect();
        let names: Vec<&'static str> = self.all.iter().map(|driver| driver.info().name).collect();
        let formers = formers(&own, &names, &self.service_proxy_name, published);
        if self.stay_beside(published) {
            self.record_rules_that_stay(shared, &own);
        }
        let places = Places::default();
        let is_known = !shared.status().other_proxies.is_empty();
        let has_kube_proxy =
            may_have_kube_proxy(self.own, is_known, !leftovers::unlistable(&places).is_empty());
        let remover = NodeRemover { own: self.own, all: self.all.clone(), places, has_kube_proxy };
        (TakeOver::new(formers, self.sync_period), remover)
    }
}

/// The rules of each backend that has some and that no process runs.
fn rules_without_a_process<'a>(
    drivers: impl Iterator<Item = &'a dyn Driver>,
    is_running: impl Fn(&'static str) -> bool,
) -> Vec<(&'static str, String)> {
    let rules = drivers.filter(|driver| !is_running(driver.info().name)).filter_map(|driver| {
        let found = driver.find_rules().ok().filter(|found| !found.is_empty())?;
        Some((driver.info().name, summary(&found)))
    });
    rules.collect()
}

fn rules_that_stay(name: &str, rules: &str) -> String {
    format!(
        "no process serves with the backend {name}, and its rules stay, because proxies run side by side: {rules}; if none is \
         to use it, run `keelson proxy cleanup --backend {name}`"
    )
}

/// `own`: the name of the backend that takes over.
fn record(shared: &Shared, own: &'static str, event: &TakenOver) {
    match event {
        TakenOver::Done { former, removed } => {
            let from = former.name();
            let removed = summary(removed);
            tracing::info!(backend = own, from, removed, "took over; rules of the former proxy removed");
            shared.metrics.took_over(from);
            let text = format!("{own} took over from {from}: removed {removed}");
            shared.status().take_overs.push(text.clone());
            shared.record_event(text);
        }
        TakenOver::Failed { former, failed, gives_up } => {
            let from = former.name();
            let failed = failed.join("; ");
            tracing::warn!(backend = own, from, failed, gives_up, "cannot remove rules of the former proxy");
            if *gives_up {
                shared.record_event(format!(
                    "rules of {from} stay: {failed}; stop this proxy and run `keelson proxy cleanup`"
                ));
            }
        }
        TakenOver::Waits { former, reason } => {
            let from = former.name();
            tracing::info!(backend = own, from, reason, "rules of the former proxy are removed later");
            shared.record_event(format!("rules of {from} are removed later: {reason}"));
        }
        TakenOver::Beside { former } => {
            let from = former.name();
            tracing::info!(backend = own, other = from, "another proxy runs beside this one; its rules stay");
            shared
                .record_event(format!("another keelson proxy runs with the backend {from}; its rules stay"));
        }
    }
}

/// Rules of a former backend that a sync of this one has replaced. Both families are one take-over.
pub(super) fn record_replaced(shared: &Shared, family: Family, from: &'static str) {
    let own = shared.sync().backend().info().name;
    tracing::info!(backend = own, from, %family, "took over; rules of the former proxy replaced");
    let start = format!("{own} took over from {from}: ");
    let is_first = !shared.status().take_overs.iter().any(|known| known.starts_with(&start));
    if is_first {
        shared.metrics.took_over(from);
    }
    let text = format!("{start}replaced its chains of {family}");
    shared.status().take_overs.push(text.clone());
    shared.record_event(text);
}

/// The first objects, and how many more there are.
fn summary(removed: &[String]) -> String {
    const NAMED: usize = 8;
    let named = removed.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    match removed.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::{Access, Backend, BackendError, BackendInfo, RuleOwner},
        options::Options,
    };

    #[test]
    fn only_what_cannot_belong_to_a_proxy_beside_this_one_is_taken_over() {
        let all = ["nft", "iptables", "userspace"];
        let names = |name: &str, published: &[&str]| -> Vec<&'static str> {
            let published: Vec<String> = published.iter().map(|name| (*name).to_owned()).collect();
            formers(&["iptables"], &all, name, &published).into_iter().map(Former::name).collect()
        };
        assert_eq!(names("", &[]), ["nft", "userspace", "kube-proxy"]);
        assert_eq!(names("", &["edge"]), ["kube-proxy"]);
        assert_eq!(names("edge", &["edge"]), [""; 0]);
        assert_eq!(names("edge", &[]), [""; 0]);
        // The rules of an included backend are its own.
        assert_eq!(formers(&["iptables", "nft"], &all, "", &[]).len(), 2);
    }

    /// A backend of which nothing is asked but what it is.
    struct Named {
        has_chains: bool,
        keeps_translation: bool,
    }

    impl Driver for Named {
        fn info(&self) -> BackendInfo {
            let has_chains = self.has_chains;
            BackendInfo { name: "test", proxy_mode: "test", requirements: "", has_chains }
        }
        fn open(&self, _: &Options, _: Access) -> Result<Box<dyn Backend>, BackendError> {
            Err(BackendError::new(&"not opened", true))
        }
        fn keeps_translation(&self) -> bool {
            self.keeps_translation
        }
        fn remove_rules(&self, _: RuleOwner, _: &mut dyn FnMut(String)) -> Result<(), BackendError> {
            Ok(())
        }
    }

    struct WithRules(&'static str, &'static [&'static str]);

    impl Driver for WithRules {
        fn info(&self) -> BackendInfo {
            BackendInfo { name: self.0, proxy_mode: "", requirements: "", has_chains: false }
        }

        fn open(&self, _: &Options, _: Access) -> Result<Box<dyn Backend>, BackendError> {
            Err(BackendError::new(&"not opened here", true))
        }

        fn find_rules(&self) -> Result<Vec<String>, BackendError> {
            match self.1 {
                ["unknown"] => Err(BackendError::new(&"no right", true)),
                rules => Ok(rules.iter().map(|&rule| rule.to_owned()).collect()),
            }
        }

        fn remove_rules(&self, _: RuleOwner, _: &mut dyn FnMut(String)) -> Result<(), BackendError> {
            Ok(())
        }
    }

    #[test]
    fn rules_of_a_kube_proxy_are_looked_for_where_they_may_exist() {
        let nft = Named { has_chains: false, keeps_translation: true };
        let iptables = Named { has_chains: true, ..nft };
        let userspace = Named { keeps_translation: false, ..nft };
        for (own, is_known, is_unlistable, expected) in [
            (&nft, false, false, false),
            (&nft, true, false, true),
            (&nft, false, true, true),
            (&iptables, false, false, true),
            (&userspace, false, false, true),
        ] {
            assert_eq!(may_have_kube_proxy(own, is_known, is_unlistable), expected);
        }
    }

    #[test]
    fn rules_that_no_process_serves_with_are_reported() {
        let all = [
            WithRules("nft", &["table ip keelson", "table ip6 keelson"]),
            WithRules("iptables", &["4 chains"]),
            WithRules("ipvs", &["unknown"]),
            WithRules("userspace", &[]),
        ];
        let rules = rules_without_a_process(all.iter().map(|driver| driver as &dyn Driver), |name| {
            name == "iptables"
        });
        assert_eq!(rules, [("nft", "table ip keelson, table ip6 keelson".to_owned())]);
        assert!(rules_that_stay("nft", &rules[0].1).ends_with("run `keelson proxy cleanup --backend nft`"));
    }

    #[test]
    fn a_long_list_is_cut() {
        let objects = |count: usize| (0..count).map(|number| number.to_string()).collect::<Vec<_>>();
        assert_eq!(summary(&objects(2)), "0, 1");
        assert!(summary(&objects(10)).ends_with("7 and 2 more"));
    }
}
