//! `keelson agent`: builds the parts, runs them, and stops them.
//!
//! Owns: the order of start and stop ([`start`], [`stop`]), and the main thread. In: settings and signals. Out: the
//! exit code. Each part is built by its module (`build`) from the settings and other parts: [`pulls`], [`credentials`],
//! [`heartbeats`], [`endpoints`], [`debug`].
//!
//! Threads: the main one runs the actix system with the debug API and the signals; PullCoordinator, RuntimeClient,
//! LeaseRenewer and StatusReporter have an arbiter each, so that none waits for another; the CRI front has a thread
//! with its own runtime, so that a call passes on one thread.

mod actor_handle;
pub(crate) mod cluster;
mod control_users;
mod credentials;
mod cri_path;
mod debug;
mod dumps;
pub(crate) mod endpoints;
mod front;
mod handover;
pub(crate) mod heartbeats;
mod history;
mod jobs;
pub(crate) mod logs;
mod node_events;
mod node_facts;
pub(crate) mod panics;
mod pulls;
mod reload;
mod rest_client;
mod running;
mod shared;
mod signals;
mod sockets;
pub(crate) mod stand_in;
mod store;
pub(crate) mod systemd;
mod view;
mod watchdog;

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use keelson_config::{Gate, Loaded, Settings};
use tokio::{
    net::UnixStream,
    sync::{oneshot, watch},
    time::Instant,
};

use crate::settings::SettingsArgs;
use actor_handle::ActorHandle;
use cluster::Cluster;
use debug::DebugServers;
pub(crate) use debug::host_names;
use handover::{
    offer::Offer,
    relay,
    take::{Link, Predecessor},
};
use jobs::Job;
use running::Running;
use shared::Shared;
use signals::{Request, Signals};
use sockets::Sockets;
use stand_in::StandIn;
use systemd::PassedSockets;
use view::{View, ViewParts};

/// Time for replies to reach their callers when no pull runs any more.
const REPLY_TIMEOUT: Duration = Duration::from_millis(300);

/// Runs the agent until a signal stops it. Fails if state, sockets or runtime threads cannot be had.
pub(crate) fn run(args: &SettingsArgs, systemd_handover: bool) -> anyhow::Result<ExitCode> {
    let loaded = match crate::settings::or_print_error(args.check_agent()) {
        Ok(loaded) => loaded,
        Err(code) => return Ok(code),
    };
    let filter = logs::start(&loaded.settings.agent)?;
    raise_descriptors();
    dumps::forbid();
    // Before any thread exists: what systemd passes is in the environment.
    let inherited = systemd::inherited_sockets();
    let system = actix::System::with_tokio_rt(|| {
        #[allow(clippy::expect_used)] // Without a runtime there is nothing to report an error with.
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a tokio runtime")
    });
    panics::run(|| system.block_on(agent(args.clone(), loaded, filter, inherited, systemd_handover)))
}

/// A client takes two descriptors, and the usual soft limit of 1,024 is for programs that use select.
pub(crate) fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit on file descriptors");
    }
}

