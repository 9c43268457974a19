//! The socket.
//!
//! Owns: [`Netlink`]. In: [`Change`]s and requests. Out: transactions, [`Found`].
//!
//! The kernel handles a request within the system call that sends it, so all answers to a transaction are in the
//! receive buffer when the call returns. A transaction has succeeded only if its last message is acknowledged and no
//! message failed. The acknowledgement alone is not enough, because the kernel also sends it if the commit fails
//! afterwards. The absence of errors is not enough, because an answer is lost when there is no memory for it.

mod affinity;
mod dump;
mod flowtable;
mod request_error;

use std::time::Duration;

use keelson_proxy::model::Family;
use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_netfilter::{
    NetfilterProtoFamily,
    nftables::{ChainAttribute, ChainMessage, GenMessage, NfTablesMessage, TableMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::{
    errno::Errno,
    libc::{MSG_DONTWAIT, MSG_TRUNC},
    sys::{
        socket::{setsockopt, sockopt},
        time::{TimeVal, TimeValLike},
    },
};

use self::request_error::RequestError;
use super::{
    AffinityClients, Change, Elements, Found, Generation, KernelError,
    codec::{Body, Buffer, incoming, message, protocol},
    elements::{self, Content, Reader},
    encode::Batch,
    parse,
};
use crate::{
    element::{Key, SetName},
    flowtable::FoundFlowtable,
    ruleset::TABLE,
};

/// Datagrams of the kernel are at most half of this (`NLMSG_GOODSIZE`, 32 KiB for dumps).
const DATAGRAM_MAX: usize = 64 * 1024;

/// Room for the answers to a transaction in which every message fails: thousands.
const RECEIVE_BUFFER: usize = 4 * 1024 * 1024;

/// Initial room for a transaction; unused room costs nothing.
const SEND_BUFFER: usize = 16 * 1024 * 1024;

/// Timeout of an answer. The kernel answers a dump in pieces, each within milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

const READS: u32 = 16;

/// Maximum size of a transaction buffer that is kept, in bytes.
const KEPT: usize = 1024 * 1024;

/// A netlink socket to nf_tables in the network namespace of the thread that opened it.
///
/// All calls block, usually for less than a millisecond, and for large tables up to some hundred: use it on a thread
/// that may block. It may be sent to a thread in another namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    send_buffer: usize,
    received: Vec<u8>,
    spare: Vec<u8>,
}

impl Netlink {
    /// Opens a socket, and checks that the kernel has nf_tables and permits access.
    ///
    /// # Errors
    /// [`KernelError::NotPermitted`], [`KernelError::Unsupported`], or another error of the kernel.
    pub fn open() -> Result<Self, KernelError> {
        let mut socket = Socket::new(NETLINK_NETFILTER).map_err(|error| match errno_of(&error) {
            errno @ (Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT) => KernelError::Unsupported {
                feature: "netfilter netlink (CONFIG_NETFILTER_NETLINK)".to_owned(),
                errno,
            },
            errno => KernelError::Socket { action: "open", errno },
        })?;
        socket
            .bind_auto()
            .map_err(|error| KernelError::Socket { action: "bind", errno: errno_of(&error) })?;
        let prepare = |result: Result<(), Errno>| result.map_err(socket_option_error);
        prepare(setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER))?;
        prepare(setsockopt(&socket, sockopt::SndBufForce, &SEND_BUFFER))?;
        prepare(setsockopt(
            &socket,
            sockopt::ReceiveTimeout,
            &TimeVal::milliseconds(ANSWER_WITHIN.as_millis() as i64),
        ))?;
        // Both have existed since 4.12; without them errors have less detail, or repeat the whole message.
        let asked = socket.set_cap_ack(true).and_then(|()| socket.set_ext_ack(true));
        asked.map_err(|error| KernelError::Socket { action: "prepare", errno: errno_of(&error) })?;
        let mut netlink = Self {
            socket,
            sequence: 1,
            send_buffer: SEND_BUFFER,
            received: Vec::with_capacity(DATAGRAM_MAX),
            spare: Vec::new(),
        };
        netlink.generation()?;
        Ok(netlink)
    }

    /// Sends a datagram. The kernel has handled it when this returns.
    fn send(&mut self, bytes: &[u8]) -> Result<(), KernelError> {
        if bytes.len() > self.send_buffer {
            setsockopt(&self.socket, sockopt::SndBufForce, &bytes.len()).map_err(socket_option_error)?;
            self.send_buffer = bytes.len();
        }
        loop {
            match self.socket.send_to(bytes, &SocketAddr::new(0, 0), 0) {
                Ok(sent) if sent == bytes.len() => return Ok(()),
                Ok(_) => return Err(KernelError::Socket { action: "write to", errno: Errno::EMSGSIZE }),
                Err(error) => match errno_of(&error) {
                    // Nothing has been sent yet.
                    Errno::EINTR => {}
                    errno => return Err(KernelError::Socket { action: "write to", errno }),
                },
            }
        }
    }

    /// Receives a datagram into `self.received`.
    fn receive(&mut self, flags: i32) -> Result<(), Errno> {
        loop {
            self.received.clear();
            match self.socket.recv(&mut self.received, flags | MSG_TRUNC) {
                Ok(len) if len > self.received.len() => return Err(Errno::EMSGSIZE),
                Ok(_) => return Ok(()),
                Err(error) => match errno_of(&error) {
                    Errno::EINTR => {}
                    errno => return Err(errno),
                },
            }
        }
    }

    /// Discards the remaining answers of an earlier request.
    fn drain(&mut self) {
        while !matches!(self.receive(MSG_DONTWAIT), Err(errno) if errno != Errno::ENOBUFS && errno != Errno::EMSGSIZE)
        {
        }
    }

    /// Sends a request, and passes every message of the answer to `each`, with its kind, family and attributes.
    ///
    /// The kernel marks a dump as interrupted (`NLM_F_DUMP_INTR`) when any transaction of the namespace is committed
    /// meanwhile, of any table. The mark is ignored: it says nothing about the table, and next to a program that
    /// commits all the time every long dump has it. Counts show whether a dump is complete.
    fn request(
        &mut self,
        what: &str,
        family: NetfilterProtoFamily,
        flags: u16,
        message: NfTablesMessage,
        each: impl FnMut(u16, u8, &[u8]) -> Result<(), String>,
    ) -> Result<(), RequestError> {
        let mut buffer = Buffer::default();
        buffer.message(family, 0, flags, self.sequence, message);
        self.exchange(what, flags, &buffer, each)
    }

    /// Sends a request with the next sequence number, and passes every message of the answer to `each`.
    fn exchange(
        &mut self,
        what: &str,
        flags: u16,
        request: &Buffer,
        mut each: impl FnMut(u16, u8, &[u8]) -> Result<(), String>,
    ) -> Result<(), RequestError> {
        self.drain();
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        self.send(request.as_slice()).map_err(RequestError::Error)?;
        let failed = |errno: Errno| RequestError::of_errno(what, errno);
        let malformed =
            |why: String| RequestError::Error(KernelError::Malformed { what: what.to_owned(), why });
        loop {
            self.receive(0).map_err(|errno| match errno {
                Errno::EAGAIN => malformed("there is none".to_owned()),
                Errno::ENOBUFS => RequestError::Interrupted,
                errno => RequestError::Error(KernelError::Socket { action: "read from", errno }),
            })?;
            for part in incoming(&self.received) {
                let part = part.map_err(malformed)?;
                if part.sequence != sequence {
                    continue;
                }
                match part.body {
                    Body::Message { kind, family, attributes } => {
                        each(kind, family, attributes).map_err(malformed)?;
                        if flags & NLM_F_DUMP != NLM_F_DUMP {
                            return Ok(());
                        }
                    }
                    Body::Failed { errno, .. } | Body::Done(Some(errno)) => return Err(failed(errno)),
                    Body::Done(None) | Body::Acknowledged => return Ok(()),
                    Body::Other => {}
                }
            }
        }
    }

    /// Repeats a request while the kernel cannot answer it.
    fn retry<T>(
        &mut self,
        what: &str,
        mut ask: impl FnMut(&mut Self) -> Result<T, RequestError>,
    ) -> Result<T, KernelError> {
        for _ in 0..READS {
            match ask(self) {
                Err(RequestError::Interrupted) => {}
                asked => return asked.map_err(|error| error.into_error(what)),
            }
        }
        Err(RequestError::Interrupted.into_error(what))
    }
}

