//! Owns: what the tests share. In: Services. Out: a network of a node with an agent, its folder of manifests and a
//! proxy, and the output of both and their commands.

use crate::kernel;
use crate::model::{NODE_NAME, Service, meaning};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::manifests::ManifestFolder;
use keelson_cluster::net::plan::SERVICE_CIDRS;
use keelson_cluster::net::{Family, KeelsonProxy, KeelsonProxyOptions, Namespace, World, node_object};
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::command::{self, CommandOutput};
use keelson_harness::cri;
use keelson_harness::peers;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::free_port;
pub(crate) use keelson_harness::util::{ensure_contains, eventually_slow};
use keelson_proto::proxy::{GetStateRequest, proxy_client::ProxyClient};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::Command;

/// Timeout of steps that take long only on a very busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// A node, whose agent and proxy are prepared and not started yet.
pub(crate) struct TestEnv {
    pub(crate) agent: Agent,
    pub(crate) proxy: KeelsonProxy,
    pub(crate) options: KeelsonProxyOptions,
    pub(crate) manifests: ManifestFolder,
    pub(crate) world: Arc<World>,
    pub(crate) scratch: Scratch,
    is_nft: bool,
}

impl TestEnv {
    /// The proxy checks its table once a second.
    pub(crate) fn new() -> Result<Self> {
        Self::with(|options| options.set("proxy.sync_period", "1s"))
    }

    pub(crate) fn with(settings: impl FnOnce(KeelsonProxyOptions) -> KeelsonProxyOptions) -> Result<Self> {
        Self::in_world(|options, _| Ok(settings(options)))
    }

    /// With the backend ebpf, for the sockets of the world.
    pub(crate) async fn started_at_sockets(services: &[Service]) -> Result<Self> {
        let mut env = Self::at_sockets()?;
        env.start(services).await?;
        Ok(env)
    }

    /// The same, not started yet.
    pub(crate) fn at_sockets() -> Result<Self> {
        let mut env =
            Self::in_world(|options, world| options.set("proxy.sync_period", "1s").at_socket_level(world))?;
        env.is_nft = false;
        Ok(env)
    }

    /// Before the start: the agent serves a proxy of this name beside the usual one.
    pub(crate) fn name_a_proxy(&mut self, name: &str) -> Result<()> {
        self.agent.configure(
            &Settings::new()
                .set("agent.node_name", NODE_NAME)
                .set("endpoints.source", "files")
                .set("endpoints.manifests", self.manifests.path().display().to_string())
                .set("endpoints.service_proxy_names", vec![name.to_owned()]),
        )
    }

    /// Whether the tables of nftables are all that there is.
    pub(crate) fn is_nft(&self) -> bool {
        self.is_nft
    }

    fn in_world(
        settings: impl FnOnce(KeelsonProxyOptions, &World) -> Result<KeelsonProxyOptions>,
    ) -> Result<Self> {
        let scratch = Scratch::new()?;
        let manifests = ManifestFolder::new(scratch.dir("manifests")?);
        let node = node_object(NODE_NAME, &json!({"topology.kubernetes.io/zone": "zone-a"}));
        manifests.put("node.json", &[node, service_cidr()])?;
        let of_agent = Settings::new()
            .set("agent.node_name", NODE_NAME)
            .set("endpoints.source", "files")
            .set("endpoints.manifests", manifests.path().display().to_string());
        let agent = Agent::new_in(&scratch.dir("agent")?, free_port()?, &no_runtime(&scratch), &of_agent)?;
        let world = Arc::new(World::new()?);
        let options = settings(KeelsonProxyOptions::new(&agent.endpoints_target()), &world)?;
        let proxy = KeelsonProxy::new(&scratch, world.node(), &options)?;
        Ok(Self { agent, proxy, options, manifests, world, scratch, is_nft: true })
    }

    /// With these Services, and agent and proxy in sync.
    pub(crate) async fn started(services: &[Service]) -> Result<Self> {
        let mut env = Self::new()?;
        env.start(services).await?;
        Ok(env)
    }

    /// With these Services, programmed by another backend than nft.
    pub(crate) async fn started_with(
        services: &[Service],
        settings: impl FnOnce(KeelsonProxyOptions) -> KeelsonProxyOptions,
    ) -> Result<Self> {
        let mut env = Self::other(settings)?;
        env.start(services).await?;
        Ok(env)
    }

    /// The same, not started yet.
    pub(crate) fn other(settings: impl FnOnce(KeelsonProxyOptions) -> KeelsonProxyOptions) -> Result<Self> {
        let mut env = Self::with(|options| settings(options.set("proxy.sync_period", "1s")))?;
        env.is_nft = false;
        Ok(env)
    }

    /// Starts both, and waits until the kernel has these Services.
    pub(crate) async fn start(&mut self, services: &[Service]) -> Result<()> {
        for service in services {
            service.write(&self.manifests)?;
        }
        self.agent.start_live().await?;
        self.proxy.start_again(self.world.node()).await?;
        self.wait_for_services(services).await
    }

    pub(crate) fn node(&self) -> &Namespace {
        self.world.node()
    }

