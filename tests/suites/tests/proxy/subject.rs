//! Owns: the proxy under test. In: `KEELSON_PROXY_SUBJECT` (`keelson`, or `kube-proxy`), `KEELSON_TEST_PROXY_BACKEND` (the
//! backend of `keelson`, `nft` by default, or the mode of `kube-proxy`), a setup, a world.
//! Out: a running proxy.

use crate::common::{Setup, SharedCluster};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::{ApiProxy, Identity, KubeProxy, KubeProxyOptions};
use keelson_cluster::net::plan::NODE_NETWORKS;
use keelson_cluster::net::{KeelsonProxy, KeelsonProxyOptions, Transport, World};
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::{Value, json};
use tokio::sync::Mutex;

const ACCOUNT: &str = "keelson-agent";
/// kube-proxy's rights for its service account, if it is not `system:kube-proxy`.
const NODE_PROXIER: &str = "\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kube-proxy-by-token}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
";

const EVERYTHING: [&str; 2] = ["0.0.0.0/0", "::/0"];
/// The sync period of proxies with retries: a family is unhealthy after two of them.
pub(crate) const ROUGH_SYNC_PERIOD: &str = "2s";

pub(crate) const BACKEND: &str = "KEELSON_TEST_PROXY_BACKEND";
pub(crate) const SUBJECT: &str = "KEELSON_PROXY_SUBJECT";

/// The cases that are left out: number, backend, reason. The backend nft has all of them. Sorted by backend, then by case;
/// `docs/kube-proxy-differences.md` has the same rows.
const DIFFERENCES: &[(u8, &str, &str)] = &[
    (56, "ebpf", "the test reads a table of nftables, and a pod's connection meets none"),
    (160, "ebpf", "the test deletes a table of nftables, and a pod's connection meets none"),
    (161, "ebpf", "packets of the node and its pods have no number in their priority"),
    (17, "iptables", "other ports of cluster IPs and unused addresses are left alone, as by kube-proxy"),
    (42, "iptables", "without endpoints every source is rejected, as by kube-proxy"),
    (45, "iptables", "node ports are at all addresses by default, as with kube-proxy"),
    (56, "iptables", "the test reads a table of nftables"),
    (59, "iptables", "the test holds a table of nftables"),
    (147, "iptables", "node ports are at 127.0.0.1 as well, as with kube-proxy"),
    (153, "iptables", "the test holds a table of nftables"),
    (160, "iptables", "the test deletes a table of nftables"),
    (161, "iptables", "packets have no number in their priority"),
    (56, "ipvs", "the test reads a table of nftables"),
    (59, "ipvs", "the test holds a table of nftables"),
    (153, "ipvs", "the test holds a table of nftables"),
    (160, "ipvs", "the test deletes a table of nftables"),
    (161, "ipvs", "packets have no number in their priority"),
    (247, "ipvs", "an idle client is remembered as long as a connection of it, two minutes after its end"),
    (17, "userspace", "other ports of routed addresses are rejected, and unused cluster IPs left alone"),
    (49, "userspace", "the test lists conntrack, which tracks nothing on a node without rules"),
    (56, "userspace", "the test reads a table of nftables"),
    (57, "userspace", "no connection outlives the process, and none is accepted until the next one"),
    (59, "userspace", "the test holds a table of nftables"),
    (149, "userspace", "UDP sessions end with their endpoint, also with the last one"),
    (153, "userspace", "the test holds a table of nftables"),
    (160, "userspace", "the test deletes a table of nftables"),
    (161, "userspace", "packets have no number in their priority"),
    (166, "userspace", "an ICMP error of an endpoint ends at the socket of the relay"),
];

