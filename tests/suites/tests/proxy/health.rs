//! Health checks over HTTP: cases 51 to 55.

use crate::common::{Case, Setup};
use crate::expect::{kept, masked};
use crate::held::HeldTable;
use crate::objects::{elsewhere, on_node, port};
use crate::subject::is_as_mode_nftables;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::endpoints::Kind;
use keelson_cluster::net::plan::{NODE, NODE_2};
use keelson_cluster::net::{Family, Transport, http_get_from};
use keelson_harness::util::Answer;
use serde_json::{Value, json};

/// Port of the proxy's own health.
const HEALTH: u16 = 10256;

fn checked(case: &Case, n: u8) -> Value {
    json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": case.node_port(n)})
}

/// Response of the health check port to C.
async fn ask(case: &Case, family: Family, port: u16, path: &str) -> Result<Answer> {
    http_get_from(case.client().namespace(), NODE.at(family, port), path).await
}

async fn check_closed(case: &Case, port: u16) -> Result<()> {
    for family in Family::ALL {
        let answer = ask(case, family, port, "/").await;
        ensure!(answer.is_err(), "port {port} is open: {answer:?}");
    }
    Ok(())
}

/// Fails unless the response is complete and correct.
fn check_answer(
    answer: &Answer,
    namespace: &str,
    service: &str,
    endpoints: usize,
    healthy: bool,
) -> Result<()> {
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{namespace}\",\n\t\t\"name\": \"{service}\"\n\t}},\n\t\
         \"localEndpoints\": {endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    );
    let status = if endpoints > 0 && healthy { 200 } else { 503 };
    let header =
        |name: &str| answer.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    ensure!(answer.status.as_u16() == status, "HTTP {} and not {status}: {}", answer.status, answer.text());
    ensure!(answer.text() == body, "the body is {:?} and not {body:?}", answer.text());
    ensure!(header("content-type") == "application/json", "content-type is {:?}", header("content-type"));
    ensure!(header("x-content-type-options") == "nosniff", "no nosniff");
    let weight = header("x-load-balancing-endpoint-weight");
    ensure!(weight == endpoints.to_string(), "the weight is {weight:?} and not {endpoints}");
    Ok(())
}

/// Waits until both families answer with these values.
async fn eventually_is(case: &Case, port: u16, service: &str, endpoints: usize, healthy: bool) -> Result<()> {
    let what = format!("port {port} reports {endpoints} endpoints, healthy {healthy}");
    case.eventually(&what, || async {
        for family in Family::ALL {
            let answer = ask(case, family, port, "/").await?;
            check_answer(&answer, case.writer.namespace(), service, endpoints, healthy)?;
        }
        Ok(())
    })
    .await
}

#[test]
fn case_51_a_health_check_counts_the_addresses_of_local_endpoints_that_are_ready() -> Result<()> {
    Case::run(51, Setup::Plain, async |case| {
        let mut ports = [port("http", 80, Transport::Tcp), port("more", 81, Transport::Tcp)];
        for (n, port) in (1..).zip(&mut ports) {
            port["nodePort"] = json!(case.node_port(n));
        }
        let mut spec = checked(&case, 9);
        spec["ports"] = json!(ports);
        case.make("svc", 1, &spec).await?;
        let ports = [port("http", 8080, Transport::Tcp), port("more", 8081, Transport::Tcp)];
        let endpoints = [on_node(&case, 1), on_node(&case, 2), on_node(&case, 3).terminating(), elsewhere(1)];
        case.slices_of("svc", "a", &ports, &endpoints).await?;
        eventually_is(&case, case.node_port(9), "svc", 2, true).await?;
        for path in ["/healthz", "/any/path?of=it"] {
            let answer = ask(&case, Family::V4, case.node_port(9), path).await?;
            check_answer(&answer, case.writer.namespace(), "svc", 2, true)
                .with_context(|| path.to_owned())?;
        }
        // At the addresses of node ports.
        let (c, second) = (case.client(), NODE_2.at(Family::V4, case.node_port(9)));
        let other = http_get_from(c.namespace(), second, "/").await;
        ensure!(other.is_err() == is_as_mode_nftables(), "on N2: {other:?}");
        Ok(())
    })
}

