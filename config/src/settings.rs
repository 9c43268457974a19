//! The table of all settings: types, bounds, defaults, whether a change takes effect live, and what each is for.
//!
//! The macro makes of it the structs that the rest of Keelson reads, and the list of keys that checks,
//! reference and example file are made of.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::Value as Json;

use crate::error::Fault;
use crate::gates::{self, FeatureGates, Gate};
use crate::rules::{Any, Raw, Setting, TextRule, within, zero_or};
use crate::size::ByteSize;
use crate::values::{
    DetectLocalMode, EndpointsSource, EndpointsWatch, Enforce, HostName, InterfacePattern, ListenSpec,
    LogFormat, NodePortAddresses, ProxyBackend, Register, Role, SocketMode, SocketSpec, WhenContested,
    WhenFull,
};

/// The section of the gates, whose keys are the gates' names.
pub(crate) const GATES_SECTION: &str = "feature_gates";

/// A section of the settings.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its name, as in `[pulls]`.
    pub name: &'static str,
    /// What it is about.
    pub doc: String,
}

/// What there is to know about one setting.
#[derive(Clone, Debug)]
pub struct Key {
    /// `section.key`.
    pub path: &'static str,
    /// The section.
    pub section: &'static str,
    /// The key within the section.
    pub name: &'static str,
    /// Type and bounds in words.
    pub kind: String,
    /// The default.
    pub default: Json,
    /// Whether a running agent takes over a change (SIGHUP).
    pub live: bool,
    /// What the setting does.
    pub doc: String,
    check: fn(&Raw) -> Result<Json, Fault>,
}

impl Key {
    /// The environment variable that sets it.
    pub fn env(&self) -> String {
        env_name(self.section, self.name)
    }

    /// The canonical form of a value, or what is wrong with it.
    pub(crate) fn check(&self, raw: &Raw) -> Result<Json, Fault> {
        (self.check)(raw)
    }
}

/// The environment variable that sets `section.key`.
pub(crate) fn env_name(section: &str, name: &str) -> String {
    // The names of gates are not folded: their case tells their words apart.
    let name = if section == GATES_SECTION { name.to_owned() } else { name.to_uppercase() };
    format!("KEELSON_{}__{name}", section.to_uppercase())
}

/// One setting of a [`Settings`] in canonical form.
pub(crate) struct Flat {
    pub(crate) key: String,
    pub(crate) live: bool,
    pub(crate) value: Json,
}

