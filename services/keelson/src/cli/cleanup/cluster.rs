//! What the agent left at the API server.
//!
//! Owns: nothing. In: the settings' API server and credentials. Out: the agent's own Lease and its own conditions of the
//! Node deleted. In the role of a node that includes the node's heartbeat: the Lease of the node's name.

use keelson_actors::{
    cluster::{ApiErrorKind, LEASE_NAMESPACE, NodeApi as _},
    status,
};
use keelson_config::Settings;
use keelson_kube::ApiServer;
use serde_json::json;

use super::report::{Outcome, Report};
use crate::agent::{cluster::Cluster, heartbeats};

const LEASE: &str = "Lease";
const CONDITION: &str = "node condition";

pub(super) async fn clean(settings: &Settings, report: &mut Report) {
    let Some(cluster) = Cluster::of(settings) else {
        return report.add(LEASE, "", Outcome::Skipped, "no API server is configured (section [kube])");
    };
    let api = cluster.connect(cluster.request_timeout);
    clean_lease(settings, &api, report).await;
    clean_conditions(settings, &api, report).await;
}

async fn clean_lease(settings: &Settings, api: &ApiServer, report: &mut Report) {
    use keelson_actors::cluster::LeaseApi as _;
    let policy = heartbeats::lease_policy(settings);
    let shown = format!("{LEASE_NAMESPACE}/{}", policy.name);
    match api.get_lease(&policy.name).await {
        Err(error) if error.kind == ApiErrorKind::NotFound => {
            report.add(LEASE, shown, Outcome::Absent, "");
        }
        Err(error) => report.add(LEASE, shown, Outcome::Failed, error.to_string()),
        Ok(lease) if lease.holder.as_deref().is_some_and(|holder| holder != policy.holder) => {
            let holder = lease.holder.unwrap_or_default();
            report.add(LEASE, shown, Outcome::Skipped, format!("held by {holder}"));
        }
        Ok(_) => {
            let removal = async || match api.delete_lease(&policy.name).await {
                Err(error) if error.kind == ApiErrorKind::Forbidden => Err(format!(
                    "{error}; companions may not delete their Lease: use other credentials, \
                     such as --set kube.kubeconfig=/etc/kubernetes/admin.conf"
                )),
                Err(error) if error.kind != ApiErrorKind::NotFound => Err(error.to_string()),
                _ => Ok(()),
            };
            report.remove(LEASE, &shown, String::new(), removal).await;
        }
    }
}

async fn clean_conditions(settings: &Settings, api: &ApiServer, report: &mut Report) {
    let name = &settings.agent.node_name;
    let node = match api.get_node(name).await {
        Ok(node) => node,
        Err(error) if error.kind == ApiErrorKind::NotFound => {
            return report.add(CONDITION, "", Outcome::Absent, format!("there is no Node {name}"));
        }
        Err(error) => return report.add(CONDITION, "", Outcome::Failed, error.to_string()),
    };
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    for kind in status::companion_conditions() {
        if !conditions.iter().any(|condition| condition.type_ == *kind) {
            report.add(CONDITION, *kind, Outcome::Absent, "");
            continue;
        }
        let patch = json!({"status": {"conditions": [{"$patch": "delete", "type": kind}]}});
        let removal =
            async || api.patch_status(name, patch).await.map(drop).map_err(|error| error.to_string());
        report.remove(CONDITION, kind, String::new(), removal).await;
    }
}
