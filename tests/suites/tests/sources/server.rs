//! Situations of a source that only an API server can cause.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use keelson_cluster::kube::AuditEvent;
use keelson_endpoint_publisher::SourceKind;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use crate::cluster::{InCluster, NODE, SharedCluster};
use crate::objects::{PROXY_NAME, cidr, service, slice, with};
use crate::sink::{Collector, Known, Named, SinkState};
use crate::world::{World as _, eventually_in_sink, run};

const COLLECTED: [SourceKind; 3] =
    [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::ServiceCidrs];

fn check_events(state: &SinkState, world: &InCluster, services: &[&str], slices: &[&str]) -> Result<()> {
    let of_services: Vec<_> = state.services(&world.namespace())?.into_keys().collect();
    let of_slices: Vec<_> = state.slices(&world.namespace())?.into_keys().collect();
    ensure!(of_services == services && of_slices == slices, "there are {of_services:?} and {of_slices:?}");
    Ok(())
}

/// Requests of a user for a resource.
fn requests_for(world: &InCluster, user: &str, resource: &str) -> Result<Vec<AuditEvent>> {
    world.shared.cluster.api.audit(|event| event.user == user && event.resource == resource)
}

fn check_only<T: Named>(known: &Known<T>, labels: &[&str]) -> Result<()> {
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
fn unused_fields_and_irrelevant_objects_are_not_requested() -> Result<()> {
    run(async {
        let world = InCluster::make().await?;
        let ns = world.namespace();
        world.put(&service(&ns, "a", &world.ip(1))).await?;
        world.put(&service(&ns, "headless", "None")).await?;
        let foreign =
            with(service(&ns, "foreign", &world.ip(2)), "/metadata/labels", json!({PROXY_NAME: ""}));
        world.put(&foreign).await?;
        world.put(&slice(&ns, "a-1", "a", &["10.0.0.1"])).await?;
        let headless = "service.kubernetes.io/headless";
        let of_headless = json!({"kubernetes.io/service-name": "headless", headless: ""});
        let hidden = with(slice(&ns, "h-1", "headless", &["10.0.0.2"]), "/metadata/labels", of_headless);
        world.put(&hidden).await?;
        let sink = Arc::new(Collector::default());
        let _source = world.start(&sink);
        eventually_in_sink(&sink, "relevant objects are received", |state| {
            check_events(state, &world, &["a"], &["a-1"])
        })
        .await?;
        // With a watch as with the list.
        world.put(&service(&ns, "late", "None")).await?;
        world.put(&service(&ns, "z", &world.ip(3))).await?;
        world.put(&slice(&ns, "z-1", "z", &["10.0.0.3"])).await?;
        eventually_in_sink(&sink, "and what comes later", |state| {
            check_events(state, &world, &["a", "z"], &["a-1", "z-1"])
        })
        .await?;
        let state = sink.state();
        for never in ["headless", "foreign", "late"] {
            ensure!(!state.services.ever.contains(&format!("{ns}/{never}")), "{never} was received");
        }
        ensure!(
            !state.slices.ever.contains(&format!("{ns}/h-1")),
            "the slice of a headless Service was received"
        );
        check_only(&state.services, &[])?;
        check_only(&state.slices, &["kubernetes.io/service-name"])?;
        check_only(&state.cidrs, &[])?;
        let slice = &state.slices.objects[&format!("{ns}/a-1")];
        ensure!(slice.meta().annotations.len() == 1, "when the change was made is lost: {slice:?}");
        Ok(())
    })
}

#[test]
fn a_restarted_api_server_loses_nothing() -> Result<()> {
    run(async {
        let mut world = InCluster::of(Arc::new(SharedCluster::start().await?)).await?;
        let ns = world.namespace();
        let a = service(&ns, "a", &world.ip(1));
        world.put(&a).await?;
        world.put(&service(&ns, "b", &world.ip(2))).await?;
        world.put(&slice(&ns, "b-1", "b", &["10.0.0.1"])).await?;
        let sink = Arc::new(Collector::default());
        let kubeconfig = world.shared.companion.kubeconfig();
        let (api, _source) = world.start_by(&kubeconfig, &sink);
        eventually_in_sink(&sink, "existing objects are received", |state| {
            check_events(state, &world, &["a", "b"], &["b-1"])
        })
        .await?;

        world.own()?.cluster.api.kill9()?;
        eventually_in_sink(&sink, "the outage of the server is reported", |state| {
            COLLECTED.iter().try_for_each(|kind| state.check_failing(*kind, "(Unreachable)"))?;
            check_events(state, &world, &["a", "b"], &["b-1"])
        })
        .await?;
        world.own()?.cluster.api.start_again().await?;
        world.delete(&a).await?;
        world.put(&service(&ns, "c", &world.ip(3))).await?;
        eventually_in_sink(&sink, "changes after the kill are received", |state| {
            api.wake_watches();
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["b", "c"], &["b-1"])
        })
        .await?;

        world.own()?.cluster.api.terminate().await?;
        world.own()?.cluster.api.start_again().await?;
        world.delete(&slice(&ns, "b-1", "b", &[])).await?;
        world.put(&slice(&ns, "b-2", "b", &["10.0.0.2"])).await?;
        eventually_in_sink(&sink, "changes after the restart are received", |state| {
            api.wake_watches();
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["b", "c"], &["b-2"])
        })
        .await
    })
}

