//! Texts for keys, ranges and verdicts.

use ipnet::IpNet;
use keelson_proxy::model::Family;

use crate::{
    element::{Element, Key, SetName, Value, Verdict},
    ruleset::element_text,
};

/// Number of ranges that are listed; further ones are counted.
const NAMED: usize = 4;

/// A key as nft writes it: `10.96.0.10 . tcp . 80`.
pub(super) fn key(family: Family, set: SetName, key: Key) -> String {
    element_text(family, &Element { set, key, key_end: None, value: Value::None })
}

pub(super) fn verdict(verdict: Verdict) -> String {
    match verdict {
        Verdict::Drop => "drop".into(),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

/// `192.0.2.0/24, 203.0.113.0/25 and 7 more`.
pub(super) fn ranges(ranges: &[IpNet]) -> String {
    let name = |range: &IpNet| {
        if range.prefix_len() == range.max_prefix_len() {
            range.addr().to_string()
        } else {
            range.to_string()
        }
    };
    let named: Vec<String> = ranges.iter().take(NAMED).map(name).collect();
    match ranges.len().checked_sub(NAMED) {
        Some(more @ 1..) => format!("{} and {more} more", named.join(", ")),
        _ => named.join(", "),
    }
}

/// `1 endpoint`, `2 endpoints`.
pub(super) fn count(number: usize, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}
