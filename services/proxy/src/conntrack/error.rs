use std::io;

use nix::errno::Errno;

#[derive(Debug, thiserror::Error)]
pub enum ConntrackError {
    /// EPERM.
    #[error(
        "conntrack: cannot {what}: not permitted; the proxy needs CAP_NET_ADMIN in its network namespace"
    )]
    NotPermitted { what: &'static str },
    /// The kernel has no conntrack, or no netlink interface for it.
    #[error(
        "conntrack: cannot {what}: not supported by the kernel ({source}); it needs CONFIG_NF_CONNTRACK and \
         CONFIG_NF_CT_NETLINK (module nf_conntrack_netlink)"
    )]
    NotSupported { what: &'static str, source: io::Error },
    /// Any other error, or no answer within 30 s.
    #[error("conntrack: cannot {what}: {source}")]
    Failed { what: &'static str, source: io::Error },
    #[error("conntrack: cannot decode the kernel's answer to {what}: {reason}")]
    Malformed { what: &'static str, reason: String },
}

impl ConntrackError {
    /// Whether a retry cannot help: an administrator has to act.
    #[must_use]
    pub const fn is_lasting(&self) -> bool {
        matches!(self, Self::NotPermitted { .. } | Self::NotSupported { .. })
    }

    /// Whether the flow is in a flowtable and the kernel does not release it. Source: `ctnetlink_del_conntrack` before
    /// Linux 6.4; stable kernels have backported the change.
    #[must_use]
    pub fn is_offloaded(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if source.raw_os_error() == Some(Errno::EBUSY as i32))
    }

    pub(super) fn new(what: &'static str, source: io::Error) -> Self {
        match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EPERM | Errno::EACCES) => Self::NotPermitted { what },
            Some(Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT | Errno::ENOSYS) => {
                Self::NotSupported { what, source }
            }
            _ => Self::Failed { what, source },
        }
    }
}
