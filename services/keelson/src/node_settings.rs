//! Section `[node]` for the LeaseRenewer and the StatusReporter.
//!
//! Owns: the check of settings whose syntax only they know. In: settings. Out: their policies, or every invalid
//! setting.

use keelson_config::{EndpointsSource, Gate, Settings};
use keelson_heartbeats::{
    lease::LeasePolicy,
    status::{
        EndpointsOrigin, Labels, NodeIps, Register, ResourceList, Role, SettingError, StatusPolicy, Taint,
        Thresholds,
    },
};

/// An invalid setting of section `[node]`.
pub(crate) struct NodeProblem {
    /// `node.KEY`.
    pub(crate) key: &'static str,
    pub(crate) error: SettingError,
}

/// Collects problems; an invalid value is replaced by a default that is never used.
fn read<T: Default>(key: &'static str, read: Result<T, SettingError>, problems: &mut Vec<NodeProblem>) -> T {
    read.unwrap_or_else(|error| {
        problems.push(NodeProblem { key, error });
        T::default()
    })
}

pub(crate) fn status_policy(settings: &Settings) -> Result<StatusPolicy, Vec<NodeProblem>> {
    let node = &settings.node;
    let role = match node.role {
        keelson_config::Role::Companion => Role::Companion,
        keelson_config::Role::Node => Role::Node,
    };
    let own = StatusPolicy::new(role, &settings.agent.node_name);
    let mut wrong = Vec::new();
    let policy = StatusPolicy {
        update_frequency: node.node_status_update_frequency,
        report_frequency: node.node_status_report_frequency,
        lease_duration: node.lease_duration,
        pulls_stalled_after: node.pulls_stalled_after,
        endpoints_origin: endpoints_origin(settings),
        external_conditions: settings.feature_gates.enabled(Gate::ExternalNodeConditions),
        register: match node.register_node {
            keelson_config::Register::Once => Register::Once,
            keelson_config::Register::Always => Register::Always,
            keelson_config::Register::Never => Register::Never,
        },
        labels: read("node.node_labels", Labels::parse_list(&node.node_labels), &mut wrong),
        taints: read("node.register_with_taints", Taint::parse_list(&node.register_with_taints), &mut wrong),
        zone: node.zone.clone(),
        region: node.region.clone(),
        provider_id: node.provider_id.clone(),
        node_ips: read("node.node_ip", NodeIps::parse_list(&node.node_ip), &mut wrong),
        kube_reserved: read("node.kube_reserved", ResourceList::parse(&node.kube_reserved), &mut wrong),
        system_reserved: read("node.system_reserved", ResourceList::parse(&node.system_reserved), &mut wrong),
        eviction_hard: read("node.eviction_hard", Thresholds::parse(&node.eviction_hard), &mut wrong),
        pressure_transition: node.eviction_pressure_transition_period,
        max_pods: node.max_pods,
        max_images: i32::try_from(node.node_status_max_images).unwrap_or(i32::MAX),
        root_dir: node.root_dir.clone(),
        kubelet_version: match node.kubelet_version.is_empty() {
            true => own.kubelet_version.clone(),
            false => node.kubelet_version.clone(),
        },
        ..own
    };
    if wrong.is_empty() { Ok(policy) } else { Err(wrong) }
}

/// The source of endpoints while heartbeats run, which requires an API server.
fn endpoints_origin(settings: &Settings) -> EndpointsOrigin {
    match settings.endpoints.source {
        EndpointsSource::Files => EndpointsOrigin::Manifests,
        EndpointsSource::Off | EndpointsSource::Kube | EndpointsSource::Auto => EndpointsOrigin::ApiServer,
    }
}

/// Whether the agent renews a Lease: in role node that of the node, in role companion its own if requested.
pub(crate) fn renews_lease(settings: &Settings) -> bool {
    settings.node.role == keelson_config::Role::Node || settings.node.companion_lease
}

pub(crate) fn lease_policy(settings: &Settings) -> LeasePolicy {
    let node = settings.agent.node_name.clone();
    let name = match settings.node.role {
        keelson_config::Role::Node => node.clone(),
        keelson_config::Role::Companion => format!("keelson-{node}"),
    };
    LeasePolicy {
        name,
        holder: node.clone(),
        node,
        duration: settings.node.lease_duration,
        drops_managed_fields: settings.feature_gates.enabled(Gate::LeanLeases),
        may_stand_back: settings.node.role == keelson_config::Role::Node
            && settings.node.when_contested == keelson_config::WhenContested::StandBack,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_invalid_setting_is_named() {
        let mut settings = Settings::default();
        assert!(status_policy(&settings).is_ok(), "the defaults do");
        settings.node.eviction_hard = "memory.available".into();
        settings.node.register_with_taints = "a=b:Never".into();
        settings.node.node_ip = "10.0.0.1,10.0.0.2".into();
        let keys: Vec<_> =
            status_policy(&settings).expect_err("three mistakes").into_iter().map(|of| of.key).collect();
        assert_eq!(keys, ["node.register_with_taints", "node.node_ip", "node.eviction_hard"]);
    }
    /// E7: it costs the API server more than the status saves, and nothing reads it.
    #[test]
    fn e7_a_companion_renews_a_lease_only_where_that_is_asked_for() {
        let mut settings = Settings::default();
        assert!(!renews_lease(&settings));
        settings.node.companion_lease = true;
        assert!(renews_lease(&settings));
        settings.node.companion_lease = false;
        settings.node.role = keelson_config::Role::Node;
        assert!(renews_lease(&settings), "a node's heartbeat");
    }

    /// E17.
    #[test]
    fn e17_condition_texts_depend_on_the_source_of_endpoints() {
        let mut settings = Settings::default();
        let origin = |settings: &Settings| status_policy(settings).map(|policy| policy.endpoints_origin).ok();
        assert_eq!(origin(&settings), Some(EndpointsOrigin::ApiServer));
        settings.endpoints.source = EndpointsSource::Files;
        assert_eq!(origin(&settings), Some(EndpointsOrigin::Manifests));
    }

    #[test]
    fn a_companion_has_a_lease_of_its_own_name() {
        let mut settings = Settings::default();
        settings.agent.node_name = "n1".into();
        let lease = lease_policy(&settings);
        assert_eq!(
            (&*lease.name, &*lease.holder, &*lease.node, lease.drops_managed_fields),
            ("keelson-n1", "n1", "n1", true)
        );
        settings.node.role = keelson_config::Role::Node;
        settings.feature_gates = settings.feature_gates.with(Gate::LeanLeases, false);
        let lease = lease_policy(&settings);
        assert_eq!((&*lease.name, lease.drops_managed_fields, lease.may_stand_back), ("n1", false, true));
        settings.node.when_contested = keelson_config::WhenContested::Continue;
        assert!(!lease_policy(&settings).may_stand_back);
    }
}
