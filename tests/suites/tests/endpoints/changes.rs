//! Changes of objects at the API server and their results, without faults.

use crate::rig::{Lane, Stage, chosen, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{FullState, Kind, endpoint, port, service, slice};
use keelson_proto::localnetv1::NodeInfo;
use serde_json::json;

/// A Service that is written last: once it is seen, everything written before it has been seen too.
async fn fence(stage: &Stage, followers: &keelson_cluster::endpoints::Followers, name: &str) -> Result<()> {
    stage.writer.create(Kind::Service, &service(name, &[port("p", 1)], &json!({}))).await?;
    let full = stage.qualified_name(name);
    followers
        .until(&format!("{full} is seen"), |whole| whole.service(&full).map(drop).context("it is not there"))
        .await
}

#[test]
fn services_are_created_changed_and_deleted_on_both_apis() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "changes").await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let first = stage.settled(&followers).await?;

        let (web, node) = (stage.qualified_name("web"), stage.name.clone());
        let spec =
            json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "externalIPs": ["203.0.113.9"]});
        stage.writer.create(Kind::Service, &service("web", &[port("http", 80)], &spec)).await?;
        followers.until("web is seen", |whole| whole.service(&web).map(drop).context("no web")).await?;
        let made = stage.settled(&followers).await?;
        ensure!(made.0 == first.0 && made.1 > first.1, "{first:?} {made:?}");

        let here = endpoint("10.200.1.1", &node, &json!({}));
        let there = endpoint("10.200.1.2", "elsewhere", &json!({}));
        let with = |number, endpoints: &[_]| slice("web", "a", &[port("http", number)], endpoints);
        stage.writer.create(Kind::Slice, &with(8080, &[here.clone(), there.clone()])).await?;
        followers
            .until("both endpoints are seen", |whole| picks(whole, &web, &["10.200.1.1", "10.200.1.2"]))
            .await?;
        let ingress = json!({"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}]}}});
        stage.writer.patch(Kind::Service, "web/status", &ingress).await?;
        stage.writer.replace(Kind::Slice, &with(9090, &[here])).await?;
        followers.until("one endpoint is left", |whole| picks(whole, &web, &["10.200.1.1"])).await?;
        stage.settled(&followers).await?;
        let (truth, service) = (stage.truth().await?, web.as_str());
        let meant = truth.services.get(service).context("web has a meaning")?;
        ensure!(meant.external_traffic_to_local && meant.endpoints[0].ports[0].port == 9090, "{meant:?}");

        stage.writer.delete(Kind::Slice, "web-a").await?;
        followers.until("no endpoint is left", |whole| picks(whole, &web, &[])).await?;
        stage.writer.delete(Kind::Service, "web").await?;
        let gone = |whole: &FullState| {
            ensure!(whole.service(&web).is_none(), "web is there");
            Ok(())
        };
        followers.until("web is gone", gone).await?;
        let last = stage.settled(&followers).await?;
        ensure!(last.0 == first.0, "one instance all along");

        // A change without meaning on this node makes no revision.
        stage.writer.create(Kind::Service, &service_with_noise("quiet")).await?;
        fence(&stage, &followers, "fence-1").await?;
        let before = stage.settled(&followers).await?;
        let noise = json!({"metadata": {"annotations": {"example.org/seen": "yes"}}});
        for _ in 0..5 {
            stage.writer.patch(Kind::Service, "quiet", &noise).await?;
        }
        fence(&stage, &followers, "fence-2").await?;
        let after = stage.settled(&followers).await?;
        ensure!(
            after == (before.0, before.1 + 1),
            "one Service more, one revision more: {before:?} {after:?}"
        );
        Ok(())
    })
}

fn service_with_noise(name: &str) -> serde_json::Value {
    let mut made = service(name, &[port("p", 1)], &json!({}));
    made["metadata"]["annotations"] = json!({"example.org/noise": "x".repeat(500)});
    made
}

/// Fails unless exactly these addresses are chosen for the first port.
fn picks(whole: &FullState, service: &str, addresses: &[&str]) -> Result<()> {
    let chosen = chosen(whole, service, 0).with_context(|| format!("{service} is not there"))?;
    ensure!(chosen == addresses, "{chosen:?} are chosen, not {addresses:?}");
    Ok(())
}

