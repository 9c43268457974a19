//! When the kernel's rules change, observed from outside and in the same way for every proxy.
//!
//! Owns: [`Nft`], requests to the nf_tables of a network namespace; [`Generations`], which polls the generation of its
//! rules. In: a namespace. Out: times and counts. During a measurement only the generation number is requested, which
//! takes none of the locks that a transaction takes. iptables-legacy has no such number: there, connections tell which
//! rules are in effect.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::SocketAddr as IpSocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
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
use nix::sched::{CloneFlags, setns};
use socket2::{Domain, SockAddr, Socket as IpSocket, Type};

const BETWEEN: Duration = Duration::from_micros(200);
/// Pause between two connections that ask which rules are in effect.
const BETWEEN_CONNECTIONS: Duration = Duration::from_millis(1);
/// Timeout of such a connection.
const ANSWER: Duration = Duration::from_millis(50);
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

/// A thread that polls the generation every 0.2 ms, or the port that answers, and records changes. Stopped on drop.
#[derive(Debug)]
pub(super) struct Generations {
    moves: Arc<Mutex<Moves>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Generations {
    pub(super) fn watch(namespace: &Namespace) -> Result<Self> {
        let mut nft = Nft::open(namespace)?;
        Self::poll(BETWEEN, move || nft.generation(), |last, id| id.wrapping_sub(last) as usize)
    }

    /// Records when connections from a namespace to `to` begin to be answered, and when by another port. For rules
    /// without a generation.
    pub(super) fn watch_answers(namespace: &Namespace, to: IpSocketAddr) -> Result<Self> {
        let file = Path::new("/run/netns").join(namespace.name());
        let mut file = Some(File::open(&file).with_context(|| format!("no {}", file.display()))?);
        let mut last = 0;
        let answering = move || {
            if let Some(file) = file.take() {
                setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")?;
            }
            // Without an answer, the last one counts.
            last = answering_port(to).map_or(last, u32::from);
            Ok(last)
        };
        Self::poll(BETWEEN_CONNECTIONS, answering, |_, _| 1)
    }

    /// `count`: the number of changes between two values that differ.
    fn poll(
        between: Duration,
        mut read: impl FnMut() -> Result<u32> + Send + 'static,
        count: fn(u32, u32) -> usize,
    ) -> Result<Self> {
        let (moves, stop) = (Arc::<Mutex<Moves>>::default(), Arc::<AtomicBool>::default());
        let (noted, stopped) = (moves.clone(), stop.clone());
        let (begun, begins) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut last = None;
            while !stopped.load(Ordering::Relaxed) {
                let value = read();
                let at = Instant::now();
                match value {
                    Ok(value) => {
                        let changes = last.filter(|last| *last != value).map_or(0, |last| count(last, value));
                        // Between two polls there may have been several.
                        lock(&noted).at.extend(vec![at; changes]);
                        if last.replace(value).is_none() {
                            // If no task waits any more, this is dropped.
                            let _ = begun.send(());
                        }
                    }
                    Err(error) => {
                        lock(&noted).failed = Some(format!("{error:#}"));
                        return;
                    }
                }
                thread::sleep(between);
            }
        });
        let generations = Self { moves, stop, thread: Some(thread) };
        if begins.recv().is_err() {
            generations.all()?;
        }
        Ok(generations)
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

/// The port of the endpoint that answers a new TCP connection.
fn answering_port(to: IpSocketAddr) -> io::Result<u16> {
    let socket = IpSocket::new(Domain::for_address(to), Type::STREAM, None)?;
    // Reset at the end, so that no port stays in TIME_WAIT.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.connect_timeout(&SockAddr::from(to), ANSWER)?;
    socket.set_read_timeout(Some(ANSWER))?;
    let mut stream = std::net::TcpStream::from(socket);
    stream.write_all(b"?\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let by = line.split(' ').next().and_then(|by| by.parse::<IpSocketAddr>().ok());
    by.map(|by| by.port()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn lock(moves: &Mutex<Moves>) -> MutexGuard<'_, Moves> {
    moves.lock().unwrap_or_else(PoisonError::into_inner)
}
