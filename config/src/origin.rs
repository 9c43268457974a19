//! Where a value or a problem comes from.

use std::fmt;
use std::path::PathBuf;

/// `{}` prints the place as `/etc/keelson/keelson.toml:12`; `{:#}` adds the column.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    Default,
    File {
        path: PathBuf,
        /// From 1; 0: the entire file.
        line: usize,
        /// In characters, from 1; 0: the entire file.
        column: usize,
    },
    Env(String),
    /// Without the value: `--set pulls.when_full`.
    Flag(String),
}

impl Origin {
    /// `default`, `file`, `environment` or `flag`.
    pub fn source(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File { .. } => "file",
            Self::Env(_) => "environment",
            Self::Flag(_) => "flag",
        }
    }

    /// Sorts by layer, within a file by position, within the environment by name. Flags keep the order in which they
    /// were given.
    pub(crate) fn sort_key(&self) -> (u8, usize, usize, &str) {
        match self {
            Self::Default => (0, 0, 0, ""),
            Self::File { line, column, .. } => (1, *line, *column, ""),
            Self::Env(name) => (2, 0, 0, name),
            Self::Flag(_) => (3, 0, 0, ""),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line, column } => {
                f.write_str(&escaped(&path.to_string_lossy()))?;
                if *line > 0 {
                    write!(f, ":{line}")?;
                }
                if f.alternate() && *column > 0 {
                    write!(f, ":{column}")?;
                }
                Ok(())
            }
            Self::Env(name) => write!(f, "environment {}", escaped(name)),
            Self::Flag(text) => write!(f, "flag {}", escaped(text)),
        }
    }
}

/// A problem is one line and an origin may appear in a TOML comment, so control characters are escaped.
pub(crate) fn escaped(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let (escaped, plain) =
                if c.is_control() { (Some(c.escape_default()), None) } else { (None, Some(c)) };
            escaped.into_iter().flatten().chain(plain)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_the_place() {
        let file = Origin::File { path: "/etc/keelson/keelson.toml".into(), line: 12, column: 5 };
        assert_eq!(file.to_string(), "/etc/keelson/keelson.toml:12");
        assert_eq!(format!("{file:#}"), "/etc/keelson/keelson.toml:12:5");
        let file = Origin::File { path: "a\nb".into(), line: 0, column: 0 };
        assert_eq!(format!("{file:#}"), "a\\nb");
        assert_eq!(
            Origin::Env("KEELSON_PULLS__WHEN_FULL".into()).to_string(),
            "environment KEELSON_PULLS__WHEN_FULL"
        );
        assert_eq!(Origin::Flag("--set pulls.when_full".into()).to_string(), "flag --set pulls.when_full");
        assert_eq!(Origin::Default.to_string(), "default");
    }
}
