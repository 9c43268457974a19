//! IP families that a node supports.
//!
//! Owns: the decision of kube-proxy (`platformCheckSupported`). In: files of /proc, read in the network namespace of
//! the calling thread. Out: why a family is disabled. The backend decides whether the kernel has what it needs of a
//! family.

use std::{fs, path::Path};

use crate::model::Family;

/// Absent if the kernel has no IPv6, or was started with `ipv6.disable=1`. Read per thread, because `/proc/net` is the
/// network namespace of the main thread.
const IF_INET6: &str = "/proc/thread-self/net/if_inet6";

const DISABLE_IPV6: &str = "/proc/sys/net/ipv6/conf/all/disable_ipv6";

/// Why the system does not support a family; `None` if it does.
#[must_use]
pub fn disabled(family: Family) -> Option<&'static str> {
    match family {
        Family::V4 => None,
        Family::V6 => {
            let setting = fs::read_to_string(DISABLE_IPV6).ok();
            ipv6_disabled(Path::new(IF_INET6).exists(), setting.as_deref())
        }
    }
}

/// Source: kube-proxy's `platformCheckSupported`. A sysctl that cannot be read disables nothing.
fn ipv6_disabled(has_if_inet6: bool, disable_ipv6: Option<&str>) -> Option<&'static str> {
    if !has_if_inet6 {
        return Some("the kernel has no IPv6 (/proc/net/if_inet6 does not exist)");
    }
    let is_disabled = disable_ipv6.is_some_and(|text| text.trim() == "1");
    is_disabled.then_some("IPv6 is disabled on this node (net.ipv6.conf.all.disable_ipv6 is 1)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p10_ipv6_is_disabled_as_kube_proxy_decides() {
        for (has_if_inet6, disable_ipv6, reason) in [
            (true, Some("0\n"), None),
            (true, None, None),
            (true, Some(""), None),
            (true, Some("1\n"), Some("disable_ipv6 is 1")),
            (false, Some("0\n"), Some("if_inet6")),
            (false, None, Some("if_inet6")),
        ] {
            let decided = ipv6_disabled(has_if_inet6, disable_ipv6);
            assert_eq!(decided.is_some(), reason.is_some(), "{has_if_inet6} {disable_ipv6:?}");
            assert!(decided.unwrap_or_default().contains(reason.unwrap_or_default()), "{decided:?}");
        }
    }
}
