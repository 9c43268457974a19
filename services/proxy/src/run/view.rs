//! The status of a proxy in the debug API.
//!
//! Owns: [`View`]. In: calls of the debug API. Out: messages of `proxy.proto`, from [`Shared`]. Calls wait for the lock
//! on blocking threads, never on the servers' own.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::stream;
use keelson_proto::{proxy as pb, unix_ms};
use keelson_serve::history::History;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::{
    affinity::MAX_AGE,
    report::sync_status,
    shared::{Link, ProxyStatus, Shared},
};
use crate::{
    backend::{AffinityClients, RulesetPrinter},
    explain::Question,
    health::SocketState,
    inspect::{Check, Chunks, ProxyView, ViewError},
    model::Family,
    sync::SyncLoop,
};

/// Approximate size of a chunk of printed text, in bytes.
const PIECE: usize = 64 * 1024;

/// Minimum time between two copies of the ruleset, each of which holds the sync loop for some milliseconds.
const PRINT_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub(super) struct View {
    shared: Arc<Shared>,
    registry: Arc<Registry>,
    history: History,
    last_print: Arc<tokio::sync::Mutex<Option<tokio::time::Instant>>>,
}

impl View {
    pub(super) fn new(shared: Arc<Shared>, registry: Arc<Registry>, history: History) -> Self {
        Self { shared, registry, history, last_print: Arc::default() }
    }

    /// Calls the sync loop on a blocking thread, because it may be busy with the kernel.
    async fn with_sync_loop<T: Send + 'static>(
        &self,
        question: impl FnOnce(&SyncLoop) -> T + Send + 'static,
    ) -> Result<T, ViewError> {
        let shared = self.shared.clone();
        let answer = tokio::task::spawn_blocking(move || question(&shared.sync()));
        answer.await.map_err(|error| ViewError::Unavailable(format!("the proxy did not answer: {error}")))
    }
}

impl ProxyView for View {
    async fn state(&self) -> Result<pb::State, ViewError> {
        let status = self.shared.status().clone();
        let others = status.other_proxies.clone();
        let synced = status.synced_unix_ms;
        let shared = self.shared.clone();
        let clients = tokio::task::spawn_blocking(move || shared.affinity.clients(MAX_AGE)).await;
        let clients = clients.unwrap_or_default();
        let (families, features) = self
            .with_sync_loop(move |sync| {
                let state = |family: Family| {
                    let at = family as usize;
                    family_state(sync, family, synced[at], clients[at].as_ref(), &others)
                };
                (Family::ALL.map(state).to_vec(), sync.backend().features())
            })
            .await?;
        Ok(state(&self.shared, &status, families, features))
    }

    async fn explain(&self, question: Question) -> Result<pb::Explanation, ViewError> {
        let explained = self.with_sync_loop(move |sync| {
            let family = question.target.family();
            let backend = sync.backend();
            if let Some(reason) = backend.disabled_reason(family) {
                return Err(format!("no rules to explain: {family} is disabled on this node: {reason}"));
            }
            let explained =
                backend.has_synced(family).then(|| backend.explain(&question, sync.local_addresses()));
            explained.ok_or_else(|| "no rules to explain: no state of the agent is in effect yet".to_owned())
        });
        explained.await?.map_err(ViewError::Unavailable)
    }

    async fn print(&self) -> Result<Chunks, ViewError> {
        // A client that polls must not keep the sync loop busy.
        let mut last = self.last_print.lock().await;
        if let Some(last) = *last {
            tokio::time::sleep_until(last + PRINT_PAUSE).await;
        }
        let printer = self.with_sync_loop(|sync| sync.backend().ruleset()).await?;
        *last = Some(tokio::time::Instant::now());
        drop(last);
        let pieces = tokio::task::spawn_blocking(move || printed(printer)).await;
        let pieces = pieces.map_err(|error| ViewError::Unavailable(format!("cannot print: {error}")))?;
        Ok(Box::pin(stream::iter(pieces.into_iter().map(Ok))))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes()
    }

    fn history(&self) -> History {
        self.history.clone()
    }

    async fn livez(&self) -> Vec<Check> {
        // Failures that only a restart can repair: a capability that was taken away, or a stuck thread (then nothing
        // answers).
        let fatal = self.with_sync_loop(|sync| {
            let failures = Family::ALL.into_iter().filter_map(|family| sync.family(family).failure.as_ref());
            failures.filter(|failure| failure.error.is_fatal).map(|failure| failure.error.to_string()).next()
        });
        let reason = fatal.await.unwrap_or_else(|error| Some(error.to_string()));
        vec![check("kernel", reason)]
    }

    async fn readyz(&self) -> Vec<Check> {
        let (state, reason, _) = sync_status(&self.shared).await;
        let rules = (state != "synced").then(|| {
            if reason.is_empty() { "no state of the agent is in effect yet".to_owned() } else { reason }
        });
        let status = self.shared.status().clone();
        let link = match status.link {
            Link::Following => None,
            Link::Connecting => Some("connecting to the agent".to_owned()),
            Link::Failing(reason) => Some(reason),
        };
        vec![check("rules", rules), check("agent", link)]
    }

    async fn metrics(&self) -> String {
        let mut text = String::new();
        match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n# EOF\n"),
        }
    }
}

fn check(name: &str, reason: Option<String>) -> Check {
    Check {
        name: name.to_owned(),
        ok: reason.is_none(),
        message: reason.unwrap_or_default(),
        since_unix_ms: 0,
    }
}