/// The tests in which kube-proxy's mode ipvs differs from its other modes: `docs/kube-proxy-differences.md` says how.
pub(crate) const KUBE_PROXY_IPVS: &[&str] = &[
    "conntrack::case_49_flows_of_the_last_endpoint_are_kept_until_another_is_added",
    "conntrack::case_50_udp_flows_to_serving_endpoints_are_kept_unless_the_port_changed",
    "policies::case_32_internal_policy_local_without_local_endpoints_drops_and_without_any_rejects",
    "policies::case_33_external_policy_local_keeps_the_source_and_short_circuits_pods_and_host",
    "policies::case_34_external_policy_local_without_local_endpoints_drops_external_traffic",
    "policies::case_35_without_a_detector_pods_count_as_outside_and_the_host_does_not",
    "policies::case_36_masquerade_all_applies_to_cluster_ips_only",
    "slices::case_12_the_first_address_counts_and_endpoints_without_node_are_not_local",
    "slices::case_20_the_local_fallback_is_independent_of_that_of_the_cluster",
    "slices::case_21_a_remote_terminating_endpoint_serves_the_cluster_set_only",
];

fn backend() -> String {
    std::env::var(BACKEND).ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "nft".to_owned())
}

/// Whether node ports are by default at the primary address only, and (not in user space) unused addresses of ServiceCIDRs dropped: as
/// in kube-proxy's mode nftables, and not as in its modes iptables and ipvs.
pub(crate) fn is_as_mode_nftables() -> bool {
    !["iptables", "ipvs"].contains(&&*backend())
}

/// Whether a sync has several steps: sets and rules of iptables are written by different programs, and the last step removes; maps
/// of the socket level come after the tables of the packet level.
pub(crate) fn syncs_in_steps() -> bool {
    ["iptables", "ipvs", "ebpf"].contains(&&*backend())
}

/// Whether the node has the addresses of Services. Then their other ports are rejected, those of external addresses too, and
/// a client has one endpoint for each frontend and not for each service port.
pub(crate) fn is_ipvs() -> bool {
    backend() == "ipvs"
}

/// Whether connections are relayed by the process. Then endpoints see the node's address, refused TCP connections are reset,
/// other ports of the addresses of Services are rejected, and SCTP is not served: in every case.
pub(crate) fn is_in_user_space() -> bool {
    backend() == "userspace"
}

/// Whether sockets of the node and its pods connect to endpoints themselves. Then endpoints see the client's own address, as
/// no packet is masqueraded, where the socket level decides.
pub(crate) fn is_at_sockets() -> bool {
    backend() == "ebpf"
}

/// The protocols that are served.
pub(crate) fn transports() -> &'static [Transport] {
    if is_in_user_space() { &[Transport::Tcp, Transport::Udp] } else { &Transport::ALL }
}

/// Whether the case is left out for the backend under test; then the reason is printed.
pub(crate) fn differs_by_design(case: u8) -> bool {
    let backend = backend();
    let found = DIFFERENCES.iter().find(|(number, name, _)| *number == case && *name == backend);
    if let Some((_, _, reason)) = found {
        eprintln!("case {case} is left out for the backend {backend}: {reason}");
        return true;
    }
    false
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// `keelson proxy` behind a `keelson agent`.
    Keelson,
    /// The real kube-proxy, in the mode that corresponds to the backend.
    KubeProxy,
}

impl Subject {
    /// Reads the environment. Unknown values become Keelson, and are reported by [`Running::start`].
    pub(crate) fn get() -> Self {
        match std::env::var(SUBJECT).as_deref() {
            Ok("kube-proxy") => Self::KubeProxy,
            _ => Self::Keelson,
        }
    }

    pub(crate) fn table(self) -> &'static str {
        match self {
            Self::Keelson => "keelson",
            Self::KubeProxy => "kube-proxy",
        }
    }
}

pub(crate) enum Running {
    /// `keelson proxy`, with the agent that it follows.
    Keelson {
        /// Some tests kill and restart it.
        proxy: Box<Mutex<KeelsonProxy>>,
        agent: Box<Mutex<Agent>>,
        _identity: Box<Identity>,
    },
    KubeProxy(Box<Mutex<KubeProxy>>),
}

