//! ServiceCIDRs, which a server may not have or not permit to list.

use super::*;

fn cidrs(server: &Server) -> Source {
    Source::of::<ServiceCidr>(server.api(), Semaphore::MAX_PERMITS)
}

/// Lists one ServiceCIDR; returns what a source reports of it.
fn one_listed(feed: &Feed) -> Call {
    let metadata = Some(keelson_proto::kubernetes::ObjectMeta {
        name: "kubernetes".into(),
        resource_version: "3".into(),
        ..Default::default()
    });
    let spec = Some(keelson_proto::kubernetes::ServiceCidrSpec { cidrs: vec!["10.96.0.0/12".into()] });
    feed.bytes(wire::event("ADDED", "ServiceCIDR", &ServiceCidr { metadata, spec }));
    feed.bytes(wire::event("BOOKMARK", "ServiceCIDR", &wire::bookmark(5, true)));
    Call::Put("kubernetes".into(), "10.96.0.0/12".into())
}

#[tokio::test]
async fn a_server_without_service_cidrs_is_asked_again() {
    let mut server = Server::plain().await;
    server.reply(Reply::Answer(404, Vec::new(), Bytes::from_static(b"404 page not found")));
    let mut source = cidrs(&server);
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
    assert!(server.seen().await.line.starts_with("GET /apis/networking.k8s.io/v1/servicecidrs?watch=true&"));
    server.nothing_more();
    // Within each minute nothing is reported; after ten minutes it asks again.
    tokio::time::pause();
    for _ in 0..10 {
        source.expects(&[Call::Nothing]).await;
    }
    tokio::time::resume();
    let feed = server.begin();
    server.seen().await;
    let cidr = one_listed(&feed);
    source.expects(&[Call::Listing, cidr, Call::Listed]).await;
    server.nothing_more();
}

/// P19: a role without `servicecidrs` must not keep Services from working.
#[tokio::test]
async fn p19_refused_service_cidrs_block_nothing_and_are_requested_again() {
    let mut server = Server::plain().await;
    for _ in 0..3 {
        server.reply(refusal(403, "Forbidden"));
    }
    let mut source = cidrs(&server);
    source.expects(&[Call::Listing, Call::Refused]).await;
    source.fails("Forbidden").await;
    // It is retried; the refusal is reported once to the sink, and each failure.
    source.expects(&[Call::Nothing]).await;
    source.fails("Forbidden").await;
    // A sink that has restarted meanwhile is told again: nothing else would end its wait.
    source.sink.answers.lock().unwrap().push_back(Ack::Relist);
    source.expects(&[Call::Nothing, Call::Listing, Call::Refused]).await;
    source.fails("Forbidden").await;
    let feed = server.begin();
    server.skip(4).await;
    let cidr = one_listed(&feed);
    source.expects(&[Call::Listing, cidr, Call::Listed, Call::Healthy]).await;
}

/// P19: nothing waits for a server that answers, but not with ServiceCIDRs.
#[tokio::test]
async fn p19_failing_service_cidrs_block_nothing() {
    for (code, reason) in [(500, "InternalError"), (503, "ServiceUnavailable")] {
        let server = Server::plain().await;
        // A failed streaming list is retried once as a list.
        (0..3).for_each(|_| server.reply(refusal(code, reason)));
        let mut source = cidrs(&server);
        source.expects(&[Call::Listing, Call::Refused]).await;
    }
}

/// P19: the objects that were listed before the refusal stay known.
#[tokio::test]
async fn p19_service_cidrs_that_are_refused_later_stay_as_they_were() {
    let server = Server::plain().await;
    let feed = server.begin();
    server.reply(refusal(403, "Forbidden"));
    let mut source = cidrs(&server);
    feed.bytes(wire::event("BOOKMARK", "ServiceCIDR", &wire::bookmark(4, true)));
    source.expects(&[Call::Listing, Call::Listed, Call::Healthy]).await;
    drop(feed);
    source.expects(&[Call::Nothing]).await;
    source.fails("Forbidden").await;
}
