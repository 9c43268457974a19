//! Settings that hold addresses, networks and interfaces.
//!
//! Owns: the types of such settings, and how they are parsed. In: a text. Out: the value, or a fault with a
//! correction.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde_json::Value as Json;

use crate::error::{Fault, quote};
use crate::setting_type::{Any, Raw, Setting, text};

const PRIMARY: &str = "primary";
/// In bytes (RFC 1035, section 2.3.4).
const HOST_BYTES: usize = 253;
/// In bytes (Kubernetes, `LabelValueMaxLength`).
const LABEL_BYTES: usize = 63;
/// In bytes (`IFNAMSIZ` without its terminator).
const INTERFACE_BYTES: usize = 15;

/// Node addresses at which node ports are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// What kube-proxy does in the mode of the backend.
    Unset,
    Primary,
    /// Those in these networks; never empty. A family without a network, or with one of length 0, uses all addresses.
    Networks(Vec<IpNet>),
}

/// A name or address by which clients reach this machine: in lower case, without a trailing dot; an address without
/// brackets, in canonical form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostName(pub String);

/// Interfaces by name, or by a prefix followed by `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfacePattern(pub String);

/// A value of the label `service.kubernetes.io/service-proxy-name`, which names a service proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyName(pub String);

impl fmt::Display for ProxyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for InterfacePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

text!(IpAddr, "IP addresses", "IP addresses, such as [\"10.0.0.7\", \"fd00::7\"]", address);
text!(IpNet, "networks (CIDR)", "networks, such as [\"10.244.0.0/16\", \"fd00:10:244::/56\"]", network);
text!(
    InterfacePattern,
    "interfaces, names or prefixes with `*`",
    "interfaces, such as [\"eth0\", \"veth*\"]",
    interface_pattern
);
text!(HostName, "host names", "host names, such as [\"node-7\", \"node-7.example.com\"]", host_name);
text!(
    ProxyName,
    "names of service proxies",
    "values of the label service.kubernetes.io/service-proxy-name, such as [\"edge\"]",
    proxy_name,
    " for none"
);
text!(
    SocketAddr,
    "IP address and port",
    "an address as text, such as \"127.0.0.1:9440\"",
    socket_address,
    " for off"
);

impl Setting for NodePortAddresses {
    type Rule = Any;

    fn read(raw: &Raw, _: &Any) -> Result<Self, Fault> {
        let texts: Vec<&str> =
            raw.texts("a list, [\"primary\"] or networks such as [\"10.0.0.0/8\"]")?.collect();
        if texts.is_empty() {
            return Ok(Self::Unset);
        }
        if texts.iter().all(|text| *text == PRIMARY) {
            return Ok(Self::Primary);
        }
        if texts.contains(&PRIMARY) {
            return Err(Fault::Malformed {
                what: "a list of addresses for node ports",
                value: quote(&texts.join(",")),
                reason: "primary cannot be combined with networks".into(),
                right: "write [\"primary\"] or only networks".into(),
            });
        }
        texts.into_iter().map(network).collect::<Result<_, _>>().map(Self::Networks)
    }

    fn show(&self) -> Json {
        match self {
            Self::Unset => Json::Array(Vec::new()),
            Self::Primary => vec![PRIMARY].into(),
            Self::Networks(networks) => networks.show(),
        }
    }

    fn describe(_: &Any) -> String {
        "\"primary\", or list of networks (CIDR); as text, comma-separated".into()
    }
}

fn address(text: &str) -> Result<IpAddr, Fault> {
    let malformed = |reason: &str, right: String| Fault::Malformed {
        what: "an IP address",
        value: quote(text),
        reason: reason.into(),
        right,
    };
    let example = || "write such as \"10.0.0.7\" or \"fd00::7\"".to_owned();
    let ip: IpAddr = text.parse().map_err(|_| match text.contains('/') {
        true => malformed("it is a network", example()),
        false => malformed("it is neither an IPv4 nor an IPv6 address", example()),
    })?;
    match ip.to_canonical() {
        same if same == ip => Ok(ip),
        inner => Err(malformed("it is an IPv4-mapped IPv6 address", format!("write \"{inner}\""))),
    }
}

fn socket_address(text: &str) -> Result<SocketAddr, Fault> {
    let text = text.trim();
    if text.contains('@') {
        return Err(Fault::UserInfo { right: "127.0.0.1:9440" });
    }
    text.parse().map_err(|_| Fault::Malformed {
        what: "an address",
        value: quote(text),
        reason: "an IP address and a port are required".into(),
        right: "write \"127.0.0.1:9440\" or \"[::1]:9440\", or \"\" for off".into(),
    })
}