async fn agent(
    args: SettingsArgs,
    loaded: Loaded,
    filter: logs::Filter,
    inherited: PassedSockets,
    systemd_handover: bool,
) -> anyhow::Result<ExitCode> {
    let settings = loaded.settings.clone();
    tracing::info!(version = crate::build_info::VERSION, node = settings.agent.node_name, "agent starting");
    reload::log_warnings(&settings);
    crate::memory::release_free_memory();
    let mut signals = Signals::new()?;
    let handover = handover::socket_path(settings.cri.listen.path());
    let search = handover::take::take_over(&handover)
        .await
        .with_context(|| format!("cannot listen on {} (cri.listen)", settings.cri.listen))?;
    let (mut predecessor, result) = (search.predecessor, search.result);
    let is_successor = predecessor.is_some();
    let adopted = predecessor.as_mut().and_then(|predecessor| predecessor.handover.take());
    let Started { mut running, sockets, link, handover_job } = start(loaded, inherited, predecessor).await?;
    if let Some(result) = result {
        running.view.count_handover(result);
    }
    if let Some(link) = link {
        actix::spawn(link.follow(running.pulls.coordinator.clone()));
    }
    let offer = Offer::bind(&handover, adopted, &handover_job).await?;
    let stand_in = if systemd_handover { StandIn::start_if_managed().await } else { None };
    systemd::ready(&settings, stand_in.as_ref().map(StandIn::pid));
    signals.follow(stand_in);
    tracing::info!(
        cri = %settings.cri.listen,
        runtime = %settings.cri.runtime_endpoint,
        debug = %settings.debug.listen,
        http = settings.debug.http.map(tracing::field::display),
        "agent serving"
    );
    let watchdog = watchdog::start(running.view.clone())?;
    let waits_for_successor = loop {
        tokio::select! {
            request = signals.next() => match request {
                Request::Stop { replaced } => break replaced,
                Request::Reload => reload::reload(&args, &mut running, &filter),
            },
            () = running.pulls.front.ended() => anyhow::bail!("the CRI front exited unexpectedly"),
        }
    };
    drop(watchdog);
    // Clients of the previous agent may reconnect soon.
    let is_used = is_successor || running.pulls.front.was_used();
    // Without a stand-in, systemd starts no successor before this process has ended.
    let can_be_replaced = !systemd::is_manager() || signals.has_stand_in;
    let successor_timeout = match waits_for_successor && is_used && can_be_replaced {
        true => settings.agent.handover_timeout,
        false => Duration::ZERO,
    };
    stop(Stopping { running, sockets, offer, successor_timeout }, &settings, &mut signals).await;
    tracing::info!("agent stopped");
    Ok(ExitCode::SUCCESS)
}

struct Started {
    running: Running,
    sockets: Sockets,
    /// To the previous agent.
    link: Option<Link>,
    handover_job: Job,
}

/// Starts everything, in this order: sockets, store (it opens in the background; no call waits for it), pulls with the
/// CRI front, heartbeats, endpoints, debug API. `predecessor`: the agent that hands over to this one.
async fn start(
    loaded: Loaded,
    inherited: PassedSockets,
    predecessor: Option<Predecessor>,
) -> anyhow::Result<Started> {
    let (handed, adopted, link) = match predecessor {
        Some(Predecessor { state, cri, debug, link, .. }) => {
            (Some(state), PassedSockets { cri, debug }, Some(link))
        }
        None => Default::default(),
    };
    let settings = loaded.settings.clone();
    // Sockets before state: two agents with one socket and two states must not disturb each other, and a socket that is
    // in use is reported before anything is changed.
    let (listeners, sockets) = sockets::bind(&settings, inherited, adopted).await?;
    let shared = Shared::new(settings.clone())?;
    let cluster = Cluster::of(&settings);
    let credentials = cluster.as_ref().map(|cluster| {
        let renewal = cluster.renewal(&settings);
        credentials::build(cluster.credentials.clone(), renewal, shared.changes.clone())
    });
    // Before everything that may wait for a disk or for the API server.
    let pulls = pulls::build(&shared, cluster.as_ref(), listeners.cri, handed)?;
    let (endpoints_view, endpoints_seen) = watch::channel(endpoints::first_view(&settings));
    let heartbeats = heartbeats::build(&shared, cluster.as_ref(), &pulls, endpoints_seen)?;
    let endpoints = endpoints::build(&shared, cluster.clone(), heartbeats.node(), endpoints_view);
    let debug = DebugServers::new(&shared.changes);
    let handover_job = Job::new("HandoverSocket", shared.changes.clone());

    let (credentials, credentials_job) = credentials.unzip();
    let mut actors = pulls.actors();
    actors.extend(heartbeats.actors());
    actors.extend(endpoints.actors());
    let events_job = pulls.events.as_ref().map(|writer| &writer.job);
    actors.extend(credentials_job.iter().chain(events_job).map(|job| ActorHandle::job(job.recorder())));
    actors.extend(debug.handles());
    actors.push(ActorHandle::job(handover_job.recorder()));
    let (loaded, loaded_seen) = watch::channel(Arc::new(loaded));
    let view = View::new(ViewParts {
        cri_socket: listeners.cri_path,
        pulls: pulls.coordinator.clone(),
        actors,
        heartbeats,
        endpoints,
        cluster,
        credentials,
        health: pulls.runtime_health.clone(),
        changes: shared.changes.clone(),
        store: shared.store.clone(),
        state_folder_id: shared.state_folder_id.clone(),
        loaded: loaded_seen,
        metrics: pulls.metrics.clone(),
        control_users: control_users::read(&settings.debug.control_users),
    });
    if let Some(writer) = pulls.events.as_ref().filter(|_| settings.feature_gates.enabled(Gate::NodeEvents)) {
        node_events::start(writer, &view, shared.clock);
    }
    let endpoints_server = view.serve_endpoints().await;
    let stop_debug = debug.serve(&settings, listeners.debug, &view).await;
    let running = Running { loaded, pulls, endpoints_server, stop_debug, store: shared.store, view };
    Ok(Started { running, sockets, link, handover_job })
}

