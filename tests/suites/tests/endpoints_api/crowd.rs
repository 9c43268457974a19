//! Five hundred watchers at once: all get the latest state, one more is refused with a message, and the agent stops in
//! time.

use crate::commands::Running;
use crate::common::{LONG, TestEnv, ensure_contains, plain};
use crate::wire::{Connection, NEXT, WATCH, ask, framed};
use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use keelson_proto::endpoints::{WatchItem, watch_item};
use keelson_proto::localnetv1::{NextFilter, NextItem, ServiceEndpoints};
use prost::Message as _;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::task::JoinSet;
use tonic::Code;

const EACH: usize = 250;
/// Streams on connections that several share; each of the rest has its own connection.
const SHARED: [usize; 4] = [50, 50, 50, 50];

struct Messages {
    body: Incoming,
    bytes: BytesMut,
}

impl Messages {
    fn of(body: Incoming) -> Self {
        Self { body, bytes: BytesMut::new() }
    }

    /// The next message; None after a successful end of the call.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(prefix) = self.bytes.get(..5) {
                let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
                if self.bytes.len() >= 5 + length {
                    self.bytes.advance(5);
                    return Ok(Some(self.bytes.split_to(length).freeze()));
                }
            }
            match self.body.frame().await {
                Some(frame) => match frame.context("the call broke off")?.into_data() {
                    Ok(data) => self.bytes.extend_from_slice(&data),
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        match tonic::Status::from_header_map(&trailers) {
                            Some(status) if status.code() != Code::Ok => bail!("{status}"),
                            _ => return Ok(None),
                        }
                    }
                },
                None => bail!("the call ended without a status"),
            }
        }
    }
}

type Services = HashMap<(String, String), ServiceEndpoints>;

fn key(service: &ServiceEndpoints) -> (String, String) {
    (service.namespace.clone(), service.name.clone())
}

/// Follows a `Watch` and passes every complete state to a callback.
async fn follow(body: Incoming, mut on_sync: impl FnMut(u64, &Services) -> bool) -> Result<()> {
    let (mut services, mut messages) = (Services::new(), Messages::of(body));
    while let Some(message) = messages.next().await? {
        match WatchItem::decode(message)?.item.context("an empty item")? {
            watch_item::Item::Reset(_) => services.clear(),
            watch_item::Item::Set(service) => drop(services.insert(key(&service), service)),
            watch_item::Item::Delete(name) => drop(services.remove(&(name.namespace, name.name))),
            watch_item::Item::Node(_) => {}
            watch_item::Item::Sync(sync) if !on_sync(sync.rev, &services) => return Ok(()),
            watch_item::Item::Sync(_) => {}
        }
    }
    bail!("Watch ended by itself")
}

/// Reads a `Watch` until this revision; returns it and the number of Services.
pub(crate) async fn newest(body: Incoming, until: u64) -> Result<(u64, usize)> {
    let mut found = (0, 0);
    let following = follow(body, |rev, services| {
        found = (rev, services.len());
        rev < until
    });
    tokio::time::timeout(LONG, following).await.context("it does not come to the newest state")??;
    Ok(found)
}

/// The state in a response of `Next`.
async fn one(body: Incoming) -> Result<(NextFilter, Services)> {
    let (mut filter, mut services, mut messages) = (None, Services::new(), Messages::of(body));
    while let Some(message) = messages.next().await? {
        let item = NextItem::decode(message)?;
        filter = filter.or(item.next);
        services.extend(item.endpoints.map(|service| (key(&service), service)));
    }
    Ok((filter.context("no filter")?, services))
}

/// The revision that is encoded in a state's only endpoint.
fn revision_in(services: &Services) -> Option<u64> {
    let service = services.get(&("ns".to_owned(), "web".to_owned()))?;
    let ip: std::net::Ipv4Addr = service.endpoints.first()?.i_ps.as_ref()?.v4.first()?.parse().ok()?;
    Some(ip.octets()[3].into())
}

/// The revision of each watcher.
#[derive(Clone, Default)]
struct Places(Arc<std::sync::Mutex<Vec<Arc<AtomicU64>>>>);

impl Places {
    fn add(&self) -> Arc<AtomicU64> {
        let place = Arc::<AtomicU64>::default();
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(place.clone());
        place
    }

    fn at(&self, rev: u64) -> usize {
        let all = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        all.iter().filter(|place| place.load(Ordering::Relaxed) == rev).count()
    }
}

fn check(place: &AtomicU64, rev: u64, services: &Services) -> Result<()> {
    ensure!(revision_in(services) == Some(rev), "revision {rev} contains {:?}", revision_in(services));
    let before = place.swap(rev, Ordering::Relaxed);
    ensure!(before < rev, "{rev} after {before}");
    Ok(())
}

