//! `keelson agent`: puts the parts together, runs them, and takes them down again.
//!
//! Owns: the order of starting and stopping, and the threads. In: settings and signals. Out: the exit
//! code. Threads: the main one runs the actix system with the debug endpoint and the signals; the
//! PullCoordinator and the RuntimeClient have an arbiter each, so that neither waits for the other, and so have the
//! LeaseRenewer and the StatusReporter; the CRI front has a thread with a runtime of its own, so that a call passes on one thread.
//!
//! Start: sockets, RuntimeClient, PullCoordinator, the CRI front, then the heartbeats and the rest, then READY. The
//! state store opens in the background meanwhile; no call waits for it. Before it, whatever an agent that is stopping
//! hands over. Stop: a successor is waited for and gets everything ([`handover`]); without one, no new pulls, running
//! ones end or the drain time does, then the sockets.

pub(crate) mod cluster;
mod control;
mod credentials;
mod dumps;
pub(crate) mod endpoints;
mod front;
mod handles;
mod handover;
pub(crate) mod heartbeats;
mod jobs;
pub(crate) mod logs;
pub(crate) mod panics;
mod parts;
mod reload;
mod rest_client;
pub(crate) mod stand_in;
mod store;
pub(crate) mod systemd;
mod view;
mod watchdog;

use std::{
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    path::PathBuf,
    process::ExitCode,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use keelson_actor_system::inspect::Status;
use keelson_config::{Loaded, Settings};
use keelson_debug::{serve_grpc, serve_http};
use keelson_serve::unix::{Bound, SocketFile};
use tokio::{
    net::UnixStream,
    signal::unix::{Signal, SignalKind, signal},
    sync::{oneshot, watch},
};

use crate::settings::SettingsArgs;
use handover::{
    offer::Offer,
    relay,
    take::{Link, PATIENCE, Predecessor},
};
use jobs::{Attempt, Job, Jobs};
use parts::Running;
use stand_in::StandIn;
use view::View;

/// How long replies have to reach their callers once nothing runs any more.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Runs the agent until it is told to stop.
///
/// # Errors
/// It cannot start: state, sockets or runtime threads.
pub(crate) fn run(args: &SettingsArgs, systemd_handover: bool) -> anyhow::Result<ExitCode> {
    let loaded = match crate::settings::or_complain(args.check_agent()) {
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

/// Says which settings are valid and probably not meant.
fn warn(settings: &Settings) {
    for warning in settings.warnings() {
        tracing::warn!(key = warning.key, warning = warning.message, "valid setting is probably a mistake");
    }
}

/// A client costs two descriptors, and the usual soft limit of 1,024 is for programs that use select.
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
    inherited: systemd::Inherited,
    systemd_handover: bool,
) -> anyhow::Result<ExitCode> {
    let settings = loaded.settings.clone();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = settings.agent.node_name, "agent starting");
    warn(&settings);
    crate::memory::give_back();
    let mut signals = Signals::new()?;
    let handover = handover::socket_path(settings.cri.listen.path());
    let search = handover::take::take_over(&handover)
        .await
        .with_context(|| format!("cannot listen on {} (cri.listen)", settings.cri.listen))?;
    let (mut predecessor, result) = (search.predecessor, search.result);
    let is_successor = predecessor.is_some();
    let adopted = predecessor.as_mut().and_then(|predecessor| predecessor.handover.take());
    let (mut running, sockets, link, offering) = start(loaded, inherited, predecessor).await?;
    if let Some(result) = result {
        running.view.count_handover(result);
    }
    if let Some(link) = link {
        actix::spawn(link.follow(running.pulls.clone()));
    }
    let offer = handover::offer::Offer::bind(&handover, adopted, &offering).await?;
    let stand_in = start_stand_in(systemd_handover).await;
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
            told = signals.next() => match told {
                Told::Stop { replaced } => break replaced,
                Told::Reload => reload::reload(&args, &mut running, &filter),
            },
            () = running.front.ended() => anyhow::bail!("the CRI front exited unexpectedly"),
        }
    };
    drop(watchdog);
    // The clients of the agent before this one may be about to come.
    let is_used = is_successor || running.front.was_used();
    // Without a stand-in, systemd starts no successor before this process has ended.
    let can_be_replaced = !systemd::is_manager() || signals.has_stand_in;
    let patience = match waits_for_successor && is_used && can_be_replaced {
        true => settings.agent.handover_timeout,
        false => Duration::ZERO,
    };
    stop(Stopping { running, sockets, offer, patience }, &settings, &mut signals).await;
    tracing::info!("agent stopped");
    Ok(ExitCode::SUCCESS)
}

