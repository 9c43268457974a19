//! The methods of `keelson.endpoints.v1.Inspection`.
//!
//! In: requests, checked by [`crate::endpoints`]. Out: the view's answers, or a status: INVALID_ARGUMENT (invalid
//! request), NOT_FOUND (neither a Service nor an EndpointSlice of that name is known), RESOURCE_EXHAUSTED
//! (busy: retry), UNAVAILABLE (nothing is known yet, or there is no answer).

use keelson_proto::endpoints::{self as pb, inspection_server::Inspection};
use tonic::{Request, Response, Status};

use crate::{
    AgentView,
    endpoints::{self, ExplainError},
};

impl From<ExplainError> for Status {
    fn from(error: ExplainError) -> Self {
        match error {
            ExplainError::NotKnown(text) => Self::not_found(text),
            ExplainError::View(error) => error.into(),
        }
    }
}

#[derive(Debug)]
pub(super) struct InspectionService<V> {
    view: V,
}

impl<V: AgentView> InspectionService<V> {
    pub(super) fn new(view: V) -> Self {
        Self { view }
    }
}

#[tonic::async_trait]
impl<V: AgentView> Inspection for InspectionService<V> {
    async fn get_state(&self, request: Request<pb::GetStateRequest>) -> Result<Response<pb::State>, Status> {
        let request = request.into_inner();
        let state = endpoints::state(&self.view, &request.namespace, request.max_services).await?;
        Ok(Response::new(state))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::Explanation>, Status> {
        let request = request.into_inner();
        let explanation = endpoints::explain(&self.view, &request.namespace, &request.name).await?;
        Ok(Response::new(explanation))
    }
}
