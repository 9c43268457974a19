//! Rights that are removed and restored.

use crate::common::{Lane, MANIFEST, TestEnv, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{FullState, Kind, port, service};
use serde_json::{Value, json};

/// The resources that endpoints are made of, except the Node.
const RESOURCES: [&str; 3] = ["services", "endpointslices", "servicecidrs"];

/// The manifest without the rights to these.
fn without_endpoints() -> Result<String> {
    let mut documents: Vec<Value> =
        serde_saphyr::from_multiple(MANIFEST).context("the manifest is no YAML")?;
    let mut removed = 0;
    for rules in documents.iter_mut().filter_map(|document| document.get_mut("rules")?.as_array_mut()) {
        let before = rules.len();
        rules.retain(|rule| !RESOURCES.iter().any(|resource| rule["resources"] == json!([resource])));
        removed += before - rules.len();
    }
    ensure!(removed == RESOURCES.len(), "{removed} rules of the manifest are about endpoints");
    Ok(documents.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"))
}

#[test]
fn lost_rights_are_reported_and_recovered() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Rough, "rights").await?;
        env.writer.create(Kind::Service, &service("web", &[port("p", 80)], &json!({}))).await?;
        let proxy = env.cluster.proxy().await?;
        env.via(&proxy.endpoint())?;
        env.agent.start_live().await?;
        let followers = env.followers()?;
        let pair = env.settled(&followers).await?;
        env.wait_until_current().await?;
        let (node, condition) = (env.name.clone(), "ServiceEndpointsStale");
        env.cluster.admin.await_condition(&node, condition, "False").await?;

        // A running watch is not authorized again; the next one is.
        env.cluster.admin.apply(&without_endpoints()?).await?;
        let gone =
            crate::common::eventually_slow("the API server knows that the rights are gone", || async {
                let client = env.identity.client().await?;
                let request = http::Request::get("/api/v1/services?limit=1").body(Vec::new())?;
                keelson_cluster::kube::refused(client.request::<Value>(request).await, 403)
            });
        gone.await?;
        proxy.close_all();
        let stale = |full_state: &FullState| {
            let position = &full_state.position;
            ensure!(position.stale && position.stale_reason.contains("403"), "{position:?}");
            ensure!(full_state.pair() == pair, "{position:?}");
            Ok(())
        };
        followers.watch.until("it is stale for lack of rights", stale).await?;
        env.wait_until_stale("403").await?;
        let reported = env.cluster.admin.await_condition(&node, condition, "True").await?;
        ensure!(reported.reason.as_deref() == Some("SourceRefused"), "{reported:?}");
        // E6: the text of an error is not written to the Node.
        ensure!(reported.message.as_deref().is_some_and(|message| !message.contains("403")), "{reported:?}");
        env.writer.create(Kind::Service, &service("more", &[port("p", 80)], &json!({}))).await?;
        // A new client gets the known state, marked as stale.
        let newcomers = env.followers()?;
        newcomers.until("it is stale for lack of rights", stale).await?;
        drop(newcomers);

        env.cluster.admin.apply(MANIFEST).await?;
        let after = env.settled(&followers).await?;
        ensure!(after == (pair.0, pair.1 + 1), "{pair:?} {after:?}");
        env.wait_until_current().await?;
        env.cluster.admin.await_condition(&node, condition, "False").await.map(drop)
    })
}