fn state(
    shared: &Shared,
    status: &ProxyStatus,
    families: Vec<pb::FamilyState>,
    features: Vec<String>,
) -> pb::State {
    let (link, link_reason) = match &status.link {
        Link::Connecting => ("connecting", String::new()),
        Link::Following => ("following", String::new()),
        Link::Failing(reason) => ("failing", reason.clone()),
    };
    let position = &status.applied;
    let healthz = shared.health.is_node_eligible();
    pb::State {
        backend: shared.backend.name.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        started_unix_ms: shared.started_unix_ms,
        target: shared.target.clone(),
        link: link.to_owned(),
        link_reason,
        instance_id: position.instance_id.to_string(),
        rev: position.rev,
        stale: position.stale,
        stale_reason: position.stale_reason.clone(),
        families,
        settings: shared
            .settings
            .iter()
            .cloned()
            .chain(features)
            .chain(status.conntrack.iter().map(ToString::to_string))
            .collect(),
        health_checks: health_checks(shared),
        events: status.events.iter().cloned().collect(),
        node_eligible: healthz,
        healthy: shared.health.is_healthy(),
        endpoints_too_stale: shared.health.is_too_stale(),
        stale_since_unix_ms: position.stale_since_unix_ms.unwrap_or(0),
        take_overs: status.take_overs.clone(),
    }
}

fn health_checks(shared: &Shared) -> Vec<pb::HealthCheck> {
    let states = shared.checks.states().borrow().clone();
    let one = |state: &crate::health::HealthCheckState| {
        let open = state.sockets.iter().filter(|socket| socket.state == SocketState::Open);
        let reasons = state.sockets.iter().filter_map(|socket| match &socket.state {
            SocketState::Open => None,
            SocketState::Failing(reason) => Some(format!("{}: {reason}", socket.address)),
        });
        pb::HealthCheck {
            namespace: state.check.name.namespace().to_owned(),
            name: state.check.name.name().to_owned(),
            port: i32::from(state.check.port),
            local_endpoints: state.check.local_v4.unwrap_or(0) + state.check.local_v6.unwrap_or(0),
            listening: open.map(|socket| socket.address.to_string()).collect(),
            reason: reasons.collect::<Vec<_>>().join("; "),
        }
    };
    states.iter().map(one).collect()
}

fn family_state(
    sync: &SyncLoop,
    family: Family,
    synced_unix_ms: i64,
    clients: Option<&AffinityClients>,
    other_proxies: &[(Family, String)],
) -> pb::FamilyState {
    let (backend, status) = (sync.backend(), sync.family(family));
    let (counts, details) = (backend.counts(family), backend.details(family));
    let has_synced = backend.has_synced(family);
    let (state, reason) = match (backend.disabled_reason(family), &status.failure, has_synced) {
        (Some(reason), ..) => ("disabled", reason.to_owned()),
        (None, Some(failure), _) => ("failing", format!("{} (tried {} times)", failure.error, failure.times)),
        (None, None, true) => ("synced", String::new()),
        (None, None, false) => ("pending", String::new()),
    };
    let since =
        |at: Instant| unix_ms().saturating_sub(i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX));
    let mut conflicts: Vec<String> = details.conflicts.iter().map(ToString::to_string).collect();
    if details.without_affinity > 0 {
        conflicts.push(format!(
            "{} service ports have no session affinity although they request it: too many service ports or \
             endpoints use it",
            details.without_affinity
        ));
    }
    pb::FamilyState {
        family: family.to_string(),
        state: state.to_owned(),
        reason,
        services: counts.services as u64,
        service_ports: counts.service_ports as u64,
        endpoints: counts.endpoints as u64,
        chains: details.chains as u64,
        elements: details.elements,
        syncs: status.totals.syncs,
        full_syncs: status.totals.full,
        failures: status.totals.failures,
        repaired: status.totals.repaired,
        last_sync_unix_ms: synced_unix_ms,
        last_sync_us: u64::try_from(status.totals.took.as_micros()).unwrap_or(u64::MAX),
        last_added: status.totals.last.added as u64,
        last_deleted: status.totals.last.deleted as u64,
        pending_since_unix_ms: status
            .pending
            .filter(|_| has_synced || status.failure.is_some())
            .map_or(0, since),
        other_proxies: other_proxies
            .iter()
            .filter(|(of, _)| *of == family)
            .map(|(_, what)| what.clone())
            .collect(),
        conflicts,
        affinity_clients: clients.map(affinity_clients).unwrap_or_default(),
        affinity_clients_max: clients.map_or(0, |_| backend.affinity_capacity()),
        not_checked: status.unchecked.as_ref().map_or_else(String::new, |unchecked| {
            format!("{} (tried {} times)", unchecked.error, unchecked.times)
        }),
    }
}

/// By map, without empty ones.
fn affinity_clients(clients: &AffinityClients) -> BTreeMap<String, u64> {
    let all = clients.iter().filter(|(_, clients)| *clients > 0);
    all.map(|(map, clients)| ((*map).to_owned(), *clients as u64)).collect()
}

fn printed(printer: RulesetPrinter) -> Vec<String> {
    let mut pieces = Pieces(vec![String::new()]);
    // Writing to memory cannot fail.
    let _ = printer(&mut pieces);
    pieces.0
}

struct Pieces(Vec<String>);

impl fmt::Write for Pieces {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        match self.0.last_mut() {
            Some(last) if last.len() < PIECE => last.push_str(text),
            _ => self.0.push(text.to_owned()),
        }
        Ok(())
    }
}
