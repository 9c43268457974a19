//! The path of a packet as text.
//!
//! In: an explanation from the proxy. Out: the meaning of address and port, then for each kind of sender the path
//! of the packet and the reasons, step by step.

use keelson_proto::proxy as pb;

use crate::cli::format::{clean, first_names, one_line};

/// Maximum number of endpoints; the document has all.
const NAMED: usize = 10;

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