impl Running {
    /// Starts it; `via` is another address of the API server, which accepts only tokens.
    pub(crate) async fn start(
        shared: &SharedCluster,
        setup: Setup,
        world: &World,
        via: Option<&ApiProxy>,
    ) -> Result<Self> {
        if let Ok(name) = std::env::var(SUBJECT)
            && !["keelson", "kube-proxy"].contains(&&*name)
        {
            bail!("{SUBJECT} is {name:?}: it can be keelson or kube-proxy");
        }
        match Subject::get() {
            Subject::Keelson => Self::keelson(shared, setup, world, via).await,
            Subject::KubeProxy if is_in_user_space() => bail!("kube-proxy has no mode userspace"),
            Subject::KubeProxy if is_at_sockets() => bail!("kube-proxy has no mode ebpf"),
            Subject::KubeProxy => {
                let mut options = KubeProxyOptions::new(setup.node()).with(kube_proxy_config(setup));
                if let Some(via) = via {
                    shared.cluster.admin.apply(NODE_PROXIER).await?;
                    let mut by_token =
                        shared.cluster.service_account(&shared.scratch, "kube-system", "kube-proxy").await?;
                    options.kubeconfig = Some(by_token.kubeconfig_via(&via.endpoint())?);
                }
                let started =
                    KubeProxy::start(&shared.scratch, &shared.cluster, world.node(), &options).await?;
                Ok(Self::KubeProxy(Box::new(Mutex::new(started))))
            }
        }
    }

    async fn keelson(
        shared: &SharedCluster,
        setup: Setup,
        world: &World,
        via: Option<&ApiProxy>,
    ) -> Result<Self> {
        let scratch: &Scratch = &shared.scratch;
        let mut identity = shared.cluster.companion(scratch, ACCOUNT, setup.node()).await?;
        let kubeconfig = match via {
            Some(via) => identity.kubeconfig_via(&via.endpoint())?,
            None => identity.kubeconfig(),
        };
        let settings = Settings::new()
            .set("agent.node_name", setup.node())
            .set("kube.kubeconfig", kubeconfig.display().to_string());
        let mut agent = Agent::new(scratch, &no_runtime(scratch), &settings)?;
        agent.start_live().await?;
        let options = KeelsonProxyOptions::new(&agent.endpoints_target()).set("proxy.backend", backend());
        let options = if is_at_sockets() { options.at_socket_level(world)? } else { options };
        let options = keelson_options(setup, options);
        let proxy = KeelsonProxy::start(scratch, world.node(), &options).await?;
        Ok(Self::Keelson {
            proxy: Box::new(Mutex::new(proxy)),
            agent: Box::new(Mutex::new(agent)),
            _identity: Box::new(identity),
        })
    }

    /// Its log so far; empty while a test holds the proxy's lock.
    pub(crate) fn log(&self) -> Result<String> {
        match self {
            Self::Keelson { proxy, .. } => {
                proxy.try_lock().map_or_else(|_| Ok(String::new()), |proxy| proxy.log())
            }
            Self::KubeProxy(proxy) => {
                proxy.try_lock().map_or_else(|_| Ok(String::new()), |proxy| proxy.log())
            }
        }
    }

    pub(crate) async fn kill9(&self) -> Result<()> {
        match self {
            Self::Keelson { proxy, .. } => proxy.lock().await.kill9(),
            Self::KubeProxy(proxy) => proxy.lock().await.kill9(),
        }
    }

    pub(crate) async fn start_again(&self, world: &World) -> Result<()> {
        match self {
            Self::Keelson { proxy, .. } => proxy.lock().await.start_again(world.node()).await,
            Self::KubeProxy(proxy) => proxy.lock().await.start_again(world.node()).await,
        }
    }
}

impl Running {
    /// Kills and restarts the agent that the proxy follows, if there is one.
    pub(crate) async fn restart_agent(&self) -> Result<()> {
        let Self::Keelson { agent, .. } = self else { return Ok(()) };
        let mut agent = agent.lock().await;
        agent.kill9()?;
        // It does not become ready: it has no runtime.
        agent.start_live().await
    }
}

impl Running {
    /// Whether the agent knows of the Node; None without an agent.
    pub(crate) async fn sees_node(&self) -> Result<Option<bool>> {
        let Self::Keelson { agent, .. } = self else { return Ok(None) };
        let state = agent.lock().await.json("/debug/endpoints?max=0").await?;
        state["node"]["exists"].as_bool().with_context(|| format!("no Node in {state}")).map(Some)
    }

