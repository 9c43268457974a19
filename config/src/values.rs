//! Types of settings that are more specific than numbers, texts and durations.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};

use crate::error::{Fault, quote};
use crate::setting_type::{Text, text};
use crate::suggest::nearest;

/// Longest path in a `sockaddr_un` on Linux, without its terminator.
const SOCKET_PATH_BYTES: usize = 107;
const SOCKET_EXAMPLE: &str = "unix:///run/keelson/name.sock";
const TCP_EXAMPLE: &str = "tcp://127.0.0.1:12345";

/// A unix socket, written `unix:///absolute/path`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SocketSpec {
    path: PathBuf,
}

impl SocketSpec {
    /// For defaults only; a test checks them by the rules of other values.
    pub(crate) fn built_in(path: &str) -> Self {
        Self { path: path.into() }
    }

    pub fn parse(text: &str) -> Result<Self, Fault> {
        let malformed = |reason: String, right: String| Fault::Malformed {
            what: "a unix socket address",
            value: quote(text),
            reason,
            right,
        };
        let write = |example: &str| format!("write {example}");
        let Some((scheme, rest)) = text.split_once("://") else {
            if text.starts_with('/') {
                let right = write(&quote(&format!("unix://{text}")));
                return Err(malformed("the scheme is missing".into(), right));
            }
            return Err(match text.contains('@') {
                true => Fault::UserInfo { right: SOCKET_EXAMPLE },
                false => malformed("neither a scheme nor an absolute path".into(), write(SOCKET_EXAMPLE)),
            });
        };
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.contains('@') || scheme.contains('@') {
            return Err(Fault::UserInfo { right: SOCKET_EXAMPLE });
        }
        if scheme != "unix" {
            let reason = format!("the scheme is {}; only unix sockets are supported", quote(scheme));
            return Err(malformed(reason, write(SOCKET_EXAMPLE)));
        }
        if !authority.is_empty() {
            return Err(malformed(
                "an absolute path requires three slashes".into(),
                write(&quote(&format!("unix:///{rest}"))),
            ));
        }
        match socket_path_fault(rest) {
            Some(reason) => Err(malformed(reason, write(SOCKET_EXAMPLE))),
            None => Ok(Self { path: rest.into() }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn socket_path_fault(path: &str) -> Option<String> {
    if path.trim_matches('/').is_empty() || path.ends_with('/') {
        return Some("the file name is missing".into());
    }
    if path.len() > SOCKET_PATH_BYTES {
        let len = path.len();
        return Some(format!("the path has {len} bytes; the maximum for a socket is {SOCKET_PATH_BYTES}"));
    }
    path_fault(path)
}

pub(crate) fn path_fault(path: &str) -> Option<String> {
    if !path.starts_with('/') {
        return Some("the path is not absolute".into());
    }
    if path.chars().any(char::is_control) {
        return Some("the path contains a control character".into());
    }
    if Path::new(path).components().any(|c| c == Component::ParentDir) {
        return Some("the path contains \"..\"".into());
    }
    None
}

impl fmt::Display for SocketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.path.display())
    }
}

text!(
    SocketSpec,
    "unix socket, `unix:///path`",
    "a unix socket address as text, such as \"unix:///run/keelson/name.sock\"",
    |text: &str| Self::parse(text.trim())
);

/// `unix:///absolute/path` or `tcp://address:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenSpec {
    Unix(SocketSpec),
    /// Port 0: any free port.
    Tcp(SocketAddr),
}

impl ListenSpec {
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let Some(address) = text.strip_prefix("tcp://") else {
            return SocketSpec::parse(text).map(Self::Unix);
        };
        if address.contains('@') {
            return Err(Fault::UserInfo { right: TCP_EXAMPLE });
        }
        address.trim_end_matches('/').parse().map(Self::Tcp).map_err(|_| Fault::Malformed {
            what: "an address of the Endpoints API",
            value: quote(text),
            reason: "tcp:// requires an IP address and a port".into(),
            right: format!("write {TCP_EXAMPLE} or tcp://[::1]:12345"),
        })
    }
}

impl fmt::Display for ListenSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(socket) => socket.fmt(f),
            Self::Tcp(address) => write!(f, "tcp://{address}"),
        }
    }
}

text!(
    ListenSpec,
    "`unix:///path` and `tcp://address:port`",
    "addresses, such as [\"unix:///run/keelson/name.sock\"]",
    Self::parse
);

/// The permission bits of a socket file, written in octal as text: `"0660"`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketMode(u32);

impl SocketMode {
    pub(crate) const OWNER_AND_GROUP: Self = Self(0o660);

