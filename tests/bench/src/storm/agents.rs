//! Owns: many agents, each a process with a follower. In: a kubeconfig per node. Out: which of them have served a name.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use futures_util::{StreamExt as _, TryStreamExt as _};
use keelson_client::{BoxError, Handlers, Options, Position, ServiceEndpoints, ServiceName};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::scratch::Scratch;
use tokio::task::JoinSet;

const STARTING: usize = 8;

/// When each node had a Service with an endpoint, by its name, in Unix milliseconds.
type Sightings = Arc<Mutex<HashMap<String, HashMap<usize, u64>>>>;

/// Stopped on drop.
pub(super) struct Agents {
    seen: Sightings,
    _agents: Vec<Agent>,
    _followers: JoinSet<()>,
}

impl Agents {
    pub(super) async fn start(
        scratch: &Scratch,
        kubeconfigs: &Path,
        nodes: usize,
        prefix: &str,
    ) -> Result<Self> {
        let prepared = (0..nodes).map(|node| {
            let settings = Settings::new()
                .set("agent.node_name", format!("{prefix}{node}"))
                .set("kube.kubeconfig", super::kubeconfig(kubeconfigs, node).display().to_string())
                .set("node.role", "node")
                .set("node.node_ip", "10.0.0.1")
                .set("node.root_dir", scratch.path().display().to_string());
            // No runtime: nothing is pulled here.
            Agent::new(scratch, &format!("unix://{}/none.sock", scratch.path().display()), &settings)
        });
        let prepared = prepared.collect::<Result<Vec<Agent>>>()?;
        let agents: Vec<Agent> = futures_util::stream::iter(prepared)
            .map(|mut agent| async move {
                agent.start_live().await?;
                anyhow::Ok(agent)
            })
            .buffered(STARTING)
            .try_collect()
            .await?;
        let (seen, mut followers) = (Sightings::default(), JoinSet::new());
        for (node, agent) in agents.iter().enumerate() {
            let target = agent.endpoints_target().parse().context("the target of an agent")?;
            let mut looker = Looker { node, seen: seen.clone() };
            followers.spawn(async move {
                // Ends with the bench.
                let _ = keelson_client::run(Options { target, ..Options::default() }, &mut looker).await;
            });
        }
        Ok(Self { seen, _agents: agents, _followers: followers })
    }

    /// When each agent served this Service with an endpoint, in Unix milliseconds.
    pub(super) fn seen(&self, name: &str) -> HashMap<usize, u64> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned().unwrap_or_default()
    }
}

/// Finds markers among the Services of one agent.
struct Looker {
    node: usize,
    seen: Sightings,
}

impl Handlers for Looker {
    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        if name.namespace() == "default" && !service.endpoints.is_empty() {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let now = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
            seen.entry(name.name().to_owned()).or_default().entry(self.node).or_insert(now);
        }
    }

    fn delete(&mut self, _name: &ServiceName) {}

    async fn sync(&mut self, _position: &Position) -> Result<(), BoxError> {
        Ok(())
    }
}
