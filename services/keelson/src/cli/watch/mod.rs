//! `keelson pulls --watch`.
//!
//! Owns: the stream of lists, reconnecting to the agent, and when to end:
//! Ctrl-C, a closed output, or idleness with `--until-idle`.
//! In: the debug API's `WatchPulls`. Out: lists to a [`Screen`]: progress bars on a terminal, else one line per change,
//! or JSON.

mod bars;
mod changes;
mod screen;

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use keelson_config::SocketSpec;
use keelson_proto::debug as pb;
use tonic::{Code, Status, Streaming};

use self::{bars::Bars, changes::Changes, screen::Screen};
use super::{
    args::Output,
    client::{self, ConnectError},
};
use crate::output;

/// Interval of reconnecting.
const RETRY: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Watch {
    pub(super) socket: SocketSpec,
    pub(super) max_queued: u32,
    pub(super) until_idle: bool,
}

enum FollowEnd {
    Idle,
    /// The connection is lost; with the reason for the user.
    Lost(String),
}

impl Watch {
    pub(super) async fn run(&self, output: Output) -> anyhow::Result<()> {
        let mut screen: Box<dyn Screen> = match output {
            Output::Json => Box::new(Documents),
            Output::Table if io::stdout().is_terminal() => Box::new(Bars::new()),
            Output::Table => Box::new(Lines::default()),
        };
        let result = tokio::select! {
            result = self.follow(screen.as_mut()) => result,
            _ = tokio::signal::ctrl_c() => Ok(()),
        };
        screen.end();
        match result {
            Err(error) if is_closed_output(&error) => Ok(()),
            result => result,
        }
    }

    async fn follow(&self, screen: &mut dyn Screen) -> anyhow::Result<()> {
        let mut lists = self.open().await.map_err(|lost| lost.into_error())?;
        loop {
            let reason = match self.read(&mut lists, screen).await? {
                FollowEnd::Idle => return Ok(()),
                FollowEnd::Lost(reason) => reason,
            };
            screen.note(&format!("disconnected from the agent ({reason}); reconnecting"))?;
            lists = self.reopen().await?;
            screen.note("reconnected to the agent")?;
        }
    }

    async fn read(
        &self,
        lists: &mut Streaming<pb::PullList>,
        screen: &mut dyn Screen,
    ) -> anyhow::Result<FollowEnd> {
        loop {
            match lists.message().await {
                Ok(Some(list)) => {
                    screen.show(&list)?;
                    if self.until_idle && idle(&list) {
                        return Ok(FollowEnd::Idle);
                    }
                }
                Ok(None) => return Ok(FollowEnd::Lost("the agent ended the stream".into())),
                Err(status) if is_retryable(&status) => return Ok(FollowEnd::Lost(reason(&status))),
                Err(status) => return Err(client::Refused::from(status).into()),
            }
        }
    }

    async fn open(&self) -> Result<Streaming<pb::PullList>, StreamError> {
        let mut client = client::connect(&self.socket).await.map_err(StreamError::Connect)?;
        let request = pb::WatchPullsRequest { max_queued: self.max_queued, interval_ms: 250 };
        Ok(client.watch_pulls(request).await.map_err(StreamError::Status)?.into_inner())
    }

    async fn reopen(&self) -> anyhow::Result<Streaming<pb::PullList>> {
        loop {
            tokio::time::sleep(RETRY).await;
            match self.open().await {
                Ok(lists) => return Ok(lists),
                Err(lost) if lost.is_retryable() => {}
                Err(lost) => return Err(lost.into_error()),
            }
        }
    }
}

enum StreamError {
    Connect(ConnectError),
    Status(Status),
}

impl StreamError {
    fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(error) => error.is_retryable(),
            Self::Status(status) => is_retryable(status),
        }
    }

    fn into_error(self) -> anyhow::Error {
        match self {
            Self::Connect(error) => error.into(),
            Self::Status(status) => client::Refused::from(status).into(),
        }
    }
}

/// Whether an agent with this status may answer later. A broken connection is reported as `Unknown`, `Internal`
/// or `Cancelled`, depending on where it broke.
fn is_retryable(status: &Status) -> bool {
    !matches!(status.code(), Code::InvalidArgument | Code::Unimplemented | Code::PermissionDenied)
}

fn reason(status: &Status) -> String {
    match status.code() {
        Code::Unavailable | Code::ResourceExhausted => super::format::one_line(status.message()),
        _ => "the connection broke".into(),
    }
}

/// No pull runs or waits; pulls that are held for a caller with credentials do not count, because they may be held for
/// long.
fn idle(list: &pb::PullList) -> bool {
    let held = |pull: &pb::Pull| pull.state() == pb::PullState::Held;
    list.running == 0 && list.queued == 0 && list.pulls.iter().all(held)
}

/// Whether the reader of the output closed it.
fn is_closed_output(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[derive(Default)]
struct Lines {
    changes: Changes,
}

impl Screen for Lines {
    fn show(&mut self, list: &pb::PullList) -> io::Result<()> {
        self.changes.of(list).iter().try_for_each(|line| output::write(line))
    }

    fn note(&mut self, text: &str) -> io::Result<()> {
        self.changes.forget();
        output::write(text)
    }

    fn end(&mut self) {}
}

struct Documents;

impl Screen for Documents {
    fn show(&mut self, list: &pb::PullList) -> io::Result<()> {
        output::write(&serde_json::to_string(list)?)
    }

    fn note(&mut self, text: &str) -> io::Result<()> {
        // Standard output contains only documents.
        output::print_error(text);
        Ok(())
    }

    fn end(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idleness() {
        let list = |running, queued, states: &[pb::PullState]| pb::PullList {
            running,
            queued,
            pulls: states
                .iter()
                .map(|state| pb::Pull { state: (*state).into(), ..Default::default() })
                .collect(),
            ..Default::default()
        };
        use pb::PullState as S;
        assert!(idle(&list(0, 0, &[])));
        assert!(idle(&list(0, 0, &[S::Held])));
        assert!(!idle(&list(1, 0, &[S::Running])));
        assert!(!idle(&list(0, 1, &[S::Queued])));
        assert!(!idle(&list(0, 0, &[S::RunningPresent])));
        assert!(!idle(&list(0, 0, &[S::Retrying])));
        assert!(!idle(&list(0, 0, &[S::WaitingForRuntime])));
    }

    #[test]
    fn permanent_stream_errors() {
        for (status, back) in [
            (Status::unavailable("the agent is stopping"), true),
            (Status::unknown("transport error"), true),
            (Status::resource_exhausted("busy"), true),
            (Status::invalid_argument("interval"), false),
            (Status::unimplemented(""), false),
        ] {
            assert_eq!(is_retryable(&status), back, "{status}");
        }
    }
}
