//! Owns: expectations of a case. In: clients, targets and expected outcomes. Out: an error with the actual outcome.

use crate::common::{Case, Setup, answer_time};
use crate::objects::{Ep, PORT, elsewhere};
use crate::subject::{
    Subject, is_as_mode_nftables, is_at_sockets, is_in_user_space, is_ipvs, syncs_in_steps,
};
use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _};
use keelson_cluster::net::plan::{BRIDGE, NODE, NODE_2, local};
use keelson_cluster::net::{Dual, Family, NetClient, Outcome, Tally, Transport};
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::json;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Time without a response after which a request counts as dropped: a hundred times the usual latency.
const SILENCE: Duration = Duration::from_millis(700);
const UNANSWERED_REQUESTS: usize = 3;
/// Number of concurrent checks of a table.
const CONCURRENT_CHECKS: usize = 12;

/// A destination, in both families.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    address: Dual,
    port: u16,
    transport: Transport,
    families: &'static [Family],
}

impl Target {
    pub(crate) fn new(address: Dual, port: u16) -> Self {
        Self { address, port, transport: Transport::Tcp, families: &Family::ALL }
    }

    pub(crate) fn port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    pub(crate) fn over(self, transport: Transport) -> Self {
        Self { transport, ..self }
    }

    pub(crate) fn v4(self) -> Self {
        Self { families: &[Family::V4], ..self }
    }

    pub(crate) fn v6(self) -> Self {
        Self { families: &[Family::V6], ..self }
    }

    pub(crate) fn at(self, family: Family) -> SocketAddr {
        self.address.at(family, self.port)
    }
}

impl Case {
    pub(crate) fn v(&self, n: u8) -> Target {
        Target::new(self.v_address(n), PORT)
    }

    pub(crate) fn w(&self, n: u8) -> Target {
        Target::new(self.w_address(n), PORT)
    }

    pub(crate) fn x(&self, n: u8) -> Target {
        Target::new(self.x_address(n), PORT)
    }

    pub(crate) fn np(&self, n: u8) -> Target {
        Target::new(NODE, self.node_port(n))
    }

    pub(crate) fn np2(&self, n: u8) -> Target {
        Target::new(NODE_2, self.node_port(n))
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Want {
    /// Exactly these answer, each of them at least once, and see a masqueraded source or not. `by_packets`: packets decide,
    /// also where the socket level decides otherwise.
    Answers { by: BTreeSet<(Dual, u16)>, masqueraded: bool, by_packets: bool },
    /// ICMP "port unreachable".
    Reject,
    /// No response.
    Drop,
    /// The node forwards it untranslated: the gateway, which has all these addresses, answers.
    Untouched,
    /// TCP reset of a host that has the address.
    Reset,
}

/// {..} -M: these answer and see the client.
pub(crate) fn kept<'a>(by: impl IntoIterator<Item = &'a Ep>) -> Want {
    answers(by, false)
}

/// {..} +M: these answer and see the node.
pub(crate) fn masked<'a>(by: impl IntoIterator<Item = &'a Ep>) -> Want {
    answers(by, true)
}

fn answers<'a>(by: impl IntoIterator<Item = &'a Ep>, masqueraded: bool) -> Want {
    let by = by.into_iter().map(|ep| (ep.at, 8080)).collect();
    Want::Answers { by, masqueraded, by_packets: false }
}

/// An address of a ServiceCIDR that no Service has.
pub(crate) fn unused_cluster_ip() -> Want {
    if is_as_mode_nftables() && !is_in_user_space() { Want::Drop } else { Want::Untouched }
}

/// A UDP port of a cluster IP that its Service does not have.
pub(crate) fn unused_udp_port() -> Want {
    // The gateway, which has the address otherwise, does not answer over UDP.
    if is_as_mode_nftables() || is_ipvs() { Want::Reject } else { Want::Drop }
}

/// A port of an external address that its Service does not have; `otherwise` where the node does not have the address.
pub(crate) fn unused_external_port(otherwise: Want) -> Want {
    if is_ipvs() || is_in_user_space() { Want::Reject } else { otherwise }
}

