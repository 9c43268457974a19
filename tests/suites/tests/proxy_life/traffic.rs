//! Owns: clients of Services that send requests all the time. In: Services whose endpoints stay. Out: checks that an
//! endpoint of its Service answered each connection, and the same endpoint each long one throughout; or the first
//! violation.

use crate::common::{LONG, eventually_slow};
use crate::model::Service;
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use keelson_cluster::net::{NetClient, Outcome, Transport, World};
use keelson_harness::util::patience;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;

/// Interval between two connections of one client, of which there are several. Where everything takes longer, they would take all of
/// the processor: the interval grows with the square of the patience.
const BETWEEN: Duration = Duration::from_millis(20);
/// Interval between two requests over one connection.
const IN_A_FLOW: Duration = Duration::from_millis(100);
/// One of this number of connections may need a retransmission of its first packet, after a second: the result of a
/// busy machine, and no sign of missing rules, which many connections would meet.
const CONNECTIONS_PER_RETRANSMISSION: u64 = 200;

#[derive(Debug, Default)]
struct TrafficState {
    stop: AtomicBool,
    failed: Mutex<Option<String>>,
}

impl TrafficState {
    fn check_healthy(&self) -> Result<()> {
        match &*self.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(anyhow!("a client met this: {error}")),
            None => Ok(()),
        }
    }
}

/// Running clients. Stopped on drop.
#[derive(Debug)]
pub(crate) struct Traffic {
    shared: Arc<TrafficState>,
    clients: Vec<Arc<AtomicUsize>>,
    tasks: JoinSet<()>,
    world: Arc<World>,
    retransmissions_before: u64,
}

impl Traffic {
    /// A pod, a client from outside and the node itself each open connection after connection to each of these
    /// Services, and use one that stays open; for a Service with UDP, a UDP flow too.
    pub(crate) fn start(world: &Arc<World>, services: &[Service]) -> Result<Self> {
        let mut traffic = Self::connections(world, services)?;
        for service in services {
            for client in [world.pod(), world.client(), world.host()] {
                for transport in &service.transports {
                    traffic.open_flow(client.clone(), service.at(), *transport, service.endpoints.clone());
                }
            }
        }
        Ok(traffic)
    }

    /// As [`Self::start`], without anything that stays open.
    pub(crate) fn connections(world: &Arc<World>, services: &[Service]) -> Result<Self> {
        let mut traffic = Self::none(world)?;
        for service in services {
            for client in [world.pod(), world.client(), world.host()] {
                let valid = service.endpoints.clone();
                traffic.open_connections(
                    client.clone(),
                    service.at(),
                    move |by, ()| valid.contains(&by),
                    || (),
                )?;
            }
        }
        Ok(traffic)
    }

    pub(crate) fn none(world: &Arc<World>) -> Result<Self> {
        let retransmissions_before = retransmissions(world)?;
        let (shared, clients, tasks) = (Arc::default(), Vec::new(), JoinSet::new());
        Ok(Self { shared, clients, tasks, world: world.clone(), retransmissions_before })
    }

    fn client<F>(&mut self, what: String, each: impl FnOnce(Arc<TrafficState>, Arc<AtomicUsize>) -> F)
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let (shared, count) = (self.shared.clone(), Arc::<AtomicUsize>::default());
        self.clients.push(count.clone());
        let work = each(shared.clone(), count);
        self.tasks.spawn(async move {
            if let Err(error) = work.await {
                let mut failed = shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(format!("{what}: {error:#}"));
            }
        });
    }

    /// Opens connections one after the other. `before` is called before each, and its result is passed to `is_valid`
    /// with the endpoint that answered.
    pub(crate) fn open_connections<B: Send + 'static>(
        &mut self,
        client: NetClient,
        to: SocketAddr,
        is_valid: impl Fn(SocketAddr, B) -> bool + Send + 'static,
        before: impl Fn() -> B + Send + 'static,
    ) -> Result<()> {
        let what = format!("connections from {} to {to}", client.namespace().name());
        let between = BETWEEN * patience().pow(2);
        self.client(what, |shared, count| async move {
            while !shared.stop.load(Ordering::Relaxed) {
                let known = before();
                match client.ask(to, Transport::Tcp, LONG).await? {
                    Outcome::Answered { by, .. } if is_valid(by, known) => {}
                    other => bail!("after {} good ones: {other:?}", count.load(Ordering::Relaxed)),
                }
                count.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(between).await;
            }
            Ok(())
        });
        Ok(())
    }

    /// Sends requests over one flow, which must stay with the same endpoint, one of these.
    pub(crate) fn open_flow(
        &mut self,
        client: NetClient,
        to: SocketAddr,
        transport: Transport,
        valid: Vec<SocketAddr>,
    ) {
        let what = format!("a flow of {} from {} to {to}", transport.name(), client.namespace().name());
        self.client(what, |shared, count| async move {
            let mut flow = client.open(to, transport)?;
            let mut peer = None;
            while !shared.stop.load(Ordering::Relaxed) {
                let by = match flow.ask(LONG).await? {
                    Outcome::Answered { by, .. } => by,
                    other => bail!("from port {}, it was with {peer:?}, and now: {other:?}", flow.port()),
                };
                let first = *peer.get_or_insert(by);
                ensure!(by == first, "it was with {first} and is now answered by {by}");
                ensure!(valid.contains(&by), "{by} answers");
                count.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(IN_A_FLOW).await;
            }
            Ok(())
        });
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Waits until each client has had a complete response to a request sent after this call.
    pub(crate) async fn wait_for_answers(&self) -> Result<()> {
        let before: Vec<usize> = self.clients.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        eventually_slow("every client is answered", || async {
            if self.shared.check_healthy().is_err() {
                return Ok(());
            }
            for (count, before) in self.clients.iter().zip(&before) {
                // The one that was in flight, and another.
                ensure!(count.load(Ordering::Relaxed) >= before + 2, "some client is not");
            }
            Ok(())
        })
        .await?;
        self.shared.check_healthy()
    }

    pub(crate) fn check_healthy(&self) -> Result<()> {
        self.shared.check_healthy()
    }

    pub(crate) fn answers(&self) -> usize {
        self.clients.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Stops it when each client has been answered once more; returns the number of responses.
    pub(crate) async fn finish(mut self) -> Result<usize> {
        self.wait_for_answers().await?;
        self.shared.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.context("a client panicked")?;
        }
        self.shared.check_healthy()?;
        let (answers, again) =
            (self.answers(), retransmissions(&self.world)?.saturating_sub(self.retransmissions_before));
        eprintln!("{answers} answers; {again} first packets of connections were sent again");
        ensure!(
            again <= 2 + answers as u64 / CONNECTIONS_PER_RETRANSMISSION,
            "{again} connections of {answers} answers met a gap of a second"
        );
        Ok(answers)
    }
}

/// Number of retransmitted first packets of TCP connections in the clients' kernels so far.
fn retransmissions(world: &World) -> Result<u64> {
    let mut sum = 0;
    for client in [world.pod(), world.client(), world.host()] {
        let text = client.namespace().run(|| fs::read_to_string("/proc/thread-self/net/netstat"))?;
        let text = text.context("the kernel does not count")?;
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
        let names = lines.next().context("no TcpExt")?.split(' ');
        let counts: BTreeMap<_, _> = names.zip(lines.next().context("no TcpExt")?.split(' ')).collect();
        sum += counts.get("TCPSynRetrans").context("no TCPSynRetrans")?.parse::<u64>()?;
    }
    Ok(sum)
}
