//! Which interfaces are meant by their names.
//!
//! Owns: [`InterfacePattern`], one entry of a setting such as `proxy.flowtable_interfaces`, and [`matching`]. In: the node's
//! interfaces. Out: names. Pure.

use std::collections::BTreeSet;

/// An interface of the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// Its name, as `ip link` lists it.
    pub name: String,
    /// Its number: another interface that gets the same name has another.
    pub index: usize,
}

/// Interfaces by their name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterfacePattern {
    /// The one of this name.
    Name(String),
    /// Those whose name begins so.
    Prefix(String),
}

impl InterfacePattern {
    /// Reads a name, or a prefix that ends in `*`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text.strip_suffix('*') {
            Some(prefix) => Self::Prefix(prefix.to_owned()),
            None => Self::Name(text.to_owned()),
        }
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Name(own) => own == name,
            Self::Prefix(prefix) => name.starts_with(prefix.as_str()),
        }
    }
}

/// The names of the interfaces that a pattern matches. Nothing is forwarded through the loopback interface, so it is never
/// among them.
#[must_use]
pub fn matching(patterns: &[InterfacePattern], interfaces: &[Interface]) -> BTreeSet<String> {
    let names = interfaces.iter().map(|interface| interface.name.as_str());
    let wanted = names.filter(|name| *name != "lo" && patterns.iter().any(|pattern| pattern.matches(name)));
    wanted.map(str::to_owned).collect()
}
