//! The way of a packet, in words.
//!
//! In: an explanation as the proxy gives it. Out: what the address and port are, then for each kind of sender what becomes
//! of the packet and why, step by step.

use keelson_proto::proxy as pb;

use crate::cli::format::{clean, first_names, one_line};

/// Endpoints that are named; the document has all.
const NAMED: usize = 10;

/// Everything there is to say, for people.
pub(super) fn describe(explanation: &pb::Explanation) -> String {
    let mut text = format!("{}\n", one_line(&explanation.frontend));
    for way in &explanation.ways {
        let masqueraded = if way.masqueraded { ", masqueraded" } else { "" };
        text.push_str(&format!(
            "\nFrom {}: {}{masqueraded}\n",
            one_line(&way.from),
            clean(&way.verdict).to_uppercase()
        ));
        if !way.endpoints.is_empty() {
            text.push_str(&format!("  to {}\n", first_names(&way.endpoints, NAMED)));
        }
        for (number, step) in (1..).zip(&way.steps) {
            text.push_str(&format!("  {number:2}. {}\n", one_line(step)));
        }
    }
    text
}