/// Doc comments as one line.
fn join(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

macro_rules! is_live {
    (live) => {
        true
    };
    (restart) => {
        false
    };
}

macro_rules! settings {
    ($(
        $(#[doc = $section_doc:literal])+
        $section:ident: $Section:ident {
            $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $default:expr, $rule:expr, $live:ident; )+
        }
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $Section { $( $(#[doc = $doc])+ pub $field: $ty, )+ }

            impl Default for $Section {
                fn default() -> Self {
                    Self { $($field: $default,)+ }
                }
            }
        )+

        /// All settings, checked.
        ///
        /// `Settings::default()` holds the defaults; its node's name is empty until [`load`](crate::load)
        /// puts the host's there.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Settings {
            $( $(#[doc = $section_doc])+ pub $section: $Section, )+
            /// Which features are on.
            pub feature_gates: FeatureGates,
        }

        static SECTIONS: LazyLock<Vec<Section>> = LazyLock::new(|| vec![
            $( Section { name: stringify!($section), doc: join(&[$($section_doc),+]) }, )+
            Section { name: GATES_SECTION, doc: GATES_DOC.into() },
        ]);

        static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| vec![$($(
            Key {
                path: concat!(stringify!($section), ".", stringify!($field)),
                section: stringify!($section),
                name: stringify!($field),
                kind: <$ty as Setting>::describe(&$rule),
                default: <$ty as Setting>::show(&$default),
                live: is_live!($live),
                doc: join(&[$($doc),+]),
                check: |raw| <$ty as Setting>::read(raw, &$rule).map(|value| value.show()),
            },
        )+)+]);

        impl Settings {
            /// Reads every key but the gates; `get` gives the merged value of a path.
            pub(crate) fn build(
                get: &dyn Fn(&'static str) -> Raw,
                feature_gates: FeatureGates,
            ) -> Result<Self, (&'static str, Fault)> {
                $( let $section = $Section { $(
                    $field: {
                        let path = concat!(stringify!($section), ".", stringify!($field));
                        <$ty as Setting>::read(&get(path), &$rule).map_err(|fault| (path, fault))?
                    },
                )+ }; )+
                Ok(Self { $($section,)+ feature_gates })
            }

            /// Every setting in canonical form, in the order of the table, the gates last.
            pub(crate) fn flatten(&self) -> Vec<Flat> {
                let mut all = vec![$($( Flat {
                    key: concat!(stringify!($section), ".", stringify!($field)).into(),
                    live: is_live!($live),
                    value: Setting::show(&self.$section.$field),
                }, )+)+];
                all.extend(Gate::ALL.map(|gate| Flat {
                    key: format!("{GATES_SECTION}.{}", gate.name()),
                    live: false,
                    value: Json::Bool(self.feature_gates.enabled(gate)),
                }));
                all
            }

            /// `self` with the live settings of `new`.
            pub(crate) fn replace_live(&self, new: &Self) -> Self {
                let mut merged = self.clone();
                $($( if is_live!($live) {
                    merged.$section.$field.clone_from(&new.$section.$field);
                } )+)+
                merged
            }
        }
    };
}

const GATES_DOC: &str = "Features that can be switched on or off, one Name = true or false a line. AllAlpha and \
                         AllBeta set every gate of their stage; a gate set by its own name wins over them.";

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
        /// The node's name as Kubernetes knows it. Empty: the host's name in lower case, as the kubelet has it.
        node_name: String = String::new(), TextRule::NodeName, restart;
        /// The folder of the durable state. One agent a folder.
        state_dir: PathBuf = "/var/lib/keelson".into(), Any, restart;
        /// How long calls and pulls that run may go on after SIGTERM. With an agent that replaces this one, pulls go
        /// on without this limit. 0s does not wait. Keep it under the unit's `TimeoutStopSec`.
        drain_timeout: Duration = secs(20), within(secs(0), mins(10)), restart;
        /// How long SIGTERM waits for an agent that replaces this one, and takes its calls and queue over, before the
        /// agent ends as without one; only if a CRI client has ever connected. 0s does not wait.
        handover_timeout: Duration = secs(5), within(secs(0), mins(10)), restart;
        /// What is logged: a level, or directives by target such as `info,keelson_cri=debug`.
        log: String = "info".into(), TextRule::LogFilter, live;
        /// How log lines are written: `text` for people, `json` for collectors.
        log_format: LogFormat = LogFormat::Text, Any, restart;
    }

    /// The CRI socket towards the kubelet and the connection to the runtime.
    cri: Cri {
        /// The socket that the kubelet and `crictl` use as runtime and image endpoint.
        listen: SocketSpec = SocketSpec::built_in("/run/keelson/cri.sock"), Any, restart;
        /// The container runtime's CRI socket.
        runtime_endpoint: SocketSpec = SocketSpec::built_in("/run/containerd/containerd.sock"), Any, restart;
        /// How long a call is held while the runtime is away, before it gets UNAVAILABLE. Under the 2m that the
        /// kubelet waits (`runtimeRequestTimeout`), so that it sees the reason and not its own deadline.
        hold_timeout: Duration = secs(100), within(secs(0), secs(119)), live;
        /// How long a pull waits for the pull coordinator to acknowledge it. After that it is passed to the runtime
        /// without a decision: outside the limit, the queue and the de-duplication. Waiting in the queue does not count.
        decision_timeout: Duration = secs(10), within(secs(1), secs(119)), live;
        /// Permissions of the CRI socket. Who can connect is root on the node.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
    }

    /// Image pulls: the limit, the queue, what outlives a cancel or a crash.
    pulls: Pulls {
        /// One pull at a time, as the kubelet's `serializeImagePulls`.
        serialize_image_pulls: bool = false, Any, live;
        /// How many pulls may run at once, as the kubelet's `maxParallelImagePulls`; 0 for no limit.
        max_parallel_image_pulls: u32 = 0, zero_or("no limit", 1, 10_000), live;
        /// What happens to a pull beyond the limit: `wait` queues it, first come first served; `reject` queues it for
        /// `reject_retries` times `reject_retry_interval` and then refuses it with RESOURCE_EXHAUSTED.
        when_full: WhenFull = WhenFull::Wait, Any, live;
        /// Who keeps to the limit: the `agent`, or the `runtime` by the pull option if it says that it can.
        enforce: Enforce = Enforce::Agent, Any, live;
        /// How many pulls from one registry may run at once, so that a slow one cannot hold every slot; 0 for off.
        /// Needs the feature gate PerRegistryPullLimit.
        per_registry_max_parallel_image_pulls: u32 = 0, zero_or("off", 1, 10_000), live;
        /// How many pulls of images that are there already may run at once, outside the limit.
        max_parallel_present_images: u32 = 10, within(1, 10_000), live;
        /// The longest that a pull may wait for a slot; 0s for no bound. The kubelet sets no deadline on pulls.
        max_queue_time: Duration = secs(0), zero_or("no bound", secs(1), hours(24)), live;
        /// How many callers may wait or be served at once, before further ones are told that the agent is busy.
        max_queued_callers: u32 = 20_000, within(1, 1_000_000), live;
        /// How long a running pull goes on after its last caller left, in case one returns; then it is cancelled.
        cancel_grace: Duration = secs(10), within(secs(0), mins(10)), live;
        /// How long after a restart the place of an interrupted pull that needs credentials is held for its caller, and
        /// how long one without waits for the API server to confirm that its pod exists.
        resume_window: Duration = mins(2), within(secs(0), hours(1)), live;
        /// Records of interrupted pulls that no caller has wanted for this long are dropped at the next start.
        record_max_age: Duration = hours(1), within(mins(1), hours(24)), live;
        /// Keep the layers fetched so far when a pull is cancelled or the agent or runtime dies.
        keep_progress: bool = true, Any, live;
        /// How long layers of an unfinished pull are kept from the runtime's garbage collection.
        progress_retention: Duration = hours(3), within(mins(1), hours(24)), live;
        /// Maximum number of bytes retained of unfinished pulls; the oldest are released first. 0 retains nothing.
        retained_bytes_max: ByteSize = ByteSize::gibibytes(2),
            zero_or("nothing", ByteSize::mebibytes(1), ByteSize::gibibytes(1 << 20)), live;
        /// Release everything retained when less than this share of the image file system is free, in bytes or inodes.
        /// Above the kubelet's 15 (`imageGCHighThresholdPercent: 85`, `imagefs.available<15%`), so that its garbage
        /// collection and eviction never act because of retained content; 0 for no such check.
        retain_min_free_percent: u32 = 20, zero_or("no check", 1, 99), live;
        /// A running pull whose downloads receive no byte for this long is cancelled and its slot freed; 0s for off.
        stall_timeout: Duration = mins(10), zero_or("off", secs(1), hours(24)), live;
        /// A running pull that has not ended after this long is cancelled, whatever it does; 0s for off.
        max_pull_time: Duration = secs(0), zero_or("off", secs(1), hours(24)), live;
        /// With `when_full = "reject"`: for how many intervals a pull waits for a slot before it is refused.
        reject_retries: u32 = 3, within(0, 100), live;
        /// With `when_full = "reject"`: the length of one interval.
        reject_retry_interval: Duration = secs(10), within(ms(1), mins(10)), live;
        /// How often a pull is tried again when the runtime went away in the middle of it, or failed it together with an equal
        /// pull that was cancelled a moment before (CRI-O).
        runtime_retries: u32 = 2, within(0, 100), live;
        /// How long a caller that left the queue may take to return to its old place; also one whose credentials failed
        /// and that has others. Callers without a pod have no place to return to.
        reentry_window: Duration = secs(30), within(secs(0), mins(10)), live;
        /// After this wait in the queue the pod gets an Event that says so, where the agent has an API server; 0s for off.
        queued_event_after: Duration = secs(30), zero_or("off", secs(1), hours(24)), live;
        /// How often the progress of running pulls is asked for.
        progress_interval: Duration = ms(500), within(ms(50), mins(1)), live;
    }

    /// The API server. Without `kubeconfig`, `bootstrap_kubeconfig`, `in_cluster` and `server` it is not used.
    kube: Kube {
        /// A kubeconfig file. It and the files that it names are read again when they change.
        kubeconfig: Option<PathBuf> = None, Any, restart;
        /// The context of the kubeconfig; empty for its current one.
        context: String = String::new(), TextRule::Free("text, or \"\" for the current context"), restart;
        /// With role `node`: a kubeconfig to request the first client certificate with, as the kubelet's `--bootstrap-kubeconfig`.
        bootstrap_kubeconfig: Option<PathBuf> = None, Any, restart;
        /// With `bootstrap_kubeconfig`: the folder of the client certificate and its key, as the kubelet's `--cert-dir`.
        certificate_dir: PathBuf = "/var/lib/keelson/pki".into(), Any, restart;
        /// Use the service account that Kubernetes mounts into a pod.
        in_cluster: bool = false, Any, restart;
        /// The API server's address, such as `https://10.0.0.1:6443`, for credentials given one by one.
        server: String = String::new(), TextRule::Server, restart;
        /// With `server`: the certificates that the API server's is signed with (PEM).
        certificate_authority: Option<PathBuf> = None, Any, restart;
        /// With `server`: a file that holds a bearer token.
        token_file: Option<PathBuf> = None, Any, restart;
        /// With `server`: the client's certificate (PEM).
        client_certificate: Option<PathBuf> = None, Any, restart;
        /// With `server`: the key of `client_certificate` (PEM).
        client_key: Option<PathBuf> = None, Any, restart;
        /// How long a request may take. A renewal's is no longer than the lease, as the kubelet's.
        /// A list or a watch may wait for the head of its answer for 60 s at least: a busy API server keeps requests
        /// waiting.
        request_timeout: Duration = secs(10), within(secs(1), mins(2)), restart;
    }

    /// Heartbeats: the node's Lease, its status and its conditions.
    node: Node {
        /// `companion`: the kubelet is the node's heartbeat, the agent adds conditions of its own.
        /// `node`: the agent is the node's heartbeat; no kubelet may run on the node.
        role: Role = Role::Companion, Any, restart;
        /// With role `companion`: renew a Lease of its own, `keelson-NODE`, which tells through the API that the agent is alive. It
        /// costs a write every quarter of `lease_duration`, and needs the rights in `companion-lease.yaml`.
        companion_lease: bool = false, Any, restart;
        /// Remove the agent's conditions, and those set through it, from the Node when the agent stops without a successor.
        /// Each restart then costs two writes. Conditions of a kubelet stay.
        remove_conditions_on_stop: bool = false, Any, restart;
        /// How long a Lease lasts, in whole seconds, as the kubelet's `nodeLeaseDurationSeconds`; renewed every quarter of that.
        lease_duration: Duration = secs(40), within(secs(4), mins(10)), restart;
        /// How often the status is worked out, as the kubelet's `nodeStatusUpdateFrequency`.
        node_status_update_frequency: Duration = secs(10), within(secs(1), mins(10)), restart;
        /// With role `node`: how often a status that has not changed is reported, as the kubelet's
        /// `nodeStatusReportFrequency`, which is 5 min by default. The node is Ready by its Lease.
        node_status_report_frequency: Duration = mins(15), within(secs(1), hours(24)), restart;
        /// When pulls wait and none that runs has got a byte for this long, the condition ImagePullsStalled is True.
        pulls_stalled_after: Duration = mins(2), within(secs(10), hours(1)), restart;
        /// With role `node`, what is done when the Node is missing: `once` makes it at the start only, as the
        /// kubelet does; `always` also when it was deleted later; `never` waits for somebody else to.
        register_node: Register = Register::Once, Any, restart;
        /// With role `node`, what is done while another process, such as a kubelet, renews the node's Lease: `stand-back` leaves
        /// Lease and status to it until it has not renewed the Lease for `lease_duration`; `continue` goes on.
        when_contested: WhenContested = WhenContested::StandBack, Any, restart;
        /// With role `node`: labels of the Node, as the kubelet's `--node-labels`: `key=value,key=value`.
        node_labels: String = String::new(), TextRule::Free("labels, `key=value,...`"), restart;
        /// With role `node`: taints that the Node is registered with, as the kubelet's `--register-with-taints`:
        /// `key=value:Effect,...`.
        register_with_taints: String = String::new(), TextRule::Free("taints, `key=value:Effect,...`"), restart;
        /// With role `node`: the zone, label `topology.kubernetes.io/zone`; empty for none.
        zone: String = String::new(), TextRule::Free("label value, or \"\" for none"), restart;
        /// With role `node`: the region, label `topology.kubernetes.io/region`; empty for none.
        region: String = String::new(), TextRule::Free("label value, or \"\" for none"), restart;
        /// With role `node`: the id that the cloud knows the machine by; empty for none.
        provider_id: String = String::new(), TextRule::Free("text, or \"\" for none"), restart;
        /// With role `node`: addresses of the Node, at most one a family, as the kubelet's `--node-ip`:
        /// `10.0.0.7,fd00::7`; empty for those of the default route's interface.
        node_ip: String = String::new(), TextRule::Free("IP addresses, `a,b`"), restart;
        /// With role `node`: what Kubernetes' own daemons need, taken from what pods may have, as the kubelet's
        /// `kubeReserved`: `cpu=100m,memory=200Mi,ephemeral-storage=1Gi,pid=100`.
        kube_reserved: String = String::new(), TextRule::Free("resources, `cpu=100m,memory=200Mi,...`"), restart;
        /// With role `node`: what the system needs, as the kubelet's `systemReserved`.
        system_reserved: String = String::new(), TextRule::Free("resources, `cpu=100m,memory=200Mi,...`"), restart;
        /// With role `node`: when the pressure conditions become True, as the kubelet's `evictionHard`; its own
        /// defaults are these. The agent evicts nothing.
        eviction_hard: String =
            "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<15%,imagefs.inodesFree<5%"
                .into(),
            TextRule::Free("thresholds, `signal<quantity,signal<percent%`"), restart;
        /// How long a pressure condition, and each of the agent's own three, stays True after the problem was last seen, as
        /// the kubelet's `evictionPressureTransitionPeriod`.
        eviction_pressure_transition_period: Duration = mins(5), within(secs(0), hours(1)), restart;
        /// With role `node`: how many pods the node takes, as the kubelet's `maxPods`.
        max_pods: u32 = 110, within(1, 10_000), restart;
        /// With role `node`: how many images the status lists, the largest first, as the kubelet's
        /// `nodeStatusMaxImages`; 0 for none.
        node_status_max_images: u32 = 50, within(0, 10_000), restart;
        /// With role `node`: the directory whose file system is `nodefs`, as the kubelet's `--root-dir`.
        root_dir: PathBuf = "/var/lib/kubelet".into(), Any, restart;
        /// With role `node`: the version that the Node shows as its kubelet's, for what reads the skew from it;
        /// empty for the agent's own.
        kubelet_version: String = String::new(), TextRule::Free("version, or \"\" for the agent's"), restart;
    }

    /// Service endpoints: what Services mean on this node, for dataplanes and other processes.
    endpoints: Endpoints {
        /// Where Services and EndpointSlices come from: `kube` (the API server of `[kube]`), `files` (the folder
        /// `manifests`), `off`; `auto` takes the API server if there is one, else the folder if there is one.
        source: EndpointsSource = EndpointsSource::Auto, Any, restart;
        /// When Services are watched at the API server: `on-demand`, from the first client on that follows them (a call of `Next` or
        /// `Watch`), until the agent ends; `always`, from the start on. A folder of manifests is always read.
        watch: EndpointsWatch = EndpointsWatch::OnDemand, Any, restart;
        /// A folder of Kubernetes manifests (YAML, JSON): Services, EndpointSlices, ServiceCIDRs and this Node.
        manifests: Option<PathBuf> = None, Any, restart;
        /// Where the Endpoints API is served. Loopback addresses only, unless `allow_remote`.
        listen: Vec<ListenSpec> = vec![ListenSpec::Unix(SocketSpec::built_in("/run/keelson-endpoints/endpoints.sock"))], Any, restart;
        /// Allow `listen` addresses that other machines can reach. There is no authentication on them.
        allow_remote: bool = false, Any, restart;
        /// Permissions of the sockets in `listen`.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
        /// Time between two revisions while changes keep coming; each is a sync of the disk. Ten may follow each other at once after
        /// a pause, so a change that comes alone never waits; 0s for no limit.
        min_interval: Duration = ms(100), within(secs(0), secs(10)), restart;
        /// Maximum time that a write to the state disk may delay a revision. After it the revision is published from memory,
        /// under a new instance ID, until the disk answers.
        write_timeout: Duration = secs(5), within(secs(1), mins(10)), restart;
        /// Maximum age of a state on disk that is served after the node has booted, counted from when it was current last. A node that
        /// was off for longer serves nothing until its sources are synced: other pods may have the addresses by then.
        max_age_after_boot: Duration = hours(1), within(secs(0), hours(8760)), restart;
        /// For how many revisions it is known what changed, so that a client that was away gets only that.
        history: u32 = 1000, within(1, 100_000), restart;
        /// How many clients may follow at once, for each address of `listen`; further ones are told RESOURCE_EXHAUSTED.
        max_watchers: u32 = 1000, within(1, 100_000), restart;
    }

    /// `keelson proxy`, which makes Services work on the node. It is a program of its own, and reads this section when it
    /// starts; a running agent makes nothing of it. The defaults are those of kube-proxy (1.36) in its mode `nftables`.
    proxy: Proxy {
        /// What makes the Services work: `nft`, rules of nftables (kernel 5.13 or later).
        backend: ProxyBackend = ProxyBackend::Nft, Any, restart;
        /// Where the agent serves the Endpoints API; empty: the first unix socket of `endpoints.listen`. A port would not do: any
        /// user of the machine can listen at it while the agent restarts, and would write the node's rules.
        target: Option<SocketSpec> = None, Any, restart;
        /// Addresses that stand for the node's own, at most one a family, as kube-proxy's `bindAddress`; a family
        /// without one here, or with `0.0.0.0` or `::`, has the node's.
        bind_address: Vec<IpAddr> = Vec::new(), Any, restart;
        /// How traffic of this node's pods is told from other traffic, as kube-proxy's `detectLocalMode`:
        /// `ClusterCIDR` (a source in `cluster_cidr`), `NodeCIDR` (a source in the Node's `spec.podCIDRs`),
        /// `BridgeInterface` (it comes in by `bridge_interface`), `InterfaceNamePrefix` (it comes in by an interface
        /// whose name begins with `interface_name_prefix`).
        detect_local_mode: DetectLocalMode = DetectLocalMode::ClusterCidr, Any, restart;
        /// With `ClusterCIDR`: the networks of the cluster's pods, at most one a family, as kube-proxy's
        /// `clusterCIDR`; a family without one tells no pods from others.
        cluster_cidr: Vec<IpNet> = Vec::new(), Any, restart;
        /// With `BridgeInterface`: the bridge that this node's pods are attached to, such as `cbr0`.
        bridge_interface: String = String::new(), TextRule::Interface, restart;
        /// With `InterfaceNamePrefix`: what the names of the pods' interfaces begin with, such as `veth`.
        interface_name_prefix: String = String::new(), TextRule::Interface, restart;
        /// Masquerade all traffic to cluster IPs, as kube-proxy's `masqueradeAll`; else only what does not come from
        /// pods, where pods are told from others.
        masquerade_all: bool = false, Any, restart;
        /// The bit of the packet mark that says that a packet is to be masqueraded, as kube-proxy's `masqueradeBit`.
        masquerade_bit: u32 = 14, within(0, 31), restart;
        /// At which of the node's addresses node ports answer, as kube-proxy's `nodePortAddresses`: those in these
        /// networks, or with `primary` alone the node's own. All addresses of a family: a network such as
        /// `0.0.0.0/0`, or networks of the other family only. Empty: `primary`.
        nodeport_addresses: NodePortAddresses = NodePortAddresses::Primary, Any, restart;
        /// Serve `spec.externalIPs` of Services, as kube-proxy's feature gate `AllowServiceExternalIPs`. With them,
        /// anyone with write access to Services can intercept traffic to any address (CVE-2020-8554).
        allow_external_ips: bool = true, Any, restart;
        /// How long at most until rules that another program has changed are repaired, as kube-proxy's `syncPeriod`.
        sync_period: Duration = secs(30), within(secs(1), hours(24)), restart;
        /// For how long endpoints may be stale, because the API server or the agent cannot be reached, before `/healthz` and health
        /// check node ports answer 503. The rules stay. 0s for never, as kube-proxy.
        max_staleness: Duration = hours(24), zero_or("never", secs(1), hours(8760)), restart;
        /// While changes keep coming, at most one commit to nftables in this time for each IP family, as kube-proxy's
        /// `minSyncPeriod`; the first ten after a quiet time are made at once. Each commit makes other programs that read the ruleset begin again, so a
        /// burst that goes on for a minute is also interrupted for 20 microseconds per element (5 s at most). 0: no limit.
        min_sync_period: Duration = ms(100), within(secs(0), mins(1)), restart;
        /// Interfaces whose forwarded connections to Services are offloaded to a flowtable of nftables once they are
        /// established (TCP and UDP): names, or beginnings of names with `*` after them, such as `["eth0", "veth*"]`.
        /// Empty: no flowtable. Packets of an offloaded connection bypass the rules of all other programs, a NetworkPolicy
        /// that changes among them: read `docs/proxy.md` before you set it.
        flowtable_interfaces: Vec<InterfacePattern> = Vec::new(), Any, restart;
        /// Maximum number of conntrack entries per CPU, at most 1,048,576 in total, as kube-proxy's
        /// `conntrack.maxPerCore`. 0 keeps the kernel's limit. The limit belongs to the machine: a proxy in a network
        /// namespace of its own cannot change it.
        conntrack_max_per_core: u32 = 32768, zero_or("the kernel's limit", 1, 1_048_576), restart;
        /// Minimum of that limit, as kube-proxy's `conntrack.min`. Not used if `conntrack_max_per_core` is 0.
        conntrack_min: u32 = 131_072, within(0, 16_777_216), restart;
        /// Idle timeout of established TCP connections in conntrack, as kube-proxy's `conntrack.tcpEstablishedTimeout`. 0
        /// keeps the kernel's value.
        conntrack_tcp_timeout_established: Duration = hours(24), zero_or("the kernel's time", secs(1), hours(8760)), restart;
        /// Timeout of TCP connections in CLOSE_WAIT, as kube-proxy's `conntrack.tcpCloseWaitTimeout`. 0 keeps the
        /// kernel's value.
        conntrack_tcp_timeout_close_wait: Duration = hours(1), zero_or("the kernel's time", secs(1), hours(8760)), restart;
        /// Accept TCP segments outside the window, as kube-proxy's `conntrack.tcpBeLiberal`. `false` keeps the kernel's
        /// value.
        conntrack_tcp_be_liberal: bool = false, Any, restart;
        /// Timeout of UDP entries without a reply, as kube-proxy's `conntrack.udpTimeout`. 0 keeps the kernel's value.
        conntrack_udp_timeout: Duration = secs(0), zero_or("the kernel's time", secs(1), hours(8760)), restart;
        /// Timeout of UDP entries with replies, as kube-proxy's `conntrack.udpStreamTimeout`. 0 keeps the kernel's value.
        conntrack_udp_timeout_stream: Duration = secs(0), zero_or("the kernel's time", secs(1), hours(8760)), restart;
        /// Directory of the kernel's conntrack settings. A container sees `/proc/sys` read-only; there, mount the host's
        /// directory elsewhere and name the mount here, as `packaging/kubernetes/proxy.yaml` does.
        conntrack_sysctl_dir: PathBuf = "/proc/sys/net/netfilter".into(), Any, restart;
        /// Where `/healthz` and `/livez` answer, as kube-proxy's `healthzBindAddress`: load balancers ask there whether
        /// the node takes traffic. Empty for off; port 0 takes a free one.
        healthz_bind_address: Option<SocketAddr> = Some(SocketAddr::from(([0, 0, 0, 0], 10256))), Any, restart;
        /// Where `/metrics` and `/proxyMode` answer, as kube-proxy's `metricsBindAddress`, without authentication. Empty
        /// for off; port 0 takes a free one.
        metrics_bind_address: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 10249))), Any, restart;
        /// End where `healthz_bind_address` or `metrics_bind_address` cannot be listened on, as kube-proxy's
        /// `bindAddressHardFail`; else it is retried every 5 s, and nothing else waits for it.
        bind_address_hard_fail: bool = false, Any, restart;
        /// The socket of the proxy's debug API, which `keelson proxy explain` and `keelson proxy state` use.
        listen: SocketSpec = SocketSpec::built_in("/run/keelson-proxy/proxy.sock"), Any, restart;
        /// Permissions of that socket.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
        /// The address of the proxy's page and its JSON; empty for off. A loopback address unless
        /// `http_allow_remote`; port 0 takes a free one.
        http: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 9441))), Any, restart;
        /// Allow an `http` address that other machines can reach. There is no authentication on it.
        http_allow_remote: bool = false, Any, restart;
        /// Host names by which clients may call the `http` address, besides IP addresses that it has and `localhost`. Others are refused
        /// (421), so that no web site can reach it through a browser (DNS rebinding).
        http_hosts: Vec<HostName> = Vec::new(), Any, restart;
    }

    /// The debug socket (gRPC) and the debug page, metrics and probes (HTTP).
    debug: Debug {
        /// The socket of the debug API, which `keelson pulls`, `keelson actors` and the like use.
        listen: SocketSpec = SocketSpec::built_in("/run/keelson/debug.sock"), Any, restart;
        /// The address of page, metrics and probes; empty for off. A loopback address unless `http_allow_remote`;
        /// port 0 takes a free one.
        http: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 9440))), Any, restart;
        /// Allow an `http` address that other machines can reach. There is no authentication on it.
        http_allow_remote: bool = false, Any, restart;
        /// Host names by which clients may call the `http` address, besides IP addresses that it has and `localhost`. Others are refused
        /// (421), so that no web site can reach it through a browser (DNS rebinding).
        http_hosts: Vec<HostName> = Vec::new(), Any, restart;
        /// Permissions of the debug socket. Who can connect may look at everything.
        socket_mode: SocketMode = SocketMode::OWNER_AND_GROUP, Any, restart;
        /// Users who may also change something through the debug socket (the limit, conditions of the node), besides
        /// root and the user that the agent runs as: names or ids.
        control_users: String = String::new(), TextRule::Free("users, `name,id,...`"), restart;
    }
}

impl Settings {
    /// Where `keelson proxy` finds the Endpoints API: `proxy.target`, else the first unix socket of `endpoints.listen`; none: there is
    /// none.
    pub fn proxy_target(&self) -> Option<&SocketSpec> {
        let sockets = self.endpoints.listen.iter().filter_map(|spec| match spec {
            ListenSpec::Unix(socket) => Some(socket),
            ListenSpec::Tcp(_) => None,
        });
        self.proxy.target.as_ref().or(sockets.into_iter().next())
    }
}

/// Every setting but the feature gates (those are [`Gate::ALL`]), in the order of the
/// reference.
pub fn schema() -> &'static [Key] {
    &KEYS
}

/// Every section, in the order of the reference.
pub fn sections() -> &'static [Section] {
    &SECTIONS
}

/// What a gate does, for the list of entries.
pub(crate) fn gate_doc(gate: Gate) -> &'static str {
    gates::specs()[gate as usize].description
}

#[cfg(test)]
mod tests;
