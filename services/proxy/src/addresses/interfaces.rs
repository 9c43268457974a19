//! Patterns that select interfaces by name.
//!
//! Owns: [`InterfacePattern`], one entry of a setting such as `proxy.flowtable_interfaces`, and [`matching`]. In: the node's
//! interfaces. Out: names. Pure.

use std::collections::BTreeSet;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    pub name: String,
    /// Interface index. An interface that is created again under the same name has another index.
    pub index: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterfacePattern {
    Name(String),
    Prefix(String),
}

impl InterfacePattern {
    /// Parses a name, or a prefix that ends in `*`.
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

/// Names of the interfaces that a pattern matches. The loopback interface is never among them: nothing is forwarded
/// through it.
#[must_use]
pub fn matching(patterns: &[InterfacePattern], interfaces: &[Interface]) -> BTreeSet<String> {
    let names = interfaces.iter().map(|interface| interface.name.as_str());
    let wanted = names.filter(|name| *name != "lo" && patterns.iter().any(|pattern| pattern.matches(name)));
    wanted.map(str::to_owned).collect()
}
