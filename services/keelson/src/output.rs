//! Standard output and standard error.
//!
//! In: text. Out: standard output and standard error. A closed output (`keelson pulls | head -1`) is
//! no error.

use std::io::{self, Write as _};

/// Writes `text` and a line break to standard output; a closed pipe is no error.
pub(crate) fn print(text: &str) -> io::Result<()> {
    match write(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// As [`print()`], but a closed pipe is an error, for callers that would go on writing.
pub(crate) fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// Writes a line to standard error; failures are ignored.
pub(crate) fn print_error(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", text.trim_end());
}

pub(crate) fn json(document: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(document)?)
}
