//! Settings of the types `bool`, `u32`, `Duration` and `String`.

use std::fmt::Display;
use std::time::Duration;

use serde_json::Value as Json;
use tracing_subscriber::filter::Targets;

use crate::error::{Fault, quote};
use crate::net;
use crate::setting_type::{Any, Raw, Setting, Within};
use crate::suggest::nearest;

impl Setting for bool {
    type Rule = Any;

    fn read(raw: &Raw, _: &Any) -> Result<Self, Fault> {
        match raw {
            Raw::Bool(b) => Ok(*b),
            Raw::Untyped(t) if t == "true" => Ok(true),
            Raw::Untyped(t) if t == "false" => Ok(false),
            Raw::Text(t) if t == "true" || t == "false" => Err(raw.wrong("true or false, without quotes")),
            _ => Err(raw.wrong("true or false")),
        }
    }

    fn show(&self) -> Json {
        Json::Bool(*self)
    }

    fn describe(_: &Any) -> String {
        "true or false".into()
    }
}

impl Setting for u32 {
    type Rule = Within<u32>;

    fn read(raw: &Raw, rule: &Self::Rule) -> Result<Self, Fault> {
        let out_of_range =
            |value: &dyn Display| Fault::OutOfRange { value: value.to_string(), allowed: rule.words(|n| *n) };
        let number = match raw {
            Raw::Int(i) => *i,
            Raw::Untyped(t) => match t.parse::<i64>() {
                Ok(i) => i,
                Err(_) if is_number(t) => return Err(out_of_range(&quote(t))),
                Err(_) => return Err(raw.wrong("a whole number")),
            },
            Raw::Text(t) if is_number(t) => return Err(raw.wrong("a whole number, without quotes")),
            _ => return Err(raw.wrong("a whole number")),
        };
        u32::try_from(number).ok().filter(|n| rule.admits(n)).ok_or_else(|| out_of_range(&number))
    }

    fn show(&self) -> Json {
        Json::from(*self)
    }

    fn describe(rule: &Self::Rule) -> String {
        format!("number, {}", rule.words(|n| *n))
    }
}

fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

/// The largest unit is hours: `1m30s`.
pub(crate) fn show_duration(duration: &Duration) -> String {
    let (secs, nanos) = (duration.as_secs(), u64::from(duration.subsec_nanos()));
    let parts = [
        (secs / 3600, "h"),
        (secs / 60 % 60, "m"),
        (secs % 60, "s"),
        (nanos / 1_000_000, "ms"),
        (nanos / 1000 % 1000, "us"),
        (nanos % 1000, "ns"),
    ];
    let text: String = parts.iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n}{unit}")).collect();
    if text.is_empty() { "0s".into() } else { text }
}

impl Setting for Duration {
    type Rule = Within<Duration>;

    fn read(raw: &Raw, rule: &Self::Rule) -> Result<Self, Fault> {
        let text = match raw {
            Raw::Int(i) => return Err(Fault::DurationWithoutUnit { number: i.to_string() }),
            Raw::Text(t) | Raw::Untyped(t) => t.trim(),
            _ => return Err(raw.wrong("a duration such as \"10s\"")),
        };
        if is_number(text) && text.len() <= 20 {
            return Err(Fault::DurationWithoutUnit { number: text.into() });
        }
        let duration = humantime::parse_duration(text).map_err(|e| Fault::Malformed {
            what: "a duration",
            value: quote(text),
            reason: e.to_string(),
            right: "write numbers with units, such as \"500ms\", \"10s\" or \"1m30s\"".into(),
        })?;
        if rule.admits(&duration) {
            return Ok(duration);
        }
        Err(Fault::OutOfRange { value: quote(text), allowed: rule.words(show_duration) })
    }

    fn show(&self) -> Json {
        show_duration(self).into()
    }

    fn describe(rule: &Self::Rule) -> String {
        format!("duration, {}", rule.words(show_duration))
    }
}

pub(crate) enum TextRule {
    /// Empty: the host name.
    NodeName,
    /// Directives of a `tracing` filter.
    LogFilter,
    /// Empty: none.
    Server,
    /// A name or a prefix; empty: none.
    Interface,
    /// One line of text, with this description. The user of the setting checks more.
    Free(&'static str),
}

impl Setting for String {
    type Rule = TextRule;

