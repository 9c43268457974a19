//! Errors of nf_tables.
//!
//! Owns: [`KernelError`], and how to handle each ([`ErrorKind`]). In: errno. Out: messages.

use keelson_proxy::model::Family;
use nix::errno::Errno;
use thiserror::Error;

use super::Change;
use crate::{
    element::{Element, Op},
    ruleset::FLOWTABLE,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorKind {
    /// Repeat the request later.
    Retry,
    /// The kernel's state is not as expected: read the table and compare.
    Resync,
    /// The kernel is out of memory, or a set is full.
    Full,
    /// An administrator has to act: a capability or a kernel feature is missing.
    Fatal,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KernelError {
    /// EPERM.
    #[error(
        "cannot change nftables: operation not permitted (EPERM); the process needs CAP_NET_ADMIN in the \
         user namespace that owns its network namespace, and the table must not belong to another process (`flags owner` in \
         `nft list ruleset`)"
    )]
    NotPermitted,
    /// The kernel has no nf_tables, or not this part of it.
    #[error(
        "the kernel does not support {feature} ({errno}); load the module or use another kernel; \
         docs/proxy.md lists the requirements"
    )]
    Unsupported { feature: String, errno: Errno },
    /// One change was rejected, and with it the whole transaction.
    #[error("cannot {change} in table {family} keelson: {errno}{}", suffix(.message))]
    Refused {
        family: Family,
        /// Index of the change in the transaction, from 0.
        index: usize,
        change: String,
        errno: Errno,
        /// Extended error text; usually `None`.
        message: Option<String>,
    },
    #[error("the kernel rejected a transaction of {changes} changes in table {family} keelson: {errno}")]
    Transaction { family: Family, changes: usize, errno: Errno },
    #[error("cannot delete table {family} {name}: {errno}")]
    Table { family: Family, name: String, errno: Errno },
    #[error("cannot read {what} from the kernel: {errno}")]
    Read { what: String, errno: Errno },
    #[error("cannot {action} the netlink socket of nf_tables: {errno}")]
    Socket { action: &'static str, errno: Errno },
    /// The answer to a transaction was lost, so it may or may not be committed.
    #[error(
        "the kernel's answer to a transaction of {changes} changes in table {family} keelson was lost; the \
         transaction may have been committed"
    )]
    AnswerLost { family: Family, changes: usize },
    /// The rules changed during every read.
    #[error(
        "the ruleset of this network namespace changed {attempts} times while table {family} keelson was \
         read; another program commits continuously"
    )]
    ReadInterrupted { family: Family, attempts: u32 },
    #[error("cannot decode the kernel's answer about {what}: {why}")]
    Malformed { what: String, why: String },
}

fn suffix(message: &Option<String>) -> String {
    message.as_ref().map(|message| format!(" ({message})")).unwrap_or_default()
}

impl KernelError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotPermitted | Self::Unsupported { .. } => ErrorKind::Fatal,
            Self::Refused { errno, .. }
            | Self::Transaction { errno, .. }
            | Self::Table { errno, .. }
            | Self::Read { errno, .. }
            | Self::Socket { errno, .. } => kind_of(*errno),
            // Repeating a committed transaction would fail, and a malformed answer may belong to a committed one.
            Self::AnswerLost { .. } | Self::Malformed { .. } => ErrorKind::Resync,
            Self::ReadInterrupted { .. } => ErrorKind::Retry,
        }
    }

    /// Whether the kernel lacks a part of nftables.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        match self {
            Self::Unsupported { .. } => true,
            Self::Refused { errno, .. } | Self::Transaction { errno, .. } | Self::Read { errno, .. } => {
                matches!(errno, Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT)
            }
            _ => false,
        }
    }

    /// Whether a change was rejected because something that it refers to does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::Refused { errno: Errno::ENOENT | Errno::ENODEV, .. }
                | Self::Transaction { errno: Errno::ENOENT | Errno::ENODEV, .. }
        )
    }
}

