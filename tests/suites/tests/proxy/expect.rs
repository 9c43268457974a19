//! Owns: what a case expects. In: who asks whom, and what must come of it. Out: an error that tells what came of it instead.

use crate::objects::{Ep, PORT, elsewhere};
use crate::rig::Case;
use anyhow::{Context as _, Result, bail, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _};
use keelson_cluster::net::plan::{BRIDGE, NODE, NODE_2, local};
use keelson_cluster::net::{Asker, Dual, Family, Outcome, Tally, Transport};
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::json;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// How long an answer may take: nobody waits for it if it does not come at all.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a question must stay without an answer, so that it counts as dropped: a hundred times of what an answer takes.
const SILENCE: Duration = Duration::from_millis(700);
/// How many questions must be dropped.
const SILENT: usize = 3;
/// How many checks of a table run at the same time.
const BESIDE: usize = 12;

/// An address to ask, of both families.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    address: Dual,
    port: u16,
    transport: Transport,
    families: &'static [Family],
}

impl Target {
    pub(crate) fn new(address: Dual, port: u16) -> Self {
        Self { address, port, transport: Transport::Tcp, families: &Family::BOTH }
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

    /// Of one of its families.
    pub(crate) fn at(self, family: Family) -> SocketAddr {
        self.address.at(family, self.port)
    }
}

impl Case {
    /// V:80.
    pub(crate) fn v(&self, n: u8) -> Target {
        Target::new(self.v_address(n), PORT)
    }

    /// W:80.
    pub(crate) fn w(&self, n: u8) -> Target {
        Target::new(self.w_address(n), PORT)
    }

    /// X:80.
    pub(crate) fn x(&self, n: u8) -> Target {
        Target::new(self.x_address(n), PORT)
    }

    /// N:NP.
    pub(crate) fn np(&self, n: u8) -> Target {
        Target::new(NODE, self.node_port(n))
    }

    /// N2:NP.
    pub(crate) fn np2(&self, n: u8) -> Target {
        Target::new(NODE_2, self.node_port(n))
    }
}

/// What must come of questions.
#[derive(Clone, Debug)]
pub(crate) enum Want {
    /// Exactly these answer, each of them at some time, and see this.
    Answers { by: BTreeSet<(Dual, u16)>, masqueraded: bool },
    /// An ICMP message says that the port is unreachable.
    Reject,
    /// Nothing comes back.
    Drop,
    /// The node forwards it as it is: the gateway, which has all these addresses, answers.
    Untouched,
    /// A host that has the address says that nobody listens.
    Reset,
}

/// {..} -M: these answer and see who asked.
pub(crate) fn kept<'a>(by: impl IntoIterator<Item = &'a Ep>) -> Want {
    Want::Answers { by: by.into_iter().map(|ep| (ep.at, 8080)).collect(), masqueraded: false }
}

/// {..} +M: these answer and see the node.
pub(crate) fn masked<'a>(by: impl IntoIterator<Item = &'a Ep>) -> Want {
    Want::Answers { by: by.into_iter().map(|ep| (ep.at, 8080)).collect(), masqueraded: true }
}

impl Want {
    /// The same, at another port of all of them.
    pub(crate) fn at(self, port: u16) -> Self {
        match self {
            Self::Answers { by, masqueraded } => {
                Self::Answers { by: by.into_iter().map(|(at, _)| (at, port)).collect(), masqueraded }
            }
            other => other,
        }
    }

    /// How often to ask, so that who is to answer is missed once in a thousand million runs: of `k` each is missed by
    /// `n` questions with probability `(1 - 1/k)^n`.
    fn times(&self) -> usize {
        match self {
            Self::Answers { by, .. } => match by.len() {
                0 | 1 => 3,
                2 => 32,
                3 => 56,
                4 => 80,
                k => 24 * k,
            },
            Self::Drop => SILENT,
            Self::Reject | Self::Untouched | Self::Reset => 3,
        }
    }

