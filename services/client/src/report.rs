//! Reports of a backend's status to the agent.
//!
//! Owns: [`report`] and [`Reporter`], and the normalization of texts. In: the status of a backend. Out: whether the
//! agent accepted it; `keelson endpoints` and the agent's page show it. Reports use a connection of their own, so that
//! they never disturb the reading of endpoints.

use std::time::Duration;

use keelson_proto::endpoints::Backend;
use tokio::time::timeout;
use tonic::Status;

use crate::{Error, Options, Target, connection::Connection};

/// Maximum time of a report, including connecting.
const DEADLINE: Duration = Duration::from_secs(5);
/// Maximum length of a reason that an agent accepts, in bytes.
const REASON: usize = 1024;

/// Result of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Reported {
    /// The agent accepted it.
    Accepted,
    /// The agent is too old to support reports. This is not an error.
    Unsupported,
}

/// Sends one report of a backend's status; see [`Reporter`] for repeated reports.
///
/// # Errors
/// No answer within 5 s, or the agent refuses it. A backend works without.
pub async fn report(target: &Target, backend: Backend) -> Result<Reported, Error> {
    Reporter::new(target.clone()).report(backend).await
}

/// Reports a backend's status, with each change and at least every 10 s.
///
/// ```no_run
/// # async fn example() {
/// use keelson_client::{Backend, Reporter, Target};
///
/// let mut reporter = Reporter::new(Target::default());
/// let backend = Backend { name: "nft".into(), pid: std::process::id(), state: "pending".into(), ..Backend::default() };
/// if let Err(error) = reporter.report(backend).await {
///     tracing::debug!(%error, "cannot report the status to the agent");
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Reporter {
    options: Options,
    connection: Option<Connection>,
    /// That the agent does not support reports was logged.
    is_unsupported_logged: bool,
}

impl Reporter {
    /// Creates a reporter; it connects with the first report.
    #[must_use]
    pub fn new(target: Target) -> Self {
        // Reports every few seconds make pings unnecessary.
        let options = Options { target, keep_alive: Duration::ZERO, ..Options::default() };
        Self { options, connection: None, is_unsupported_logged: false }
    }

    /// Sends a report. The reason is put on one line and cut to the length that the agent accepts. That the agent does
    /// not support reports is logged once, and tried again with each report: the agent may have been replaced.
    ///
    /// # Errors
    /// No answer within 5 s, or the agent refuses it. A backend works without, and the next report reconnects.
    pub async fn report(&mut self, mut backend: Backend) -> Result<Reported, Error> {
        backend.reason = fitting_reason(&backend.reason);
        // Not put back if it fails or is dropped.
        let kept = self.connection.take();
        let told = timeout(DEADLINE, async {
            let connection = match kept {
                Some(connection) => connection,
                None => Connection::open(&self.options).await?,
            };
            let answer = connection.report(backend).await;
            Ok((connection, answer))
        });
        let late = |_| {
            let text = format!("the agent did not answer the report within {DEADLINE:?}");
            Error::status(Status::deadline_exceeded(text), false)
        };
        let (connection, answer) = told.await.map_err(late)??;
        match answer {
            Ok(()) => {
                self.connection = Some(connection);
                Ok(Reported::Accepted)
            }
            Err(error) if error.is_unimplemented() => {
                self.connection = Some(connection);
                if !std::mem::replace(&mut self.is_unsupported_logged, true) {
                    tracing::info!(target = %self.options.target, "agent does not support reports; this \
                                                                   backend is not shown");
                }
                Ok(Reported::Unsupported)
            }
            Err(error) => Err(error),
        }
    }
}

/// A reason on one line, cut to the maximum length.
fn fitting_reason(reason: &str) -> String {
    let mut line: String = reason.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.len() > REASON {
        const MORE: &str = "...";
        let fits = (0..=REASON - MORE.len()).rev().find(|at| line.is_char_boundary(*at)).unwrap_or_default();
        line.truncate(fits);
        line.push_str(MORE);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_made_to_fit() {
        assert_eq!(fitting_reason("netlink: \x1b[1mno\nsuch\tset\n"), "netlink:  [1mno such set");
        assert_eq!(fitting_reason(&"x".repeat(REASON)).len(), REASON);
        for text in ["x".repeat(REASON + 1), "\u{20ac}".repeat(REASON)] {
            let line = fitting_reason(&text);
            assert!(line.ends_with("...") && (REASON - 3..=REASON).contains(&line.len()), "{}", line.len());
        }
    }
}
