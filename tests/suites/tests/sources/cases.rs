//! Owns: the cases that every source must pass. In: a [`World`]. Out: a failure that tells the difference to the
//! objects put.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use keelson_endpoint_publisher::{NodeView, SourceKind};
use serde_json::{Value, json};

use crate::objects::{PROXY_NAME, cidr, node, service, slice, with};
use crate::sink::{Collector, Short, SinkState};
use crate::world::{World, eventually_in_sink};

fn short(of: &[(&str, String)]) -> Short {
    of.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect()
}

fn services(state: &SinkState, world: &impl World, expected: &[(&str, String)]) -> Result<()> {
    let found = state.services(&world.namespace())?;
    ensure!(found == short(expected), "Services are {found:?}");
    Ok(())
}

fn slices(state: &SinkState, world: &impl World, expected: &[(&str, String)]) -> Result<()> {
    let found = state.slices(&world.namespace())?;
    ensure!(found == short(expected), "slices are {found:?}");
    Ok(())
}

const COLLECTED: [SourceKind; 3] =
    [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::ServiceCidrs];

pub(crate) async fn existing_objects_arrive_as_one_listing_per_kind(world: &impl World) -> Result<()> {
    let ns = world.namespace();
    let range = format!("range-{}", world.number());
    world.put(&service(&ns, "a", &world.ip(1))).await?;
    world.put(&service(&ns, "b", &world.ip(2))).await?;
    world.put(&slice(&ns, "a-1", "a", &["10.0.0.1", "10.0.0.2"])).await?;
    world.put(&slice(&ns, "a-2", "a", &["10.0.0.3"])).await?;
    world.put(&cidr(&range, "172.30.0.0/24")).await?;
    world.put(&node(&world.node(), "zone-a", None)).await?;
    let sink = Arc::new(Collector::default());
    let _source = world.start(&sink);
    eventually_in_sink(&sink, "everything is received", |state| {
        let ip = |n| format!("{} 80", world.ip(n));
        services(state, world, &[("a", ip(1)), ("b", ip(2))])?;
        slices(state, world, &[("a-1", "a: 10.0.0.1,10.0.0.2".into()), ("a-2", "a: 10.0.0.3".into())])?;
        let cidrs = state.cidrs(&range)?;
        ensure!(cidrs == short(&[("", "172.30.0.0/24".into())]), "ServiceCIDRs are {cidrs:?}");
        let node = state.node.as_ref().context("no Node")?;
        ensure!(node.exists && node.name == world.node(), "{node:?}");
        state.check_healthy(&SourceKind::ALL)
    })
    .await
}

pub(crate) async fn each_change_is_sent(world: &impl World) -> Result<()> {
    let ns = world.namespace();
    let range = format!("range-{}", world.number());
    let sink = Arc::new(Collector::default());
    let _source = world.start(&sink);
    eventually_in_sink(&sink, "there is nothing", |state| {
        services(state, world, &[])?;
        slices(state, world, &[])?;
        state.check_healthy(&COLLECTED)
    })
    .await?;

    let a = service(&ns, "a", &world.ip(1));
    let ip = format!("{} 80", world.ip(1));
    world.put(&a).await?;
    eventually_in_sink(&sink, "a Service is made", |state| services(state, world, &[("a", ip.clone())]))
        .await?;
    let a = with(a, "/spec/ports", json!([{"name": "http", "port": 81, "protocol": "TCP"}]));
    world.put(&a).await?;
    let ip = format!("{} 81", world.ip(1));
    eventually_in_sink(&sink, "its port changes", |state| services(state, world, &[("a", ip.clone())]))
        .await?;

    world.put(&slice(&ns, "a-1", "a", &["10.0.0.1"])).await?;
    eventually_in_sink(&sink, "a slice is made", |state| {
        slices(state, world, &[("a-1", "a: 10.0.0.1".into())])
    })
    .await?;
    let second = slice(&ns, "a-2", "a", &["10.0.0.2"]);
    world.put(&second).await?;
    world.put(&slice(&ns, "a-1", "a", &["10.0.0.7", "10.0.0.8"])).await?;
    let changed = ("a-1", "a: 10.0.0.7,10.0.0.8".to_owned());
    eventually_in_sink(&sink, "slices come and change", |state| {
        slices(state, world, &[changed.clone(), ("a-2", "a: 10.0.0.2".into())])
    })
    .await?;
    world.delete(&second).await?;
    eventually_in_sink(&sink, "a slice goes", |state| slices(state, world, std::slice::from_ref(&changed)))
        .await?;

    let own = cidr(&range, "172.30.1.0/24");
    world.put(&own).await?;
    eventually_in_sink(&sink, "a ServiceCIDR comes", |state| {
        ensure!(state.cidrs(&range)?.len() == 1, "{:?}", state.cidrs(&range)?);
        Ok(())
    })
    .await?;
    world.delete(&own).await?;
    world.delete(&a).await?;
    eventually_in_sink(&sink, "they go", |state| {
        ensure!(state.cidrs(&range)?.is_empty(), "{:?}", state.cidrs(&range)?);
        services(state, world, &[])
    })
    .await
}