fn socket_option_error(errno: Errno) -> KernelError {
    match errno {
        Errno::EPERM => KernelError::NotPermitted,
        errno => KernelError::Socket { action: "prepare", errno },
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

impl Netlink {
    /// Commits all changes, or none of them.
    ///
    /// # Errors
    /// The kernel rejected the transaction and has nothing of it (exceptions: [`KernelError::AnswerLost`] and
    /// [`KernelError::Malformed`]).
    pub fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError> {
        if changes.is_empty() {
            return Ok(());
        }
        self.drain();
        let batch = Batch::new(family, changes, self.sequence, std::mem::take(&mut self.spare));
        self.sequence = self.sequence.wrapping_add(batch.messages());
        self.send(batch.as_slice())?;
        let outcome = self.outcome(family, changes, &batch);
        let bytes = batch.into_bytes();
        if bytes.capacity() <= KEPT {
            self.spare = bytes;
        }
        outcome
    }

    /// Reads our table of a family. `None`: the table does not exist. Transactions of other tables do no harm; if our
    /// elements change meanwhile, [`Found::is_complete`] may be false.
    ///
    /// # Errors
    /// The table cannot be read, or its chains and sets changed during every attempt.
    pub fn read(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        let Some((mut found, counts)) = self.structure(family)? else { return Ok(None) };
        let read = self.read_elements(family, &counts, &mut found);
        read.map_err(|error| error.into_error("the elements of the table"))?;
        Ok(Some(found))
    }

    /// As [`Self::read`], without elements.
    pub fn read_structure(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        Ok(self.structure(family)?.map(|(found, _)| found))
    }

    /// Reads the elements of a set of our table. A set that does not exist has none.
    pub fn read_set(&mut self, family: Family, set: SetName) -> Result<Elements, KernelError> {
        let mut reader = Reader::default();
        match self.dump_set(family, set, true, &mut reader) {
            Ok(()) => {
                reader.finish(set);
                Ok(reader.elements)
            }
            Err(RequestError::Rejected(Errno::ENOENT, _)) => Ok(Elements::default()),
            Err(error) => Err(error.into_error("the elements of a set")),
        }
    }

    /// Reads one element of a set without intervals. `None`: the element or the set does not exist.
    pub fn get(&mut self, family: Family, set: SetName, key: &Key) -> Result<Option<Content>, KernelError> {
        let mut request = Buffer::default();
        elements::write_get(&mut request, family, self.sequence, set, key);
        let mut reader = Reader::default();
        let what = format!("an element of {set}");
        let asked = self.exchange(&what, 0, &request, |kind, _, message| {
            if kind == message::NEW_SET_ELEMENT {
                reader.read(set, message)?;
            }
            Ok(())
        });
        match asked {
            Ok(()) => Ok(reader.elements.remove(&(set, *key))),
            Err(RequestError::Rejected(Errno::ENOENT, _)) => Ok(None),
            Err(error) => Err(error.into_error(&what)),
        }
    }

    /// The generation of the last transaction.
    pub fn generation(&mut self) -> Result<Generation, KernelError> {
        const WHAT: &str = "the generation of the rules";
        let mut id = 0;
        let message = NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() });
        self.request(WHAT, NetfilterProtoFamily::Unspec, 0, message, |kind, _, message| {
            if kind == message::NEW_GENERATION {
                id = parse::generation(message)?;
            }
            Ok(())
        })
        .map_err(|error| error.into_error(WHAT))?;
        Ok(Generation { id })
    }

    /// Every table of both families, including ours, by family and name.
    pub fn tables(&mut self) -> Result<Vec<(Family, String)>, KernelError> {
        const WHAT: &str = "the list of tables";
        let unspec = NetfilterProtoFamily::Unspec;
        self.retry(WHAT, |netlink| {
            let mut tables = Vec::new();
            let all = NfTablesMessage::GetTable(TableMessage { attributes: Vec::new() });
            netlink.request(WHAT, unspec, NLM_F_DUMP, all, |kind, number, message| {
                let family = Family::ALL.into_iter().find(|family| u8::from(protocol(*family)) == number);
                if let (message::NEW_TABLE, Some(family)) = (kind, family) {
                    tables.push((family, parse::table(message)?.name));
                }
                Ok(())
            })?;
            Ok(tables)
        })
    }

    /// Whether a table of any program has a chain of this name.
    pub fn has_chain(&mut self, family: Family, table: &str, chain: &str) -> Result<bool, KernelError> {
        const WHAT: &str = "whether a chain exists";
        let attributes =
            vec![ChainAttribute::Table(table.to_owned()), ChainAttribute::Name(chain.to_owned())];
        let message = NfTablesMessage::GetChain(ChainMessage { attributes });
        match self.request(WHAT, protocol(family), 0, message, |_, _, _| Ok(())) {
            Ok(()) => Ok(true),
            Err(RequestError::Rejected(Errno::ENOENT, _)) => Ok(false),
            Err(error) => Err(error.into_error(WHAT)),
        }
    }

    /// Deletes a table of any program.
    ///
    /// # Errors
    /// No table has the name, or the kernel refuses.
    pub fn delete_table(&mut self, family: Family, name: &str) -> Result<(), KernelError> {
        self.drain();
        let batch = Batch::delete_table(family, name, self.sequence);
        self.sequence = self.sequence.wrapping_add(batch.messages());
        self.send(batch.as_slice())?;
        self.outcome(family, &[], &batch).map_err(|error| match error {
            KernelError::Transaction { errno, .. } => {
                KernelError::Table { family, name: name.to_owned(), errno }
            }
            other => other,
        })
    }

    /// Creates a table with NAT chains without rules, unless it exists: with them the kernel goes on to translate
    /// established connections when all other NAT chains are gone.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn keep_translation(&mut self, family: Family, name: &str) -> Result<(), KernelError> {
        self.drain();
        let batch = Batch::keep_translation(family, name, self.sequence);
        self.sequence = self.sequence.wrapping_add(batch.messages());
        self.send(batch.as_slice())?;
        self.outcome(family, &Batch::KEEP_TRANSLATION, &batch)
    }
}