#[test]
fn case_01_headless_and_external_name_have_no_frontend() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "case-01").await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let ports = [port("p", 80)];
        let none = stage.qualified_name("none");
        stage
            .writer
            .create(Kind::Service, &service("headless", &ports, &json!({"clusterIP": "None"})))
            .await?;
        let elsewhere = json!({"type": "ExternalName", "externalName": "elsewhere.example"});
        stage.writer.create(Kind::Service, &service("named", &ports, &elsewhere)).await?;
        let ready = [endpoint("10.200.2.1", "elsewhere", &json!({}))];
        for name in ["headless", "named"] {
            stage.writer.create(Kind::Slice, &slice(name, "a", &ports, &ready)).await?;
        }
        fence(&stage, &followers, "fence").await?;
        stage.settled(&followers).await?;
        let own: Vec<_> = followers.watch.with_state(|whole| whole.services.keys().cloned().collect());
        let own: Vec<_> = own.iter().filter(|name| name.starts_with("case-01/")).collect();
        ensure!(own == ["case-01/fence"], "{own:?}");

        // One that becomes an ExternalName loses its frontend, and gets one when it changes back.
        stage.writer.create(Kind::Service, &service("none", &ports, &json!({}))).await?;
        followers.until("it is there", |whole| whole.service(&none).map(drop).context("no")).await?;
        let away = json!({"spec": {"type": "ExternalName", "externalName": "elsewhere.example",
            "clusterIP": null, "clusterIPs": null, "ipFamilies": null, "ipFamilyPolicy": null,
            "internalTrafficPolicy": null}});
        stage.writer.patch(Kind::Service, "none", &away).await?;
        let gone = |whole: &FullState| {
            ensure!(whole.service(&none).is_none(), "it is there");
            Ok(())
        };
        followers.until("it is gone", gone).await?;
        stage
            .writer
            .patch(Kind::Service, "none", &json!({"spec": {"type": "ClusterIP", "externalName": null}}))
            .await?;
        followers.until("it is there", |whole| whole.service(&none).map(drop).context("no")).await?;
        stage.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_02_a_service_of_another_proxy_is_removed_and_restored() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "case-02").await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let (ports, web) = ([port("p", 80)], stage.qualified_name("web"));
        stage.writer.create(Kind::Service, &service("web", &ports, &json!({}))).await?;
        let ready = [endpoint("10.200.3.1", "elsewhere", &json!({}))];
        stage.writer.create(Kind::Slice, &slice("web", "a", &ports, &ready)).await?;
        let there = |whole: &FullState| picks(whole, &web, &["10.200.3.1"]);
        followers.until("it is there", there).await?;
        for label in ["", "another"] {
            let labelled =
                json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": label}}});
            stage.writer.patch(Kind::Service, "web", &labelled).await?;
            let gone = |whole: &FullState| {
                ensure!(whole.service(&web).is_none(), "it is there");
                Ok(())
            };
            followers.until("it is gone", gone).await?;
            let unlabelled =
                json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": null}}});
            stage.writer.patch(Kind::Service, "web", &unlabelled).await?;
            followers.until("it is there again", there).await?;
        }
        stage.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_03_families_are_separate() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "case-03").await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let (ports, web) = ([port("p", 80)], stage.qualified_name("web"));
        let both = json!({"ipFamilyPolicy": "RequireDualStack"});
        stage.writer.create(Kind::Service, &service("web", &ports, &both)).await?;
        let four = [endpoint("10.200.4.1", "elsewhere", &json!({}))];
        stage.writer.create(Kind::Slice, &slice("web", "four", &ports, &four)).await?;
        let has_any = |wanted: (bool, bool)| {
            let web = web.clone();
            move |whole: &FullState| {
                let port = &whole.service(&web).context("no web")?.ports[0];
                ensure!((port.has_any_v4, port.has_any_v6) == wanted, "{port:?}");
                Ok(())
            }
        };
        followers.until("there is IPv4 only", has_any((true, false))).await?;
        let ips = followers.watch.with_state(|whole| whole.service(&web).and_then(|web| web.i_ps.clone()));
        let ips = ips.and_then(|ips| ips.cluster_i_ps).context("it has cluster IPs")?;
        ensure!((ips.v4.len(), ips.v6.len()) == (1, 1), "{ips:?}");
        let six = [endpoint("2001:db8:4::1", "elsewhere", &json!({}))];
        stage.writer.create(Kind::Slice, &slice("web", "six", &ports, &six)).await?;
        followers.until("there are both", has_any((true, true))).await?;
        followers.until("both", |whole| picks(whole, &web, &["10.200.4.1", "2001:db8:4::1"])).await?;
        stage.writer.delete(Kind::Slice, "web-four").await?;
        followers.until("there is IPv6 only", has_any((false, true))).await?;
        stage.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_16_a_slice_before_its_service() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "case-16").await?;
        stage.agent.start_live().await?;
        let (late, marker) = (stage.qualified_name("late"), stage.qualified_name("marker"));
        let ports = [port("p", 80)];
        let of_late = late.clone();
        // The slice existed before the Service: no state has one without the other.
        let followers = stage.followers_with(move |whole| match whole.service(&of_late) {
            Some(late) if late.endpoints.is_empty() => anyhow::bail!("it has no endpoints yet: {late:?}"),
            _ => Ok(()),
        })?;
        stage.writer.create(Kind::Service, &service("marker", &ports, &json!({}))).await?;
        let ready = |address| [endpoint(address, "elsewhere", &json!({}))];
        stage.writer.create(Kind::Slice, &slice("late", "a", &ports, &ready("10.200.5.1"))).await?;
        stage.writer.create(Kind::Slice, &slice("marker", "a", &ports, &ready("10.200.5.2"))).await?;
        followers.until("slices were seen", |whole| picks(whole, &marker, &["10.200.5.2"])).await?;
        stage.settled(&followers).await?;
        for follower in followers.both() {
            ensure!(follower.with_state(|whole| whole.service(&late).is_none()), "there is no Service yet");
        }
        stage.writer.create(Kind::Service, &service("late", &ports, &json!({}))).await?;
        followers.until("it is there", |whole| picks(whole, &late, &["10.200.5.1"])).await?;
        stage.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_30_a_nodes_zone_changes_the_sets_without_a_service_event() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "case-30").await?;
        stage.agent.start_live().await?;
        let followers = stage.followers()?;
        let (ports, web) = ([port("p", 80)], stage.qualified_name("web"));
        let in_zone = |address: &str, zone: &str| {
            let more = json!({"zone": zone, "hints": {"forZones": [{"name": zone}]}});
            endpoint(address, "elsewhere", &more)
        };
        stage.writer.create(Kind::Service, &service("web", &ports, &json!({}))).await?;
        let endpoints = [in_zone("10.200.6.1", "zone-a"), in_zone("10.200.6.2", "zone-b")];
        stage.writer.create(Kind::Slice, &slice("web", "a", &ports, &endpoints)).await?;
        followers.until("zone-a", |whole| picks(whole, &web, &["10.200.6.1"])).await?;
        let before = stage.settled(&followers).await?;
        let events = "keelson_endpoints_source_events_total{resource=\"services\"}";
        let (events_before, node) = (stage.metric(events).await?, stage.name.clone());
        let label = |zone| json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}});
        stage.writer.patch(Kind::Node, &node, &label(Some("zone-b"))).await?;
        followers.until("zone-b", |whole| picks(whole, &web, &["10.200.6.2"])).await?;
        let after = stage.settled(&followers).await?;
        ensure!(after == (before.0, before.1 + 1), "one change, one revision: {before:?} {after:?}");
        stage.writer.patch(Kind::Node, &node, &label(None)).await?;
        followers.until("no zone", |whole| picks(whole, &web, &["10.200.6.1", "10.200.6.2"])).await?;
        ensure!(stage.metric(events).await? == events_before, "there were events of Services");
        // P4: a deleted Node is reported, and its last known state stays.
        let last = stage.settled(&followers).await?;
        let known = followers.watch.with_state(|whole| whole.node.clone()).context("there is a Node")?;
        ensure!(known.exists && known.eligible, "{known:?}");
        stage.cluster.admin.delete_node(&node).await?;
        let absent = |whole: &FullState| {
            let node = whole.node.as_ref().context("there is a Node")?;
            ensure!(*node == NodeInfo { exists: false, ..known.clone() }, "{node:?} after {known:?}");
            picks(whole, &web, &["10.200.6.1", "10.200.6.2"])
        };
        followers.until("the Node is gone", absent).await?;
        let pair = followers.watch.pair();
        ensure!(pair == (last.0, last.1 + 1), "one change, one revision: {last:?} {pair:?}");
        Ok(())
    })
}
