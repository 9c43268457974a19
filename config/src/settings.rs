//! The table of all settings: types, bounds, defaults, whether a change takes effect live, and descriptions.
//!
//! The macro `settings!` generates the structs that the rest of Keelson reads, and the list of keys from which checks,
//! reference and example file are made.

#[macro_use]
mod expand;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::Value as Json;

use crate::error::Fault;
use crate::gates::{self, FeatureGates, Gate};
use crate::net::{HostName, InterfacePattern, NodePortAddresses, ProxyName};
use crate::primitives::TextRule;
use crate::setting_type::{Any, Raw, Setting, within, zero_or};
use crate::size::ByteSize;
use crate::values::{
    DetectLocalMode, DirectReturnHook, EndpointsSource, EndpointsWatch, Enforce, IptablesVariant,
    IpvsScheduler, ListenSpec, LogFormat, ProxyBackend, ProxyProtocol, Register, Role, SocketMode,
    SocketSpec, WhenContested, WhenFull,
};

/// Its keys are the names of the gates.
pub(crate) const GATES_SECTION: &str = "feature_gates";

#[derive(Clone, Debug)]
pub struct Section {
    /// As in `[pulls]`.
    pub name: &'static str,
    pub doc: String,
}

#[derive(Clone, Debug)]
pub struct Key {
    /// `section.key`.
    pub path: &'static str,
    pub section: &'static str,
    pub name: &'static str,
    pub kind: String,
    pub default: Json,
    /// A running agent applies a change on SIGHUP.
    pub live: bool,
    pub doc: String,
    check: fn(&Raw) -> Result<Json, Fault>,
}

impl Key {
    pub fn env(&self) -> String {
        env_name(self.section, self.name)
    }

    /// Returns the value in canonical form.
    pub(crate) fn check(&self, raw: &Raw) -> Result<Json, Fault> {
        (self.check)(raw)
    }
}

pub(crate) fn env_name(section: &str, name: &str) -> String {
    // Names of gates are not folded: their case separates the words.
    let name = if section == GATES_SECTION { name.to_owned() } else { name.to_uppercase() };
    format!("KEELSON_{}__{name}", section.to_uppercase())
}

pub(crate) struct FlatSetting {
    pub(crate) key: String,
    pub(crate) live: bool,
    pub(crate) value: Json,
}