/// Removes socket files at the end, unless they are a successor's by then.
struct Sockets {
    /// Of listeners that can be handed over.
    files: Vec<SocketFile>,
    /// Listeners to hand over, by name.
    handed: Vec<(&'static str, OwnedFd)>,
}

impl Sockets {
    /// Closes the listeners; `handed`: a successor has them.
    fn leave(self, handed: bool) {
        if handed {
            self.files.into_iter().for_each(SocketFile::disown);
        }
    }
}

async fn start(
    loaded: Loaded,
    mut inherited: systemd::Inherited,
    predecessor: Option<Predecessor>,
) -> anyhow::Result<(Running, Sockets, Option<Link>, Job)> {
    let settings = loaded.settings.clone();
    // Sockets before state: two agents with one socket and two states must not disturb each other,
    // and a socket that cannot be had is a mistake worth knowing before anything is touched.
    let (state, mut adopted, link) = match predecessor {
        Some(predecessor) => {
            let adopted = systemd::Inherited { cri: predecessor.cri, debug: predecessor.debug };
            (Some(predecessor.state), adopted, Some(predecessor.link))
        }
        None => Default::default(),
    };
    let cri = Source { inherited: inherited.cri.take(), adopted: adopted.cri.take() };
    let cri = cri.bind(&settings.cri.listen, settings.cri.socket_mode).await?;
    let debug = Source { inherited: inherited.debug.take(), adopted: adopted.debug.take() };
    let debug = debug.bind_now(&settings.debug.listen, settings.debug.socket_mode).await;
    let (cri, cri_file) = cri.into_parts();
    let cri_socket = socket_path(&cri, &settings);
    let mut files = vec![cri_file];
    let mut handed =
        vec![(handover::CRI, cri.as_fd().try_clone_to_owned().context("cannot duplicate the CRI listener")?)];
    let debug = match debug {
        Ok(bound) => {
            let (listener, file) = bound.into_parts();
            files.push(file);
            handed.push((
                handover::DEBUG,
                listener.as_fd().try_clone_to_owned().context("cannot duplicate the debug listener")?,
            ));
            Some(Rc::new(listener.into_std().context("cannot use the debug listener")?))
        }
        // Its job says why, and tries again.
        Err(_) => None,
    };
    let (changes, _) = watch::channel(0);
    let jobs @ [grpc, page, offering] =
        &["DebugSocket", "DebugHttp", "HandoverSocket"].map(|name| Job::new(name, changes.clone()));
    let mut running =
        parts::start(loaded, parts::Listeners { cri, cri_socket, changes, jobs: jobs.clone() }, state)?;
    running.endpoints = running.view.serve_endpoints().await;
    let mut serving = Jobs::new(running.stop_debug.subscribe());
    let (view, own) = (running.view.clone(), settings.clone());
    serving.keep(grpc, 0, move |attempt| debug_socket(debug.clone(), own.clone(), view.clone(), attempt));
    match settings.debug.http {
        Some(address) => {
            let (view, names) = (running.view.clone(), host_names(&settings.debug.http_hosts));
            serving.keep(page, 0, move |attempt| debug_http(address, view.clone(), names.clone(), attempt));
        }
        None => page.recorder().status(Status::Off, "debug.http is off"),
    }
    // They end by the watch.
    drop(serving.tried().await);
    Ok((running, Sockets { files, handed }, link, offering.clone()))
}

/// Where clients reach the CRI listener: one from systemd may be elsewhere than the settings say. A socket that the agent
/// made was renamed, and has its own name no more.
fn socket_path(listener: &tokio::net::UnixListener, settings: &Settings) -> PathBuf {
    let address = listener.local_addr().ok();
    let own = address.as_ref().and_then(|address| address.as_pathname()).filter(|path| path.exists());
    own.unwrap_or_else(|| settings.cri.listen.path()).to_owned()
}

/// Serves the debug API on the socket that the agent has, or on one that is made.
async fn debug_socket(
    given: Option<Rc<UnixListener>>,
    settings: Arc<Settings>,
    view: View,
    mut attempt: Attempt,
) -> anyhow::Result<()> {
    let spec = &settings.debug.listen;
    let (listener, _file) = match given {
        Some(given) => (tokio::net::UnixListener::from_std(given.try_clone()?)?, None),
        None => {
            let bound = Bound::bind(spec.path(), settings.debug.socket_mode.bits()).await?;
            let (listener, file) = bound.into_parts();
            (listener, Some(file))
        }
    };
    attempt.serves(spec.to_string());
    let stop = told(attempt.stop.clone());
    serve_grpc(listener, view, stop).await.context("cannot serve the debug socket")
}

/// Serves the page, the probes and the metrics.
async fn debug_http(
    address: std::net::SocketAddr,
    view: View,
    names: Arc<[String]>,
    mut attempt: Attempt,
) -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} (debug.http)"))?;
    attempt.serves(listener.local_addr().unwrap_or(address).to_string());
    let stop = told(attempt.stop.clone());
    serve_http(listener, view, names, stop).await.context("cannot serve the debug page")
}

