//! Owns: a kube-controller-manager of the test. In: the controllers to run, and their timeouts for silent nodes.
//! Out: control of its process.

use super::pki::Pki;
use anyhow::{Context as _, Result};
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::free_port;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::TcpStream;

#[derive(Clone, Debug)]
pub struct ControllerOptions {
    pub controllers: Vec<String>,
    /// Interval of checks of nodes (default of Kubernetes: 5 s).
    pub node_monitor_period: Duration,
    /// Silence after which a node is marked `Unknown` (default of Kubernetes: 50 s).
    pub node_monitor_grace_period: Duration,
    /// The same for a node that has never posted a status (default of Kubernetes: 60 s).
    pub node_startup_grace_period: Duration,
    /// Appended to the flags of the harness, which they override.
    pub args: Vec<String>,
}

impl Default for ControllerOptions {
    fn default() -> Self {
        let controllers = [
            "node-lifecycle-controller",
            "taint-eviction-controller",
            "garbage-collector-controller",
            "pod-garbage-collector-controller",
            "namespace-controller",
            "serviceaccount-controller",
        ];
        Self {
            controllers: controllers.map(str::to_owned).into(),
            node_monitor_period: Duration::from_secs(5),
            node_monitor_grace_period: Duration::from_secs(50),
            node_startup_grace_period: Duration::from_secs(60),
            args: Vec::new(),
        }
    }
}

impl ControllerOptions {
    /// The controllers that approve and sign the certificates of nodes, which are then valid for `valid`.
    pub fn signing(pki: &Pki, valid: Duration) -> Result<Self> {
        let controllers = [
            "certificatesigningrequest-approving-controller",
            "certificatesigningrequest-signing-controller",
        ];
        Ok(Self {
            controllers: controllers.map(str::to_owned).into(),
            args: vec![
                format!("--cluster-signing-cert-file={}", pki.ca_file().display()),
                format!("--cluster-signing-key-file={}", pki.signing_key()?.display()),
                format!("--cluster-signing-duration={}s", valid.as_secs()),
            ],
            ..Self::default()
        })
    }

    /// Checks nodes every half second, and marks them after `grace` without a heartbeat.
    pub fn with_grace_period(grace: Duration) -> Self {
        Self {
            node_monitor_period: Duration::from_millis(500),
            node_monitor_grace_period: grace,
            node_startup_grace_period: grace,
            ..Self::default()
        }
    }
}

/// Killed on drop.
#[derive(Debug)]
pub struct ControllerManager {
    port: u16,
    daemon: Daemon,
}

impl ControllerManager {
    /// Starts one below `scratch` with an administrator's kubeconfig, and waits until it serves.
    pub(super) async fn start(
        scratch: &Scratch,
        kubeconfig: &Path,
        options: &ControllerOptions,
    ) -> Result<Self> {
        let port = free_port()?;
        let folder: PathBuf = scratch.numbered("controllers-")?;
        let millis = |duration: Duration| format!("{}ms", duration.as_millis());
        let mut args = vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--authentication-kubeconfig={}", kubeconfig.display()),
            format!("--authorization-kubeconfig={}", kubeconfig.display()),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!("--cert-dir={}", folder.display()),
            "--leader-elect=false".to_owned(),
            format!("--controllers={}", options.controllers.join(",")),
            format!("--node-monitor-period={}", millis(options.node_monitor_period)),
            format!("--node-monitor-grace-period={}", millis(options.node_monitor_grace_period)),
            format!("--node-startup-grace-period={}", millis(options.node_startup_grace_period)),
        ];
        args.extend(options.args.iter().cloned());
        let program = Program {
            name: "kube-controller-manager".to_owned(),
            path: peers::control_plane("kube-controller-manager")?,
            args,
            env: Vec::new(),
            log: folder.join("controllers.log"),
        };
        let mut manager = Self { port, daemon: Daemon::new(program) };
        manager.start_again().await?;
        Ok(manager)
    }

    /// False as well after it ended by itself: that of 1.36 panics if it finds a node reachable again before it knows the node's zone
    /// (`markNodeAsReachable`). A kubelet starts its static pod again.
    pub fn is_running(&mut self) -> Result<bool> {
        self.daemon.is_running()
    }

    /// Starts it after [`ControllerManager::kill9`] or [`ControllerManager::terminate`] and waits until it serves.
    pub async fn start_again(&mut self) -> Result<()> {
        let port = self.port;
        self.daemon
            .start(|| async move {
                TcpStream::connect(("127.0.0.1", port)).await.map(drop).context("no process listens")
            })
            .await
    }
}

daemon_life!(ControllerManager);
