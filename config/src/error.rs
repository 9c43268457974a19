//! Everything that can be wrong with settings, each problem with its place, its key and what would be right.

use std::fmt;

use crate::origin::Origin;

/// What is wrong with one value, key or source, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The file is not there, not readable, not text or too large.
    #[error("cannot read the settings file: {reason}")]
    Unreadable {
        /// What the operating system or the check said.
        reason: String,
    },
    /// The file is not TOML.
    #[error("not valid TOML: {message}")]
    Syntax { message: String },
    /// A section that does not exist.
    #[error("unknown section {section}; {}", hint(nearest, "the sections are", known))]
    UnknownSection {
        section: String,
        /// The known section that is most like it.
        nearest: Option<String>,
        known: Vec<String>,
    },
    /// A key that does not exist.
    #[error("unknown key {key}; {}", hint(nearest, "the keys of this section are", known))]
    UnknownKey {
        key: String,
        /// The known key that is most like it, spelt as its source spells keys.
        nearest: Option<String>,
        /// All keys that the place takes.
        known: Vec<String>,
    },
    /// A feature gate that does not exist.
    #[error("unknown feature gate {name}; {}", gate_hint(nearest, known))]
    UnknownGate {
        name: String,
        /// The known gate that is most like it.
        nearest: Option<String>,
        known: Vec<String>,
    },
    /// A gate that has become a fixed part of the program was switched off.
    #[error("feature gate {name} is GA since {since} and cannot be switched off; remove it")]
    LockedGate { name: &'static str, since: &'static str },
    /// `--feature-gates` or `KEELSON_FEATURE_GATES` holds something that is not `Name=true` or `Name=false`.
    #[error("{text} is not a feature gate setting; write Name=true or Name=false, separated by commas")]
    MalformedGate { text: String },
    /// `--set` without a section, a key or a value.
    #[error("{text} is not a setting; write --set section.key=value, such as --set pulls.when_full=reject")]
    MalformedSet { text: String },
    /// An environment variable with one underscore where two belong.
    #[error("two underscores are required between section and key; write {right}")]
    OneUnderscore { right: String },
    /// Two environment variables that differ only in case name the same key and disagree.
    #[error("set twice with different values, also as environment {other}; remove one")]
    SetTwice { other: String },
    #[error("expected {expected}, found {found}")]
    WrongType { expected: String, found: String },
    /// A number or duration outside its bounds.
    #[error("{value} is out of range; allowed: {allowed}")]
    OutOfRange { value: String, allowed: String },
    /// A duration given as a bare number.
    #[error("{number} has no unit; for seconds write \"{number}s\" (units: ms, s, m, h)")]
    DurationWithoutUnit { number: String },
    /// A word that is not one of the choices.
    #[error("{value} is not one of {}{}", allowed.join(", "), did_you_mean(nearest))]
    NotAChoice {
        value: String,
        allowed: Vec<String>,
        /// The choice that is most like it, quoted.
        nearest: Option<String>,
    },
    /// A duration, address, path, mode, name or log filter that cannot be understood.
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
        /// An address of the right form.
        right: &'static str,
    },
    /// Values that are right each by itself but not together.
    #[error("{message}{}", also_involved(others))]
    Relation {
        /// What does not go together and what would be right.
        message: String,
        /// The other settings involved, with their origins.
        others: Vec<(String, Origin)>,
    },
    /// The layers could not be put together; a defect in Keelson.
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

/// The longest piece of a value that an error repeats.
const QUOTED_CHARS: usize = 80;

/// A value as it is repeated in an error: quoted, on one line, cut if long, and without what stands before an
/// `@`, which may be a password in the wrong place.
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

/// One problem: where, which key, what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub place: Origin,
    /// The setting, as `section.key`; absent when no known setting is meant.
    pub key: Option<String>,
    /// What is wrong and what would be right.
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

/// Every problem of a set of sources, in the order of their places. Never empty.
///
/// `Display` gives one line a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors {
    problems: Vec<Problem>,
}

impl Errors {
    /// Sorts the problems by place.
    pub(crate) fn sorted(mut problems: Vec<Problem>) -> Self {
        problems.sort_by(|a, b| a.place.sort_key().cmp(&b.place.sort_key()));
        Self { problems }
    }

    /// The problems, sorted by place.
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
