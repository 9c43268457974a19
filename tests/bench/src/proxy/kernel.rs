//! When the kernel's rules change, observed from outside and in the same way for every proxy.
//!
//! Owns: [`Nft`], requests to the nf_tables of a network namespace; [`Generations`], which polls the generation of its
//! rules. In: a namespace. Out: times and counts. During a measurement only the generation number is requested, which
//! takes none of the locks that a transaction takes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use keelson_cluster::net::Namespace;
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NlasIterator, Parseable as _,
};
use netlink_packet_netfilter::nftables::{
    GenAttribute, GenMessage, NfTablesMessage, SetElementList, SetElementMessage,
};
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterProtoFamily};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;

const BETWEEN: Duration = Duration::from_micros(200);
/// A datagram of a dump is at most half of this, in bytes.
const DATAGRAM_MAX: usize = 64 * 1024;
/// Number of attempts of a dump that is interrupted.
const TRIES: u32 = 10;
/// The number of `NLM_F_DUMP_INTR`: the objects changed during the dump.
const INTERRUPTED: u16 = 0x10;
/// Length of `nfgenmsg`, after which the attributes begin.
const GENERIC: usize = 4;
/// `NFTA_SET_ELEM_LIST_ELEMENTS`.
const ELEMENTS: u16 = 3;

/// A set or map of an IPv4 table whose elements are counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set {
    pub(super) table: &'static str,
    pub(super) name: &'static str,
}

#[derive(Debug)]
pub(super) struct Nft {
    socket: Socket,
    sequence: u32,
    received: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    FullState,
    /// The objects changed during the dump.
    Disturbed,
    Failed(Errno),
}

impl Nft {
    pub(super) fn open(namespace: &Namespace) -> Result<Self> {
        let socket = namespace.run(|| {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind_auto()?;
            Ok::<_, std::io::Error>(socket)
        })?;
        let socket = socket.context("cannot open a netlink socket")?;
        Ok(Self { socket, sequence: 0, received: Vec::with_capacity(DATAGRAM_MAX) })
    }

    /// Generation number of the rules: each transaction increments it.
    pub(super) fn generation(&mut self) -> Result<u32> {
        let mut id = None;
        let question = NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() });
        let end = self.ask(0, question, |attributes| {
            let generation = GenMessage::parse(attributes).context("a generation that is none")?;
            id = generation.attributes.iter().find_map(|attribute| match attribute {
                GenAttribute::Id(id) => Some(*id),
                _ => None,
            });
            Ok(())
        })?;
        id.with_context(|| format!("the kernel did not return its generation: {end:?}"))
    }

    /// Number of elements of a set; 0 if there is no such set.
    pub(super) fn count(&mut self, set: Set) -> Result<usize> {
        for _ in 0..TRIES {
            let mut count = 0;
            let attributes =
                vec![SetElementList::Table(set.table.to_owned()), SetElementList::Set(set.name.to_owned())];
            let question = NfTablesMessage::GetSetElement(SetElementMessage { attributes });
            let end = self.ask(NLM_F_DUMP, question, |attributes| {
                // The elements are not parsed: there are very many of them.
                for attribute in NlasIterator::new(attributes) {
                    let attribute = attribute.context("an attribute that is none")?;
                    if attribute.kind() == ELEMENTS {
                        count += NlasIterator::new(attribute.value()).count();
                    }
                }
                Ok(())
            })?;
            match end {
                End::FullState => return Ok(count),
                End::Failed(Errno::ENOENT) => return Ok(0),
                End::Disturbed | End::Failed(Errno::EINTR) => {}
                End::Failed(errno) => bail!("cannot count the elements of {}: {errno}", set.name),
            }
        }
        bail!("{} changed whenever it was counted", set.name)
    }

    /// Sends a request, and passes the attributes of each message of the response to a callback.
    fn ask(
        &mut self,
        flags: u16,
        question: NfTablesMessage,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<End> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        (header.flags, header.sequence_number) = (NLM_F_REQUEST | flags, self.sequence);
        let inner = NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::IPv4, 0, 0), question);
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(inner));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send_to(&bytes, &SocketAddr::new(0, 0), 0).context("cannot ask nf_tables")?;
        let mut end = End::FullState;
        loop {
            self.received.clear();
            self.socket.recv(&mut self.received, 0).context("nf_tables does not answer")?;
            let mut rest = self.received.as_slice();
            while !rest.is_empty() {
                let message =
                    NetlinkBuffer::new_checked(rest).context("nf_tables answers what is no message")?;
                rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
                if message.sequence_number() != self.sequence {
                    continue;
                }
                if message.flags() & INTERRUPTED != 0 {
                    end = End::Disturbed;
                }
                match message.message_type() {
                    // Both begin with a number, which is negative for an error.
                    NLMSG_ERROR | NLMSG_DONE => {
                        let number = message.payload().first_chunk().context("an end without a number")?;
                        let number = i32::from_ne_bytes(*number);
                        return Ok(if number < 0 { End::Failed(Errno::from_raw(-number)) } else { end });
                    }
                    _ => each(message.payload().get(GENERIC..).unwrap_or_default())?,
                }
                if flags == 0 {
                    return Ok(end);
                }
            }
        }
    }
}

