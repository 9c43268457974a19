//! `keelson agent`: puts the parts together, runs them, and takes them down again.
//!
//! Owns: the order of starting and stopping, and the threads. In: settings and signals. Out: the exit
//! code. Threads: the main one runs the actix system with the debug endpoint and the signals; the
//! PullCoordinator and the RuntimeClient have an arbiter each, so that neither waits for the other, and so have the
//! LeaseRenewer and the StatusReporter; the CRI front has a thread with a runtime of its own, so that a call passes on one thread.
//!
//! Start: state, then RuntimeClient, then PullCoordinator (which reads the journal), then the heartbeats, then the
//! sockets, then READY. Stop: no new pulls, running ones end or the drain time does, then the sockets.

mod cluster;
mod endpoints;
mod front;
mod handles;
pub(crate) mod heartbeats;
pub(crate) mod logs;
pub(crate) mod panics;
mod parts;
mod reload;
mod rest_client;
pub(crate) mod systemd;
mod view;

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use keelson_config::{Loaded, Settings};
use keelson_cri::listen::Bound;
use keelson_debug::{serve_grpc, serve_http};
use keelson_endpoints::server::EndpointsThread;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{oneshot, watch},
};

use crate::settings::SettingsArgs;
use parts::Running;

/// How long replies have to reach their callers once nothing runs any more.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Runs the agent until it is told to stop.
///
/// # Errors
/// It cannot start: state, sockets or runtime threads.
pub(crate) fn run(args: &SettingsArgs) -> anyhow::Result<ExitCode> {
    let loaded = match args.load_or_complain() {
        Ok(loaded) => loaded,
        Err(code) => return Ok(code),
    };
    let filter = logs::start(&loaded.settings.agent)?;
    raise_descriptors();
    // Before any thread exists: what systemd passes is in the environment.
    let inherited = systemd::inherited_sockets();
    let system = actix::System::with_tokio_rt(|| {
        #[allow(clippy::expect_used)] // Without a runtime there is nothing to report an error with.
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a tokio runtime")
    });
    panics::run(|| system.block_on(agent(args.clone(), loaded, filter, inherited)))
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
) -> anyhow::Result<ExitCode> {
    let settings = loaded.settings.clone();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = settings.agent.node_name, "keelson starts");
    crate::memory::give_back();
    let mut signals = Signals::new()?;
    let (mut running, sockets) = start(loaded, inherited).await?;
    systemd::ready(&settings);
    tracing::info!(
        cri = %settings.cri.listen,
        runtime = %settings.cri.runtime_endpoint,
        debug = %settings.debug.listen,
        http = settings.debug.http.map(tracing::field::display),
        "keelson serves"
    );
    let watchdog = systemd::watchdog(running.view.clone());
    loop {
        tokio::select! {
            told = signals.next() => match told {
                Told::Stop => break,
                Told::Reload => reload::reload(&args, &mut running, &filter),
            },
            () = running.front.ended() => anyhow::bail!("the CRI front ended by itself"),
            () = ended(&mut running.endpoints) => anyhow::bail!("the server of the Endpoints API ended by itself"),
        }
    }
    drop(watchdog);
    stop(running, &settings, &mut signals).await;
    drop(sockets);
    // One left over names a process that is gone, which tells as much.
    let _ = std::fs::remove_file(settings.agent.state_dir.join(parts::PID_FILE));
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

/// Removes socket files at the end.
struct Sockets {
    _files: Vec<keelson_cri::listen::SocketFile>,
}

async fn start(loaded: Loaded, mut inherited: systemd::Inherited) -> anyhow::Result<(Running, Sockets)> {
    let settings = loaded.settings.clone();
    // Sockets before state: two agents with one socket and two states must not disturb each other,
    // and a socket that cannot be had is a mistake worth knowing before anything is touched.
    let cri = bind(&settings.cri.listen, settings.cri.socket_mode, inherited.cri.take()).await?;
    let debug = bind(&settings.debug.listen, settings.debug.socket_mode, inherited.debug.take()).await?;
    let (endpoints, endpoints_files) = match endpoints::wanted(&settings) {
        true => endpoints::bind(&settings).await?,
        false => (Vec::new(), Vec::new()),
    };
    let http = match settings.debug.http {
        Some(address) => Some(
            tokio::net::TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen at {address} (debug.http)"))?,
        ),
        None => None,
    };
    let (cri, cri_file) = cri.into_parts();
    let (debug, debug_file) = debug.into_parts();
    let running = parts::start(loaded, parts::Listeners { cri, endpoints })?;
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
    let mut files = endpoints_files;
    files.extend([cri_file, debug_file]);
    Ok((running, Sockets { _files: files }))
}

async fn bind(
    spec: &keelson_config::SocketSpec,
    mode: keelson_config::SocketMode,
    inherited: Option<std::os::unix::net::UnixListener>,
) -> anyhow::Result<Bound> {
    if let Some(listener) = inherited {
        return Bound::inherited(listener)
            .with_context(|| format!("cannot use the socket from systemd for {spec}"));
    }
    Ok(Bound::bind(spec.path(), mode.bits()).await?)
}

/// Ends when the watch says so, or its sender is gone.
async fn told(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Starts no more pulls, waits for those that run, then closes the doors.
async fn stop(running: Running, settings: &Arc<Settings>, signals: &mut Signals) {
    systemd::stopping();
    running.view.stopping();
    let deadline = tokio::time::Instant::now() + settings.agent.drain_timeout;
    tracing::info!(drain_timeout = ?settings.agent.drain_timeout, "stopping: no new pulls");
    let (done, drained) = oneshot::channel();
    running.pulls.deliver(keelson_actors::pulls::Drain { done });
    tokio::select! {
        _ = drained => tracing::info!("all pulls have ended, the state is written"),
        () = tokio::time::sleep_until(deadline) => {
            tracing::warn!("the drain time is over; pulls that still run go on at the next start");
        }
        () = signals.stop() => tracing::warn!("told to stop a second time; pulls that still run go on at the next start"),
    }
    let endpoints = async {
        if let Some(server) = running.endpoints {
            server.stop(LAST_WORDS).await;
        }
    };
    tokio::join!(running.front.stop(LAST_WORDS), endpoints);
    let _ = running.stop_debug.send(true);
    tokio::time::sleep(Duration::from_millis(20)).await;
}

enum Told {
    Stop,
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
            _ = self.terminate.recv() => Told::Stop,
            _ = self.interrupt.recv() => Told::Stop,
            _ = self.hangup.recv() => Told::Reload,
        }
    }

    async fn stop(&mut self) {
        while matches!(self.next().await, Told::Reload) {}
    }
}