/// Names as the servers of pages take them.
pub(crate) fn host_names(names: &[keelson_config::HostName]) -> Arc<[String]> {
    names.iter().map(|name| name.0.clone()).collect()
}

/// Where a listening socket may come from, besides being made.
struct Source {
    /// From systemd.
    inherited: Option<UnixListener>,
    /// From the agent before this one.
    adopted: Option<UnixListener>,
}

impl Source {
    async fn bind(
        self,
        spec: &keelson_config::SocketSpec,
        mode: keelson_config::SocketMode,
    ) -> anyhow::Result<Bound> {
        match (self.inherited, self.adopted) {
            (Some(listener), _) => Bound::inherited(listener)
                .with_context(|| format!("cannot use the socket from systemd for {spec}")),
            (None, Some(listener)) => Bound::adopted(listener, spec.path())
                .with_context(|| format!("cannot use the socket of the previous agent for {spec}")),
            (None, None) => Ok(Bound::bind_within(spec.path(), mode.bits(), PATIENCE).await?),
        }
    }

    /// As [`Source::bind`], but does not wait for a socket to become free.
    async fn bind_now(
        self,
        spec: &keelson_config::SocketSpec,
        mode: keelson_config::SocketMode,
    ) -> anyhow::Result<Bound> {
        match self {
            Self { inherited: None, adopted: None } => Ok(Bound::bind(spec.path(), mode.bits()).await?),
            given => given.bind(spec, mode).await,
        }
    }
}

