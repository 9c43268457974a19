//! Changes of objects at the API server and their results, without faults.

use crate::common::{Lane, TestEnv, chosen, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{Followers, FullState, Kind, endpoint, port, service, slice};
use keelson_proto::localnetv1::NodeInfo;
use serde_json::json;

/// A Service that is written last: once it is seen, everything written before it has been seen too.
async fn fence(env: &TestEnv, followers: &Followers, name: &str) -> Result<()> {
    env.writer.create(Kind::Service, &service(name, &[port("p", 1)], &json!({}))).await?;
    let full = env.qualified_name(name);
    followers.until_service(&full).await
}

#[test]
fn services_are_created_changed_and_deleted_on_both_apis() -> Result<()> {
    run(async {
        let (env, followers) = TestEnv::started(Lane::Calm, "changes").await?;
        let first = env.settled(&followers).await?;

        let (web, node) = (env.qualified_name("web"), env.name.clone());
        let spec =
            json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "externalIPs": ["203.0.113.9"]});
        env.writer.create(Kind::Service, &service("web", &[port("http", 80)], &spec)).await?;
        followers.until_service(&web).await?;
        let made = env.settled(&followers).await?;
        ensure!(made.0 == first.0 && made.1 > first.1, "{first:?} {made:?}");

        let here = endpoint("10.200.1.1", &node, &json!({}));
        let there = endpoint("10.200.1.2", "elsewhere", &json!({}));
        let with = |number, endpoints: &[_]| slice("web", "a", &[port("http", number)], endpoints);
        env.writer.create(Kind::Slice, &with(8080, &[here.clone(), there.clone()])).await?;
        until_picks(&followers, &web, &["10.200.1.1", "10.200.1.2"]).await?;
        let ingress = json!({"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}]}}});
        env.writer.patch(Kind::Service, "web/status", &ingress).await?;
        env.writer.replace(Kind::Slice, &with(9090, &[here])).await?;
        until_picks(&followers, &web, &["10.200.1.1"]).await?;
        env.settled(&followers).await?;
        let (expected, service) = (env.expected().await?, web.as_str());
        let meant = expected.services.get(service).context("web has a meaning")?;
        ensure!(meant.external_traffic_to_local && meant.endpoints[0].ports[0].port == 9090, "{meant:?}");

        env.writer.delete(Kind::Slice, "web-a").await?;
        until_picks(&followers, &web, &[]).await?;
        env.writer.delete(Kind::Service, "web").await?;
        followers.until_no_service(&web).await?;
        let last = env.settled(&followers).await?;
        ensure!(last.0 == first.0, "one instance all along");

        // A change without meaning on this node makes no revision.
        env.writer.create(Kind::Service, &service_with_noise("quiet")).await?;
        fence(&env, &followers, "fence-1").await?;
        let before = env.settled(&followers).await?;
        let noise = json!({"metadata": {"annotations": {"example.org/seen": "yes"}}});
        for _ in 0..5 {
            env.writer.patch(Kind::Service, "quiet", &noise).await?;
        }
        fence(&env, &followers, "fence-2").await?;
        let after = env.settled(&followers).await?;
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

/// Waits until exactly these addresses are chosen for the first port, in the states of both consumers.
async fn until_picks(followers: &Followers, service: &str, addresses: &[&str]) -> Result<()> {
    let what = format!("{service} has {addresses:?}");
    followers.until(&what, |full_state| picks(full_state, service, addresses)).await
}

/// Fails unless exactly these addresses are chosen for the first port.
fn picks(full_state: &FullState, service: &str, addresses: &[&str]) -> Result<()> {
    let chosen = chosen(full_state, service, 0).with_context(|| format!("{service} is not there"))?;
    ensure!(chosen == addresses, "{chosen:?} are chosen, not {addresses:?}");
    Ok(())
}

#[test]
fn case_01_headless_and_external_name_have_no_frontend() -> Result<()> {
    run(async {
        let (env, followers) = TestEnv::started(Lane::Calm, "case-01").await?;
        let ports = [port("p", 80)];
        let none = env.qualified_name("none");
        env.writer.create(Kind::Service, &service("headless", &ports, &json!({"clusterIP": "None"}))).await?;
        let elsewhere = json!({"type": "ExternalName", "externalName": "elsewhere.example"});
        env.writer.create(Kind::Service, &service("named", &ports, &elsewhere)).await?;
        let ready = [endpoint("10.200.2.1", "elsewhere", &json!({}))];
        for name in ["headless", "named"] {
            env.writer.create(Kind::Slice, &slice(name, "a", &ports, &ready)).await?;
        }
        fence(&env, &followers, "fence").await?;
        env.settled(&followers).await?;
        let own: Vec<_> =
            followers.watch.with_state(|full_state| full_state.services.keys().cloned().collect());
        let own: Vec<_> = own.iter().filter(|name| name.starts_with("case-01/")).collect();
        ensure!(own == ["case-01/fence"], "{own:?}");

        // One that becomes an ExternalName loses its frontend, and gets one when it changes back.
        env.writer.create(Kind::Service, &service("none", &ports, &json!({}))).await?;
        followers.until_service(&none).await?;
        let away = json!({"spec": {"type": "ExternalName", "externalName": "elsewhere.example",
            "clusterIP": null, "clusterIPs": null, "ipFamilies": null, "ipFamilyPolicy": null,
            "internalTrafficPolicy": null}});
        env.writer.patch(Kind::Service, "none", &away).await?;
        followers.until_no_service(&none).await?;
        env.writer
            .patch(Kind::Service, "none", &json!({"spec": {"type": "ClusterIP", "externalName": null}}))
            .await?;
        followers.until_service(&none).await?;
        env.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_02_a_service_of_another_proxy_is_removed_and_restored() -> Result<()> {
    run(async {
        let (env, followers) = TestEnv::started(Lane::Calm, "case-02").await?;
        let (ports, web) = ([port("p", 80)], env.qualified_name("web"));
        env.writer.create(Kind::Service, &service("web", &ports, &json!({}))).await?;
        let ready = [endpoint("10.200.3.1", "elsewhere", &json!({}))];
        env.writer.create(Kind::Slice, &slice("web", "a", &ports, &ready)).await?;
        let there = |full_state: &FullState| picks(full_state, &web, &["10.200.3.1"]);
        followers.until("it is there", there).await?;
        for label in ["", "another"] {
            let labelled =
                json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": label}}});
            env.writer.patch(Kind::Service, "web", &labelled).await?;
            followers.until_no_service(&web).await?;
            let unlabelled =
                json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": null}}});
            env.writer.patch(Kind::Service, "web", &unlabelled).await?;
            followers.until("it is there again", there).await?;
        }
        env.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_03_families_are_separate() -> Result<()> {
    run(async {
        let (env, followers) = TestEnv::started(Lane::Calm, "case-03").await?;
        let (ports, web) = ([port("p", 80)], env.qualified_name("web"));
        let both = json!({"ipFamilyPolicy": "RequireDualStack"});
        env.writer.create(Kind::Service, &service("web", &ports, &both)).await?;
        let four = [endpoint("10.200.4.1", "elsewhere", &json!({}))];
        env.writer.create(Kind::Slice, &slice("web", "four", &ports, &four)).await?;
        let has_any = |wanted: (bool, bool)| {
            let web = web.clone();
            move |full_state: &FullState| {
                let port = &full_state.service(&web).context("no web")?.ports[0];
                ensure!((port.has_any_v4, port.has_any_v6) == wanted, "{port:?}");
                Ok(())
            }
        };
        followers.until("there is IPv4 only", has_any((true, false))).await?;
        let ips = followers
            .watch
            .with_state(|full_state| full_state.service(&web).and_then(|web| web.i_ps.clone()));
        let ips = ips.and_then(|ips| ips.cluster_i_ps).context("it has cluster IPs")?;
        ensure!((ips.v4.len(), ips.v6.len()) == (1, 1), "{ips:?}");
        let six = [endpoint("2001:db8:4::1", "elsewhere", &json!({}))];
        env.writer.create(Kind::Slice, &slice("web", "six", &ports, &six)).await?;
        followers.until("there are both", has_any((true, true))).await?;
        until_picks(&followers, &web, &["10.200.4.1", "2001:db8:4::1"]).await?;
        env.writer.delete(Kind::Slice, "web-four").await?;
        followers.until("there is IPv6 only", has_any((false, true))).await?;
        env.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_16_a_slice_before_its_service() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Calm, "case-16").await?;
        env.agent.start_live().await?;
        let (late, marker) = (env.qualified_name("late"), env.qualified_name("marker"));
        let ports = [port("p", 80)];
        let of_late = late.clone();
        // The slice existed before the Service: no state has one without the other.
        let followers = env.followers_with(move |full_state| match full_state.service(&of_late) {
            Some(late) if late.endpoints.is_empty() => anyhow::bail!("it has no endpoints yet: {late:?}"),
            _ => Ok(()),
        })?;
        env.writer.create(Kind::Service, &service("marker", &ports, &json!({}))).await?;
        let ready = |address| [endpoint(address, "elsewhere", &json!({}))];
        env.writer.create(Kind::Slice, &slice("late", "a", &ports, &ready("10.200.5.1"))).await?;
        env.writer.create(Kind::Slice, &slice("marker", "a", &ports, &ready("10.200.5.2"))).await?;
        until_picks(&followers, &marker, &["10.200.5.2"]).await?;
        env.settled(&followers).await?;
        for follower in followers.both() {
            ensure!(
                follower.with_state(|full_state| full_state.service(&late).is_none()),
                "there is no Service yet"
            );
        }
        env.writer.create(Kind::Service, &service("late", &ports, &json!({}))).await?;
        until_picks(&followers, &late, &["10.200.5.1"]).await?;
        env.settled(&followers).await.map(drop)
    })
}

#[test]
fn case_30_a_nodes_zone_changes_the_sets_without_a_service_event() -> Result<()> {
    run(async {
        let (env, followers) = TestEnv::started(Lane::Calm, "case-30").await?;
        let (ports, web) = ([port("p", 80)], env.qualified_name("web"));
        let in_zone = |address: &str, zone: &str| {
            let more = json!({"zone": zone, "hints": {"forZones": [{"name": zone}]}});
            endpoint(address, "elsewhere", &more)
        };
        env.writer.create(Kind::Service, &service("web", &ports, &json!({}))).await?;
        let endpoints = [in_zone("10.200.6.1", "zone-a"), in_zone("10.200.6.2", "zone-b")];
        env.writer.create(Kind::Slice, &slice("web", "a", &ports, &endpoints)).await?;
        until_picks(&followers, &web, &["10.200.6.1"]).await?;
        let before = env.settled(&followers).await?;
        let events = "keelson_endpoints_source_events_total{resource=\"services\"}";
        let (events_before, node) = (env.metric(events).await?, env.name.clone());
        let label = |zone| json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}});
        env.writer.patch(Kind::Node, &node, &label(Some("zone-b"))).await?;
        until_picks(&followers, &web, &["10.200.6.2"]).await?;
        let after = env.settled(&followers).await?;
        ensure!(after == (before.0, before.1 + 1), "one change, one revision: {before:?} {after:?}");
        env.writer.patch(Kind::Node, &node, &label(None)).await?;
        until_picks(&followers, &web, &["10.200.6.1", "10.200.6.2"]).await?;
        ensure!(env.metric(events).await? == events_before, "there were events of Services");
        // P4: a deleted Node is reported, and its last known state stays.
        let last = env.settled(&followers).await?;
        let known =
            followers.watch.with_state(|full_state| full_state.node.clone()).context("there is a Node")?;
        ensure!(known.exists && known.eligible, "{known:?}");
        env.cluster.admin.delete_node(&node).await?;
        let absent = |full_state: &FullState| {
            let node = full_state.node.as_ref().context("there is a Node")?;
            ensure!(*node == NodeInfo { exists: false, ..known.clone() }, "{node:?} after {known:?}");
            picks(full_state, &web, &["10.200.6.1", "10.200.6.2"])
        };
        followers.until("the Node is gone", absent).await?;
        let pair = followers.watch.pair();
        ensure!(pair == (last.0, last.1 + 1), "one change, one revision: {last:?} {pair:?}");
        Ok(())
    })
}