/// When the generation changed so far, and the error that ended the polling.
#[derive(Debug, Default)]
struct Moves {
    at: Vec<Instant>,
    failed: Option<String>,
}

/// A thread that polls the generation every 0.2 ms, and records changes. Stopped on drop.
#[derive(Debug)]
pub(super) struct Generations {
    moves: Arc<Mutex<Moves>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Generations {
    pub(super) fn watch(namespace: &Namespace) -> Result<Self> {
        let mut nft = Nft::open(namespace)?;
        let (moves, stop) = (Arc::<Mutex<Moves>>::default(), Arc::<AtomicBool>::default());
        let mut last = nft.generation()?;
        let (noted, stopped) = (moves.clone(), stop.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(BETWEEN);
                let generation = nft.generation();
                let at = Instant::now();
                match generation {
                    Ok(id) if id == last => {}
                    // Between two polls there may have been several.
                    Ok(id) => {
                        lock(&noted).at.extend(vec![at; id.wrapping_sub(last) as usize]);
                        last = id;
                    }
                    Err(error) => {
                        lock(&noted).failed = Some(format!("{error:#}"));
                        return;
                    }
                }
            }
        });
        Ok(Self { moves, stop, thread: Some(thread) })
    }

    /// Every change so far, oldest first.
    pub(super) fn all(&self) -> Result<Vec<Instant>> {
        let moves = lock(&self.moves);
        match &moves.failed {
            Some(error) => Err(anyhow!("the generation of the rules is not known any more: {error}")),
            None => Ok(moves.at.clone()),
        }
    }

    /// The changes after a time.
    pub(super) fn after(&self, time: Instant) -> Result<Vec<Instant>> {
        let all = self.all()?;
        let first = all.partition_point(|at| *at <= time);
        Ok(all.get(first..).unwrap_or_default().to_vec())
    }

    /// Waits for the first change after a time, for at most `patience`.
    pub(super) async fn first_after(&self, time: Instant, patience: Duration) -> Result<Option<Instant>> {
        let until = Instant::now() + patience;
        loop {
            if let Some(first) = self.after(time)?.first() {
                return Ok(Some(*first));
            }
            if Instant::now() > until {
                return Ok(None);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until nothing has changed for `long`, for at most `patience`, and returns whether that happened.
    pub(super) async fn rests(&self, long: Duration, patience: Duration) -> Result<bool> {
        let started = Instant::now();
        loop {
            let last = self.all()?.last().copied().unwrap_or(started).max(started);
            if last.elapsed() >= long {
                return Ok(true);
            }
            if started.elapsed() > patience {
                return Ok(false);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Generations {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

fn lock(moves: &Mutex<Moves>) -> MutexGuard<'_, Moves> {
    moves.lock().unwrap_or_else(PoisonError::into_inner)
}