pub(crate) async fn case_2_a_service_of_another_proxy_is_removed_and_restored(
    world: &impl World,
) -> Result<()> {
    let plain = service(&world.namespace(), "a", &world.ip(1));
    let there = [("a", format!("{} 80", world.ip(1)))];
    let sink = Arc::new(Collector::default());
    let _source = world.start(&sink);
    world.put(&plain).await?;
    eventually_in_sink(&sink, "the Service is there", |state| services(state, world, &there)).await?;
    // Any value excludes it, even an empty one.
    for value in ["", "another"] {
        let labelled = with(plain.clone(), "/metadata/labels", json!({"app": "a", PROXY_NAME: value}));
        world.put(&labelled).await?;
        eventually_in_sink(&sink, "it has vanished", |state| services(state, world, &[])).await?;
        world.put(&plain).await?;
        eventually_in_sink(&sink, "it is back", |state| services(state, world, &there)).await?;
    }
    Ok(())
}

pub(crate) async fn case_1_headless_and_external_services_are_ignored(world: &impl World) -> Result<()> {
    let ns = world.namespace();
    let external = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": ns, "name": "external"},
        "spec": {"type": "ExternalName", "externalName": "example.com"},
    });
    let sink = Arc::new(Collector::default());
    world.put(&service(&ns, "headless", "None")).await?;
    let _source = world.start(&sink);
    world.put(&external).await?;
    world.put(&service(&ns, "late", "None")).await?;
    // Delivered after the others, so their events have been delivered too.
    world.put(&service(&ns, "z", &world.ip(1))).await?;
    eventually_in_sink(&sink, "only one counts", |state| {
        services(state, world, &[("z", format!("{} 80", world.ip(1)))])
    })
    .await
}

pub(crate) async fn node_info_matches_the_node(world: &impl World) -> Result<()> {
    let name = world.node();
    let sink = Arc::new(Collector::default());
    let _source = world.start(&sink);
    let none = NodeView { name: name.clone(), ..NodeView::default() };
    let is = async |what: &str, expected: &NodeView| {
        eventually_in_sink(&sink, what, |state| {
            ensure!(state.node.as_ref() == Some(expected), "the Node is {:?}", state.node);
            Ok(())
        })
        .await
    };
    is("there is no Node", &none).await?;
    world.put(&node(&name, "zone-a", None)).await?;
    let there = NodeView {
        name: name.clone(),
        exists: true,
        zone: Some("zone-a".into()),
        ips: vec!["10.1.2.3".parse()?, "192.0.2.9".parse()?],
        pod_cidrs: vec!["10.200.0.0/24".into()],
        eligible: true,
    };
    is("the Node is there", &there).await?;
    let moved = node(&name, "zone-b", Some("ToBeDeletedByClusterAutoscaler"));
    world.put(&moved).await?;
    is(
        "it moves, and is to be deleted",
        &NodeView { zone: Some("zone-b".into()), eligible: false, ..there.clone() },
    )
    .await?;
    world.put(&node(&name, "zone-b", Some("other"))).await?;
    is("it stays", &NodeView { zone: Some("zone-b".into()), ..there }).await?;
    world.delete(&moved).await?;
    is("it is gone", &none).await
}

