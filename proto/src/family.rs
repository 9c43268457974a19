//! IP families. A dual-stack Service is handled once for each of its families.

use std::{
    borrow::Borrow,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// An IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `IPv4` in `spec.ipFamilies` and `addressType`.
    V4,
    /// `IPv6` in `spec.ipFamilies` and `addressType`.
    V6,
}

impl Family {
    /// In the order in which they are handled.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub fn of(ip: impl Borrow<IpAddr>) -> Self {
        match ip.borrow() {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Whether an address is of this family.
    #[must_use]
    pub const fn has(self, ip: &IpAddr) -> bool {
        matches!((self, ip), (Self::V4, IpAddr::V4(_)) | (Self::V6, IpAddr::V6(_)))
    }

    /// The length of an address, in bytes.
    #[must_use]
    pub const fn address_len(self) -> usize {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }

    /// `0.0.0.0` or `::`.
    #[must_use]
    pub const fn unspecified(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    /// The family of this name in Kubernetes.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.as_str() == name)
    }

    /// `IPv4` or `IPv6`, as Kubernetes writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
