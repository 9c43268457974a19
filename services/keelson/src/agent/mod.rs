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
mod dumps;
mod endpoints;
mod front;
mod handles;
mod handover;
pub(crate) mod heartbeats;
pub(crate) mod logs;
pub(crate) mod panics;
mod parts;
mod reload;
mod rest_client;
pub(crate) mod stand_in;
mod store;
pub(crate) mod systemd;
mod view;

use std::{
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use keelson_config::{Loaded, Settings};
use keelson_cri::listen::{Bound, SocketFile};
use keelson_debug::{serve_grpc, serve_http};
use keelson_endpoints::server::EndpointsThread;
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
use parts::Running;

/// How long replies have to reach their callers once nothing runs any more.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Runs the agent until it is told to stop.
///
/// # Errors
/// It cannot start: state, sockets or runtime threads.
pub(crate) fn run(args: &SettingsArgs, systemd_handover: bool) -> anyhow::Result<ExitCode> {
    let loaded = match args.load_or_complain() {
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
        tracing::warn!(key = warning.key, "{}", warning.message);
    }
}

/// A client costs two descriptors, and the usual soft limit of 1,024 is for programs that use select.
fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of file descriptors");
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
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = settings.agent.node_name, "keelson starts");
    warn(&settings);
    crate::memory::give_back();
    let mut signals = Signals::new()?;
    let handover = handover::socket_path(settings.cri.listen.path());
    let mut predecessor = handover::take::take_over(&handover)
        .await
        .with_context(|| format!("cannot listen on {} (cri.listen)", settings.cri.listen))?;
    let is_successor = predecessor.is_some();
    let adopted = predecessor.as_mut().and_then(|predecessor| predecessor.handover.take());
    let (mut running, sockets, link) = start(loaded, inherited, predecessor).await?;
    if let Some(link) = link {
        actix::spawn(link.follow(running.pulls.clone()));
    }
    let offer = handover::offer::Offer::bind(&handover, adopted).await?;
    systemd::ready(&settings);
    tracing::info!(
        cri = %settings.cri.listen,
        runtime = %settings.cri.runtime_endpoint,
        debug = %settings.debug.listen,
        http = settings.debug.http.map(tracing::field::display),
        "keelson serves"
    );
    let watchdog = systemd::watchdog(running.view.clone());
    let waits_for_successor = loop {
        tokio::select! {
            told = signals.next() => match told {
                Told::Stop { replaced } => break replaced,
                Told::Reload => reload::reload(&args, &mut running, &filter),
            },
            () = running.front.ended() => anyhow::bail!("the CRI front ended by itself"),
            () = ended(&mut running.endpoints) => anyhow::bail!("the server of the Endpoints API ended by itself"),
        }
    };
    drop(watchdog);
    // The clients of the agent before this one may be about to come.
    let is_used = is_successor || running.front.was_used();
    let patience = match waits_for_successor && is_used {
        true => settings.agent.handover_timeout,
        false => Duration::ZERO,
    };
    stop(Stopping { running, sockets, offer, patience, systemd_handover }, &settings, &mut signals).await;
    tracing::info!("keelson ends");
    Ok(ExitCode::SUCCESS)
}

/// When the server of the Endpoints API has ended, which it does not while it is off.
async fn ended(server: &mut Option<EndpointsThread>) {
    match server {
        Some(server) => server.ended().await,
        None => std::future::pending().await,
    }
}