/// A frontend that is gone and was used a moment ago. Ours of the backend ipvs stays until its connections are forgotten,
/// and accepts no other.
pub(crate) fn used_before(otherwise: Want) -> Want {
    if is_ipvs() && Subject::get() == Subject::Keelson { Want::Reject } else { otherwise }
}

impl Want {
    pub(crate) fn at(self, port: u16) -> Self {
        match self {
            Self::Answers { by, masqueraded, by_packets } => {
                let by = by.into_iter().map(|(at, _)| (at, port)).collect();
                Self::Answers { by, masqueraded, by_packets }
            }
            other => other,
        }
    }

    /// Of a frontend that the socket level leaves to packets.
    pub(crate) fn by_packets(self) -> Self {
        match self {
            Self::Answers { by, masqueraded, .. } => Self::Answers { by, masqueraded, by_packets: true },
            other => other,
        }
    }

    /// What a socket of the node sees instead: it connects to the endpoint itself.
    fn at_sockets(self) -> Self {
        match self {
            Self::Answers { by, by_packets: false, .. } => {
                Self::Answers { by, masqueraded: false, by_packets: false }
            }
            other => other,
        }
    }

    /// What a backend in user space does instead: it connects to endpoints itself, and refuses TCP with a reset.
    fn in_user_space(self, transport: Transport) -> Self {
        match self {
            Self::Answers { by, by_packets, .. } => Self::Answers { by, masqueraded: true, by_packets },
            Self::Reject if transport == Transport::Tcp => Self::Reset,
            other => other,
        }
    }

    /// Number of requests, so that an expected endpoint is missed once in 10^9 runs: each of `k` is missed by `n`
    /// requests with probability `(1 - 1/k)^n`.
    fn times(&self) -> usize {
        match self {
            Self::Answers { by, .. } => match by.len() {
                0 | 1 => 3,
                2 => 32,
                3 => 56,
                4 => 80,
                k => 24 * k,
            },
            Self::Drop => UNANSWERED_REQUESTS,
            Self::Reject | Self::Untouched | Self::Reset => 3,
        }
    }

    fn allows(&self, outcome: Outcome, client: &NetClient, to: SocketAddr) -> bool {
        match (self, outcome) {
            (Self::Answers { by, masqueraded, .. }, Outcome::Answered { by: who, source }) => {
                let family = Family::of(who.ip());
                let seen = if *masqueraded { node_as_seen_by(who.ip()) } else { client.ip(family) };
                source == seen && by.iter().any(|(at, port)| at.at(family, *port) == who)
            }
            (Self::Untouched, Outcome::Answered { by, source }) => {
                by == to && source == client.ip(Family::of(by.ip()))
            }
            (Self::Reject, Outcome::Rejected)
            | (Self::Drop, Outcome::Dropped)
            | (Self::Reset, Outcome::Reset) => true,
            _ => false,
        }
    }

    fn check(&self, tally: &Tally, client: &NetClient, to: SocketAddr) -> Result<()> {
        let odd = tally.0.keys().find(|outcome| !self.allows(**outcome, client, to));
        ensure!(odd.is_none(), "{tally}; wanted was {self:?}");
        if let Self::Answers { by, .. } = self {
            ensure!(
                tally.by_endpoint().len() == by.len(),
                "not every endpoint answered: {tally}; wanted was {self:?}"
            );
        }
        Ok(())
    }
}

/// Source of a masqueraded connection: the node's address on the path to the endpoint.
fn node_as_seen_by(endpoint: IpAddr) -> IpAddr {
    let family = Family::of(endpoint);
    let on_node = (1..=3).any(|n| local(n).of(family) == endpoint);
    if on_node { BRIDGE.of(family) } else { NODE.of(family) }
}