    /// Reads three or four octal digits.
    ///
    /// # Errors
    ///
    /// The text is not octal, the owner could not connect, or everybody could: a process that reaches the CRI socket
    /// is root on the node.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let malformed = |reason: &str| Fault::Malformed {
            what: "a socket mode",
            value: quote(text),
            reason: reason.into(),
            right: "write \"0600\" (owner) or \"0660\" (owner and group)".into(),
        };
        let octal = matches!(text.len(), 3 | 4) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
        let mode = u32::from_str_radix(text, 8).ok().filter(|_| octal);
        match mode {
            None => Err(malformed("three or four octal digits are required")),
            Some(mode) if mode > 0o777 => Err(malformed("special bits have no meaning on a socket")),
            Some(mode) if mode & 0o600 != 0o600 => Err(malformed("the owner could not connect")),
            Some(mode) if mode & 0o007 != 0 => Err(malformed("every user of the node could connect")),
            Some(mode) => Ok(Self(mode)),
        }
    }

    pub fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl fmt::Debug for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SocketMode({self})")
    }
}

text!(
    SocketMode,
    "octal mode as text, no access for others",
    "an octal mode as text, such as \"0660\"",
    |text: &str| Self::parse(text.trim())
);

impl Text for PathBuf {
    const EMPTY: &'static str = " for none";

    fn kind() -> String {
        "absolute path".into()
    }

    fn expected() -> String {
        "an absolute path".into()
    }

    fn parse(text: &str) -> Result<Self, Fault> {
        match path_fault(text) {
            None => Ok(text.into()),
            Some(reason) => Err(Fault::Malformed {
                what: "an absolute path",
                value: quote(text),
                reason,
                right: "write a path that begins with \"/\" and has no \"..\"".into(),
            }),
        }
    }

    fn write(&self) -> String {
        self.to_string_lossy().into_owned()
    }
}

pub(crate) trait Choice: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];
}

impl<C: Choice> Text for C {
    fn kind() -> String {
        C::WORDS.iter().map(|(word, _)| quote(word)).collect::<Vec<_>>().join(" or ")
    }

    fn expected() -> String {
        C::kind()
    }

    fn parse(text: &str) -> Result<Self, Fault> {
        let text = text.trim();
        let words = || C::WORDS.iter().map(|(word, _)| *word);
        C::WORDS.iter().find(|(word, _)| *word == text).map(|(_, choice)| *choice).ok_or_else(|| {
            Fault::NotAChoice {
                value: quote(text),
                allowed: words().map(quote).collect(),
                nearest: nearest(text, words()).map(quote),
            }
        })
    }

    fn write(&self) -> String {
        C::WORDS.iter().find(|(_, choice)| choice == self).map_or("", |(word, _)| word).to_owned()
    }
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl Choice for $name {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$variant)),+];
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

choice! {
    WhenFull {
        Wait = "wait",
        /// Retried a few times, then failed with `RESOURCE_EXHAUSTED`.
        Reject = "reject",
    }
}

choice! {
    Enforce {
        Agent = "agent",
        /// The runtime, through the pull option, if it supports it; otherwise the agent.
        Runtime = "runtime",
    }
}

choice! {
    LogFormat {
        Text = "text",
        Json = "json",
    }
}

choice! {
    Role {
        /// The kubelet sends the heartbeats; the agent adds a Lease and conditions of its own.
        Companion = "companion",
        Node = "node",
    }
}

choice! {
    Register {
        /// Created at the start, but not after it is deleted later.
        Once = "once",
        /// Created whenever it is missing.
        Always = "always",
        /// Created by other means.
        Never = "never",
    }
}

choice! {
    /// Behavior of role node while another process renews the node's Lease.
    WhenContested {
        /// Stop renewing the Lease and reporting the status until the other process stops.
        StandBack = "stand-back",
        Continue = "continue",
    }
}

choice! {
    EndpointsSource {
        /// The API server if one is configured, else the folder of manifests if one is configured, else off.
        Auto = "auto",
        Kube = "kube",
        Files = "files",
        Off = "off",
    }
}

choice! {
    EndpointsWatch {
        /// From the first client until the agent stops.
        OnDemand = "on-demand",
        Always = "always",
    }
}

choice! {
    ProxyBackend {
        /// The best that this node supports.
        Auto = "auto",
        Nft = "nft",
        Iptables = "iptables",
        Ipvs = "ipvs",
        Userspace = "userspace",
        Ebpf = "ebpf",
    }
}