/// Removes socket files at the end, unless they are a successor's by then.
struct Sockets {
    /// Of listeners that can be handed over.
    files: Vec<SocketFile>,
    _own_files: Vec<SocketFile>,
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
) -> anyhow::Result<(Running, Sockets, Option<Link>)> {
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
    let debug = debug.bind(&settings.debug.listen, settings.debug.socket_mode).await?;
    let (endpoints, endpoints_files) = match endpoints::wanted(&settings) {
        true => endpoints::bind(&settings).await?,
        false => (Vec::new(), Vec::new()),
    };
    let http = match settings.debug.http {
        Some(address) => Some(
            bind_tcp(address).await.with_context(|| format!("cannot listen at {address} (debug.http)"))?,
        ),
        None => None,
    };
    let (cri, cri_file) = cri.into_parts();
    let (debug, debug_file) = debug.into_parts();
    let handed = vec![
        (handover::CRI, cri.as_fd().try_clone_to_owned().context("the CRI listener")?),
        (handover::DEBUG, debug.as_fd().try_clone_to_owned().context("the debug listener")?),
    ];
    let running = parts::start(loaded, parts::Listeners { cri, endpoints }, state)?;
    let (view, stop) = (running.view.clone(), running.stop_debug.subscribe());
    actix::spawn(async move {
        if let Err(error) = serve_grpc(debug, view, told(stop)).await {
            tracing::error!(%error, "the debug socket ended");
        }
    });
    if let Some(listener) = http {
        let (view, stop) = (running.view.clone(), running.stop_debug.subscribe());
        actix::spawn(async move {
            if let Err(error) = serve_http(listener, view, told(stop)).await {
                tracing::error!(%error, "the debug page ended");
            }
        });
    }
    let sockets = Sockets { files: vec![cri_file, debug_file], _own_files: endpoints_files, handed };
    Ok((running, sockets, link))
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
                .with_context(|| format!("cannot use the socket of the agent before this one for {spec}")),
            (None, None) => Ok(Bound::bind_within(spec.path(), mode.bits(), PATIENCE).await?),
        }
    }
}

/// Listens at a TCP address; one that a process which was killed has not given back yet is waited for.
async fn bind_tcp(address: std::net::SocketAddr) -> std::io::Result<tokio::net::TcpListener> {
    let since = tokio::time::Instant::now();
    loop {
        match tokio::net::TcpListener::bind(address).await {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && since.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            ended => return ended,
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
    /// systemd starts the successor while this process runs.
    systemd_handover: bool,
}

/// Hands over to a successor; without one, starts no more pulls, waits for those that run, then closes the sockets.
async fn stop(stopping: Stopping, settings: &Arc<Settings>, signals: &mut Signals) {
    let Stopping { running, sockets, mut offer, patience, systemd_handover } = stopping;
    systemd::stopping();
    let mut deadline = tokio::time::Instant::now() + settings.agent.drain_timeout;
    offer.stopping();
    let patience = let_systemd_start(patience, systemd_handover).await;
    let successor = match wait_for_successor(&mut offer, patience, &mut deadline, signals).await {
        Some(successor) => Some(successor),
        None => drain(&running, &mut offer, settings, &mut deadline, signals).await,
    };
    match successor {
        Some(stream) => match relay::run(running, sockets, offer, stream, deadline, signals).await {
            relay::Ended::Done => {}
            relay::Ended::Told => tracing::warn!("told to stop a second time; calls that run are cut off"),
        },
        None => {
            let store = running.store.clone();
            close(running, deadline).await;
            drop((offer, sockets));
            store::close(store, settings).await;
        }
    }
}

/// systemd starts a successor only when the main process has ended: makes it so, or says that nobody is to be waited for.
async fn let_systemd_start(patience: Duration, systemd_handover: bool) -> Duration {
    if patience.is_zero() || !systemd::is_manager() {
        return patience;
    }
    if !systemd_handover {
        return Duration::ZERO;
    }
    match stand_in::take_the_end().await {
        Ok(()) => patience,
        Err(error) => {
            let reason = format!("{error:#}");
            tracing::error!(reason, "systemd cannot start a successor before this agent ends");
            Duration::ZERO
        }
    }
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
    tracing::info!(handover_timeout = ?patience, "stopping: waiting for an agent that takes over");
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
    running.pulls.deliver(keelson_actors::pulls::Drain { done });
    tokio::select! {
        _ = drained => tracing::info!("all pulls have ended, the state is written"),
        () = tokio::time::sleep_until(*deadline) => {
            tracing::warn!("the drain time is over; pulls that still run go on at the next start");
        }
        () = signals.stop() => {
            tracing::warn!("told to stop a second time; pulls that still run go on at the next start");
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
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::Stop { replaced: true },
            // Somebody at a terminal.
            _ = self.interrupt.recv() => Told::Stop { replaced: false },
            _ = self.hangup.recv() => Told::Reload,
        }
    }

    async fn stop(&mut self) {
        while matches!(self.next().await, Told::Reload) {}
    }
}
