//! Owns: the faults of the whole node. In: a lane's choices. Out: a fault, undone.
//!
//! Four lanes: agent and proxy, their versions and backends; kubelet and runtime; the API server and the way to it; the disk of the
//! agent's state and the rules in the kernel.

use super::env::NodeEnv;
use crate::agent_host::AgentHost;
use crate::lanes::{Fault, Inject, Lane, LaneSpec, name};
use crate::timeline::Broken;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_harness::command::run;
use keelson_harness::peers;
use keelson_harness::util::{eventually, eventually_every, http_get};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::RngExt as _;
use rand::seq::IndexedRandom as _;
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::process::Command;

pub(crate) const LANES: [LaneSpec<'static>; 4] = [
    ("Keelson", &END_LIVES, (4.0, 15.0)),
    (
        "node",
        &[Fault::KubeletKill, Fault::KubeletRestart, Fault::RuntimeKill, Fault::RuntimeRestart],
        (10.0, 30.0),
    ),
    (
        "API server",
        &[Fault::ApiKill, Fault::ApiRestart, Fault::ApiHangs, Fault::ApiCut, Fault::ApiSlow],
        (15.0, 45.0),
    ),
    ("surroundings", &[Fault::StateDiskFull, Fault::StateDiskHangs, Fault::RulesRemoved], (5.0, 20.0)),
];

/// Those of Keelson itself. They end the life of the agent's or the proxy's process. They pause in a part of a long run, so that a life is long
/// enough to see it grow.
pub(super) const END_LIVES: [Fault; 7] = [
    Fault::AgentKill,
    Fault::AgentRestart,
    Fault::AgentFormer,
    Fault::ProxyKill,
    Fault::ProxyRestart,
    Fault::ProxyFormer,
    Fault::ProxyBackend,
];

/// Faults that need the former version.
pub(super) const NEED_FORMER: [Fault; 2] = [Fault::AgentFormer, Fault::ProxyFormer];

/// A kubelet restarts a container after up to 5 minutes, if it ended often.
const PROXY_PATIENCE: Duration = Duration::from_secs(400);

/// Time until removed rules are back. The proxy compares every 30 s.
const REPAIR_PATIENCE: Duration = Duration::from_secs(90);

impl Inject for NodeEnv {
    /// A fault that cannot be undone is a violation. The run goes on: it may be one of hours.
    async fn inject(&self, fault: Fault, lane: &mut Lane) -> Result<()> {
        if let Err(error) = self.break_and_repair(fault, lane).await {
            lane.timeline.violation("faults can be undone", &format!("{}: {error:#}", name(fault)));
        }
        Ok(())
    }
}

impl NodeEnv {
    async fn break_and_repair(&self, fault: Fault, lane: &mut Lane) -> Result<()> {
        let timeline = lane.timeline.clone();
        match fault {
            Fault::AgentKill => self.any_agent(lane).kill(&timeline).await,
            Fault::AgentRestart => self.any_agent(lane).restart(&timeline).await,
            Fault::AgentFormer => self.former_agent(lane).await,
            Fault::ProxyKill => self.kill_proxy(lane).await,
            Fault::ProxyRestart => self.delete_proxy_pod(lane).await,
            Fault::ProxyFormer => self.former_proxy(lane).await,
            Fault::ProxyBackend => self.other_backend(lane).await,
            Fault::KubeletKill | Fault::KubeletRestart => {
                self.kubelet(fault == Fault::KubeletKill, lane).await
            }
            Fault::RuntimeKill | Fault::RuntimeRestart => {
                self.runtime(fault == Fault::RuntimeKill, lane).await
            }
            Fault::ApiKill | Fault::ApiRestart => self.api(fault == Fault::ApiKill, lane).await,
            Fault::ApiHangs => self.api_hangs(lane).await,
            Fault::ApiCut => self.api_network("drop", lane).await,
            Fault::ApiSlow => {
                self.api_network("limit rate over 60 kbytes/second burst 20 kbytes drop", lane).await
            }
            Fault::StateDiskFull => self.agent.fill_state_disk(lane).await,
            Fault::StateDiskHangs => self.agent.freeze_state_disk(lane).await,
            Fault::RulesRemoved => self.remove_rules(lane).await,
            other => bail!("{other:?} is a fault of image pulls"),
        }
    }

