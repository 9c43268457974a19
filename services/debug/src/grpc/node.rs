//! The methods of `keelson.node.v1.Node`.
//!
//! In: requests, passed to the view unchanged: the reporter decides which conditions are valid. Out: the view's
//! answers, or a status: INVALID_ARGUMENT (the condition), PERMISSION_DENIED (its type belongs to another process, or
//! the user has read access only), RESOURCE_EXHAUSTED (there are too many), NOT_FOUND (none of that type was set),
//! UNAVAILABLE (heartbeats are disabled, or there is no answer).

use std::future::Future;

use keelson_proto::node::{self as pb, node_server::Node};
use tonic::{Request, Response, Status};

use crate::{
    AgentView, ConditionError,
    access::may_change,
    view::{answer, with_timeout},
};

impl From<ConditionError> for Status {
    fn from(error: ConditionError) -> Self {
        match error {
            ConditionError::Invalid(text) => Self::invalid_argument(text),
            ConditionError::NotYours(text) => Self::permission_denied(text),
            ConditionError::TooMany(text) => Self::resource_exhausted(text),
            ConditionError::NotSet(text) => Self::not_found(text),
            ConditionError::Unavailable(text) => Self::unavailable(text),
        }
    }
}

#[derive(Debug)]
pub(super) struct NodeService<V> {
    view: V,
}

impl<V: AgentView> NodeService<V> {
    pub(super) fn new(view: V) -> Self {
        Self { view }
    }
}

/// Bounds the wait for a change, and converts an error into a status.
async fn change<T>(change: impl Future<Output = Result<T, ConditionError>>) -> Result<T, Status> {
    Ok(with_timeout(change).await??)
}

#[tonic::async_trait]
impl<V: AgentView> Node for NodeService<V> {
    async fn set_condition(
        &self,
        request: Request<pb::SetConditionRequest>,
    ) -> Result<Response<pb::SetConditionResponse>, Status> {
        may_change(&self.view, &request)?;
        let changed = change(self.view.set_condition(request.into_inner())).await?;
        Ok(Response::new(pb::SetConditionResponse { changed }))
    }

    async fn clear_condition(
        &self,
        request: Request<pb::ClearConditionRequest>,
    ) -> Result<Response<pb::ClearConditionResponse>, Status> {
        may_change(&self.view, &request)?;
        change(self.view.clear_condition(&request.into_inner().r#type)).await?;
        Ok(Response::new(pb::ClearConditionResponse {}))
    }

    async fn get_heartbeats(
        &self,
        _: Request<pb::GetHeartbeatsRequest>,
    ) -> Result<Response<pb::Heartbeats>, Status> {
        Ok(Response::new(answer(self.view.heartbeats()).await?))
    }
}