pub(crate) async fn a_sink_that_lost_its_state_gets_everything_again(world: &impl World) -> Result<()> {
    let ns = world.namespace();
    world.put(&service(&ns, "a", &world.ip(1))).await?;
    world.put(&slice(&ns, "a-1", "a", &["10.0.0.1"])).await?;
    let sink = Arc::new(Collector::default());
    let _source = world.start(&sink);
    let of_service = [("a", format!("{} 80", world.ip(1)))];
    eventually_in_sink(&sink, "both are received", |state| {
        services(state, world, &of_service)?;
        slices(state, world, &[("a-1", "a: 10.0.0.1".into())])
    })
    .await?;
    for n in 2..4_u8 {
        sink.forget();
        // It gets a change, and reports that it knows nothing.
        world.put(&slice(&ns, "a-1", "a", &[&format!("10.0.0.{n}")])).await?;
        world.put(&service(&ns, "b", &world.ip(n))).await?;
        eventually_in_sink(&sink, "everything is received again", |state| {
            let [a] = of_service.clone();
            services(state, world, &[a, ("b", format!("{} 80", world.ip(n)))])?;
            slices(state, world, &[("a-1", format!("a: 10.0.0.{n}"))])
        })
        .await?;
        world.delete(&service(&ns, "b", &world.ip(n))).await?;
        eventually_in_sink(&sink, "as before", |state| services(state, world, &of_service)).await?;
    }
    Ok(())
}

pub(crate) async fn a_slow_sink_gets_everything_in_bounded_batches<W: World>(world: &W) -> Result<()> {
    const COUNT: usize = 1_200;
    let ns = world.namespace();
    let all: Vec<Value> = (0..COUNT)
        .map(|n| slice(&ns, &format!("s-{n}"), "a", &[&format!("10.0.{}.{}", n / 200, n % 200)]))
        .collect();
    world.put_all(&all).await?;
    let sink = Arc::new(Collector::slow(Duration::from_millis(50)));
    let _source = world.start(&sink);
    eventually_in_sink(&sink, "all slices are received", |state| {
        let count = state.slices(&ns)?.len();
        ensure!(count == COUNT, "{count} of {COUNT}");
        Ok(())
    })
    .await?;
    let largest = sink.state().slices.largest_batch;
    ensure!(largest <= W::LARGEST_BATCH, "{largest} in one event");
    Ok(())
}

pub(crate) async fn a_restarted_source_reports_deletions_during_its_absence(
    world: &impl World,
) -> Result<()> {
    let ns = world.namespace();
    let (a, b) = (service(&ns, "a", &world.ip(1)), service(&ns, "b", &world.ip(2)));
    world.put(&a).await?;
    world.put(&b).await?;
    let sink = Arc::new(Collector::default());
    let there = |n| format!("{} 80", world.ip(n));
    let source = world.start(&sink);
    eventually_in_sink(&sink, "both are there", |state| {
        services(state, world, &[("a", there(1)), ("b", there(2))])
    })
    .await?;
    drop(source);
    world.delete(&a).await?;
    world.put(&service(&ns, "c", &world.ip(3))).await?;
    // To the same sink, which still has the old state.
    let _source = world.start(&sink);
    eventually_in_sink(&sink, "one is gone, one is new", |state| {
        services(state, world, &[("b", there(2)), ("c", there(3))])
    })
    .await
}