    /// Two times of three the one that most depends on, else the one that is a node.
    fn any_agent(&self, lane: &mut Lane) -> &AgentHost {
        if lane.rng.random_range(0..3) < 2 { &self.agent } else { &self.node_agent }
    }

    async fn former_agent(&self, lane: &mut Lane) -> Result<()> {
        let (former, timeline) = (self.former.clone().context("no former version")?, lane.timeline.clone());
        let agent = self.any_agent(lane);
        agent.replace(&timeline, Some(&former)).await?;
        lane.pass_random(10.0, 40.0).await;
        agent.replace(&timeline, Some(&peers::keelson()?)).await
    }

    /// A pod that does not come back is a violation, not the end of the run.
    async fn proxy_returns(&self, old: Option<u32>, lane: &Lane) {
        if let Err(error) = self.proxy_replaced(old, PROXY_PATIENCE).await {
            lane.timeline.violation("the proxy comes back", &format!("{error:#}"));
        }
    }

    async fn kill_proxy(&self, lane: &Lane) -> Result<()> {
        let Some(old) = self.proxy_pid() else { return Ok(()) };
        let _window = lane.timeline.open(Broken::Proxy);
        kill(Pid::from_raw(old.try_into()?), Signal::SIGKILL).context("cannot kill the proxy")?;
        self.proxy_returns(Some(old), lane).await;
        Ok(())
    }

    async fn delete_proxy_pod(&self, lane: &Lane) -> Result<()> {
        let old = self.proxy_pid();
        let _window = lane.timeline.open(Broken::Proxy);
        let label = "app.kubernetes.io/name=keelson-proxy";
        self.kubectl(&["-n", "kube-system", "delete", "pod", "-l", label, "--wait=false"]).await?;
        self.proxy_returns(old, lane).await;
        Ok(())
    }

    async fn former_proxy(&self, lane: &mut Lane) -> Result<()> {
        for is_former in [true, false] {
            let old = self.proxy_pid();
            let window = lane.timeline.open(Broken::Proxy);
            self.set_proxy_image(is_former).await?;
            self.proxy_returns(old, lane).await;
            drop(window);
            if is_former {
                lane.pass_random(10.0, 40.0).await;
            }
        }
        Ok(())
    }

    /// As an operator changes from the chart's proxy to the host package's, and back.
    async fn other_backend(&self, lane: &mut Lane) -> Result<()> {
        let window = lane.timeline.open(Broken::Backend);
        self.label_for_chart(false).await?;
        eventually(PROXY_PATIENCE, "the proxy's pod is gone", || async {
            ensure!(self.proxy_pid().is_none(), "it is there");
            Ok(())
        })
        .await?;
        let mut host = self.host_proxy("iptables")?.start()?;
        let ready = eventually(PROXY_PATIENCE, "the proxy of the host is ready", || async {
            http_get(&format!("{}/readyz", super::env::PROXY)).await?.success().map(drop)
        })
        .await;
        if let Err(error) = ready {
            lane.timeline.violation(
                "a proxy with another backend takes over",
                &format!("{error:#}\n{}", host.log_tail()),
            );
        }
        drop(window);
        lane.pass_random(15.0, 40.0).await;
        let _window = lane.timeline.open(Broken::Backend);
        host.terminate(Duration::from_secs(60)).await.context("the proxy of the host")?;
        self.label_for_chart(true).await?;
        self.proxy_returns(None, lane).await;
        Ok(())
    }

    async fn kubelet(&self, is_kill: bool, lane: &mut Lane) -> Result<()> {
        let mut kubelet = self.kubelet.lock().await;
        let _window = lane.timeline.open(Broken::Kubelet);
        if is_kill {
            kubelet.kill9()?;
        } else {
            kubelet.terminate().await?;
        }
        lane.pass_random(0.01, 20.0).await;
        kubelet.start_again().await.context("the kubelet does not start again")
    }

    async fn runtime(&self, is_kill: bool, lane: &mut Lane) -> Result<()> {
        let mut runtime = self.runtime.lock().await;
        let _window = lane.timeline.open(Broken::Runtime);
        if is_kill {
            runtime.kill9()?;
        } else {
            runtime.terminate().await?;
        }
        lane.pass_random(0.01, 15.0).await;
        runtime.start_again().await.context("the runtime does not start again")
    }