/// The events that the source missed were compacted away: it gets 410, and lists again.
#[test]
fn after_a_compaction_everything_is_listed_again() -> Result<()> {
    run(async {
        let mut world = InCluster::of(Arc::new(SharedCluster::start().await?)).await?;
        let ns = world.namespace();
        let a = service(&ns, "a", &world.ip(1));
        let gone = slice(&ns, "a-1", "a", &["10.0.0.1"]);
        world.put(&a).await?;
        world.put(&gone).await?;
        let proxy = world.shared.cluster.tcp_proxy().await?;
        let kubeconfig = world.own()?.companion.kubeconfig_via(&proxy.endpoint())?;
        let sink = Arc::new(Collector::default());
        let (api, _source) = world.start_by(&kubeconfig, &sink);
        eventually_in_sink(&sink, "existing objects are received", |state| {
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["a"], &["a-1"])
        })
        .await?;

        proxy.cut();
        proxy.reset();
        world.delete(&a).await?;
        world.delete(&gone).await?;
        for n in 2..20 {
            let n = u8::try_from(n)?;
            world.put(&service(&ns, "b", &world.ip(2))).await?;
            world.put(&slice(&ns, "b-1", "b", &[&format!("10.0.0.{n}")])).await?;
        }
        world.put(&cidr(&format!("range-{}", world.number()), "172.30.9.0/24")).await?;
        // A server that starts has only what its store has.
        world.own()?.cluster.api.kill9()?;
        world.shared.cluster.etcd.compact().await?;
        world.own()?.cluster.api.start_again().await?;
        check_events(&sink.state(), &world, &["a"], &["a-1"]).context("nothing got through the cut")?;
        proxy.repair();
        proxy.reset();
        eventually_in_sink(&sink, "the current objects are received", |state| {
            api.wake_watches();
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["b"], &["b-1"])?;
            let slices = state.slices(&ns)?;
            ensure!(slices["b-1"] == "b: 10.0.0.19", "{slices:?}");
            Ok(())
        })
        .await?;
        let state = sink.state();
        // A watch that merely broke resumes at its version: only one that is too old is listed again, at once and
        // without a report, because nothing has failed.
        let listings = (state.services.listings, state.slices.listings);
        ensure!(listings >= (2, 2), "there were {listings:?} listings");
        Ok(())
    })
}

#[test]
fn lost_rights_are_reported_and_recovered() -> Result<()> {
    run(async {
        let world = InCluster::make().await?;
        let ns = world.namespace();
        let cluster = &world.shared.cluster;
        let account = format!("rights-{}", world.number());
        let mut identity = cluster.service_account(&world.shared.scratch, "kube-system", &account).await?;
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": account},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "keelson-agent"},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "kube-system"}],
        });
        world.admin().apply(&binding.to_string()).await?;
        world.put(&service(&ns, "a", &world.ip(1))).await?;
        let proxy = cluster.tcp_proxy().await?;
        let kubeconfig = identity.kubeconfig_via(&proxy.endpoint())?;
        let sink = Arc::new(Collector::default());
        let (api, _source) = world.start_by(&kubeconfig, &sink);
        eventually_in_sink(&sink, "everything is healthy", |state| {
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["a"], &[])
        })
        .await?;

        let bindings: Api<ClusterRoleBinding> = Api::all(world.admin().client());
        bindings.delete(&account, &DeleteParams::default()).await?;
        // An open watch continues; a new one is refused, once the authorizer has the change.
        let broken = std::cell::Cell::new(0);
        eventually_in_sink(&sink, "the lost rights are reported", |state| {
            let refused = COLLECTED.iter().try_for_each(|kind| state.check_failing(*kind, "403"));
            broken.set(broken.get() + 1);
            if refused.is_err() && broken.get() % 50 == 1 {
                proxy.reset();
                api.wake_watches();
            }
            refused
        })
        .await?;
        check_events(&sink.state(), &world, &["a"], &[]).context("what was last known stays")?;
        world.put(&service(&ns, "b", &world.ip(2))).await?;
        world.put(&slice(&ns, "b-1", "b", &["10.0.0.1"])).await?;

        world.admin().apply(&binding.to_string()).await?;
        eventually_in_sink(&sink, "everything is healthy again", |state| {
            api.wake_watches();
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["a", "b"], &["b-1"])
        })
        .await
    })
}

/// A node may read Services by the API server's own rules, and the rest with the shipped ones.
#[test]
fn role_node_needs_exactly_the_shipped_rights() -> Result<()> {
    run(async {
        let world = InCluster::make().await?;
        let ns = world.namespace();
        world.put(&service(&ns, "a", &world.ip(1))).await?;
        world.put(&slice(&ns, "a-1", "a", &["10.0.0.1"])).await?;
        let identity = world.shared.cluster.node(&world.shared.scratch, &world.node()).await?;
        let sink = Arc::new(Collector::default());
        let (api, _source) = world.start_by(&identity.kubeconfig(), &sink);
        eventually_in_sink(&sink, "only Services are healthy", |state| {
            state.check_healthy(&[SourceKind::Services])?;
            ensure!(state.services(&ns)?.len() == 1, "{:?}", state.services(&ns)?);
            state.check_failing(SourceKind::EndpointSlices, "403")?;
            state.check_failing(SourceKind::ServiceCidrs, "403")
        })
        .await?;
        world.admin().apply(NODE).await?;
        eventually_in_sink(&sink, "everything is healthy", |state| {
            api.wake_watches();
            state.check_healthy(&COLLECTED)?;
            check_events(state, &world, &["a"], &["a-1"])
        })
        .await?;
        for resource in ["services", "endpointslices", "servicecidrs"] {
            let asked = requests_for(&world, identity.user(), resource)?;
            let strange = asked.iter().find(|event| !["list", "watch"].contains(&event.verb.as_str()));
            ensure!(strange.is_none(), "{strange:?}");
            ensure!(asked.iter().any(|event| event.verb == "watch"), "{resource} was never watched");
        }
        Ok(())
    })
}
