//! The methods of `keelson.debug.v1.Debug`.
//!
//! In: requests, checked here. Out: the view's answers, or a status that says what was wrong: PERMISSION_DENIED (a
//! change by a user with read access only), INVALID_ARGUMENT (the request), NOT_FOUND (no such actor),
//! RESOURCE_EXHAUSTED (busy: retry), UNAVAILABLE (that part of the agent does not run now, or the agent stops).

use std::{pin::Pin, time::Duration};

use futures_util::{Stream, stream};
use keelson_proto::debug::{self as pb, debug_server::Debug, set_limit_request::To};
use keelson_serve::{Due, Follower};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{
    AgentView, ViewError,
    access::may_change,
    view::{answer, with_timeout},
};

/// For a request without `max_queued`.
pub(crate) const DEFAULT_QUEUED: u32 = 100;
/// More would exceed the message size that clients accept by default.
pub(crate) const MAX_QUEUED: u32 = 10_000;

const DEFAULT_INTERVAL_MS: u32 = 500;
const INTERVALS_MS: std::ops::RangeInclusive<u32> = 100..=3_600_000;

/// The requested `max_queued`, or the default; an error above the maximum.
pub(crate) fn max_queued(asked: u32) -> Result<u32, ViewError> {
    match asked {
        0 => Ok(DEFAULT_QUEUED),
        1..=MAX_QUEUED => Ok(asked),
        _ => Err(ViewError::Invalid(format!("max_queued is {asked}; the maximum is {MAX_QUEUED}"))),
    }
}

/// Lists the existing actors.
pub(crate) fn no_such_actor(name: &str, view: &impl AgentView) -> String {
    format!("actor {name:?} does not exist; the actors are: {}", view.actor_names().join(", "))
}

#[derive(Debug)]
pub(crate) struct DebugService<V> {
    view: V,
    stop: CancellationToken,
}

impl<V: AgentView> DebugService<V> {
    pub(crate) fn new(view: V, stop: CancellationToken) -> Self {
        Self { view, stop }
    }
}

type Pulls = Pin<Box<dyn Stream<Item = Result<pb::PullList, Status>> + Send>>;

#[tonic::async_trait]
impl<V: AgentView> Debug for DebugService<V> {
    type WatchPullsStream = Pulls;

    async fn get_version(
        &self,
        _: Request<pb::GetVersionRequest>,
    ) -> Result<Response<pb::GetVersionResponse>, Status> {
        Ok(Response::new(with_timeout(self.view.version()).await?))
    }

    async fn get_readiness(
        &self,
        _: Request<pb::GetReadinessRequest>,
    ) -> Result<Response<pb::Readiness>, Status> {
        let checks = with_timeout(self.view.readyz()).await?;
        let ready = checks.iter().all(|check| check.ok);
        let checks = checks.into_iter().map(|check| pb::Check {
            name: check.name,
            ok: check.ok,
            message: check.message,
            since_unix_ms: check.since_unix_ms,
        });
        Ok(Response::new(pb::Readiness { ready, checks: checks.collect() }))
    }

    async fn list_actors(
        &self,
        _: Request<pb::ListActorsRequest>,
    ) -> Result<Response<pb::ListActorsResponse>, Status> {
        let actors = with_timeout(self.view.actors()).await?;
        Ok(Response::new(pb::ListActorsResponse { actors }))
    }

    async fn get_actor(&self, request: Request<pb::GetActorRequest>) -> Result<Response<pb::Actor>, Status> {
        let name = request.into_inner().name;
        let actor = with_timeout(self.view.actor(&name)).await?;
        actor.map(Response::new).ok_or_else(|| Status::not_found(no_such_actor(&name, &self.view)))
    }

    async fn list_pulls(
        &self,
        request: Request<pb::ListPullsRequest>,
    ) -> Result<Response<pb::PullList>, Status> {
        let max_queued = max_queued(request.into_inner().max_queued)?;
        Ok(Response::new(answer(self.view.pulls(max_queued)).await?))
    }

    async fn watch_pulls(&self, request: Request<pb::WatchPullsRequest>) -> Result<Response<Pulls>, Status> {
        let request = request.into_inner();
        let max_queued = max_queued(request.max_queued)?;
        let interval_ms = if request.interval_ms == 0 { DEFAULT_INTERVAL_MS } else { request.interval_ms };
        if !INTERVALS_MS.contains(&interval_ms) {
            let (least, most) = INTERVALS_MS.into_inner();
            let text =
                format!("interval_ms is {interval_ms}; it must be {least} to {most}, or 0 for the default");
            return Err(Status::invalid_argument(text));
        }
        let interval = Duration::from_millis(interval_ms.into());
        let follower = Follower::new(self.view.changes(), self.stop.clone(), interval, None);
        Ok(Response::new(Box::pin(watch(self.view.clone(), follower, max_queued))))
    }

    async fn get_limit(&self, _: Request<pb::GetLimitRequest>) -> Result<Response<pb::Limit>, Status> {
        Ok(Response::new(answer(self.view.limit()).await?))
    }

    async fn set_limit(&self, request: Request<pb::SetLimitRequest>) -> Result<Response<pb::Limit>, Status> {
        may_change(&self.view, &request)?;
        let limit = match request.into_inner().to {
            Some(To::MaxParallelImagePulls(limit)) => Some(limit),
            Some(To::Reset(true)) => None,
            Some(To::Reset(false)) | None => {
                let text = "set max_parallel_image_pulls (0: no limit) or reset = true";
                return Err(Status::invalid_argument(text));
            }
        };
        Ok(Response::new(answer(self.view.set_limit(limit)).await?))
    }

    async fn get_storage(&self, _: Request<pb::GetStorageRequest>) -> Result<Response<pb::Storage>, Status> {
        Ok(Response::new(answer(self.view.storage()).await?))
    }

    async fn get_config(&self, _: Request<pb::GetConfigRequest>) -> Result<Response<pb::Config>, Status> {
        Ok(Response::new(with_timeout(self.view.config()).await?))
    }
}

/// Sends the list now, and whenever it differs from the last one that was sent. Each list is made when the watcher has
/// room for it. A busy agent is asked again; any other error ends the stream.
fn watch<V: AgentView>(
    view: V,
    follower: Follower,
    max_queued: u32,
) -> impl Stream<Item = Result<pb::PullList, Status>> + Send {
    let state = Some((view, follower, None::<pb::PullList>));
    stream::unfold(state, move |state| async move {
        let (view, mut follower, mut last) = state?;
        loop {
            match follower.due().await {
                Due::Changed | Due::Refresh => {}
                Due::Stopping => return Some((Err(Status::unavailable("the agent is stopping")), None)),
                Due::Gone => {
                    return Some((Err(Status::unavailable("the pull coordinator is not available")), None));
                }
            }
            match answer(view.pulls(max_queued)).await {
                Ok(list) if last.as_ref() == Some(&list) => {}
                Ok(list) => {
                    last = Some(list.clone());
                    return Some((Ok(list), Some((view, follower, last))));
                }
                Err(ViewError::Busy(_)) => follower.retry(),
                Err(error) => return Some((Err(error.into()), None)),
            }
        }
    })
}