#[test]
fn case_52_terminating_endpoints_do_not_count_and_are_served() -> Result<()> {
    Case::run(52, Setup::Plain, async |case| {
        let l1 = on_node(&case, 1).terminating();
        case.serve("svc", 1, &checked(&case, 9), std::slice::from_ref(&l1)).await?;
        case.all([(case.client(), case.w(1), kept([&l1]))]).await?;
        eventually_is(&case, case.node_port(9), "svc", 0, true).await
    })
}

#[test]
fn case_53_the_health_check_port_follows_policy_and_number() -> Result<()> {
    Case::run(53, Setup::Plain, async |case| {
        case.make_with("svc", 1, &checked(&case, 9), &[on_node(&case, 1)]).await?;
        eventually_is(&case, case.node_port(9), "svc", 1, true).await?;
        // The API does not allow to change the number: this is another Service with the same name.
        case.writer.delete(Kind::Service, "svc").await?;
        case.make("svc", 1, &checked(&case, 8)).await?;
        eventually_is(&case, case.node_port(8), "svc", 1, true).await?;
        check_closed(&case, case.node_port(9)).await?;
        case.respec("svc", &json!({"externalTrafficPolicy": "Cluster", "healthCheckNodePort": null})).await?;
        case.synced().await?;
        case.eventually("the port is closed", || check_closed(&case, case.node_port(8))).await
    })
}

/// Status and JSON of a path of the proxy's own health.
async fn own_health(case: &Case, path: &str) -> Result<(u16, Value)> {
    let answer = ask(case, Family::V4, HEALTH, path).await?;
    let json = serde_json::from_slice(&answer.body).with_context(|| format!("no JSON: {}", answer.text()))?;
    Ok((answer.status.as_u16(), json))
}

async fn eventually_own(case: &Case, path: &str, status: u16) -> Result<Value> {
    let json = tokio::sync::Mutex::new(Value::Null);
    let what = format!("{path} returns {status}");
    let asked = case.eventually(&what, || async {
        let (got, body) = own_health(case, path).await?;
        ensure!(got == status, "{got}: {body}");
        *json.lock().await = body;
        Ok(())
    });
    asked.await?;
    Ok(json.into_inner())
}

#[test]
fn case_53_55_a_family_that_cannot_sync_is_unhealthy_until_it_does() -> Result<()> {
    Case::run_alone(153, Setup::Rough, async |case| {
        let l1 = on_node(&case, 1);
        case.serve("svc", 1, &checked(&case, 9), std::slice::from_ref(&l1)).await?;
        eventually_is(&case, case.node_port(9), "svc", 1, true).await?;
        eventually_own(&case, "/livez", 200).await?;

        let held = HeldTable::take(case.world(), case.subject().table(), Family::V6).await?;
        case.slices("svc", &[l1.clone(), elsewhere(1)]).await?;
        let body = eventually_own(&case, "/livez", 503).await?;
        ensure!(
            body["status"]["IPv6"]["healthy"] == false && body["status"]["IPv4"]["healthy"] == true,
            "{body}"
        );
        let body = eventually_own(&case, "/healthz", 503).await?;
        ensure!(body["nodeEligible"] == true && body["healthy"] == false, "{body}");
        // A sync of IPv4 succeeds, and does not hide the failure.
        case.eventually_all(vec![(case.pod(), case.v(1).v4(), kept([&l1, &elsewhere(1)]))]).await?;
        let (status, body) = own_health(&case, "/livez").await?;
        ensure!(status == 503, "{body}");
        let answer = ask(&case, Family::V4, case.node_port(9), "/").await?;
        check_answer(&answer, case.writer.namespace(), "svc", 1, false)?;

        drop(held);
        eventually_own(&case, "/livez", 200).await?;
        eventually_own(&case, "/healthz", 200).await?;
        eventually_is(&case, case.node_port(9), "svc", 1, true).await?;
        case.all([
            (case.pod(), case.v(1), kept([&l1, &elsewhere(1)])),
            (case.client(), case.w(1), kept([&l1])),
        ])
        .await
    })
}