    /// Whether an outcome is one that may come.
    fn allows(&self, outcome: Outcome, asker: &Asker, to: SocketAddr) -> bool {
        match (self, outcome) {
            (Self::Answers { by, masqueraded }, Outcome::Answered { by: who, source }) => {
                let family = Family::of(who.ip());
                let seen = if *masqueraded { node_as_seen_by(who.ip()) } else { asker.ip(family) };
                source == seen && by.iter().any(|(at, port)| at.at(family, *port) == who)
            }
            (Self::Untouched, Outcome::Answered { by, source }) => {
                by == to && source == asker.ip(Family::of(by.ip()))
            }
            (Self::Reject, Outcome::Rejected)
            | (Self::Drop, Outcome::Dropped)
            | (Self::Reset, Outcome::Reset) => true,
            _ => false,
        }
    }

    fn fits(&self, tally: &Tally, asker: &Asker, to: SocketAddr) -> Result<()> {
        let odd = tally.0.keys().find(|outcome| !self.allows(**outcome, asker, to));
        ensure!(odd.is_none(), "{tally}; wanted was {self:?}");
        if let Self::Answers { by, .. } = self {
            ensure!(
                tally.by_endpoint().len() == by.len(),
                "not everybody answered: {tally}; wanted was {self:?}"
            );
        }
        Ok(())
    }
}

/// What a masqueraded connection comes from: the node's address on the way to the endpoint.
fn node_as_seen_by(endpoint: IpAddr) -> IpAddr {
    let family = Family::of(endpoint);
    let on_node = (1..=3).any(|n| local(n).of(family) == endpoint);
    if on_node { BRIDGE.of(family) } else { NODE.of(family) }
}

impl Case {
    /// Asks now, in each family of the target.
    pub(crate) async fn see(&self, asker: &Asker, target: Target, want: &Want) -> Result<()> {
        for family in target.families {
            let to = target.at(*family);
            let patience = if matches!(want, Want::Drop) { SILENCE } else { ANSWER };
            let tally = asker.ask_times(to, target.transport, want.times(), patience).await?;
            want.fits(&tally, asker, to).with_context(|| {
                format!("{} asked {to} over {}", asker.ip(*family), target.transport.name())
            })?;
        }
        Ok(())
    }

    /// Checks a table of who asks, whom, and what must come of it, all of it now.
    pub(crate) async fn all(&self, table: impl IntoIterator<Item = (Asker, Target, Want)>) -> Result<()> {
        let checks = table
            .into_iter()
            .map(|(asker, target, want)| async move { self.see(&asker, target, &want).await });
        let checks: Vec<_> = checks.collect();
        let done: Result<Vec<()>> =
            futures_util::stream::iter(checks).buffer_unordered(BESIDE).try_collect().await;
        done.map(drop).with_context(|| self.explain())
    }

    /// Waits until the table holds, for changes that no sentinel tells of, and holds it against the world once more.
    pub(crate) async fn soon_all(&self, table: Vec<(Asker, Target, Want)>) -> Result<()> {
        // What was there before may choose by chance, a few times, only those that are wanted now.
        let table = &table;
        self.soon("the table holds", || async move {
            for _ in 0..4 {
                self.all(table.clone()).await?;
            }
            Ok(())
        })
        .await?;
        self.all(table.clone()).await
    }

    /// Waits until the proxy has made everything true that was written before: a Service and its slices that are written
    /// now work, and so does what came before them.
    pub(crate) async fn synced(&self) -> Result<()> {
        let number = self.next_sentinel()?;
        let (name, n) = (format!("sentinel-{number}"), 100 + number);
        let only = json!({"type": "ClusterIP"});
        self.make(&name, n, &only).await?;
        self.slices(&name, &[elsewhere(1)]).await?;
        self.wait_for(self.v(n)).await
    }

    /// Waits until somebody answers there, in each of its families.
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
            answered.await.with_context(|| self.explain())?;
        }
        Ok(())
    }

    /// Pod, host and C, each with the same expectation.
    pub(crate) fn everybody(&self, target: Target, want: &Want) -> Vec<(Asker, Target, Want)> {
        let world = self.world();
        [world.pod(), world.host(), world.client()].map(|asker| (asker, target, want.clone())).into()
    }
}
