//! When the kernel's rules change, seen from outside and in the same way for every proxy.
//!
//! Owns: [`Nft`], questions to the nf_tables of a network namespace; [`Generations`], who asks again and again which generation
//! its rules are. In: a namespace. Out: times and counts. Only the number of the generation is asked for while something is
//! measured, which takes none of the locks that a transaction takes.

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

/// Between two questions for the generation.
const BETWEEN: Duration = Duration::from_micros(200);
/// A datagram of a dump is at most half of this.
const DATAGRAM_MAX: usize = 64 * 1024;
/// A dump that something disturbed is asked for again this often.
const TRIES: u32 = 10;
/// The number of `NLM_F_DUMP_INTR`: what is dumped changed meanwhile.
const INTERRUPTED: u16 = 0x10;
/// The length of `nfgenmsg`, after which the attributes begin.
const GENERIC: usize = 4;
/// `NFTA_SET_ELEM_LIST_ELEMENTS`.
const ELEMENTS: u16 = 3;

/// What of the rules is counted: a set or map of an IPv4 table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set {
    pub(super) table: &'static str,
    pub(super) name: &'static str,
}

/// A netlink socket to the nf_tables of a namespace.
#[derive(Debug)]
pub(super) struct Nft {
    socket: Socket,
    sequence: u32,
    received: Vec<u8>,
}

/// How an answer ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Whole,
    /// What was asked about changed meanwhile.
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

    /// The number of the rules' present generation: each transaction makes another one.
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
        id.with_context(|| format!("the kernel does not tell the generation of its rules: {end:?}"))
    }

    /// How many elements a set has; none if there is no such set.
    pub(super) fn count(&mut self, set: Set) -> Result<usize> {
        for _ in 0..TRIES {
            let mut count = 0;
            let attributes =
                vec![SetElementList::Table(set.table.to_owned()), SetElementList::Set(set.name.to_owned())];
            let question = NfTablesMessage::GetSetElement(SetElementMessage { attributes });
            let end = self.ask(NLM_F_DUMP, question, |attributes| {
                // What the elements are is of no interest: there are very many of them.
                for attribute in NlasIterator::new(attributes) {
                    let attribute = attribute.context("an attribute that is none")?;
                    if attribute.kind() == ELEMENTS {
                        count += NlasIterator::new(attribute.value()).count();
                    }
                }
                Ok(())
            })?;
            match end {
                End::Whole => return Ok(count),
                End::Failed(Errno::ENOENT) => return Ok(0),
                End::Disturbed | End::Failed(Errno::EINTR) => {}
                End::Failed(errno) => bail!("cannot count the elements of {}: {errno}", set.name),
            }
        }
        bail!("{} changed whenever it was counted", set.name)
    }

    /// Asks, and hands on the attributes of each message of the answer.
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
        let mut end = End::Whole;
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
                    // Both begin with a number, which for an error is less than none.
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

/// When the generation moved so far, and what went wrong with asking.
#[derive(Debug, Default)]
struct Moves {
    at: Vec<Instant>,
    failed: Option<String>,
}

/// A thread that asks for the generation every 0.2 ms, and notes when it has moved. It ends on drop.
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
                    // Between two questions there may have been several.
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

    /// Every move so far, oldest first.
    pub(super) fn all(&self) -> Result<Vec<Instant>> {
        let moves = lock(&self.moves);
        match &moves.failed {
            Some(error) => Err(anyhow!("the generation of the rules is not known any more: {error}")),
            None => Ok(moves.at.clone()),
        }
    }

    /// The moves after a time.
    pub(super) fn after(&self, time: Instant) -> Result<Vec<Instant>> {
        let all = self.all()?;
        let first = all.partition_point(|at| *at <= time);
        Ok(all.get(first..).unwrap_or_default().to_vec())
    }

    /// Waits for the first move after a time, this long at most.
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

    /// Waits until nothing has moved for so long, this long at most, and says whether that came about.
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
            // It has nothing to tell but what it noted.
            let _ = thread.join();
        }
    }
}

fn lock(moves: &Mutex<Moves>) -> MutexGuard<'_, Moves> {
    moves.lock().unwrap_or_else(PoisonError::into_inner)
}
