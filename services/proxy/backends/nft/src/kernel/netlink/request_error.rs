//! Failed requests.
//!
//! Owns: [`RequestError`]. In: an errno of the kernel. Out: whether to repeat the request, or a [`KernelError`].

use nix::errno::Errno;

use crate::kernel::{
    KernelError,
    error::{ErrorKind, kind_of},
};

#[derive(Debug)]
pub(super) enum RequestError {
    Interrupted,
    Rejected(Errno, KernelError),
    Error(KernelError),
}

impl RequestError {
    pub(super) fn of_errno(what: &str, errno: Errno) -> Self {
        let error = match errno {
            Errno::EPERM => KernelError::NotPermitted,
            // nfnetlink answers EINVAL to messages of a subsystem that it does not have.
            Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EINVAL => {
                KernelError::Unsupported { feature: "nf_tables (CONFIG_NF_TABLES)".to_owned(), errno }
            }
            errno => KernelError::Read { what: what.to_owned(), errno },
        };
        // Such as EINTR in the middle of a dump, or EAGAIN: the request is repeated.
        if kind_of(errno) == ErrorKind::Retry { Self::Interrupted } else { Self::Rejected(errno, error) }
    }

    pub(super) fn into_error(self, what: &str) -> KernelError {
        match self {
            Self::Interrupted => KernelError::Read { what: what.to_owned(), errno: Errno::EINTR },
            Self::Rejected(_, error) | Self::Error(error) => error,
        }
    }
}
