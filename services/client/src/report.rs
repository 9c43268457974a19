//! Reports of a backend's status to the agent.
//!
//! Owns: [`report`] and [`Reporter`], and what a text must be to be taken. In: what a backend is and has done. Out: whether it
//! was taken, to be shown by `keelson endpoints` and on the agent's page. It has a connection of its own: whatever becomes
//! of a report, following goes on undisturbed.

use std::time::Duration;

use keelson_proto::endpoints::Backend;
use tokio::time::timeout;
use tonic::Status;

use crate::{Error, Options, Target, connection::Connection};

/// How long a report may take, with connecting.
const DEADLINE: Duration = Duration::from_secs(5);
/// The longest reason that an agent takes, in bytes.
const REASON: usize = 1024;

/// What became of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Reported {
    /// The agent has it.
    Taken,
    /// The agent is older than reports and knows nothing of them. Nothing is wrong with that.
    Unsupported,
}

/// Sends one report of a backend's status; see [`Reporter`] for repeated reports.
///
/// # Errors
/// Nobody took it within 5 s, or the agent refuses it. A backend goes on without.
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
///     tracing::debug!(%error, "the agent was not told");
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Reporter {
    options: Options,
    connection: Option<Connection>,
    /// That the agent takes no reports was said.
    said: bool,
}

impl Reporter {
    /// Not connected yet.
    #[must_use]
    pub fn new(target: Target) -> Self {
        // What is said every few seconds needs no pings beside it.
        let options = Options { target, keep_alive: Duration::ZERO, ..Options::default() };
        Self { options, connection: None, said: false }
    }

    /// Says it. Of a reason as much is sent as the agent takes, on one line. That the agent is older than reports is
    /// logged once, and asked again each time: it may have been replaced.
    ///
    /// # Errors
    /// Nobody took it within 5 s, or the agent refuses it. A backend goes on without, and the next report connects
    /// anew.
    pub async fn report(&mut self, mut backend: Backend) -> Result<Reported, Error> {
        backend.reason = one_line(&backend.reason);
        // Not put back where it fails, or is dropped half way.
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
                Ok(Reported::Taken)
            }
            Err(error) if error.is_unimplemented() => {
                self.connection = Some(connection);
                if !std::mem::replace(&mut self.said, true) {
                    tracing::info!(target = %self.options.target, "agent does not support reports; this \
                                                                   backend is not shown");
                }
                Ok(Reported::Unsupported)
            }
            Err(error) => Err(error),
        }
    }
}

/// A reason on one line, at most as long as an agent takes.
fn one_line(reason: &str) -> String {
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
        assert_eq!(one_line("netlink: \x1b[1mno\nsuch\tset\n"), "netlink:  [1mno such set");
        assert_eq!(one_line(&"x".repeat(REASON)).len(), REASON);
        for text in ["x".repeat(REASON + 1), "\u{20ac}".repeat(REASON)] {
            let line = one_line(&text);
            assert!(line.ends_with("...") && (REASON - 3..=REASON).contains(&line.len()), "{}", line.len());
        }
    }
}
