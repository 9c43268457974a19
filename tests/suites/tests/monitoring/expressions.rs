//! Names of metrics in PromQL expressions.
//!
//! Owns: a tokenizer that finds them. In: an expression that Prometheus accepts. Out: names of series, with `_bucket` and
//! the like.

use std::collections::BTreeSet;

/// Words of the language, which stand where a name may stand.
const WORDS: [&str; 14] = [
    "and",
    "or",
    "unless",
    "bool",
    "offset",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "start",
    "end",
    "inf",
];
/// Followed by a list of labels.
const LABEL_LISTS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

pub(crate) fn metrics_in(expr: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = expr;
    while let Some(first) = rest.chars().next() {
        match first {
            '"' => rest = after(&rest[1..], '"'),
            '{' => rest = after(rest, '}'),
            '[' => rest = after(rest, ']'),
            letter if letter.is_ascii_alphabetic() || letter == '_' || letter == ':' => {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
                let (word, behind) = rest.split_at(end.unwrap_or(rest.len()));
                let is_call = behind.trim_start().starts_with('(');
                rest = behind;
                if LABEL_LISTS.contains(&word) {
                    if is_call {
                        rest = after(behind, ')');
                    }
                } else if !WORDS.contains(&word) && !is_call && !is_aggregation(word, behind) {
                    found.insert(word.to_owned());
                }
            }
            // A number may have letters: 350e6.
            digit if digit.is_ascii_digit() => {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
                rest = &rest[end.unwrap_or(rest.len())..];
            }
            other => rest = &rest[other.len_utf8()..],
        }
    }
    found
}

/// `sum by (...) (...)`.
fn is_aggregation(word: &str, behind: &str) -> bool {
    let next = behind.trim_start();
    matches!(word, "sum" | "avg" | "min" | "max" | "count" | "group" | "topk")
        && (next.starts_with("by") || next.starts_with("without"))
}

fn after(text: &str, end: char) -> &str {
    text.find(end).map_or("", |at| &text[at + end.len_utf8()..])
}

#[test]
fn names_are_told_from_functions_labels_and_numbers() {
    for (expr, names) in [
        ("up{job=\"a_metric\"} == 0", &["up"][..]),
        ("sum by (job) (rate(a_total{le=\"1.0\"}[5m])) / b:c:rate5m > 350e6", &["a_total", "b:c:rate5m"]),
        ("a unless on (instance, name) b == 1 or vector(0)", &["a", "b"]),
        ("a / on (x) group_left b", &["a", "b"]),
        ("a / on (x) group_left (y) b", &["a", "b"]),
        ("avg by (job) (a <= bool 20)", &["a"]),
        ("histogram_quantile(0.99, sum by (le, ip_family) (rate(a_bucket[1m])))", &["a_bucket"]),
    ] {
        let expected: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(metrics_in(expr), expected, "{expr}");
    }
}
