//! Owns: that the controllers run, and whether the EndpointSlices of the Deployment that changes gracefully say what its pods are. In:
//! both, from the API server. Out: windows of [`Broken::Controllers`].
//!
//! Controllers that have ended are started again. After an outage of the API server, a controller waits up to a minute before it watches
//! pods again. Until then the slices have pods that have ended, and so has every proxy.

use super::env::NodeEnv;
use crate::Phase;
use crate::timeline::{Broken, Timeline};
use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch as channel;

const INTERVAL: Duration = Duration::from_millis(500);
/// Controllers that work need less. The servers answer for 5 s after the deletion of their pod.
const LATE: Duration = Duration::from_secs(1);
/// Timeout of a request to the API server.
const API_PATIENCE: Duration = Duration::from_secs(3);

/// Looks until the phase is `Done`. While the API server does not answer, what was known stays.
pub(super) async fn watch(env: Arc<NodeEnv>, timeline: Timeline, phases: channel::Receiver<Phase>) {
    let (mut since, mut window) = (None, None);
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(INTERVAL).await;
        restart_if_ended(&env, &timeline).await;
        let Ok(Ok(outdated)) = tokio::time::timeout(API_PATIENCE, outdated(&env)).await else { continue };
        if outdated.is_empty() {
            (since, window) = (None, None);
            continue;
        }
        let since = *since.get_or_insert_with(Instant::now);
        if window.is_none() && since.elapsed() > LATE {
            let all = outdated.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            timeline.record("controllers are late", &all);
            timeline.count("controllers are late");
            window = Some(timeline.open(Broken::Controllers));
        }
    }
}

/// As a kubelet does with their static pod.
async fn restart_if_ended(env: &NodeEnv, timeline: &Timeline) {
    let mut controllers = env.controllers.lock().await;
    if controllers.is_running().unwrap_or(true) {
        return;
    }
    let _window = timeline.open(Broken::Controllers);
    match controllers.start_again().await {
        Ok(()) => timeline.count("controllers restarted"),
        // They end as well if the API server does not answer.
        Err(error) => timeline.record("controllers do not start", &format!("{error:#}")),
    }
}

async fn outdated(env: &NodeEnv) -> Result<BTreeSet<String>> {
    let client = env.admin.client();
    let of_service = ListParams::default().labels("kubernetes.io/service-name=graceful");
    let slices = Api::<EndpointSlice>::namespaced(client, "default").list(&of_service).await?;
    let of_deployment = ListParams::default().labels("app=moving-0");
    let pods = env.admin.pods("default").list(&of_deployment).await?;
    Ok(ended(&slices.items, &pods.items))
}

/// Addresses that are ready by a slice and not those of a pod that goes on.
fn ended(slices: &[EndpointSlice], pods: &[Pod]) -> BTreeSet<String> {
    let goes_on = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
    let addresses: BTreeSet<&str> =
        pods.iter().filter(goes_on).filter_map(|pod| pod.status.as_ref()?.pod_ip.as_deref()).collect();
    let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    let ready = endpoints.filter(|endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    });
    let of_ready = ready.flat_map(|endpoint| &endpoint.addresses);
    of_ready.filter(|address| !addresses.contains(address.as_str())).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json};

    #[test]
    fn an_address_without_a_pod_that_goes_on_has_ended() -> Result<()> {
        let endpoint = |ip: &str, conditions: Value| json!({"addresses": [ip], "conditions": conditions});
        let slice: EndpointSlice = from_value(json!({
            "addressType": "IPv4", "metadata": {"name": "graceful-1"},
            "endpoints": [
                endpoint("10.0.0.1", json!({"ready": true})),
                endpoint("10.0.0.2", json!({"ready": true})),
                endpoint("10.0.0.3", json!({})),
                endpoint("10.0.0.4", json!({"ready": false, "serving": true, "terminating": true})),
            ],
        }))?;
        let pod = |ip: &str, deleted: Value| -> Result<Pod> {
            Ok(from_value(json!({"metadata": {"deletionTimestamp": deleted}, "status": {"podIP": ip}}))?)
        };
        let ends = json!("2026-01-01T00:00:00Z");
        let pods = [pod("10.0.0.1", Value::Null)?, pod("10.0.0.2", ends)?];
        let expected = ["10.0.0.2", "10.0.0.3"].map(str::to_owned);
        assert_eq!(ended(std::slice::from_ref(&slice), &pods), expected.into());
        assert_eq!(ended(&[slice], &[]).len(), 3);
        assert!(ended(&[], &pods).is_empty());
        Ok(())
    }
}