pub(super) const fn kind_of(errno: Errno) -> ErrorKind {
    match errno {
        // ERESTART: another program has committed in the meantime.
        Errno::ENOBUFS | Errno::EAGAIN | Errno::EINTR | Errno::ERESTART => ErrorKind::Retry,
        Errno::ENOSPC | Errno::ENOMEM | Errno::ENFILE | Errno::EMFILE | Errno::EMSGSIZE | Errno::E2BIG => {
            ErrorKind::Full
        }
        Errno::EPERM | Errno::EACCES | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => {
            ErrorKind::Fatal
        }
        // EEXIST, ENOENT, EBUSY, ENOTEMPTY (intervals that overlap), EINVAL (a set of another form) and the like.
        _ => ErrorKind::Resync,
    }
}

pub(super) fn describe(change: &Change) -> String {
    let element = |verb: &str, element: &Element| {
        let end = element.key_end.map(|end| format!("-{end:?}")).unwrap_or_default();
        format!("{verb} the element {:?}{end} of {}", element.key, element.set)
    };
    match change {
        Change::MakeTable => "add the table".to_owned(),
        Change::DeleteTable => "delete the table".to_owned(),
        Change::MakeChain(chain) => format!("add the chain {chain}"),
        Change::DeleteChain(chain) => format!("delete the chain {chain}"),
        Change::Rules(chain, _) => format!("set the rules of the chain {chain}"),
        Change::MakeSet(set) => format!("add the set {set}"),
        Change::DeleteChainNamed(name) => format!("delete the chain {name}"),
        Change::DeleteSetNamed(name) => format!("delete the set {name}"),
        Change::MakeFlowtable => format!("add the flowtable {FLOWTABLE}"),
        Change::DeleteFlowtable(name) => format!("delete the flowtable {name}"),
        Change::AddDevices(names) => format!("add {} to the flowtable {FLOWTABLE}", names.join(", ")),
        Change::RemoveDevices(names) => format!("remove {} from the flowtable {FLOWTABLE}", names.join(", ")),
        Change::Element(Op::Add(added)) => element("add", added),
        Change::Element(Op::Delete(deleted)) => element("delete", deleted),
        Change::Element(Op::Replace(_, added)) => element("replace", added),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_its_remedy() {
        let refused = |errno| KernelError::Refused {
            family: Family::V4,
            index: 0,
            change: describe(&Change::MakeTable),
            errno,
            message: None,
        };
        for (error, kind) in [
            (KernelError::NotPermitted, ErrorKind::Fatal),
            (KernelError::Unsupported { feature: "x".to_owned(), errno: Errno::ENOENT }, ErrorKind::Fatal),
            (refused(Errno::EEXIST), ErrorKind::Resync),
            (refused(Errno::ENOENT), ErrorKind::Resync),
            (refused(Errno::EBUSY), ErrorKind::Resync),
            (refused(Errno::ENOTEMPTY), ErrorKind::Resync),
            (refused(Errno::ENOSPC), ErrorKind::Full),
            (refused(Errno::ENOMEM), ErrorKind::Full),
            (refused(Errno::ENFILE), ErrorKind::Full),
            (refused(Errno::EINTR), ErrorKind::Retry),
            (KernelError::Socket { action: "read", errno: Errno::ENOBUFS }, ErrorKind::Retry),
            (KernelError::AnswerLost { family: Family::V4, changes: 1 }, ErrorKind::Resync),
            (KernelError::ReadInterrupted { family: Family::V6, attempts: 8 }, ErrorKind::Retry),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }

    #[test]
    fn an_error_names_change_table_and_reason() {
        let error = KernelError::Refused {
            family: Family::V6,
            index: 3,
            change: describe(&Change::DeleteChain(crate::chain::Chain::Reject)),
            errno: Errno::EBUSY,
            message: None,
        };
        let text = error.to_string();
        for part in ["delete the chain reject-it", "IPv6", "EBUSY"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(KernelError::NotPermitted.to_string().contains("CAP_NET_ADMIN"));
    }
}