choice! {
    /// Schedulers of the kernel's IPVS. Names are those of kube-proxy's `ipvs.scheduler`.
    IpvsScheduler {
        /// Round robin.
        Rr = "rr",
        Wrr = "wrr",
        /// Least connections.
        Lc = "lc",
        Wlc = "wlc",
        /// Locality-based least connections.
        Lblc = "lblc",
        Lblcr = "lblcr",
        /// By a hash of the source address.
        Sh = "sh",
        /// By a hash of the destination address.
        Dh = "dh",
        /// Shortest expected delay.
        Sed = "sed",
        /// Never queue.
        Nq = "nq",
        /// By a Maglev hash of the source address and port.
        Mh = "mh",
    }
}

choice! {
    IptablesVariant {
        /// The one that the node's `iptables` is, if the kernel supports it.
        Auto = "auto",
        Legacy = "legacy",
        Nft = "nft",
    }
}

choice! {
    /// Where the programs of direct return see what arrives on a device.
    DirectReturnHook {
        Tc = "tc",
        Xdp = "xdp",
    }
}

choice! {
    /// Header before the data of a connection, which tells the client's address (PROXY protocol).
    ProxyProtocol {
        Off = "off",
        V1 = "v1",
        V2 = "v2",
    }
}

choice! {
    /// How traffic of this node's pods is detected. Names are those of kube-proxy's `detectLocalMode`.
    DetectLocalMode {
        /// Source in the cluster's pod networks.
        ClusterCidr = "ClusterCIDR",
        /// Source in the Node's pod networks.
        NodeCidr = "NodeCIDR",
        /// Received on the bridge.
        BridgeInterface = "BridgeInterface",
        /// Received on an interface with the name prefix.
        InterfaceNamePrefix = "InterfaceNamePrefix",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets() {
        let ok = SocketSpec::parse("unix:///run/keelson/cri.sock").unwrap();
        assert_eq!(ok.path(), Path::new("/run/keelson/cri.sock"));
        assert_eq!(ok.to_string(), "unix:///run/keelson/cri.sock");
        for (text, part) in [
            ("/run/x.sock", r#"write "unix:///run/x.sock""#),
            ("unix://run/x.sock", r#"write "unix:///run/x.sock""#),
            ("tcp://127.0.0.1:80", r#"scheme is "tcp""#),
            ("x.sock", "neither a scheme"),
            ("", "neither a scheme"),
            ("unix:///", "the file name is missing"),
            ("unix://", "the file name is missing"),
            ("unix:///run/", "the file name is missing"),
            ("unix:///run/../etc/x", "\"..\""),
            ("unix:///run/a\u{0}b", "control character"),
        ] {
            let message = SocketSpec::parse(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text:?}: {message}");
        }
        let long = format!("unix:///{}", "x".repeat(106));
        assert!(SocketSpec::parse(&long).is_ok());
        let message = SocketSpec::parse(&format!("{long}x")).unwrap_err().to_string();
        assert!(message.contains("108 bytes"), "{message}");
    }

    #[test]
    fn addresses_to_listen_at() {
        for text in ["unix:///run/keelson-endpoints/endpoints.sock", "tcp://127.0.0.1:12345", "tcp://[::1]:0"]
        {
            assert_eq!(ListenSpec::parse(text).unwrap().to_string(), text);
        }
        for (text, part) in [
            ("tcp://localhost:12345", "an IP address and a port"),
            ("tcp://127.0.0.1", "an IP address and a port"),
            ("tcp://", "an IP address and a port"),
            ("http://127.0.0.1:1", r#"scheme is "http""#),
            ("127.0.0.1:12345", "neither a scheme"),
        ] {
            let message = ListenSpec::parse(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text:?}: {message}");
        }
        assert_eq!(ListenSpec::parse("tcp://joe:x@host:1"), Err(Fault::UserInfo { right: TCP_EXAMPLE }));
    }

    #[test]
    fn userinfo_is_refused_and_not_repeated() {
        for text in ["unix://joe:hunter2@/run/x", "https://joe:hunter2@host/x", "joe:hunter2@host"] {
            let fault = SocketSpec::parse(text).unwrap_err();
            assert_eq!(fault, Fault::UserInfo { right: SOCKET_EXAMPLE });
            assert!(!fault.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn modes() {
        assert_eq!(SocketMode::parse("0660").unwrap().bits(), 0o660);
        assert_eq!(SocketMode::parse("600").unwrap().to_string(), "0600");
        for (text, part) in [
            ("0666", "every user"),
            ("0460", "owner"),
            ("2660", "special"),
            ("0680", "octal"),
            ("60", "octal"),
            ("+660", "octal"),
            ("", "octal"),
        ] {
            let message = SocketMode::parse(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text:?}: {message}");
        }
    }
}