struct Stopping {
    running: Running,
    sockets: Sockets,
    offer: Offer,
    /// Time for a successor to connect.
    successor_timeout: Duration,
}

/// Hands over to a successor; without one, starts no more pulls, waits for running ones, then closes the sockets.
async fn stop(stopping: Stopping, settings: &Arc<Settings>, signals: &mut Signals) {
    let Stopping { running, sockets, mut offer, successor_timeout } = stopping;
    let mut deadline = Instant::now() + settings.agent.drain_timeout;
    offer.stopping();
    match signals.has_stand_in {
        // systemd may have started the successor by now, and would take the notification as the successor's.
        true => signals.end_stand_in(),
        false => systemd::stopping(),
    }
    let successor = match wait_for_successor(&mut offer, successor_timeout, &mut deadline, signals).await {
        Some(successor) => Some(successor),
        None => drain(&running, &mut offer, settings, &mut deadline, signals).await,
    };
    match successor {
        Some(stream) => {
            // If it fails, the next one has as much time to connect.
            let deadline = deadline.max(Instant::now() + successor_timeout);
            match relay::run(running, sockets, offer, stream, deadline, signals).await {
                relay::Ended::Done => {}
                relay::Ended::Interrupted => tracing::warn!("second stop signal; closing running calls"),
            }
        }
        None => {
            let store = running.store.clone();
            running.view.leave().await;
            close(running, deadline).await;
            drop((offer, sockets));
            store::close(store, settings).await;
        }
    }
}

/// The agent serves normally while it waits.
async fn wait_for_successor(
    offer: &mut Offer,
    timeout: Duration,
    deadline: &mut Instant,
    signals: &mut Signals,
) -> Option<UnixStream> {
    if timeout.is_zero() {
        return None;
    }
    tracing::info!(handover_timeout = ?timeout, "stopping: waiting for a successor");
    tokio::select! {
        stream = offer.successor() => Some(stream),
        () = tokio::time::sleep(timeout) => None,
        () = signals.stop() => {
            *deadline = Instant::now();
            None
        }
    }
}

/// Starts no more pulls and waits for running ones. A successor may still connect.
async fn drain(
    running: &Running,
    offer: &mut Offer,
    settings: &Settings,
    deadline: &mut Instant,
    signals: &mut Signals,
) -> Option<UnixStream> {
    running.view.stopping();
    tracing::info!(drain_timeout = ?settings.agent.drain_timeout, "stopping: no new pulls");
    let (done, drained) = oneshot::channel();
    running.pulls.coordinator.deliver(keelson_pulls::coordinator::Drain { done });
    tokio::select! {
        _ = drained => tracing::info!("all pulls ended; state written"),
        () = tokio::time::sleep_until(*deadline) => {
            tracing::warn!("drain timeout; running pulls continue at the next start");
        }
        () = signals.stop() => {
            tracing::warn!("second stop signal; running pulls continue at the next start");
            *deadline = Instant::now();
        }
        stream = offer.successor() => return Some(stream),
    }
    None
}

/// Closes the sockets. Calls that pass through may continue until `deadline`.
async fn close(running: Running, deadline: Instant) {
    let patience = deadline.saturating_duration_since(Instant::now()).max(REPLY_TIMEOUT);
    let endpoints = async {
        if let Some(server) = running.endpoints_server {
            server.stop(REPLY_TIMEOUT).await;
        }
    };
    tokio::join!(running.pulls.front.stop(patience), endpoints);
    // Before the store is closed: no revision is published that can no longer be written.
    running.view.stop_reports();
    let _ = running.stop_debug.send(true);
    tokio::time::sleep(Duration::from_millis(20)).await;
}
