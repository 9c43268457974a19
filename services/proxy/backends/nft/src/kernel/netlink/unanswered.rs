//! Questions without an answer.
//!
//! Owns: [`Unanswered`]. In: an error number of the kernel. Out: whether to ask again, or a [`KernelError`].

use nix::errno::Errno;

use crate::kernel::{
    KernelError,
    error::{ErrorKind, kind_of},
};

/// Why a question was not answered.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// The kernel could not answer now.
    Disturbed,
    /// The kernel refused.
    Refused(Errno, KernelError),
    Error(KernelError),
}

impl Unanswered {
    pub(super) fn refused(question: &str, errno: Errno) -> Self {
        let error = match errno {
            Errno::EPERM => KernelError::NotPermitted,
            // nfnetlink says EINVAL to messages of a subsystem that it does not have.
            Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EINVAL => {
                KernelError::Unsupported { feature: "nf_tables (CONFIG_NF_TABLES)".to_owned(), errno }
            }
            errno => KernelError::Question { question: question.to_owned(), errno },
        };
        // EINTR in the middle of a dump, EAGAIN and the like: it is asked again.
        if kind_of(errno) == ErrorKind::Retry { Self::Disturbed } else { Self::Refused(errno, error) }
    }

    pub(super) fn into_error(self, question: &str) -> KernelError {
        match self {
            Self::Disturbed => KernelError::Question { question: question.to_owned(), errno: Errno::EINTR },
            Self::Refused(_, error) | Self::Error(error) => error,
        }
    }
}