    /// Waits until the kernel has all that the agent has published so far. kube-proxy does not tell.
    pub(crate) async fn applied(&self, world: &World) -> Result<()> {
        let Self::Keelson { proxy, agent, .. } = self else { return Ok(()) };
        let state = agent.lock().await.json("/debug/endpoints?max=0").await?;
        let published = state["rev"].as_f64().with_context(|| format!("no revision in {state}"))?;
        eventually(PATIENCE, "the proxy has applied what the agent published", || async {
            let applied = proxy.lock().await.applied_rev(world.node()).await?;
            ensure!(applied >= Some(published), "{applied:?} of {published}");
            Ok(())
        })
        .await
    }
}

/// Its mode, and what a setup changes of its defaults.
fn kube_proxy_config(setup: Setup) -> Value {
    let backend = backend();
    let mode = if backend == "nft" { "nftables" } else { &*backend };
    let mut config = changes_of_kube_proxy(setup, mode);
    config["mode"] = json!(mode);
    config
}

fn changes_of_kube_proxy(setup: Setup, mode: &str) -> Value {
    match setup {
        Setup::Plain | Setup::OwnNode => json!({}),
        Setup::Rough => json!({mode: {"syncPeriod": ROUGH_SYNC_PERIOD}}),
        Setup::NoDetector => json!({"clusterCIDR": ""}),
        Setup::NodeCidr => json!({"clusterCIDR": "", "detectLocalMode": "NodeCIDR"}),
        Setup::Bridge => json!({
            "clusterCIDR": "", "detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"},
        }),
        Setup::Prefix => json!({
            "clusterCIDR": "", "detectLocalMode": "InterfaceNamePrefix",
            "detectLocal": {"interfaceNamePrefix": "cni"},
        }),
        // Mode ipvs reads that of mode iptables.
        Setup::MasqueradeAll if mode == "ipvs" => json!({"iptables": {"masqueradeAll": true}}),
        Setup::MasqueradeAll => json!({mode: {"masqueradeAll": true}}),
        Setup::NodePortsListed => json!({"nodePortAddresses": NODE_NETWORKS}),
        Setup::NodePortsV4 => json!({"nodePortAddresses": [NODE_NETWORKS[0]]}),
        Setup::NodePortsAll => json!({"nodePortAddresses": EVERYTHING}),
    }
}

fn keelson_options(setup: Setup, options: KeelsonProxyOptions) -> KeelsonProxyOptions {
    let no_cidrs = |options: KeelsonProxyOptions| options.set("proxy.cluster_cidr", Vec::<String>::new());
    let mode = |name: &str| no_cidrs(options.clone()).set("proxy.detect_local_mode", name);
    let listed = |networks: &[&str]| {
        let networks: Vec<String> = networks.iter().map(|network| (*network).to_owned()).collect();
        options.clone().set("proxy.nodeport_addresses", networks)
    };
    match setup {
        Setup::Plain | Setup::OwnNode => options,
        Setup::Rough => options.set("proxy.sync_period", ROUGH_SYNC_PERIOD),
        Setup::NoDetector => no_cidrs(options),
        Setup::NodeCidr => mode("NodeCIDR"),
        Setup::Bridge => mode("BridgeInterface").set("proxy.bridge_interface", "cni0"),
        Setup::Prefix => mode("InterfaceNamePrefix").set("proxy.interface_name_prefix", "cni"),
        Setup::MasqueradeAll => options.set("proxy.masquerade_all", true),
        Setup::NodePortsListed => listed(&NODE_NETWORKS),
        Setup::NodePortsV4 => listed(&NODE_NETWORKS[..1]),
        Setup::NodePortsAll => listed(&EVERYTHING),
    }
}

#[test]
fn the_documentation_lists_the_cases_that_are_left_out() {
    let document = include_str!("../../../../docs/kube-proxy-differences.md");
    let rows = document.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ");
        let (backend, case, reason) = (cells.next()?, cells.next()?, cells.next()?);
        Some((case.parse().ok()?, backend, reason))
    });
    assert_eq!(rows.collect::<Vec<(u8, &str, &str)>>(), DIFFERENCES);
}