    /// Waits until the kernel has exactly these Services; with another backend than nft, until the proxy has as many and is synced.
    pub(crate) async fn wait_for_services(&self, services: &[Service]) -> Result<()> {
        if !self.is_nft {
            return self.wait_for_count(services).await;
        }
        let wanted = Family::ALL.map(|family| meaning(services, family));
        let has = eventually_slow("the kernel has the rules of these Services", || async {
            for (family, wanted) in Family::ALL.into_iter().zip(&wanted) {
                kernel::is(self.node(), family, wanted).with_context(|| family.as_str())?;
            }
            Ok(())
        });
        has.await.with_context(|| self.logs())
    }

    async fn wait_for_count(&self, services: &[Service]) -> Result<()> {
        let synced = eventually_slow("the proxy has these Services", || async {
            let state = self.synced().await?;
            for family in Family::ALL {
                let wanted = services.iter().filter(|service| service.family == family).count();
                let known = &family_of(&state, family)?["services"];
                ensure!(*known == wanted, "{known} Services of {}, not {wanted}", family.as_str());
            }
            Ok(())
        });
        synced.await.with_context(|| self.logs())
    }

    /// The same, and that a comparison from scratch finds no difference.
    pub(crate) async fn wait_for_exact_services(&self, services: &[Service]) -> Result<()> {
        self.wait_for_services(services).await?;
        eventually_slow("no changes", || async {
            let output = self.dry_run().await?;
            ensure!(output == ["no changes"], "{output:?}");
            Ok(())
        })
        .await
        .with_context(|| self.logs())
    }

    pub(crate) fn logs(&self) -> String {
        let tail = |log: Result<String>| {
            let log = log.unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(25)..].join("\n")
        };
        format!("the proxy's log ends:\n{}\nthe agent's:\n{}", tail(self.proxy.log()), tail(self.agent.log()))
    }

    /// Every line of `keelson proxy --dry-run` with the proxy's settings.
    pub(crate) async fn dry_run(&self) -> Result<Vec<String>> {
        let output = self.proxy_command(&["--dry-run"]).await?.success()?;
        Ok(output.out.lines().map(str::to_owned).collect())
    }

    pub(crate) async fn print(&self) -> Result<String> {
        Ok(self.proxy_command(&["--print"]).await?.success()?.out)
    }

    /// `keelson proxy` on the node with the proxy's settings.
    pub(crate) async fn proxy_command(&self, args: &[&str]) -> Result<CommandOutput> {
        let config = self.proxy.config().display().to_string();
        let mut all = vec!["proxy", "--config", &config];
        all.extend(args);
        self.keelson(&all).await
    }

    /// `keelson` on the node, where the proxy runs.
    async fn keelson(&self, args: &[&str]) -> Result<CommandOutput> {
        let program = self.options.inside(self.node(), &peers::keelson()?, args)?;
        let mut command = Command::new(&program.path);
        command.args(&program.args);
        command::run(command).await
    }

    pub(crate) async fn cleanup(&self, args: &[&str]) -> Result<Vec<String>> {
        let mut all = vec!["proxy", "cleanup"];
        all.extend(args);
        let output = self.keelson(&all).await?.success()?;
        Ok(output.out.lines().map(str::to_owned).collect())
    }

    /// `keelson proxy state`, in JSON.
    pub(crate) async fn state_command(&self) -> Result<CommandOutput> {
        let socket = format!("unix://{}", self.proxy.socket().display());
        run_inside(self.node(), &peers::keelson()?, &["proxy", "state", "-o", "json", "--socket", &socket])
            .await
    }

    /// What `keelson proxy state -o json` prints, without a process: that takes long in a virtual machine, and tests ask all the time.
    pub(crate) async fn state(&self) -> Result<Value> {
        let channel =
            cri::endpoint(&self.proxy.socket())?.connect().await.context("the proxy does not listen")?;
        let state = ProxyClient::new(channel).get_state(GetStateRequest {}).await.context("no state")?;
        Ok(serde_json::to_value(state.into_inner())?)
    }

    pub(crate) async fn family(&self, family: Family) -> Result<Value> {
        family_of(&self.state().await?, family)
    }

    /// Waits until the proxy follows the agent and both families are synced, and returns its state.
    pub(crate) async fn synced(&self) -> Result<Value> {
        eventually_slow("the proxy is synced", || async {
            let state = self.state().await?;
            ensure!(state["link"] == "following", "{state}");
            for family in Family::ALL {
                ensure!(family_of(&state, family)?["state"] == "synced", "{state}");
            }
            Ok(state)
        })
        .await
        .with_context(|| self.logs())
    }

    /// The newest first.
    pub(crate) async fn events(&self) -> Result<Vec<String>> {
        let state = self.state().await?;
        let events = state["events"].as_array().context("no events")?;
        Ok(events.iter().filter_map(|event| Some(event["text"].as_str()?.to_owned())).collect())
    }
}

pub(crate) fn family_of(state: &Value, family: Family) -> Result<Value> {
    let families = state["families"].as_array().with_context(|| format!("no families: {state}"))?;
    let found = families.iter().find(|part| part["family"] == family.as_str());
    found.cloned().with_context(|| format!("no {}: {state}", family.as_str()))
}

fn service_cidr() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"}, "spec": {"cidrs": SERVICE_CIDRS},
    })
}

pub(crate) async fn run_inside(
    namespace: &Namespace,
    program: &Path,
    args: &[&str],
) -> Result<CommandOutput> {
    let mut command = Command::new(peers::system("ip", "iproute2")?);
    command.args(["netns", "exec", namespace.name()]).arg(program).args(args);
    command::run(command).await
}