    fn read(raw: &Raw, rule: &TextRule) -> Result<Self, Fault> {
        let text = raw.text("a string")?.trim();
        match rule {
            TextRule::NodeName if text.is_empty() => {}
            TextRule::NodeName => check_node_name(text)?,
            TextRule::LogFilter => check_log_filter(text)?,
            TextRule::Server if text.is_empty() => {}
            TextRule::Server => check_server(text)?,
            TextRule::Interface => net::check_interface(text)?,
            TextRule::Free(_) => check_line(text)?,
        }
        Ok(text.into())
    }

    fn show(&self) -> Json {
        self.as_str().into()
    }

    fn describe(rule: &TextRule) -> String {
        match rule {
            TextRule::NodeName => "node name (DNS subdomain), or \"\" for the host's name".into(),
            TextRule::LogFilter => "log filter".into(),
            TextRule::Server => "`https://host:port`, or \"\" for none".into(),
            TextRule::Interface => "name of a network interface, or \"\" for none".into(),
            TextRule::Free(what) => (*what).into(),
        }
    }
}

/// Node names are RFC 1123 subdomains, as in Kubernetes.
pub(crate) fn check_node_name(name: &str) -> Result<(), Fault> {
    let malformed = |reason: &str, right: String| Fault::Malformed {
        what: "a node name",
        value: quote(name),
        reason: reason.into(),
        right,
    };
    let rule = || "use lower case letters, digits, \"-\" and \".\", at most 253".to_owned();
    if name.len() > 253 {
        return Err(malformed("it is too long", rule()));
    }
    let label_ok = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if name.split('.').all(label_ok) {
        return Ok(());
    }
    let lower = name.to_ascii_lowercase();
    if lower.split('.').all(label_ok) {
        return Err(malformed("node names are lower case", format!("write {}", quote(&lower))));
    }
    Err(malformed("it is not a DNS subdomain (RFC 1123)", rule()))
}

/// TLS only: a plain connection would disclose the token.
fn check_server(text: &str) -> Result<(), Fault> {
    const VALID: &str = "https://10.0.0.1:6443";
    let malformed = |reason: &str| Fault::Malformed {
        what: "an API server's address",
        value: quote(text),
        reason: reason.into(),
        right: format!("write \"https://host:port\", such as \"{VALID}\""),
    };
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err(match text.contains('@') {
            true => Fault::UserInfo { right: VALID },
            false => malformed("the scheme is missing"),
        });
    };
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.contains('@') || scheme.contains('@') {
        return Err(Fault::UserInfo { right: VALID });
    }
    if scheme != "https" {
        return Err(malformed("the scheme must be https"));
    }
    if authority.is_empty() || text.contains(char::is_whitespace) || text.contains(['?', '#']) {
        return Err(malformed("the host is missing"));
    }
    Ok(())
}

/// One line without control characters.
fn check_line(text: &str) -> Result<(), Fault> {
    if text.chars().any(char::is_control) {
        return Err(Fault::Malformed {
            what: "a line of text",
            value: quote(text),
            reason: "it has a control character".into(),
            right: "write it on one line".into(),
        });
    }
    Ok(())
}

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The filter's parser takes a misspelt level for the name of a target and would then log only that target, so words
/// that look like a level are rejected.
fn check_log_filter(text: &str) -> Result<(), Fault> {
    let malformed = |reason: String, right: &str| Fault::Malformed {
        what: "a log filter",
        value: quote(text),
        reason,
        right: right.into(),
    };
    let example = "write a level (off, error, warn, info, debug, trace) or directives such as \
                   \"info,keelson_cri=debug\"";
    if text.is_empty() {
        return Err(malformed("it is empty".into(), example));
    }
    for word in text.split(',').map(str::trim) {
        let known = LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
        if let Some(level) = nearest(word, LEVELS).filter(|_| !known) {
            return Err(malformed(
                format!("{} is not a log level", quote(word)),
                &format!("did you mean {level}?"),
            ));
        }
    }
    match text.parse::<Targets>() {
        Ok(_) => Ok(()),
        Err(e) => Err(malformed(e.to_string(), example)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_duration_shown_is_the_duration_read(secs in 0u64..86_400, nanos in 0u32..1_000_000_000) {
            let duration = Duration::new(secs, nanos);
            let text = show_duration(&duration);
            prop_assert_eq!(humantime::parse_duration(&text), Ok(duration), "{}", text);
        }
    }

    #[test]
    fn durations_are_shown_in_the_units_of_settings() {
        for (duration, text) in [
            (Duration::ZERO, "0s"),
            (Duration::from_secs(86_400), "24h"),
            (Duration::from_secs(90), "1m30s"),
            (Duration::from_millis(500), "500ms"),
        ] {
            assert_eq!(show_duration(&duration), text);
        }
    }
}