    async fn api(&self, is_kill: bool, lane: &mut Lane) -> Result<()> {
        let mut cluster = self.cluster.lock().await;
        let _window = lane.timeline.open(Broken::Api);
        if is_kill {
            cluster.api.kill9()?;
        } else {
            cluster.api.terminate().await?;
        }
        lane.pass_random(0.01, 45.0).await;
        cluster.api.start_again().await.context("the API server does not start again")
    }

    async fn api_hangs(&self, lane: &mut Lane) -> Result<()> {
        let mut cluster = self.cluster.lock().await;
        let _window = lane.timeline.open(Broken::Api);
        cluster.api.pause().await?;
        lane.pass_random(1.0, 45.0).await;
        cluster.api.resume()
    }

    async fn api_network(&self, rule: &str, lane: &mut Lane) -> Result<()> {
        let cluster = self.cluster.lock().await;
        let (_, port) = cluster.api.address().rsplit_once(':').context("an address has a port")?;
        let _window = lane.timeline.open(Broken::Api);
        let table = format!(
            "add table inet soak\nadd chain inet soak in {{ type filter hook input priority -300; }}\n\
             add rule inet soak in tcp dport {port} {rule}\nadd rule inet soak in tcp sport {port} {rule}\n"
        );
        nft(&["-e", &table]).await?;
        lane.pass_random(1.0, 45.0).await;
        nft(&["delete", "table", "inet", "soak"]).await.map(drop)
    }

    /// Removes a table, the rules of a chain or the elements of a map, and waits until they are back.
    async fn remove_rules(&self, lane: &mut Lane) -> Result<()> {
        let listed: Value =
            serde_json::from_str(&nft(&["-j", "list", "table", "ip", "keelson"]).await.unwrap_or_default())
                .unwrap_or_default();
        let objects = listed["nftables"].as_array().cloned().unwrap_or_default();
        let names = |kind: &str, has: &dyn Fn(&Value) -> bool| -> Vec<String> {
            let of_kind = objects.iter().filter_map(|object| object.get(kind)).filter(|object| has(object));
            of_kind.filter_map(|object| object["name"].as_str().map(str::to_owned)).collect()
        };
        let maps = names("map", &|map| map["elem"].as_array().is_some_and(|all| !all.is_empty()));
        let chains = names("chain", &|_| true);
        let chosen = match lane.rng.random_range(0..3) {
            0 => Some(vec!["delete".to_owned(), "table".to_owned(), "ip".to_owned(), "keelson".to_owned()]),
            1 => maps
                .choose(&mut lane.rng)
                .map(|map| ["flush", "map", "ip", "keelson", map].map(str::to_owned).into()),
            _ => chains
                .choose(&mut lane.rng)
                .map(|one| ["flush", "chain", "ip", "keelson", one].map(str::to_owned).into()),
        };
        // While another backend serves, there is no such table.
        let Some(command) = chosen.filter(|_| !objects.is_empty()) else { return Ok(()) };
        let _window = lane.timeline.open(Broken::Rules);
        lane.timeline.record("fault", &format!("nft {}", command.join(" ")));
        let command: Vec<_> = command.iter().map(String::as_str).collect();
        // Another sync may have removed it meanwhile.
        if nft(&command).await.is_err() {
            return Ok(());
        }
        let began = Instant::now();
        let repaired = eventually_every(
            Duration::from_millis(500),
            4 * REPAIR_PATIENCE,
            "the rules are back",
            || async { self.rules_are_complete().await },
        )
        .await;
        lane.timeline.sample("proxy: repair of removed rules (s)", began.elapsed().as_secs_f64());
        let excuses = [Broken::Proxy, Broken::Backend, Broken::AgentKilled, Broken::AgentRestarted];
        let is_late = began.elapsed() > REPAIR_PATIENCE
            && !lane.timeline.excused(&excuses, began, Instant::now(), Duration::from_secs(10));
        if let Err(error) = repaired {
            lane.timeline.violation("removed rules come back", &format!("{error:#}"));
        } else if is_late {
            lane.timeline.violation("removed rules come back", &format!("only after {:?}", began.elapsed()));
        }
        Ok(())
    }
}

/// Runs `nft`, or, after `-e`, a script.
async fn nft(args: &[&str]) -> Result<String> {
    let mut nft = Command::new(peers::system("nft", "nftables")?);
    match args {
        ["-e", script] => nft.arg(script),
        args => nft.args(args),
    };
    Ok(run(nft).await?.success()?.out)
}