async fn watcher(mut connection: Connection, place: Arc<AtomicU64>) -> Result<()> {
    let response = connection.response(ask(WATCH)?).await?;
    let mut wrong = None;
    let ended = follow(response.into_body(), |rev, services| match check(&place, rev, services) {
        Ok(()) => true,
        Err(error) => {
            wrong = Some(error);
            false
        }
    });
    let ended = ended.await;
    wrong.map_or(ended, Err)
}

async fn client(mut connection: Connection, place: Arc<AtomicU64>) -> Result<()> {
    let mut known = NextFilter::default();
    loop {
        let (head, _) = ask(NEXT)?.into_parts();
        let request =
            http::Request::from_parts(head, http_body_util::Full::new(framed(&known.encode_to_vec())));
        let response = connection.response(request).await?;
        let (next, services) = one(response.into_body()).await?;
        check(&place, next.rev, &services)?;
        known = NextFilter { instance_id: next.instance_id, rev: next.rev, ..NextFilter::default() };
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_watchers_get_the_latest_state() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    env.agent.set("endpoints.max_watchers", i64::try_from(2 * EACH)?)?;
    env.agent.start_live().await?;
    env.wait_for_rev(1).await?;
    let before = env.memory()?;

    let (places, mut calls) = (Places::default(), JoinSet::new());
    let alone = EACH - SHARED.iter().sum::<usize>();
    for streams in SHARED.into_iter().chain(std::iter::repeat_n(1, alone)) {
        let connection = Connection::open(&env.socket()).await?;
        for _ in 0..streams {
            calls.spawn(watcher(connection.clone(), places.add()));
            calls.spawn(client(connection.clone(), places.add()));
        }
    }
    env.wait_for_watchers(2 * EACH, 1).await?;
    ensure!(places.at(1) == 2 * EACH, "{} have the first state", places.at(1));
    eprintln!(
        "memory of the agent: {} MB, {} MB with {} watchers",
        before >> 20,
        env.memory()? >> 20,
        2 * EACH
    );

    for rev in 2..=6 {
        let began = Instant::now();
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &[&format!("10.1.0.{rev}")]))?;
        keelson_harness::util::until("all have the change", || {
            places.at(rev) == 2 * EACH || !calls.is_empty() && ended(&mut calls)
        })
        .await?;
        ensure!(places.at(rev) == 2 * EACH, "{} are at revision {rev}", places.at(rev));
        eprintln!("revision {rev} reached all after {:?}", began.elapsed());
    }
    env.wait_for_watchers(2 * EACH, 6).await?;
    let list = env.endpoints(&["watchers"]).await?.success()?;
    ensure!(list.out.lines().count() > 2 * EACH, "{}", list.out);

    // One more is refused on either kind of connection, with a message that helps.
    let mut connection = Connection::open(&env.socket()).await?;
    for path in [NEXT, WATCH] {
        let answer = connection.call(path, framed(&[])).await?;
        let status = answer.status.context("no status")?;
        ensure!(status.code() == Code::ResourceExhausted, "{status}");
        ensure_contains(status.message(), &["500 clients are already connected", "endpoints.max_watchers"])?;
    }
    let mut late = Running::watch(&env, &[])?;
    late.error_line(&["500 clients are already connected", "endpoints.max_watchers"]).await?;
    drop(late);
    let metrics = env.agent.http_get("/metrics").await?.success()?.text();
    ensure_contains(
        &metrics,
        &["keelson_endpoints_refused_total", "keelson_endpoints_watchers{api=\"Watch\"} 250"],
    )?;

    // It stops while all are connected, and each gets the reason.
    let began = Instant::now();
    ensure!(env.agent.terminate().await?.success(), "the agent ended badly");
    eprintln!("with {} watchers the agent ended after {:?}", 2 * EACH, began.elapsed());
    let mut output = 0;
    while let Some(ended) = calls.join_next().await {
        let error = ended?.err().context("a call succeeded")?.to_string();
        output += usize::from(error.contains("the agent is stopping"));
    }
    eprintln!("{output} of {} got the status that it stops", 2 * EACH);
    ensure!(output > 0, "no client got the status that the agent stops");
    Ok(())
}

/// Whether a call has ended already, which is an error.
fn ended(calls: &mut JoinSet<Result<()>>) -> bool {
    match calls.try_join_next() {
        Some(ended) => {
            eprintln!("a call has ended: {ended:?}");
            true
        }
        None => false,
    }
}
