//! Gathers facts.
//!
//! Owns: the order and the time limits of questions. In: settings. Out: [`Facts`]. Nothing is changed: files are read,
//! sockets are connected to, the runtime and the API server answer questions, and backends are opened to compare.

mod cluster;
mod listeners;
mod node;
mod proxy;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use keelson_config::Settings;
use keelson_cri::runtime::ContainerRuntime;
use keelson_proto::debug as pb;
use keelson_pulls::runtime::Runtime as _;
use tokio::net::UnixStream;

use super::{
    Part,
    facts::{Answer, Facts, Socket},
};
use crate::{
    debug_client,
    kubelet::{self, Options},
};

/// For one question.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Request {
    pub(crate) settings: Arc<Settings>,
    pub(crate) parts: Vec<Part>,
    /// Check the proxy although none is on this node.
    pub(crate) wants_proxy: bool,
    pub(crate) kubelet: Options,
}

pub(crate) async fn gather(request: Request) -> Facts {
    let Request { settings, parts, wants_proxy, kubelet: options } = request;
    let has = |part: Part| parts.contains(&part);
    let needs_cluster = [Part::Heartbeats, Part::Endpoints, Part::Proxy].into_iter().any(has);
    let (cri, runtime, debug, endpoints, running_limit, cluster) = tokio::join!(
        cri_socket(settings.cri.listen.path()),
        cri_socket(settings.cri.runtime_endpoint.path()),
        listening(settings.debug.listen.path()),
        async { Some(listening(settings.proxy_target()?.path()).await) },
        limit(&settings),
        async { if needs_cluster { cluster::ask(&settings).await } else { None } },
    );
    let wants_proxy = has(Part::Proxy) && (wants_proxy || node::has_proxy(&settings, &options));
    Facts {
        now: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX)),
        hostname: nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned(),
        state: node::state(&settings),
        cri,
        debug,
        runtime,
        running_limit,
        kubelet: kubelet::find(&options),
        patches: node::patches(&settings, &options),
        cluster,
        listeners: listeners::all(Path::new("/proc")),
        endpoints,
        has_manifests: settings.endpoints.manifests.as_ref().is_some_and(|folder| folder.is_dir()),
        proxy: wants_proxy.then(|| proxy::look(&settings)),
        settings,
    }
}

/// What `keelson attach` needs to know.
pub(crate) async fn gather_for_attach(settings: Arc<Settings>, kubelet: Options) -> Facts {
    gather(Request { settings, parts: vec![Part::Agent, Part::Pulls], wants_proxy: false, kubelet }).await
}

/// Asks for the version, as the kubelet does.
async fn cri_socket(path: &Path) -> Socket {
    let mut socket = listening(path).await;
    if socket.answer == Answer::Listens {
        let runtime = ContainerRuntime::new(path.to_owned(), "doctor");
        socket.answer = match tokio::time::timeout(PATIENCE, runtime.probe()).await {
            Ok(Ok(info)) => Answer::Runtime { name: info.name, version: info.version },
            Ok(Err(error)) => Answer::Silent(format!("it accepts connections and {error}")),
            Err(_) => Answer::Silent(format!(
                "it accepts connections and does not answer within {} s",
                PATIENCE.as_secs()
            )),
        };
    }
    socket
}

async fn listening(path: &Path) -> Socket {
    let answer = match tokio::time::timeout(PATIENCE, UnixStream::connect(path)).await {
        Ok(Ok(_)) => Answer::Listens,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            Answer::Silent("no process is listening".to_owned())
        }
        Ok(Err(error)) => Answer::Silent(error.to_string()),
        Err(_) => Answer::Silent("it accepts no connection".to_owned()),
    };
    Socket { path: PathBuf::from(path), file: node::file_mode(path), answer }
}

/// `None`: no agent answers.
async fn limit(settings: &Settings) -> Option<u32> {
    let ask = async {
        let mut client = debug_client::connect(&settings.debug.listen).await.ok()?;
        let answer = client.get_limit(pb::GetLimitRequest {}).await.ok()?;
        Some(answer.into_inner().max_parallel_image_pulls)
    };
    tokio::time::timeout(PATIENCE, ask).await.ok().flatten()
}
