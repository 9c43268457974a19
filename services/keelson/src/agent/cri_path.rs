//! Whether the CRI path answers: the CRI socket, and the actors behind it.

use std::{path::Path, time::Duration};

use keelson_actor_system::inspect::Status;
use keelson_cri::front;
use keelson_debug::Check;
use tokio::time::timeout;

use super::actor_handle::ActorHandle;

/// A part of the path that takes longer to answer is stuck.
const TIMEOUT: Duration = Duration::from_secs(5);
const SOCKET: &str = "cri-socket";

/// Asks the socket's thread and the actors behind it; one check each.
pub(super) async fn check_path(socket: &Path, actors: impl Iterator<Item = &ActorHandle>) -> Vec<Check> {
    let pinged = async {
        let wrong = match timeout(TIMEOUT, front::ping(socket)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                Some(format!("{} does not answer: {:#}", socket.display(), anyhow::Error::new(error)))
            }
            Err(_) => Some(format!("{} does not answer within {TIMEOUT:?}", socket.display())),
        };
        check(SOCKET, wrong)
    };
    let asked = actors.map(|actor| async move {
        let name = actor.recorder().name();
        let answers = match actor.recorder().current_status() {
            // It is retried, and meanwhile the front passes pulls through.
            Status::Starting | Status::Restarting | Status::Failing => true,
            Status::Running | Status::Stopped | Status::Disabled => actor.answers(TIMEOUT).await,
        };
        check(name, (!answers).then(|| format!("does not answer within {TIMEOUT:?}")))
    });
    let (socket, mut checks) = tokio::join!(pinged, futures_util::future::join_all(asked));
    checks.insert(0, socket);
    checks
}

fn check(name: &str, wrong: Option<String>) -> Check {
    Check {
        name: name.to_owned(),
        ok: wrong.is_none(),
        message: wrong.unwrap_or_else(|| "answers".to_owned()),
        since_unix_ms: 0,
    }
}
