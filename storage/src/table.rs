//! Names of the tables, and display of keys.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! tables {
    ($($(#[$doc:meta])* $variant:ident = $tag:literal, $name:literal;)+) => {
        /// A table: a set of records ordered by key.
        ///
        /// A new table needs no new schema version: a binary that does not know a table keeps its records.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        #[non_exhaustive]
        pub enum Table {
            $($(#[$doc])* $variant,)+
        }

        impl Table {
            /// In display order.
            pub const ALL: &'static [Table] = &[$(Table::$variant),+];

            pub const fn name(self) -> &'static str {
                match self { $(Table::$variant => $name),+ }
            }

            /// First byte of the table's keys on disk. Never reuse one.
            pub(crate) const fn tag(self) -> u8 {
                match self { $(Table::$variant => $tag),+ }
            }

            pub fn from_name(name: &str) -> Option<Table> {
                match name { $($name => Some(Table::$variant),)+ _ => None }
            }
        }
    };
}

tables! {
    /// Facts about the agent itself, and records that a migration could not convert.
    Meta = 1, "meta";
    Pulls = 2, "pulls";
    /// Leases that the agent holds on the container runtime.
    Leases = 3, "leases";
    /// Settings changed at run time.
    Settings = 4, "settings";
    /// The last report to the API server, the Lease's identity, conditions set by other processes.
    Heartbeats = 5, "heartbeats";
    /// The last published endpoints, and their instance ID.
    Endpoints = 6, "endpoints";
}

impl Table {
    /// The key on disk: the table's tag, then the key.
    pub(crate) fn raw_key(self, key: &[u8]) -> Vec<u8> {
        let mut raw = Vec::with_capacity(key.len() + 1);
        raw.push(self.tag());
        raw.extend_from_slice(key);
        raw
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRecord {
    pub table: Table,
    pub key: Vec<u8>,
    pub reason: String,
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot decode record {}/{}: {}", self.table, printable_key(&self.key), self.reason)
    }
}

/// For messages: text if it is text, else a number if it has a number's length, else hex.
pub(crate) fn printable_key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.is_empty() && !text.contains(char::is_control) => text.to_owned(),
        _ => match <[u8; 8]>::try_from(key) {
            Ok(bytes) => u64::from_be_bytes(bytes).to_string(),
            Err(_) => format!("0x{}", hex(key)),
        },
    }
}

/// In lower case.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        // Writing into a String cannot fail.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_names_are_unique_and_none_is_the_internal_tag() {
        for (i, a) in Table::ALL.iter().enumerate() {
            assert_ne!(a.tag(), crate::seal::INTERNAL_TAG);
            assert_eq!(Table::from_name(a.name()), Some(*a));
            for b in &Table::ALL[i + 1..] {
                assert_ne!(a.tag(), b.tag());
                assert_ne!(a.name(), b.name());
            }
        }
        assert_eq!(Table::from_name("nonsense"), None);
    }

    #[test]
    fn keys_are_printed_readably() {
        assert_eq!(printable_key(b"instance-id"), "instance-id");
        assert_eq!(printable_key(&7u64.to_be_bytes()), "7");
        assert_eq!(printable_key(&[0xff, 0x01]), "0xff01");
        assert_eq!(printable_key(b""), "0x");
    }
}
