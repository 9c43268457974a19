//! Errors in settings, each with its place, its key and a correction.

use std::fmt;

use crate::origin::Origin;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The file is missing, unreadable, not text or too large.
    #[error("cannot read the settings file: {reason}")]
    Unreadable { reason: String },
    #[error("not valid TOML: {message}")]
    Syntax { message: String },
    #[error("unknown section {section}; {}", hint(nearest, "the sections are", known))]
    UnknownSection { section: String, nearest: Option<String>, known: Vec<String> },
    #[error("unknown key {key}; {}", hint(nearest, "the keys of this section are", known))]
    UnknownKey {
        key: String,
        /// The most similar known key, in the spelling of its source.
        nearest: Option<String>,
        /// All keys that are valid there.
        known: Vec<String>,
    },
    #[error("unknown feature gate {name}; {}", gate_hint(nearest, known))]
    UnknownGate { name: String, nearest: Option<String>, known: Vec<String> },
    /// A GA gate was set to false.
    #[error("feature gate {name} is GA since {since} and cannot be switched off; remove it")]
    LockedGate { name: &'static str, since: &'static str },
    /// `--feature-gates` or `KEELSON_FEATURE_GATES` contains something other than `Name=true` and `Name=false`.
    #[error("{text} is not a feature gate setting; write Name=true or Name=false, separated by commas")]
    MalformedGate { text: String },
    /// `--set` without a section, a key or a value.
    #[error("{text} is not a setting; write --set section.key=value, such as --set pulls.when_full=reject")]
    MalformedSet { text: String },
    /// An environment variable with one underscore instead of two.
    #[error("two underscores are required between section and key; write {right}")]
    OneUnderscore { right: String },
    /// Two environment variables that differ only in case set the same key to different values.
    #[error("set twice with different values, also as environment {other}; remove one")]
    SetTwice { other: String },
    #[error("expected {expected}, found {found}")]
    WrongType { expected: String, found: String },
    #[error("{value} is out of range; allowed: {allowed}")]
    OutOfRange { value: String, allowed: String },
    #[error("{number} has no unit; for seconds write \"{number}s\" (units: ms, s, m, h)")]
    DurationWithoutUnit { number: String },
    #[error("{value} is not one of {}{}", allowed.join(", "), did_you_mean(nearest))]
    NotAChoice {
        value: String,
        allowed: Vec<String>,
        /// The most similar choice, quoted.
        nearest: Option<String>,
    },
    #[error("{value} is not {what}: {reason}; {right}")]
    Malformed {
        /// What the value should be, with its article.
        what: &'static str,
        value: String,
        reason: String,
        right: String,
    },
    /// An address with a user name or password. The value is not repeated.
    #[error(
        "an address must not contain \"@\", because settings must not hold user names or passwords; write \
         {right}"
    )]
    UserInfo {
        /// An example of a valid address.
        right: &'static str,
    },
    #[error("{message}{}", also_involved(others))]
    Relation { message: String, others: Vec<(String, Origin)> },
    /// The layers cannot be merged: a bug in Keelson.
    #[error("cannot merge the layers of settings: {reason}; please report this bug")]
    Merge { reason: String },
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|n| format!("; did you mean {n}?")).unwrap_or_default()
}

fn hint(nearest: &Option<String>, lead: &str, known: &[String]) -> String {
    match nearest {
        Some(nearest) => format!("did you mean {nearest}?"),
        None => format!("{lead} {}", known.join(", ")),
    }
}

fn gate_hint(nearest: &Option<String>, known: &[String]) -> String {
    let known = format!("known gates: {}", known.join(", "));
    match nearest {
        Some(nearest) => format!("did you mean {nearest}? {known}"),
        None => known,
    }
}

fn also_involved(others: &[(String, Origin)]) -> String {
    if others.is_empty() {
        return String::new();
    }
    let list: Vec<String> = others.iter().map(|(key, origin)| format!("{key}: {origin}")).collect();
    format!(" ({})", list.join("; "))
}

/// Maximum length of a value in an error.
const QUOTED_CHARS: usize = 80;

/// A value for an error: quoted, on one line, truncated, and without the part before an `@`, which may be a misplaced
/// password.
pub(crate) fn quote(text: &str) -> String {
    let shown = match text.rsplit_once('@') {
        Some((_, tail)) => format!("...@{tail}"),
        None => text.to_owned(),
    };
    if shown.chars().count() <= QUOTED_CHARS {
        return format!("{shown:?}");
    }
    let head: String = shown.chars().take(QUOTED_CHARS).collect();
    format!("{:?}", head + "...")
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub place: Origin,
    /// `section.key`; `None` if no known setting is concerned.
    pub key: Option<String>,
    pub fault: Fault,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}: ", self.place)?;
        // A flag's place names the key already.
        let named = |key: &&String| matches!(&self.place, Origin::Flag(text) if text.ends_with(*key));
        if let Some(key) = self.key.as_ref().filter(|key| !named(key)) {
            write!(f, "{key}: ")?;
        }
        self.fault.fmt(f)
    }
}

/// All problems, sorted by place; never empty. `Display` prints one per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors {
    problems: Vec<Problem>,
}

impl Errors {
    pub(crate) fn sorted(mut problems: Vec<Problem>) -> Self {
        problems.sort_by(|a, b| a.place.sort_key().cmp(&b.place.sort_key()));
        Self { problems }
    }

    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}
