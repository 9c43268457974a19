//! The figures of the chart and of the table at the beginning of `docs/performance.md`.
//!
//! Owns: [`Key`], and [`Definition`] with name, unit, peer and target of each, in their order. In: nothing. Out: both.
//! In every figure less is better.

/// Unit of a figure in the file. A larger value is shown in the next larger unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Microseconds,
    Milliseconds,
    Seconds,
    /// Of 1,000 bytes.
    Kilobytes,
    /// Of 2^20 bytes.
    Megabytes,
    Count,
}

impl Unit {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
            Self::Kilobytes => "kB",
            Self::Megabytes => "MB",
            Self::Count => "count",
        }
    }
}

/// The largest value that meets a target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// In the unit of the figure.
    Value(f64),
    /// Keelson's value by the peer's.
    Ratio(f64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Definition {
    /// Name in the file: it stays the same when the text changes.
    pub(super) id: &'static str,
    pub(super) part: &'static str,
    pub(super) name: &'static str,
    pub(super) unit: Unit,
    pub(super) peer: Option<&'static str>,
    pub(super) target: Option<Target>,
}

impl Definition {
    const fn new(id: &'static str, part: &'static str, name: &'static str, unit: Unit) -> Self {
        Self { id, part, name, unit, peer: None, target: None }
    }

    const fn beside(mut self, peer: &'static str) -> Self {
        self.peer = Some(peer);
        self
    }

    const fn at_most(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }
}

const PULLS: &str = "Image pulls (containerd 2.4)";
const HEARTBEATS: &str = "Heartbeats of a node, role node";
const OUTAGE: &str = "500 nodes after 180 s without an API server";
const ENDPOINTS: &str = "Endpoints of 10,000 Services";
const NFTABLES: &str = "Proxy, nftables, 10,000 Services x 10";
const IPTABLES: &str = "Proxy, iptables-nft, 1,000 Services x 10";

/// `Key = definition`, one for each figure.
macro_rules! catalogue {
    ($($key:ident = $definition:expr;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Key { $($key),* }

        impl Key {
            pub(super) const ALL: &[Self] = &[$(Self::$key),*];

            pub(super) fn definition(self) -> &'static Definition {
                match self { $(Self::$key => const { &$definition }),* }
            }
        }
    };
}

use Target::{Ratio, Value};
use Unit::{Count, Kilobytes, Megabytes, Microseconds, Milliseconds, Seconds};

catalogue! {
    ImageStatus = Definition::new("image-status", PULLS, "ImageStatus call, median", Microseconds)
        .beside("containerd")
        .at_most(Ratio(1.5));
    SmallImages = Definition::new("small-images", PULLS, "40 small images at once, median", Seconds)
        .beside("containerd")
        .at_most(Ratio(1.02));
    KillToServing =
        Definition::new("kill-to-serving", PULLS, "kill -9 until it serves again, median", Milliseconds)
            .at_most(Value(200.0));
    FailedCalls = Definition::new("failed-calls", PULLS, "calls that fail in 20 planned restarts", Count)
        .at_most(Value(0.0));
    IdleMemory = Definition::new("idle-memory", PULLS, "memory of the idle agent, no cluster", Megabytes)
        .at_most(Value(20.0));

    RequestBytes =
        Definition::new("request-bytes", HEARTBEATS, "requests on the wire, an hour", Kilobytes)
            .beside("kubelet")
            .at_most(Ratio(0.5));
    EtcdBytes = Definition::new("etcd-bytes", HEARTBEATS, "written to etcd, an hour", Kilobytes)
        .beside("kubelet")
        .at_most(Ratio(0.5));

    OutageRequests = Definition::new("outage-requests", OUTAGE, "requests in the first 60 s", Count)
        .beside("client-go")
        .at_most(Ratio(1.0));
    OutageCurrent =
        Definition::new("outage-current", OUTAGE, "99 % of the nodes are current after", Seconds)
            .beside("client-go")
            .at_most(Ratio(1.0));

    FullState =
        Definition::new("full-state", ENDPOINTS, "full state to one client, median", Milliseconds)
            .at_most(Value(20.0));
    ChangeToClient =
        Definition::new("change-to-client", ENDPOINTS, "change, beyond a plain watch event, p99", Milliseconds)
            .at_most(Value(10.0));
    AgentMemory =
        Definition::new("agent-memory", ENDPOINTS, "memory of the agent, role companion", Megabytes)
            .at_most(Value(45.0));

    NftBothStart =
        Definition::new("nft-both-start", NFTABLES, "first sync, agent and proxy start", Seconds)
            .beside("kube-proxy");
    NftProxyStarts =
        Definition::new("nft-proxy-starts", NFTABLES, "first sync, the proxy starts", Seconds)
            .at_most(Value(0.5));
    NftChange =
        Definition::new("nft-change", NFTABLES, "changed endpoint in the kernel, p99", Milliseconds)
            .beside("kube-proxy")
            .at_most(Value(25.0));
    NftProcessor =
        Definition::new("nft-processor", NFTABLES, "processor time, 100 changes/s for 60 s", Seconds)
            .beside("kube-proxy");
    NftMemory =
        Definition::new("nft-memory", NFTABLES, "memory of agent and proxy, after changes", Megabytes)
            .beside("kube-proxy")
            .at_most(Value(80.0));
    NftConnection =
        Definition::new("nft-connection", NFTABLES, "new TCP connection, processor time", Microseconds)
            .beside("kube-proxy");

    IptablesBothStart =
        Definition::new("iptables-both-start", IPTABLES, "first sync of agent and proxy", Seconds)
            .beside("kube-proxy");
    IptablesChange =
        Definition::new("iptables-change", IPTABLES, "changed endpoint in the kernel, p50", Milliseconds)
            .beside("kube-proxy");
}