fn network(text: &str) -> Result<IpNet, Fault> {
    let malformed = |reason: &str, right: String| Fault::Malformed {
        what: "a network",
        value: quote(text),
        reason: reason.into(),
        right,
    };
    let network: IpNet = match (text.parse(), text.parse::<IpAddr>()) {
        (Ok(network), _) => network,
        (Err(_), Ok(ip)) => {
            let single = IpNet::from(ip);
            return Err(malformed(
                "the prefix length is missing",
                format!("for this one address write \"{single}\""),
            ));
        }
        (Err(_), Err(_)) => {
            let example = "write such as \"10.244.0.0/16\" or \"fd00:10:244::/56\"";
            return Err(malformed("it is not a CIDR", example.into()));
        }
    };
    if network.addr().to_canonical() != network.addr() {
        return Err(malformed("it is an IPv4-mapped IPv6 network", "write it as an IPv4 network".into()));
    }
    match network.trunc() {
        same if same == network => Ok(network),
        meant => Err(malformed("it has host bits set", format!("write \"{meant}\""))),
    }
}

/// Letters, digits, `-` and `_` between dots (RFC 1123, and the underscores that occur in practice), or an IP
/// address.
fn host_name(text: &str) -> Result<HostName, Fault> {
    let malformed = |reason: &str| Fault::Malformed {
        what: "a host name",
        value: quote(text),
        reason: reason.into(),
        right: "write such as \"node-7.example.com\"".into(),
    };
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(HostName(ip.to_string()));
    }
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    match name.split('.').find(|label| label.is_empty() || label.len() > 63 || !label.chars().all(fits)) {
        _ if text.contains("://") => Err(malformed("it is a URL")),
        _ if text.contains('*') => Err(malformed("patterns are not supported")),
        _ if text.contains(':') => Err(malformed("it contains a port; omit the port")),
        _ if name.len() > HOST_BYTES => Err(malformed("it is too long")),
        Some(_) => Err(malformed(
            "it has a label that is empty, too long, or has a character other than letters, digits, '-' and \
             '_'",
        )),
        None => Ok(HostName(name)),
    }
}

