//! The service Inspection: the status of the endpoints, and single Services.

use keelson_proto::endpoints::{
    self as pb, inspection_client::InspectionClient, inspection_server::Inspection as _,
};

use super::super::inspection::InspectionService;
use super::*;
use crate::fake::{endpoints, explanation, without_endpoints};

fn state_request(namespace: &str, max_services: u32) -> Request<pb::GetStateRequest> {
    Request::new(pb::GetStateRequest { namespace: namespace.into(), max_services })
}

fn explain_request(namespace: &str, name: &str) -> Request<pb::ExplainRequest> {
    Request::new(pb::ExplainRequest { namespace: namespace.into(), name: name.into() })
}

#[tokio::test]
async fn the_state_has_the_requested_number_of_services() {
    let fake = Fake::new();
    let service = InspectionService::new(fake.clone());
    let state =
        async |namespace, max| service.get_state(state_request(namespace, max)).await.unwrap().into_inner();
    assert_eq!(state("", 100_000).await, endpoints());
    let shop = state("shop", 1).await;
    assert_eq!((shop.list.len(), shop.list[0].name.as_str(), shop.services), (1, "cart", 3));
    assert_eq!(state("", 0).await.list, []);
    let asked = [("", 100_000), ("shop", 1), ("", 0)].map(|(namespace, max)| (namespace.to_owned(), max));
    assert_eq!(fake.script().asked_endpoints, asked);
}

#[tokio::test]
async fn invalid_requests_are_not_passed_on() {
    let fake = Fake::new();
    let service = InspectionService::new(fake.clone());
    for request in [
        state_request("", 100_001),
        state_request("a/b", 1),
        state_request("a b", 0),
        state_request(&"n".repeat(254), 0),
    ] {
        let status = service.get_state(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    for request in [
        explain_request("", "web"),
        explain_request("shop", ""),
        explain_request("shop", "a/b"),
        explain_request("<script>", "web"),
    ] {
        let status = service.explain(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains("letters, digits"), "{status}");
    }
    assert_eq!(fake.script().asked_endpoints, []);
}

#[tokio::test]
async fn one_service_or_the_reason_for_its_absence() {
    let fake = Fake::new();
    let service = InspectionService::new(fake.clone());
    let whole = service.explain(explain_request("shop", "web")).await.unwrap().into_inner();
    assert_eq!(whole, explanation());
    let refused = async || service.explain(explain_request("shop", "wep")).await.unwrap_err();
    let status = refused().await;
    assert_eq!(status.code(), Code::NotFound);
    let text = "neither a Service shop/wep nor an EndpointSlice of it exists; 3 are known";
    assert_eq!(status.message(), text);

    let off = without_endpoints("disabled", "endpoints.source is off");
    fake.script().endpoints = Ok(off.clone());
    let status = refused().await;
    assert_eq!(status.code(), Code::NotFound);
    assert_eq!(status.message(), "service endpoints are disabled: endpoints.source is off");
    assert_eq!(service.get_state(state_request("", 9)).await.unwrap().into_inner(), off, "off is an answer");

    fake.script().endpoints = Ok(without_endpoints("pending", "services are not listed"));
    let status = refused().await;
    assert_eq!(status.code(), Code::Unavailable, "what is not known yet may be there");
    assert_eq!(status.message(), "no Service is known yet: services are not listed");
}

#[tokio::test(start_paused = true)]
async fn an_agent_without_endpoints() {
    let fake = Fake::new();
    let service = InspectionService::new(fake.clone());
    let refusals = async || {
        let state = service.get_state(state_request("", 1)).await.unwrap_err();
        [state, service.explain(explain_request("shop", "web")).await.unwrap_err()]
    };
    for (error, code) in [
        (ViewError::Busy("full".into()), Code::ResourceExhausted),
        (ViewError::Unavailable("restarting".into()), Code::Unavailable),
    ] {
        fake.script().endpoints = Err(error.clone());
        fake.script().explanation = Err(error.clone());
        for status in refusals().await {
            assert_eq!((status.code(), status.message()), (code, error.to_string().as_str()));
        }
    }
    fake.script().stuck = true;
    for status in refusals().await {
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("did not answer within 8 s"), "{status}");
    }
}

#[tokio::test]
async fn inspection_answers_on_the_same_socket() {
    let fake = Fake::new();
    let served = Served::start(&fake);
    let mut inspection = InspectionClient::new(channel(&served.socket).await);
    assert_eq!(inspection.get_state(state_request("", 10)).await.unwrap().into_inner(), endpoints());
    assert_eq!(inspection.explain(explain_request("shop", "web")).await.unwrap().into_inner(), explanation());
    assert_eq!(inspection.explain(explain_request("shop", "x")).await.unwrap_err().code(), Code::NotFound);
}