#[test]
fn case_54_a_node_marked_for_deletion_is_not_eligible() -> Result<()> {
    Case::run_alone(54, Setup::OwnNode, async |case| {
        let taints = |taints: Value| json!({"spec": {"taints": taints}});
        let body = eventually_own(&case, "/healthz", 200).await?;
        ensure!(body["nodeEligible"] == true && body["healthy"] == true, "{body}");
        ensure!(body["lastUpdated"].is_string() && body["currentTime"].is_string(), "{body}");

        let other = json!([{"key": "example.com/other", "effect": "NoSchedule"}]);
        case.writer.patch(Kind::Node, case.node(), &taints(other)).await?;
        case.synced().await?;
        eventually_own(&case, "/healthz", 200).await?;

        let leaving = json!([{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]);
        case.writer.patch(Kind::Node, case.node(), &taints(leaving)).await?;
        let body = eventually_own(&case, "/healthz", 503).await?;
        ensure!(body["nodeEligible"] == false && body["healthy"] == true, "{body}");
        let (status, body) = own_health(&case, "/livez").await?;
        ensure!(status == 200 && body.get("nodeEligible").is_none(), "{status}: {body}");
        case.writer.patch(Kind::Node, case.node(), &taints(json!(null))).await?;
        eventually_own(&case, "/healthz", 200).await?;

        // A deletion that a finalizer delays.
        let finalizers = |names: Value| json!({"metadata": {"finalizers": names}});
        case.writer.patch(Kind::Node, case.node(), &finalizers(json!(["example.com/wait"]))).await?;
        case.writer.delete(Kind::Node, case.node()).await?;
        let body = eventually_own(&case, "/healthz", 503).await?;
        ensure!(body["nodeEligible"] == false, "{body}");
        let (status, body) = own_health(&case, "/livez").await?;
        ensure!(status == 200, "{status}: {body}");

        // Now it is deleted, and then created again.
        case.writer.patch(Kind::Node, case.node(), &finalizers(json!(null))).await?;
        case.wait_until_node_deleted().await?;
        let body = eventually_own(&case, "/healthz", 503).await?;
        ensure!(body["nodeEligible"] == false, "{body}");
        case.make_node().await?;
        eventually_own(&case, "/healthz", 200).await?;

        // P4: the last state of one that is deleted at once stays.
        case.writer.delete(Kind::Node, case.node()).await?;
        case.wait_until_node_deleted().await?;
        let (status, body) = own_health(&case, "/healthz").await?;
        ensure!(status == 200 && body["nodeEligible"] == true, "{status}: {body}");
        case.make_node().await?;
        eventually_own(&case, "/healthz", 200).await.map(drop)
    })
}

#[test]
fn health_is_served_at_every_address_with_timestamps() -> Result<()> {
    Case::run(155, Setup::Plain, async |case| {
        case.serve("svc", 1, &json!({}), &[elsewhere(1)]).await?;
        case.all([(case.client(), case.w(1), masked([&elsewhere(1)]))]).await?;
        let (status, body) = own_health(&case, "/livez").await?;
        let Some(families) = body["status"].as_object() else { bail!("no status in {body}") };
        ensure!(status == 200 && families.keys().eq(["IPv4", "IPv6"]), "{status}: {body}");
        for family in families.values() {
            ensure!(family["healthy"] == true && family["lastUpdated"].is_string(), "{body}");
        }
        Ok(())
    })
}
