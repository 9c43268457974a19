//! The fields of `KubeProxyConfiguration` and how each is used.

#[derive(Debug)]
pub(super) struct Field {
    pub(super) place: &'static str,
    pub(super) used: Use,
    /// A pointer in Go: zero is a value, and only null means absent.
    pub(super) zero_counts: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Use {
    Setting(&'static str, Kind),
    /// A setting of the backend iptables.
    InIptables(&'static str),
    Section,
    /// No effect, for this reason.
    No(&'static str),
    Gates,
    Verbosity,
    /// Depends on other fields; read together with them.
    Separately,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    /// Comma-separated text, for a list.
    Commas,
    Duration,
}

impl Kind {
    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Plain => "a string, a number, or true or false",
            Self::Commas | Self::Duration => "a string",
        }
    }
}

const fn setting(place: &'static str, setting: &'static str, kind: Kind) -> Field {
    Field { place, used: Use::Setting(setting, kind), zero_counts: false }
}

const fn pointer(place: &'static str, setting: &'static str, kind: Kind) -> Field {
    Field { place, used: Use::Setting(setting, kind), zero_counts: true }
}

const fn no(place: &'static str, reason: &'static str) -> Field {
    Field { place, used: Use::No(reason), zero_counts: false }
}

const fn other(place: &'static str, used: Use) -> Field {
    Field { place, used, zero_counts: false }
}

const AGENT: &str = "only the agent connects to the API server; set [kube]";
const WINDOWS: &str = "it is for Windows";

#[rustfmt::skip]
const FIELDS: [Field; 55] = [
    other("mode", Use::Separately),
    Field { place: "featureGates", used: Use::Gates, zero_counts: true },
    no("clientConnection", AGENT),
    other("logging", Use::Section),
    setting("logging.format", "agent.log_format", Kind::Plain),
    other("logging.verbosity", Use::Verbosity),
    // In every generated file.
    other("logging.flushFrequency", Use::Separately),
    other("logging.options", Use::Separately),
    no("logging.vmodule", "set targets in agent.log instead, such as info,keelson_proxy=debug"),
    no("hostnameOverride", "the agent has the node name (agent.node_name)"),
    setting("bindAddress", "proxy.bind_address", Kind::Commas),
    other("healthzBindAddress", Use::Separately),
    other("metricsBindAddress", Use::Separately),
    setting("bindAddressHardFail", "proxy.bind_address_hard_fail", Kind::Plain),
    no("enableProfiling", "Keelson has no Go profiles"),
    no("showHiddenMetricsForVersion", "Keelson has no hidden metrics"),
    other("iptables", Use::Section),
    pointer("iptables.masqueradeBit", "proxy.masquerade_bit", Kind::Plain),
    setting("iptables.masqueradeAll", "proxy.masquerade_all", Kind::Plain),
    Field {
        place: "iptables.localhostNodePorts",
        used: Use::InIptables("proxy.iptables_localhost_node_ports"),
        zero_counts: true,
    },
    setting("iptables.syncPeriod", "proxy.sync_period", Kind::Duration),
    setting("iptables.minSyncPeriod", "proxy.min_sync_period", Kind::Duration),
    other("ipvs", Use::Section),
    setting("ipvs.syncPeriod", "proxy.sync_period", Kind::Duration),
    setting("ipvs.minSyncPeriod", "proxy.min_sync_period", Kind::Duration),
    setting("ipvs.scheduler", "proxy.ipvs_scheduler", Kind::Plain),
    no("ipvs.excludeCIDRs", "virtual servers of other programs are left alone"),
    setting("ipvs.strictARP", "proxy.ipvs_strict_arp", Kind::Plain),
    setting("ipvs.tcpTimeout", "proxy.ipvs_tcp_timeout", Kind::Duration),
    setting("ipvs.tcpFinTimeout", "proxy.ipvs_tcp_fin_timeout", Kind::Duration),
    setting("ipvs.udpTimeout", "proxy.ipvs_udp_timeout", Kind::Duration),
    other("nftables", Use::Section),
    pointer("nftables.masqueradeBit", "proxy.masquerade_bit", Kind::Plain),
    setting("nftables.masqueradeAll", "proxy.masquerade_all", Kind::Plain),
    setting("nftables.syncPeriod", "proxy.sync_period", Kind::Duration),
    setting("nftables.minSyncPeriod", "proxy.min_sync_period", Kind::Duration),
    no("winkernel", WINDOWS),
    setting("detectLocalMode", "proxy.detect_local_mode", Kind::Plain),
    other("detectLocal", Use::Section),
    setting("detectLocal.bridgeInterface", "proxy.bridge_interface", Kind::Plain),
    setting("detectLocal.interfaceNamePrefix", "proxy.interface_name_prefix", Kind::Plain),
    setting("clusterCIDR", "proxy.cluster_cidr", Kind::Commas),
    other("nodePortAddresses", Use::Separately),
    no("oomScoreAdj", "set OOMScoreAdjust= in the unit, or the QoS class of the pod"),
    other("conntrack", Use::Section),
    pointer("conntrack.maxPerCore", "proxy.conntrack_max_per_core", Kind::Plain),
    pointer("conntrack.min", "proxy.conntrack_min", Kind::Plain),
    pointer("conntrack.tcpEstablishedTimeout", "proxy.conntrack_tcp_timeout_established", Kind::Duration),
    pointer("conntrack.tcpCloseWaitTimeout", "proxy.conntrack_tcp_timeout_close_wait", Kind::Duration),
    setting("conntrack.tcpBeLiberal", "proxy.conntrack_tcp_be_liberal", Kind::Plain),
    setting("conntrack.udpTimeout", "proxy.conntrack_udp_timeout", Kind::Duration),
    setting("conntrack.udpStreamTimeout", "proxy.conntrack_udp_timeout_stream", Kind::Duration),
    no("configSyncPeriod", "the agent watches the API server and does not relist periodically"),
    no("portRange", "kube-proxy does not use it either"),
    no("windowsRunAsService", WINDOWS),
];

pub(super) fn find(place: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.place == place)
}
