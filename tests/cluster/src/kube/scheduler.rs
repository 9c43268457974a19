//! Owns: a kube-scheduler of the test. In: an administrator's kubeconfig. Out: control of its process.

use anyhow::{Context as _, Result};
use keelson_harness::daemon::Daemon;
use keelson_harness::daemon_life;
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::free_port;
use std::path::Path;
use tokio::net::TcpStream;

/// Killed on drop.
#[derive(Debug)]
pub struct Scheduler {
    daemon: Daemon,
}

impl Scheduler {
    /// Starts one below `scratch`, and waits until it serves.
    pub(super) async fn start(scratch: &Scratch, kubeconfig: &Path) -> Result<Self> {
        let (port, folder) = (free_port()?, scratch.numbered("scheduler-")?);
        let program = Program {
            name: "kube-scheduler".to_owned(),
            path: peers::kubernetes("kube-scheduler")?,
            args: vec![
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--authentication-kubeconfig={}", kubeconfig.display()),
                format!("--authorization-kubeconfig={}", kubeconfig.display()),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--secure-port={port}"),
                format!("--cert-dir={}", folder.display()),
                "--leader-elect=false".to_owned(),
            ],
            env: Vec::new(),
            log: folder.join("scheduler.log"),
        };
        let mut scheduler = Self { daemon: Daemon::new(program) };
        let serves = || async move {
            TcpStream::connect(("127.0.0.1", port)).await.map(drop).context("no process listens")
        };
        scheduler.daemon.start(serves).await?;
        Ok(scheduler)
    }
}

daemon_life!(Scheduler);