impl Netlink {
    /// Reads the kernel's answer to a transaction.
    fn outcome(&mut self, family: Family, changes: &[Change], batch: &Batch) -> Result<(), KernelError> {
        let (mut failed, mut answered, mut lost) = (None, false, false);
        loop {
            match self.receive(MSG_DONTWAIT) {
                Ok(()) => {}
                Err(Errno::EAGAIN) => break,
                // Some answer did not fit. The remaining ones still have to be read.
                Err(Errno::ENOBUFS | Errno::EMSGSIZE) => {
                    lost = true;
                    continue;
                }
                Err(_) => {
                    lost = true;
                    break;
                }
            }
            for part in incoming(&self.received) {
                let Ok(part) = part else {
                    lost = true;
                    break;
                };
                let Some(place) = batch.place(part.sequence) else { continue };
                match part.body {
                    // The first failure is the cause; others may follow from it.
                    Body::Failed { errno, offset, reported } if failed.is_none() => {
                        failed = Some(batch.error(changes, place, errno, offset, reported));
                    }
                    Body::Acknowledged => answered |= batch.is_answered(place),
                    _ => {}
                }
            }
        }
        match failed {
            Some(error) => Err(error),
            None if answered && !lost => Ok(()),
            None => Err(KernelError::AnswerLost { family, changes: changes.len() }),
        }
    }
}