/// Ends when the watch says so, or its sender is gone.
async fn told(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// What a stopping agent has.
struct Stopping {
    running: Running,
    sockets: Sockets,
    offer: Offer,
    /// How long a successor is waited for.
    patience: Duration,
}

/// Hands over to a successor; without one, starts no more pulls, waits for those that run, then closes the sockets.
async fn stop(stopping: Stopping, settings: &Arc<Settings>, signals: &mut Signals) {
    let Stopping { running, sockets, mut offer, patience } = stopping;
    let mut deadline = tokio::time::Instant::now() + settings.agent.drain_timeout;
    offer.stopping();
    match signals.has_stand_in {
        // systemd may have started the successor by now: it would take the notification for the successor's.
        true => signals.end_stand_in(),
        false => systemd::stopping(),
    }
    let successor = match wait_for_successor(&mut offer, patience, &mut deadline, signals).await {
        Some(successor) => Some(successor),
        None => drain(&running, &mut offer, settings, &mut deadline, signals).await,
    };
    match successor {
        Some(stream) => match relay::run(running, sockets, offer, stream, deadline, signals).await {
            relay::Ended::Done => {}
            relay::Ended::Told => tracing::warn!("second stop signal; closing running calls"),
        },
        None => {
            let store = running.store.clone();
            running.view.leave().await;
            close(running, deadline).await;
            drop((offer, sockets));
            store::close(store, settings).await;
        }
    }
}

/// A process for systemd to follow, with `--systemd-handover`.
async fn start_stand_in(systemd_handover: bool) -> Option<StandIn> {
    if !systemd_handover || !systemd::is_manager() {
        return None;
    }
    let started = StandIn::start().await;
    started
        .inspect_err(|error| {
            let reason = format!("{error:#}");
            tracing::error!(
                reason,
                "no stand-in process; systemd starts a successor only after this agent exits"
            );
        })
        .ok()
}

/// The agent serves as before while it waits.
async fn wait_for_successor(
    offer: &mut Offer,
    patience: Duration,
    deadline: &mut tokio::time::Instant,
    signals: &mut Signals,
) -> Option<UnixStream> {
    if patience.is_zero() {
        return None;
    }
    tracing::info!(handover_timeout = ?patience, "stopping: waiting for a successor");
    tokio::select! {
        stream = offer.successor() => Some(stream),
        () = tokio::time::sleep(patience) => None,
        () = signals.stop() => {
            *deadline = tokio::time::Instant::now();
            None
        }
    }
}

/// Starts no more pulls and waits for those that run. A successor may still come.
async fn drain(
    running: &Running,
    offer: &mut Offer,
    settings: &Settings,
    deadline: &mut tokio::time::Instant,
    signals: &mut Signals,
) -> Option<UnixStream> {
    running.view.stopping();
    tracing::info!(drain_timeout = ?settings.agent.drain_timeout, "stopping: no new pulls");
    let (done, drained) = oneshot::channel();
    running.pulls.deliver(keelson_pulls::coordinator::Drain { done });
    tokio::select! {
        _ = drained => tracing::info!("all pulls ended; state written"),
        () = tokio::time::sleep_until(*deadline) => {
            tracing::warn!("drain timeout; running pulls continue at the next start");
        }
        () = signals.stop() => {
            tracing::warn!("second stop signal; running pulls continue at the next start");
            *deadline = tokio::time::Instant::now();
        }
        stream = offer.successor() => return Some(stream),
    }
    None
}

/// Closes the sockets. Calls that pass through may go on until `deadline`.
async fn close(running: Running, deadline: tokio::time::Instant) {
    let patience = deadline.saturating_duration_since(tokio::time::Instant::now()).max(LAST_WORDS);
    let endpoints = async {
        if let Some(server) = running.endpoints {
            server.stop(LAST_WORDS).await;
        }
    };
    tokio::join!(running.front.stop(patience), endpoints);
    let _ = running.stop_debug.send(true);
    tokio::time::sleep(Duration::from_millis(20)).await;
}

enum Told {
    Stop {
        /// Another agent may be about to start.
        replaced: bool,
    },
    Reload,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// Until it has ended.
    stand_in: Option<StandIn>,
    has_stand_in: bool,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
            stand_in: None,
            has_stand_in: false,
        })
    }

    /// From now on systemd's signals arrive at this process.
    fn follow(&mut self, stand_in: Option<StandIn>) {
        self.has_stand_in = stand_in.is_some();
        self.stand_in = stand_in;
    }

    /// Lets systemd start the next agent; a no-op if systemd has ended the stand-in.
    fn end_stand_in(&mut self) {
        self.stand_in.take().into_iter().for_each(StandIn::finish);
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::Stop { replaced: true },
            // Somebody at a terminal.
            _ = self.interrupt.recv() => Told::Stop { replaced: false },
            _ = self.hangup.recv() => Told::Reload,
            event = stand_in_event(&mut self.stand_in) => match event {
                stand_in::Event::Reload => Told::Reload,
                stand_in::Event::Ended => {
                    self.stand_in = None;
                    Told::Stop { replaced: true }
                }
            },
        }
    }

    async fn stop(&mut self) {
        while matches!(self.next().await, Told::Reload) {}
    }
}

async fn stand_in_event(stand_in: &mut Option<StandIn>) -> stand_in::Event {
    match stand_in {
        Some(stand_in) => stand_in.next().await,
        None => std::future::pending().await,
    }
}