impl Case {
    /// Checks once, in each family of the target.
    pub(crate) async fn expect_outcome(&self, client: &NetClient, target: Target, want: &Want) -> Result<()> {
        let mut want = want.clone();
        if is_in_user_space() {
            want = want.in_user_space(target.transport);
        }
        // Sockets are not masqueraded, and those of SCTP not translated.
        let is_masqueraded = matches!(self.bench.setup, Setup::MasqueradeAll);
        if is_at_sockets() && client.is_on_node() && target.transport != Transport::Sctp && !is_masqueraded {
            want = want.at_sockets();
        }
        for family in target.families {
            let to = target.at(*family);
            let patience = if matches!(want, Want::Drop) { SILENCE } else { answer_time() };
            let tally = client.ask_times(to, target.transport, want.times(), patience).await?;
            want.check(&tally, client, to).with_context(|| {
                format!("{} asked {to} over {}", client.ip(*family), target.transport.name())
            })?;
        }
        Ok(())
    }

    /// Checks a table of clients, targets and expected outcomes once.
    pub(crate) async fn all(&self, table: impl IntoIterator<Item = (NetClient, Target, Want)>) -> Result<()> {
        let checks = table
            .into_iter()
            .map(|(client, target, want)| async move { self.expect_outcome(&client, target, &want).await });
        let checks: Vec<_> = checks.collect();
        let done: Result<Vec<()>> =
            futures_util::stream::iter(checks).buffer_unordered(CONCURRENT_CHECKS).try_collect().await;
        done.map(drop).map_err(|error| self.explain(&error))
    }

    /// Waits until the table holds, for changes that no sentinel covers, and checks it once more.
    pub(crate) async fn eventually_all(&self, table: Vec<(NetClient, Target, Want)>) -> Result<()> {
        // The previous state may by chance choose only expected endpoints a few times.
        let table = &table;
        self.eventually("the table holds", || async move {
            for _ in 0..4 {
                self.all(table.clone()).await?;
            }
            Ok(())
        })
        .await?;
        self.all(table.clone()).await
    }

    /// Waits until the proxy has applied everything written before: a Service and its slices that are written now work,
    /// and so do all earlier ones.
    pub(crate) async fn synced(&self) -> Result<()> {
        // kube-proxy in mode ipvs makes its rules after the virtual servers: those of one sync are there when the next begins.
        let times = if Subject::get() == Subject::KubeProxy && is_ipvs() { 2 } else { 1 };
        for _ in 0..times {
            let number = self.next_sentinel()?;
            let (name, n) = (format!("sentinel-{number}"), 100 + number);
            let only = json!({"type": "ClusterIP"});
            self.make(&name, n, &only).await?;
            self.slices(&name, &[elsewhere(1)]).await?;
            self.wait_for(self.v(n)).await?;
        }
        // The sentinel answers before the last step.
        if syncs_in_steps() {
            self.bench.running.applied(self.world()).await.map_err(|error| self.explain(&error))?;
        }
        Ok(())
    }

    pub(crate) async fn wait_for(&self, target: Target) -> Result<()> {
        for family in target.families {
            let to = target.at(*family);
            let what = format!("{to} works");
            let answered = eventually(2 * PATIENCE, &what, || async move {
                match self.world().pod().ask(to, target.transport, SILENCE).await? {
                    Outcome::Answered { by, .. } if by != to => Ok(()),
                    other => bail!("{other:?}"),
                }
            });
            answered.await.map_err(|error| self.explain(&error))?;
        }
        Ok(())
    }

    /// Pod, host and C, each with the same expectation.
    pub(crate) fn all_clients(&self, target: Target, want: &Want) -> Vec<(NetClient, Target, Want)> {
        let world = self.world();
        [world.pod(), world.host(), world.client()].map(|client| (client, target, want.clone())).into()
    }

    /// Pod, host and C are rejected. kube-proxy in mode iptables rejects nothing that the node itself sends to external addresses: its
    /// chain `KUBE-EXTERNAL-SERVICES` is not in `OUTPUT`.
    pub(crate) fn all_rejected(&self, target: Target) -> Vec<(NetClient, Target, Want)> {
        let mut table = self.all_clients(target, &Want::Reject);
        let rejects_own = self.subject() == Subject::Keelson || is_as_mode_nftables() || is_ipvs();
        if !rejects_own && ![self.v(1).address, self.np(1).address].contains(&target.address) {
            table.remove(1);
        }
        table
    }
}