fn join(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

const GATES_DOC: &str = "Feature gates, one Name = true or Name = false per line. AllAlpha and AllBeta set \
                         all gates of a stage; a gate that is set by name takes precedence.";

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

const fn mins(n: u64) -> Duration {
    Duration::from_secs(60 * n)
}

const fn hours(n: u64) -> Duration {
    Duration::from_secs(3600 * n)
}

settings! {
    /// The agent's process.
    agent: Agent {
        /// Name of the Node object. Empty: the host name in lower case, as the kubelet uses it.
        node_name: String = String::new(), TextRule::NodeName, restart;
        /// Directory of the state store. Each agent needs a directory of its own.
        state_dir: PathBuf = "/var/lib/keelson".into(), Any, restart;
        /// Time that running calls and pulls have to finish after SIGTERM. If a successor takes over, pulls continue
        /// without this limit. 0s: do not wait. Must be less than `TimeoutStopSec` of the unit.
        drain_timeout: Duration = secs(20), within(secs(0), mins(10)), restart;
        /// Time that the agent waits after SIGTERM for a successor that takes over its calls and queue, before it
        /// stops without one. The agent waits only if a CRI client has connected before. 0s: do not wait.
        handover_timeout: Duration = secs(5), within(secs(0), mins(10)), restart;
        /// Log filter: a level, or directives by target such as `info,keelson_cri=debug`.
        log: String = "info".into(), TextRule::LogFilter, live;
        /// Format of log lines: `text` or `json`.
        log_format: LogFormat = LogFormat::Text, Any, restart;
    }

    /// The CRI socket towards the kubelet and the connection to the runtime.
    cri: Cri {
        /// CRI socket of the agent, which the kubelet and `crictl` use as runtime and image endpoint.
        listen: SocketSpec = SocketSpec::built_in("/run/keelson/cri.sock"), Any, restart;
        /// CRI socket of the container runtime.
        runtime_endpoint: SocketSpec = SocketSpec::built_in("/run/containerd/containerd.sock"), Any, restart;
        /// Time that a call is held while the runtime is down, before it fails with UNAVAILABLE. Less than the
        /// kubelet's `runtimeRequestTimeout` (2m), so that the kubelet gets the reason and not its own deadline.
        hold_timeout: Duration = secs(100), within(secs(0), secs(119)), live;
        /// Time that a pull waits for admission by the pull coordinator. After that it is passed through to the
        /// runtime: without limit, queue and deduplication. Time in the queue does not count.
        decision_timeout: Duration = secs(10), within(secs(1), secs(119)), live;
        /// Permissions of the CRI socket. Every user who can connect is effectively root on the node.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
    }

    /// Image pulls: limit, queue, retained content.
    pulls: Pulls {
        /// Pull one image at a time, as the kubelet's `serializeImagePulls`.
        serialize_image_pulls: bool = false, Any, live;
        /// Maximum number of parallel pulls, as the kubelet's `maxParallelImagePulls`; 0: no limit.
        max_parallel_image_pulls: u32 = 0, zero_or("no limit", 1, 10_000), live;
        /// Handling of a pull over the limit: `wait` queues it, first in, first out; `reject` queues it for
        /// `reject_retries` times `reject_retry_interval` and then fails it with RESOURCE_EXHAUSTED.
        when_full: WhenFull = WhenFull::Wait, Any, live;
        /// Component that enforces the limit: the `agent`, or the `runtime` through the pull option if it supports
        /// that.
        enforce: Enforce = Enforce::Agent, Any, live;
        /// Maximum number of parallel pulls per registry, so that a slow registry cannot use every slot; 0: off.
        /// Requires the feature gate PerRegistryPullLimit.
        per_registry_max_parallel_image_pulls: u32 = 0, zero_or("off", 1, 10_000), live;
        /// Maximum number of parallel pulls of images that are already present; they do not count towards the limit.
        max_parallel_present_images: u32 = 10, within(1, 10_000), live;
        /// Maximum time that a pull waits for a slot; 0s: no limit. The kubelet sets no deadline on pulls.
        max_queue_time: Duration = secs(0), zero_or("no limit", secs(1), hours(24)), live;
        /// Maximum number of waiting and served callers; further callers are rejected.
        max_queued_callers: u32 = 20_000, within(1, 1_000_000), live;
        /// Time that a running pull continues after its last caller left, in case one returns; then it is cancelled.
        cancel_grace: Duration = secs(10), within(secs(0), mins(10)), live;
        /// Time after a restart that an interrupted pull with credentials keeps its place for its caller, and that
        /// one without credentials waits for the API server to confirm that its pod exists.
        resume_window: Duration = mins(2), within(secs(0), hours(1)), live;
        /// Maximum age of records of interrupted pulls: those that no caller has requested for this time are dropped
        /// at the next start.
        record_max_age: Duration = hours(1), within(mins(1), hours(24)), live;
        /// Retain the fetched layers when a pull is cancelled or the agent or runtime dies.
        keep_progress: bool = true, Any, live;
        /// Time that layers of an unfinished pull are protected from the runtime's garbage collection.
        progress_retention: Duration = hours(3), within(mins(1), hours(24)), live;
        /// Maximum number of bytes retained of unfinished pulls; the oldest are released first. 0 retains nothing.
        retained_bytes_max: ByteSize = ByteSize::gibibytes(2),
            zero_or("nothing", ByteSize::mebibytes(1), ByteSize::gibibytes(1 << 20)), live;
        /// Minimum free share of the image file system in percent, of bytes and of inodes; below it all retained
        /// content is released. More than the kubelet's 15 (`imageGCHighThresholdPercent: 85`,
        /// `imagefs.available<15%`), so that retained content does not trigger its image garbage collection or
        /// eviction; 0: no check.
        retain_min_free_percent: u32 = 20, zero_or("no check", 1, 99), live;
        /// Time without received bytes after which a running pull is cancelled and its slot is freed; 0s: off.
        stall_timeout: Duration = mins(10), zero_or("off", secs(1), hours(24)), live;
        /// Maximum duration of a running pull, after which it is cancelled; 0s: off.
        max_pull_time: Duration = secs(0), zero_or("off", secs(1), hours(24)), live;
        /// With `when_full = "reject"`: number of intervals that a pull waits for a slot before it is rejected.
        reject_retries: u32 = 3, within(0, 100), live;
        /// With `when_full = "reject"`: length of one interval.
        reject_retry_interval: Duration = secs(10), within(ms(1), mins(10)), live;
        /// Number of retries of a pull when the runtime stopped during it, or failed it because an identical pull was
        /// cancelled just before (CRI-O).
        runtime_retries: u32 = 2, within(0, 100), live;
        /// Time in which a caller that left the queue can return to its place, for example to retry with other
        /// credentials. Only for callers with a pod.
        reentry_window: Duration = secs(30), within(secs(0), mins(10)), live;
        /// Time in the queue after which the agent creates an Event for the pod; requires an API server; 0s: off.
        queued_event_after: Duration = secs(30), zero_or("off", secs(1), hours(24)), live;
        /// Interval in which the progress of running pulls is read.
        progress_interval: Duration = ms(500), within(ms(50), mins(1)), live;
    }

    /// Address of the API server and the client credentials. Without `kubeconfig`, `bootstrap_kubeconfig`,
    /// `in_cluster` and `server`, no API server is used.
    kube: Kube {
        /// Kubeconfig file. It and the files that it references are reloaded when they change.
        kubeconfig: Option<PathBuf> = None, Any, restart;
        /// Context of the kubeconfig; empty: its current context.
        context: String = String::new(), TextRule::Free("text, or \"\" for the current context"), restart;
        /// With role `node`: kubeconfig to request the first client certificate with, as the kubelet's
        /// `--bootstrap-kubeconfig`.
        bootstrap_kubeconfig: Option<PathBuf> = None, Any, restart;
        /// With `bootstrap_kubeconfig`: directory of the client certificate and its key, as the kubelet's
        /// `--cert-dir`.
        certificate_dir: PathBuf = "/var/lib/keelson/pki".into(), Any, restart;
        /// Use the service account that Kubernetes mounts into a pod.
        in_cluster: bool = false, Any, restart;
        /// Address of the API server, such as `https://10.0.0.1:6443`; an alternative to a kubeconfig.
        server: String = String::new(), TextRule::Server, restart;
        /// With `server`: file with the certificate authorities of the API server (PEM).
        certificate_authority: Option<PathBuf> = None, Any, restart;
        /// With `server`: file with a bearer token.
        token_file: Option<PathBuf> = None, Any, restart;
        /// With `server`: file with the client certificate (PEM).
        client_certificate: Option<PathBuf> = None, Any, restart;
        /// With `server`: file with the key of `client_certificate` (PEM).
        client_key: Option<PathBuf> = None, Any, restart;
        /// Timeout of a request. Renewals of the Lease use at most its duration, as the kubelet does. Lists and
        /// watches wait at least 60 s for the response headers, because a busy API server queues requests.
        request_timeout: Duration = secs(10), within(secs(1), mins(2)), restart;
    }

    /// Heartbeats: the node's Lease, its status and its conditions.
    node: Node {
        /// `companion`: the kubelet sends the heartbeats of the node, and the agent adds its own conditions. `node`:
        /// the agent sends the heartbeats of the node; no kubelet may run on the node.
        role: Role = Role::Companion, Any, restart;
        /// With role `companion`: renew a Lease of the agent, `keelson-NODE`, which shows in the API that the agent
        /// is alive. It causes one write every quarter of `lease_duration` and requires the permissions in
        /// `companion-lease.yaml`.
        companion_lease: bool = false, Any, restart;
        /// Remove the agent's conditions, and those set through it, from the Node when the agent stops without a
        /// successor. Each restart then causes two writes. Conditions of a kubelet are kept.
        remove_conditions_on_stop: bool = false, Any, restart;
        /// Duration of the Lease in whole seconds, as the kubelet's `nodeLeaseDurationSeconds`; the Lease is renewed
        /// every quarter of it.
        lease_duration: Duration = secs(40), within(secs(4), mins(10)), restart;
        /// Interval in which the node status is computed, as the kubelet's `nodeStatusUpdateFrequency`.
        node_status_update_frequency: Duration = secs(10), within(secs(1), mins(10)), restart;
        /// With role `node`: interval in which an unchanged node status is reported, as the kubelet's
        /// `nodeStatusReportFrequency`, which is 5 min by default. The Lease keeps the node Ready in between.
        node_status_report_frequency: Duration = mins(15), within(secs(1), hours(24)), restart;
        /// Time after which the condition ImagePullsStalled is True if pulls are queued and no running pull receives
        /// data.
        pulls_stalled_after: Duration = mins(2), within(secs(10), hours(1)), restart;
        /// With role `node`: registration of a missing Node: `once` creates it only at the start, as the kubelet
        /// does; `always` also after it was deleted; `never` waits until it is created by other means.
        register_node: Register = Register::Once, Any, restart;
        /// With role `node`: behavior while another process, such as a kubelet, renews the node's Lease: `stand-back`
        /// stops reporting Lease and status until the other process has not renewed the Lease for `lease_duration`;
        /// `continue` keeps reporting.
        when_contested: WhenContested = WhenContested::StandBack, Any, restart;
        /// With role `node`: labels of the Node, as the kubelet's `--node-labels`: `key=value,key=value`.
        node_labels: String = String::new(), TextRule::Free("labels, `key=value,...`"), restart;
        /// With role `node`: taints that the Node is registered with, as the kubelet's `--register-with-taints`:
        /// `key=value:Effect,...`.
        register_with_taints: String = String::new(), TextRule::Free("taints, `key=value:Effect,...`"), restart;
        /// With role `node`: zone of the Node, label `topology.kubernetes.io/zone`; empty: none.
        zone: String = String::new(), TextRule::Free("label value, or \"\" for none"), restart;
        /// With role `node`: region of the Node, label `topology.kubernetes.io/region`; empty: none.
        region: String = String::new(), TextRule::Free("label value, or \"\" for none"), restart;
        /// With role `node`: `spec.providerID` of the Node; empty: none.
        provider_id: String = String::new(), TextRule::Free("text, or \"\" for none"), restart;
        /// With role `node`: addresses of the Node, at most one per IP family, as the kubelet's `--node-ip`:
        /// `10.0.0.7,fd00::7`; empty: those of the interface of the default route.
        node_ip: String = String::new(), TextRule::Free("IP addresses, `a,b`"), restart;
        /// With role `node`: resources reserved for Kubernetes daemons, subtracted from allocatable, as the kubelet's
        /// `kubeReserved`: `cpu=100m,memory=200Mi,ephemeral-storage=1Gi,pid=100`.
        kube_reserved: String = String::new(), TextRule::Free("resources, `cpu=100m,memory=200Mi,...`"), restart;
        /// With role `node`: resources reserved for system daemons, subtracted from allocatable, as the kubelet's
        /// `systemReserved`.
        system_reserved: String = String::new(), TextRule::Free("resources, `cpu=100m,memory=200Mi,...`"), restart;
        /// With role `node`: thresholds of the pressure conditions, as the kubelet's `evictionHard`, with the same
        /// defaults. The agent evicts no pods.
        eviction_hard: String =
            "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<15%,imagefs.inodesFree<5%"
                .into(),
            TextRule::Free("thresholds, `signal<quantity,signal<percent%`"), restart;
        /// Time that a pressure condition, and a problem condition of the agent, stays True after the problem was
        /// last seen, as the kubelet's `evictionPressureTransitionPeriod`.
        eviction_pressure_transition_period: Duration = mins(5), within(secs(0), hours(1)), restart;
        /// With role `node`: maximum number of pods on the node, as the kubelet's `maxPods`.
        max_pods: u32 = 110, within(1, 10_000), restart;
        /// With role `node`: maximum number of images in the node status, largest first, as the kubelet's
        /// `nodeStatusMaxImages`; 0: none.
        node_status_max_images: u32 = 50, within(0, 10_000), restart;
        /// With role `node`: directory on the file system `nodefs`, as the kubelet's `--root-dir`.
        root_dir: PathBuf = "/var/lib/kubelet".into(), Any, restart;
        /// With role `node`: kubelet version in the node status, for components that check the version skew; empty:
        /// the version of the agent.
        kubelet_version: String = String::new(), TextRule::Free("version, or \"\" for that of the agent"), restart;
    }

    /// Service endpoints: Services and endpoints of this node for service proxies and other clients.
    endpoints: Endpoints {
        /// Source of Services and EndpointSlices: `kube` (the API server of `[kube]`), `files` (the directory
        /// `manifests`), `off`; `auto` uses the API server if one is configured, otherwise the directory if one is
        /// configured.
        source: EndpointsSource = EndpointsSource::Auto, Any, restart;
        /// Start of the watch of Services at the API server: `on-demand` starts it when the first client connects (a
        /// call of `Next` or `Watch`); `always` starts it with the agent. It then lasts until the agent stops. A
        /// directory of manifests is always read.
        watch: EndpointsWatch = EndpointsWatch::OnDemand, Any, restart;
        /// Directory of Kubernetes manifests (YAML, JSON): Services, EndpointSlices, ServiceCIDRs and this Node.
        manifests: Option<PathBuf> = None, Any, restart;
        /// Names of service proxies beside the usual one: Services whose label `service.kubernetes.io/service-proxy-name`
        /// has one of these values are published to clients that request this name. With any, the agent watches all
        /// Services; without, only those without the label.
        service_proxy_names: Vec<ProxyName> = Vec::new(), Any, restart;
        /// Addresses of the Endpoints API. Only loopback addresses are allowed unless `allow_remote` is set.
        listen: Vec<ListenSpec> = vec![ListenSpec::Unix(SocketSpec::built_in("/run/keelson-endpoints/endpoints.sock"))], Any, restart;
        /// Allow `listen` addresses that other machines can reach. They have no authentication.
        allow_remote: bool = false, Any, restart;
        /// Permissions of the sockets in `listen`.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
        /// Minimum time between two revisions during continuous changes; each revision is a sync of the disk. After a
        /// pause, ten revisions can follow without delay, so a single change never waits; 0s: no limit.
        min_interval: Duration = ms(100), within(secs(0), secs(10)), restart;
        /// Maximum time that a write to the state disk delays a revision. After it, the revision is published from
        /// memory under a new instance ID until the disk answers.
        write_timeout: Duration = secs(5), within(secs(1), mins(10)), restart;
        /// Maximum age of a state on disk that is served after a boot of the node, counted from when it was last
        /// synced. A node that was off for longer serves nothing until its sources are synced, because other pods may
        /// have the addresses by then.
        max_age_after_boot: Duration = hours(1), within(secs(0), hours(8760)), restart;
        /// Number of revisions in the history; a client that reconnects within it receives only the changes.
        history: u32 = 1000, within(1, 100_000), restart;
        /// Maximum number of connected clients per address of `listen`; further clients get RESOURCE_EXHAUSTED.
        max_watchers: u32 = 1000, within(1, 100_000), restart;
    }

    /// The service proxy, `keelson proxy`. It is a separate process that reads this section when it starts; the agent
    /// does not use it. The defaults are those of kube-proxy 1.36 in mode `nftables`.
    proxy: Proxy {
        /// Backend that serves the Services: `auto` (the best that this node supports), `nft` (nftables, kernel 5.13 or
        /// later), `iptables` (needs the programs of iptables and ipset), `ipvs` (the kernel's load balancer; needs these
        /// programs, too), `userspace` (relays connections itself; the kernel is not programmed), or `ebpf` (decides at
        /// connect() for sockets of this node, and by nftables for the rest; needs CAP_BPF and Linux 6.1 or later).
        backend: ProxyBackend = ProxyBackend::Nft, Any, restart;
        /// Serve the Services whose label `service.kubernetes.io/service-proxy-name` has this value, beside another
        /// service proxy of this node, which serves those without the label. `endpoints.service_proxy_names` of the
        /// agent must have it. Each proxy needs a `listen`, `http`, `healthz_bind_address` and `metrics_bind_address` of
        /// its own. Empty: Services without the label.
        service_proxy_name: Option<ProxyName> = None, Any, restart;
        /// Remove the rules that another backend or a kube-proxy left, after the first sync. `false`: report them only.
        take_over: bool = true, Any, restart;
        /// Address of the agent's Endpoints API; empty: the first unix socket of `endpoints.listen`. TCP ports are
        /// not allowed: while the agent restarts, any user of the machine could listen on the port and control the
        /// rules of the node.
        target: Option<SocketSpec> = None, Any, restart;
        /// Primary node addresses, at most one per IP family, as kube-proxy's `bindAddress`; a family without an
        /// address, or with `0.0.0.0` or `::`, uses the address of the Node.
        bind_address: Vec<IpAddr> = Vec::new(), Any, restart;
        /// Detection of traffic from pods of this node, as kube-proxy's `detectLocalMode`: `ClusterCIDR` (source in
        /// `cluster_cidr`), `NodeCIDR` (source in the Node's `spec.podCIDRs`), `BridgeInterface` (received on
        /// `bridge_interface`), `InterfaceNamePrefix` (received on an interface with the name prefix
        /// `interface_name_prefix`).
        detect_local_mode: DetectLocalMode = DetectLocalMode::ClusterCidr, Any, restart;
        /// With `ClusterCIDR`: networks of the cluster's pods, at most one per IP family, as kube-proxy's
        /// `clusterCIDR`; in a family without a network, pods are not detected.
        cluster_cidr: Vec<IpNet> = Vec::new(), Any, restart;
        /// With `BridgeInterface`: bridge that the pods of this node are attached to, such as `cbr0`.
        bridge_interface: String = String::new(), TextRule::Interface, restart;
        /// With `InterfaceNamePrefix`: prefix of the names of the pods' interfaces, such as `veth`.
        interface_name_prefix: String = String::new(), TextRule::Interface, restart;
        /// Masquerade all traffic to cluster IPs, as kube-proxy's `masqueradeAll`; otherwise only traffic that does
        /// not come from pods, if pods are detected.
        masquerade_all: bool = false, Any, restart;
        /// Bit of the packet mark that marks packets for masquerading, as kube-proxy's `masqueradeBit`.
        masquerade_bit: u32 = 14, within(0, 31), restart;
        /// Node addresses at which node ports are served, as kube-proxy's `nodePortAddresses`: those in these
        /// networks, or with `primary` the primary node addresses. For all addresses of an IP family, use a network
        /// such as `0.0.0.0/0`, or only networks of the other family. Empty: `primary`, and with the backends `iptables`
        /// and `ipvs` all addresses, as in kube-proxy.
        nodeport_addresses: NodePortAddresses = NodePortAddresses::Unset, Any, restart;
        /// Serve `spec.externalIPs` of Services, as kube-proxy's feature gate `AllowServiceExternalIPs`. With them,
        /// any user with write access to Services can intercept traffic to any address (CVE-2020-8554).
        allow_external_ips: bool = true, Any, restart;
        /// Maximum time until rules that another program modified are repaired, as kube-proxy's `syncPeriod`.
        sync_period: Duration = secs(30), within(secs(1), hours(24)), restart;
        /// Maximum time that endpoints can be stale, because the API server or the agent is unreachable, before
        /// `/healthz` and health check node ports answer 503. The rules are kept. 0s: never, as kube-proxy.
        max_staleness: Duration = hours(24), zero_or("never", secs(1), hours(8760)), restart;
        /// Minimum time between commits to nftables per IP family during continuous changes, as kube-proxy's
        /// `minSyncPeriod`; the first ten commits after a pause are not delayed. A commit that takes longer is followed
        /// by a pause of this length. Each commit makes programs that read the ruleset start over, so changes that
        /// continue for a minute are also paused for 20 microseconds per element (at most 5 s). 0: no limit.
        min_sync_period: Duration = ms(100), within(secs(0), mins(1)), restart;
        /// Interfaces for which forwarded connections to Services are offloaded to an nftables flowtable once they
        /// are established (TCP and UDP): names, or prefixes with `*`, such as `["eth0", "veth*"]`. Empty: no
        /// flowtable. Packets of an offloaded connection bypass the rules of all other programs, including a
        /// NetworkPolicy that changes later: read `docs/proxy.md` before you set it.
        flowtable_interfaces: Vec<InterfacePattern> = Vec::new(), Any, restart;
        /// Programs that the backends `iptables` and `ipvs` run: `legacy`, `nft`, or `auto` for those that `iptables` is on this
        /// node, if the kernel supports them, otherwise the others.
        iptables_variant: IptablesVariant = IptablesVariant::Auto, Any, restart;
        /// With the backend `iptables`: serve IPv4 node ports at 127.0.0.1 to the node itself, if `nodeport_addresses`
        /// has it, as kube-proxy's `iptables.localhostNodePorts`. Sets the sysctl `net.ipv4.conf.all.route_localnet`.
        iptables_localhost_node_ports: bool = true, Any, restart;
        /// With `ipvs`: scheduler that chooses endpoints, as kube-proxy's `ipvs.scheduler`: `rr` (in turn), `lc` (least
        /// connections), `sh` (by source address), `mh` (by source address and port) and others of the kernel.
        ipvs_scheduler: IpvsScheduler = IpvsScheduler::Rr, Any, restart;
        /// With `ipvs`: answer ARP only for addresses of the interface that is asked (`arp_ignore` 1, `arp_announce` 2),
        /// as kube-proxy's `ipvs.strictARP`. Load balancers that announce addresses of Services themselves need it.
        ipvs_strict_arp: bool = false, Any, restart;
        /// With `ipvs`: idle timeout of TCP connections, as kube-proxy's `ipvs.tcpTimeout`. 0s: the kernel's, 15 minutes.
        ipvs_tcp_timeout: Duration = secs(0), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// With `ipvs`: timeout of TCP connections after a FIN, as kube-proxy's `ipvs.tcpFinTimeout`. 0s: the kernel's, 2
        /// minutes.
        ipvs_tcp_fin_timeout: Duration = secs(0), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// With `ipvs`: idle timeout of UDP flows, as kube-proxy's `ipvs.udpTimeout`. 0s: the kernel's, 5 minutes.
        ipvs_udp_timeout: Duration = secs(0), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// With `userspace`: maximum time that TCP connections of a removed Service or port continue.
        userspace_drain_timeout: Duration = secs(30), within(secs(0), hours(1)), restart;
        /// With `userspace`: maximum time that TCP connections continue after SIGTERM. Nothing listens meanwhile. Must be
        /// less than `TimeoutStopSec` of the unit. 0s: they end at once.
        userspace_stop_timeout: Duration = secs(5), within(secs(0), mins(10)), restart;
        /// With `userspace`: idle time after which a UDP session ends.
        userspace_udp_timeout: Duration = secs(60), within(secs(1), hours(1)), restart;
        /// With `userspace`: how long a TCP connection that a traffic policy or source ranges drop is held open
        /// without data before it is reset.
        userspace_drop_timeout: Duration = secs(10), within(secs(0), mins(5)), restart;
        /// With `userspace`: maximum number of TCP connections and UDP sessions together; further ones are refused.
        /// Fewer if open files (`LimitNOFILE`) are fewer: a connection has two to four.
        userspace_max_sessions: u32 = 16_384, within(1, 1_048_576), restart;
        /// With `userspace`: first of the loopback ports that replace addresses of Services which this process cannot
        /// listen at; `keelson proxy print` lists them. 0: ports that the kernel chooses.
        userspace_mapped_port_base: u32 = 0, zero_or("the kernel chooses", 1024, 65_535), restart;
        /// With `userspace`: header that tells endpoints of TCP ports the client's address, `off`, `v1` or `v2`. Every
        /// endpoint must expect it.
        userspace_proxy_protocol: ProxyProtocol = ProxyProtocol::Off, Any, restart;
        /// With `userspace`: connect to endpoints from the client's address (IP_TRANSPARENT). Requires CAP_NET_ADMIN,
        /// and routes that lead replies back to this process: see `docs/proxy.md`.
        userspace_transparent: bool = false, Any, restart;
        /// With `userspace`: add local routes for addresses of Services that no interface has, where CAP_NET_ADMIN
        /// permits it. Without them such addresses are served at mapped ports.
        userspace_routes: bool = true, Any, restart;
        /// With `userspace`: file that keeps session affinity over a restart. Empty: affinity ends with the process.
        userspace_affinity_file: Option<PathBuf> = Some("/var/lib/keelson-proxy/affinity.json".into()), Any, restart;
        /// With `ebpf`: the folder of cgroup v2 whose processes connect to Services at the socket level, those of all cgroups
        /// below it included. Empty: the root of the hierarchy, as this process sees it mounted.
        ebpf_cgroup: Option<PathBuf> = None, Any, restart;
        /// With `ebpf`: connection tracking does not see TCP and UDP between pods (`cluster_cidr`), which need no translation.
        /// What is translated between pods all the same, such as a hostPort, is masqueraded. Do not set it where firewalls or
        /// network policies of the node match the connection state: read `docs/ebpf.md` before you set it.
        ebpf_untracked_pods: bool = false, Any, restart;
        /// With `ebpf_untracked_pods`: devices of pods, on the node's side: names, or prefixes with `*`, such as `veth*`. A program
        /// at them hands packets of TCP and UDP to another pod of this node over to that pod's device; with
        /// `ebpf_direct_return_devices` and `tc`, packets of outside clients and the replies to them, too. They skip the routes,
        /// rules and devices of the node, so also policies and limits of bandwidth there: read `docs/ebpf.md` before you set it.
        /// Empty: off.
        ebpf_pod_devices: Vec<InterfacePattern> = Vec::new(), Any, restart;
        /// With `ebpf`: devices at which outside clients reach node ports, external and load-balancer addresses, and by which
        /// other nodes are reached: names, or prefixes with `*`. Programs at them send packets to an endpoint without connection
        /// tracking. The endpoint's node replies directly, and the endpoint sees the client's address. All nodes need it: read
        /// `docs/ebpf.md` before you set it. Empty: off.
        ebpf_direct_return_devices: Vec<InterfacePattern> = Vec::new(), Any, restart;
        /// Where these programs see what arrives: `tc`, or `xdp` (in the driver, where it can). What leaves is always at tc.
        ebpf_direct_return_hook: DirectReturnHook = DirectReturnHook::Tc, Any, restart;
        /// Networks of the addresses of all nodes, and of all pods unless `cluster_cidr` has those. Clients in them are left to
        /// nftables; endpoints of other nodes, and node ports of other nodes, must be in them.
        ebpf_direct_return_nodes: Vec<IpNet> = Vec::new(), Any, restart;
        /// Maximum number of conntrack entries per CPU, at most 1,048,576 in total, as kube-proxy's
        /// `conntrack.maxPerCore`. 0 keeps the kernel's limit. The limit belongs to the machine: a proxy in a network
        /// namespace of its own cannot change it.
        conntrack_max_per_core: u32 = 32768, zero_or("the kernel's limit", 1, 1_048_576), restart;
        /// Minimum of that limit, as kube-proxy's `conntrack.min`. Not used if `conntrack_max_per_core` is 0.
        conntrack_min: u32 = 131_072, within(0, 16_777_216), restart;
        /// Idle timeout of established TCP connections in conntrack, as kube-proxy's
        /// `conntrack.tcpEstablishedTimeout`. 0 keeps the kernel's value.
        conntrack_tcp_timeout_established: Duration = hours(24), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// Timeout of TCP connections in CLOSE_WAIT, as kube-proxy's `conntrack.tcpCloseWaitTimeout`. 0 keeps the
        /// kernel's value.
        conntrack_tcp_timeout_close_wait: Duration = hours(1), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// Accept TCP segments outside the window, as kube-proxy's `conntrack.tcpBeLiberal`. `false` keeps the
        /// kernel's value.
        conntrack_tcp_be_liberal: bool = false, Any, restart;
        /// Timeout of UDP entries without a reply, as kube-proxy's `conntrack.udpTimeout`. 0 keeps the kernel's
        /// value.
        conntrack_udp_timeout: Duration = secs(0), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// Timeout of UDP entries with replies, as kube-proxy's `conntrack.udpStreamTimeout`. 0 keeps the kernel's
        /// value.
        conntrack_udp_timeout_stream: Duration = secs(0), zero_or("the kernel's value", secs(1), hours(8760)), restart;
        /// Directory of the kernel's conntrack settings. A container sees `/proc/sys` read-only; there, mount the
        /// host's directory elsewhere and name the mount here, as `packaging/kustomize/proxy/proxy.yaml` does.
        conntrack_sysctl_dir: PathBuf = "/proc/sys/net/netfilter".into(), Any, restart;
        /// Address of `/healthz` and `/livez`, as kube-proxy's `healthzBindAddress`; load balancers use it to check
        /// the node. Empty: off; port 0: any free port.
        healthz_bind_address: Option<SocketAddr> = Some(SocketAddr::from(([0, 0, 0, 0], 10256))), Any, restart;
        /// Address of `/metrics` and `/proxyMode`, as kube-proxy's `metricsBindAddress`, without authentication.
        /// Empty: off; port 0: any free port.
        metrics_bind_address: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 10249))), Any, restart;
        /// Exit if the proxy cannot listen on `healthz_bind_address` or `metrics_bind_address`, as kube-proxy's
        /// `bindAddressHardFail`; otherwise retry every 5 s.
        bind_address_hard_fail: bool = false, Any, restart;
        /// Socket of the proxy's debug API, which `keelson proxy explain` and `keelson proxy state` use.
        listen: SocketSpec = SocketSpec::built_in("/run/keelson-proxy/proxy.sock"), Any, restart;
        /// Permissions of that socket.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
        /// Address of the proxy's debug page and its JSON documents. Must be a loopback address unless
        /// `http_allow_remote` is set. Empty: off; port 0: any free port.
        http: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 9441))), Any, restart;
        /// Allow an `http` address that other machines can reach. It has no authentication.
        http_allow_remote: bool = false, Any, restart;
        /// Host names that clients can use for the `http` address, in addition to its IP addresses and `localhost`.
        /// Requests with other names are rejected (421), so that web sites cannot reach it through a browser (DNS
        /// rebinding).
        http_hosts: Vec<HostName> = Vec::new(), Any, restart;
    }

    /// Debug socket (gRPC), and debug page, metrics and probes (HTTP).
    debug: Debug {
        /// Socket of the debug API, which `keelson pulls`, `keelson actors` and other commands use.
        listen: SocketSpec = SocketSpec::built_in("/run/keelson/debug.sock"), Any, restart;
        /// Address of the debug page, metrics and probes. Must be a loopback address unless `http_allow_remote` is
        /// set. Empty: off; port 0: any free port.
        http: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 9440))), Any, restart;
        /// Allow an `http` address that other machines can reach. It has no authentication.
        http_allow_remote: bool = false, Any, restart;
        /// Host names that clients can use for the `http` address, in addition to its IP addresses and `localhost`.
        /// Requests with other names are rejected (421), so that web sites cannot reach it through a browser (DNS
        /// rebinding).
        http_hosts: Vec<HostName> = Vec::new(), Any, restart;
        /// Permissions of the debug socket. Every user who can connect can read everything.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
        /// Users that can make changes through the debug socket (limit, node conditions), in addition to root and the
        /// user of the agent: names or IDs.
        control_users: String = String::new(), TextRule::Free("users, `name,id,...`"), restart;
    }
}

impl Settings {
    /// Address of the Endpoints API for `keelson proxy`: `proxy.target`, else the first unix socket of
    /// `endpoints.listen`.
    pub fn proxy_target(&self) -> Option<&SocketSpec> {
        let sockets = self.endpoints.listen.iter().filter_map(|spec| match spec {
            ListenSpec::Unix(socket) => Some(socket),
            ListenSpec::Tcp(_) => None,
        });
        self.proxy.target.as_ref().or(sockets.into_iter().next())
    }
}

/// Every setting except the feature gates ([`Gate::ALL`]), in the order of the reference.
pub fn schema() -> &'static [Key] {
    &KEYS
}

/// In the order of the reference.
pub fn sections() -> &'static [Section] {
    &SECTIONS
}

pub(crate) fn gate_doc(gate: Gate) -> &'static str {
    gates::specs()[gate as usize].description
}

#[cfg(test)]
mod tests;
