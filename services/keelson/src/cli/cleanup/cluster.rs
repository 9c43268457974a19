//! The agent's objects at the API server.
//!
//! Owns: nothing. In: the settings' API server and credentials, the types of conditions in the state folder. Out:
//! deletes the agent's Leases and its conditions of the Node, including those of earlier versions and those that others
//! set through it. In role node that includes the node's heartbeat: the Lease with the node's name.

use std::sync::Arc;

use keelson_actor_system::cluster::{ApiErrorKind, LEASE_NAMESPACE, LeaseApi as _};
use keelson_config::{Role, Settings};
use keelson_heartbeats::{lease::LeasePolicy, status};
use keelson_kube::ApiServer;
use keelson_storage::StateStore;

use super::report::{Outcome, Report};
use crate::{
    agent::{cluster::Cluster, heartbeats::removal},
    node_settings,
};

const LEASE: &str = "Lease";
const CONDITION: &str = "node condition";
/// Suggests credentials with more permissions than a companion's.
const OTHERS: &str = "use other credentials, such as --set kube.kubeconfig=/etc/kubernetes/admin.conf";

pub(super) async fn clean(settings: &Settings, report: &mut Report) {
    let Some(cluster) = Cluster::of(settings) else {
        return report.add(LEASE, "", Outcome::Skipped, "no API server is configured (section [kube])");
    };
    let api = cluster.connect(cluster.request_timeout);
    let own = node_settings::lease_policy(settings);
    clean_lease(&own, is_expected(settings), &api, report).await;
    if settings.node.role == Role::Node {
        // From when the agent was a companion with a Lease.
        let mut before = settings.clone();
        before.node.role = Role::Companion;
        clean_lease(&node_settings::lease_policy(&before), false, &api, report).await;
    }
    clean_conditions(settings, &api, report).await;
}

/// Whether an agent with these settings renews its Lease, so that its credentials permit access.
fn is_expected(settings: &Settings) -> bool {
    settings.node.role == Role::Node || settings.node.companion_lease
}

async fn clean_lease(policy: &LeasePolicy, is_expected: bool, api: &ApiServer, report: &mut Report) {
    let shown = format!("{LEASE_NAMESPACE}/{}", policy.name);
    match api.get_lease(&policy.name).await {
        Err(error) if error.kind == ApiErrorKind::NotFound => {
            report.add(LEASE, shown, Outcome::Absent, "");
        }
        // Without node.companion_lease there is no Lease, unless it was disabled later.
        Err(error) if error.kind == ApiErrorKind::Forbidden && !is_expected => {
            let detail = format!(
                "the agent renews no Lease with these settings; to look for an earlier one, {OTHERS}"
            );
            report.add(LEASE, shown, Outcome::Skipped, detail);
        }
        Err(error) => report.add(LEASE, shown, Outcome::Failed, error.to_string()),
        Ok(lease) if lease.holder.as_deref().is_some_and(|holder| holder != policy.holder) => {
            let holder = lease.holder.unwrap_or_default();
            report.add(LEASE, shown, Outcome::Skipped, format!("held by {holder}"));
        }
        Ok(_) => {
            let removal = async || match api.delete_lease(&policy.name).await {
                Err(error) if error.kind == ApiErrorKind::Forbidden => Err(format!(
                    "{error}; the role companion has no permission to delete its Lease: {OTHERS}"
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
    let mut kinds: Vec<String> = status::added_conditions().map(ToOwned::to_owned).collect();
    match recorded(settings).await {
        Ok(recorded) => kinds.extend(recorded),
        Err(why) => report.add(CONDITION, "set with keelson node set-condition", Outcome::Skipped, why),
    }
    let found = match removal::find(api, name, &kinds).await {
        Ok(Some(found)) => found,
        Ok(None) => return report.add(CONDITION, "", Outcome::Absent, format!("Node {name} does not exist")),
        Err(error) => return report.add(CONDITION, "", Outcome::Failed, error.to_string()),
    };
    let done = match found.is_empty() || report.is_dry_run() {
        true => Ok(()),
        false => removal::remove(api, name, &found).await.map_err(|error| error.to_string()),
    };
    for kind in kinds {
        let (outcome, detail) = match &done {
            _ if !found.contains(&kind) => (Outcome::Absent, String::new()),
            _ if report.is_dry_run() => (Outcome::WouldRemove, String::new()),
            Ok(()) => (Outcome::Removed, String::new()),
            Err(error) => (Outcome::Failed, error.clone()),
        };
        report.add(CONDITION, kind, outcome, detail);
    }
}

/// The types of conditions that others set through the agent, from its state folder.
async fn recorded(settings: &Settings) -> Result<Vec<String>, String> {
    let dir = settings.agent.state_dir.clone();
    // A folder that an agent used has its lock file; nothing is created here.
    if !dir.join(keelson_storage::LOCK_FILE).exists() {
        return Ok(Vec::new());
    }
    let read = move || {
        let opened = keelson_storage::open(&dir).map_err(|error| error.to_string())?;
        let store: Arc<dyn StateStore> = opened.store;
        status::recorded_conditions(&store).map_err(|error| error.to_string())
    };
    let read = tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?;
    read.map_err(|why| format!("cannot read the state directory, which records them: {why}"))
}
