//! What only an API server can do to a source.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use keelson_actors::cluster::ChoreHealth;
use keelson_actors::endpoints::SourceKind;
use keelson_tests::kube::AuditEvent;
use serde_json::json;

use crate::cluster::{InCluster, NODE, Shared};
use crate::objects::{PROXY_NAME, cidr, service, slice, with};
use crate::truth::{Collector, Known, Named, Truth};
use crate::world::{World as _, number, run, so};

const COLLECTED: [SourceKind; 3] =
    [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::ServiceCidrs];

/// Names of what is there of the test's Services and slices.
fn are(truth: &Truth, world: &InCluster, services: &[&str], slices: &[&str]) -> Result<()> {
    let of_services: Vec<_> = truth.services(&world.namespace())?.into_keys().collect();
    let of_slices: Vec<_> = truth.slices(&world.namespace())?.into_keys().collect();
    ensure!(of_services == services && of_slices == slices, "there are {of_services:?} and {of_slices:?}");
    Ok(())
}

/// What a user asked of a resource.
fn asked(world: &InCluster, user: &str, resource: &str) -> Result<Vec<AuditEvent>> {
    world.shared.cluster.api.audit(|event| event.user == user && event.resource == resource)
}

fn nothing_but<T: Named>(known: &Known<T>, labels: &[&str]) -> Result<()> {
    for (name, object) in &known.objects {
        let meta = object.meta();
        let strange = meta.labels.keys().find(|label| !labels.contains(&label.as_str()));
        ensure!(strange.is_none(), "{name} has {strange:?}");
        let trigger = "endpoints.kubernetes.io/last-change-trigger-time";
        ensure!(meta.annotations.keys().all(|key| key == trigger), "{name} has {:?}", meta.annotations);
        ensure!(meta.resource_version.is_empty(), "{name} has a resourceVersion");
    }
    Ok(())
}

#[test]
fn what_nobody_reads_does_not_come_and_what_does_not_count_is_not_asked_for() -> Result<()> {
    run(async {
        let world = InCluster::make().await?;
        let ns = world.namespace();
        world.put(&service(&ns, "a", &world.ip(1))).await?;
        world.put(&service(&ns, "headless", "None")).await?;
        let foreign = with(service(&ns, "foreign", &world.ip(2)), "/metadata/labels", json!({PROXY_NAME: ""}));
        world.put(&foreign).await?;
        world.put(&slice(&ns, "a-1", "a", &["10.0.0.1"])).await?;
        let headless = "service.kubernetes.io/headless";
        let of_headless = json!({"kubernetes.io/service-name": "headless", headless: ""});
        let hidden = with(slice(&ns, "h-1", "headless", &["10.0.0.2"]), "/metadata/labels", of_headless);
        world.put(&hidden).await?;
        let sink = Arc::new(Collector::default());
        let _source = world.start(&sink);
        so(&sink, "what counts is told", |truth| are(truth, &world, &["a"], &["a-1"])).await?;
        // By a watch as by the list.
        world.put(&service(&ns, "late", "None")).await?;
        world.put(&service(&ns, "z", &world.ip(3))).await?;
        world.put(&slice(&ns, "z-1", "z", &["10.0.0.3"])).await?;
        so(&sink, "and what comes later", |truth| are(truth, &world, &["a", "z"], &["a-1", "z-1"])).await?;
        let truth = sink.truth();
        for never in ["headless", "foreign", "late"] {
            ensure!(!truth.services.ever.contains(&format!("{ns}/{never}")), "{never} was told");
        }
        ensure!(!truth.slices.ever.contains(&format!("{ns}/h-1")), "the slice of a headless Service was told");
        nothing_but(&truth.services, &[])?;
        nothing_but(&truth.slices, &["kubernetes.io/service-name"])?;
        nothing_but(&truth.cidrs, &[])?;
        let slice = &truth.slices.objects[&format!("{ns}/a-1")];
        ensure!(slice.meta().annotations.len() == 1, "when the change was made is lost: {slice:?}");
        Ok(())
    })
}

#[test]
fn an_api_server_that_restarts_loses_nothing() -> Result<()> {
    run(async {
        let mut shared = Shared::start().await?;
        let sink = Arc::new(Collector::default());
        let world = InCluster::of(Arc::new(Shared::start_nothing())).await;
        drop(world);
        let _ = (&mut shared, &sink);
        Ok(())
    })
}