/// A label value that is not empty (Kubernetes, `IsValidLabelValue`).
fn proxy_name(text: &str) -> Result<ProxyName, Fault> {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_valid = text.len() <= LABEL_BYTES
        && text.chars().all(fits)
        && is_end(text.chars().next())
        && is_end(text.chars().last());
    match is_valid {
        true => Ok(ProxyName(text.to_owned())),
        false => Err(Fault::Malformed {
            what: "a name of a service proxy",
            value: quote(text),
            reason: "it is not a label value".into(),
            right: format!(
                "write at most {LABEL_BYTES} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            ),
        }),
    }
}

fn interface_pattern(text: &str) -> Result<InterfacePattern, Fault> {
    match text.strip_suffix('*').unwrap_or(text) {
        // Every interface.
        "" => {}
        name => check_interface(name)?,
    }
    Ok(InterfacePattern(text.to_owned()))
}

/// The kernel's rules for interface names (`dev_valid_name`), which also apply to prefixes.
pub(crate) fn check_interface(text: &str) -> Result<(), Fault> {
    let malformed = |reason: &str| Fault::Malformed {
        what: "a name of a network interface",
        value: quote(text),
        reason: reason.into(),
        right: format!("write at most {INTERFACE_BYTES} characters, such as \"cbr0\""),
    };
    let odd = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':' | '"' | '*' | '\\');
    match text {
        _ if text.len() > INTERFACE_BYTES => Err(malformed("it is too long")),
        "." | ".." => Err(malformed("it is the name of a directory")),
        _ if text.chars().any(odd) => {
            Err(malformed("it has a character that is not allowed in interface names"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list<T: Setting<Rule = Any>>(texts: &[&str]) -> Result<T, String> {
        let raw = Raw::List(texts.iter().map(|text| (*text).to_owned()).collect());
        let listed = T::read(&raw, &Any).map_err(|fault| fault.to_string());
        let joined = T::read(&Raw::Untyped(texts.join(",")), &Any).map_err(|fault| fault.to_string());
        assert_eq!(listed.as_ref().map(T::show), joined.as_ref().map(T::show));
        listed
    }

    #[test]
    fn networks() {
        let networks: Vec<IpNet> = list(&["10.244.0.0/16", " fd00:10:244::/56 ", ""]).unwrap();
        assert_eq!(networks.show(), serde_json::json!(["10.244.0.0/16", "fd00:10:244::/56"]));
        for (text, part) in [
            ("10.244.0.7/16", "write \"10.244.0.0/16\""),
            ("10.244.0.7", "write \"10.244.0.7/32\""),
            ("fd00::1", "write \"fd00::1/128\""),
            ("10.244.0.0/33", "not a CIDR"),
            ("::ffff:10.0.0.0/104", "an IPv4 network"),
            ("pods", "not a CIDR"),
            ("primary", "not a CIDR"),
        ] {
            let message = list::<Vec<IpNet>>(&[text]).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn addresses() {
        let addresses: Vec<IpAddr> = list(&["10.0.0.7", "FD00::7"]).unwrap();
        assert_eq!(addresses.show(), serde_json::json!(["10.0.0.7", "fd00::7"]));
        for (text, part) in [
            ("10.0.0.7/32", "it is a network"),
            ("node-7", "neither an IPv4"),
            ("::ffff:10.0.0.7", "write \"10.0.0.7\""),
        ] {
            let message = list::<Vec<IpAddr>>(&[text]).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn patterns_of_interfaces() {
        let interfaces: Vec<InterfacePattern> = list(&["eth0", " veth* ", "", "*"]).unwrap();
        assert_eq!(interfaces.show(), serde_json::json!(["eth0", "veth*", "*"]));
        for (text, part) in [
            ("eth0/1", "a character that is not allowed"),
            ("ve*th", "a character that is not allowed"),
            ("veth**", "a character that is not allowed"),
            ("a-name-of-16-bytes", "too long"),
            (".", "the name of a directory"),
        ] {
            let message = list::<Vec<InterfacePattern>>(&[text]).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn e21_host_names() {
        let hosts: Vec<HostName> =
            list(&["Node-7", " node-7.Example.com. ", "", "10.0.0.7", "[FD00::7]", "my_node"]).unwrap();
        assert_eq!(
            hosts.show(),
            serde_json::json!(["node-7", "node-7.example.com", "10.0.0.7", "fd00::7", "my_node"])
        );
        for (text, part) in [
            ("node-7:9440", "it contains a port"),
            ("http://node-7", "it is a URL"),
            ("*.example.com", "patterns are not"),
            ("node..7", "a label that is empty"),
            (".", "a label that is empty"),
            ("node 7", "letters, digits"),
            ("n\u{f6}de", "letters, digits"),
        ] {
            let message = list::<Vec<HostName>>(&[text]).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
        for (length, fits) in [(63, true), (64, false)] {
            assert_eq!(list::<Vec<HostName>>(&[&"n".repeat(length)]).is_ok(), fits, "{length}");
        }
        assert!(list::<Vec<HostName>>(&[&["n"; 128].join(".")]).unwrap_err().contains("too long"));
    }

    #[test]
    fn addresses_of_node_ports() {
        assert_eq!(list(&["primary"]), Ok(NodePortAddresses::Primary));
        assert_eq!(list(&[]), Ok(NodePortAddresses::Unset));
        let all: NodePortAddresses = list(&["0.0.0.0/0", "::/0"]).unwrap();
        assert_eq!(
            all,
            NodePortAddresses::Networks(vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()])
        );
        assert_eq!(all.show(), serde_json::json!(["0.0.0.0/0", "::/0"]));
        for (texts, part) in [
            (&["primary", "10.0.0.0/8"] as &[&str], "cannot be combined"),
            (&["Primary"], "not a CIDR"),
            (&["10.0.0.7"], "write \"10.0.0.7/32\""),
        ] {
            let message = list::<NodePortAddresses>(texts).unwrap_err();
            assert!(message.contains(part), "{texts:?}: {message}");
        }
    }

    #[test]
    fn interfaces() {
        for name in ["", "cbr0", "veth", "br-0a1b2c3d4e5f", "eth0.100"] {
            assert_eq!(check_interface(name), Ok(()), "{name}");
        }
        for name in ["br-0a1b2c3d4e5f6", "a/b", "a b", "a:1", "..", "veth*", "a\"b", "a\u{7f}"] {
            assert!(check_interface(name).is_err(), "{name}");
        }
    }
}
