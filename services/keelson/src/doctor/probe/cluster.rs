//! The API server: credentials, the Node, permissions, networks.
//!
//! In: settings. Out: [`Cluster`]. Permissions are asked for with SelfSubjectAccessReviews, one for each verb that the agent
//! uses with these settings, as in `packaging/kustomize`.

use keelson_actor_system::cluster::{ApiErrorKind, LEASE_NAMESPACE, NodeApi as _};
use keelson_config::{EndpointsSource, Gate, Role, Settings};
use keelson_kube::{Access, AccessQuestion, ApiServer};
use serde_json::Value;

use super::super::{
    Part,
    facts::{Cluster, Kubeadm, NodeAnswer, Right},
};
use crate::{agent::cluster::Cluster as Connection, node_settings};

pub(super) async fn ask(settings: &Settings) -> Option<Cluster> {
    let connection = Connection::of(settings)?;
    let api = connection.connect(connection.request_timeout);
    let name = &settings.agent.node_name;
    let node = match api.get_node(name).await {
        Ok(node) => {
            let spec = node.spec.unwrap_or_default();
            let cidrs = spec.pod_cidrs.filter(|cidrs| !cidrs.is_empty());
            NodeAnswer::Found { pod_cidrs: cidrs.unwrap_or_else(|| spec.pod_cidr.into_iter().collect()) }
        }
        Err(error) => match error.kind {
            ApiErrorKind::NotFound => NodeAnswer::Absent,
            ApiErrorKind::Forbidden => NodeAnswer::Refused(error.to_string()),
            _ => NodeAnswer::Failed(error.to_string()),
        },
    };
    let in_use = connection.credentials_in_use();
    let is_usable = in_use.error.is_none();
    let answers = !matches!(node, NodeAnswer::Failed(_));
    let (rights, kubeadm) = if answers {
        (rights(settings, &api).await, kubeadm(&api).await)
    } else {
        (Vec::new(), Kubeadm::default())
    };
    Some(Cluster {
        server: api.url(),
        credentials: in_use.credentials,
        warnings: in_use.warnings,
        error: in_use.error,
        node: if is_usable { node } else { NodeAnswer::NotAsked },
        rights,
        kubeadm,
    })
}

async fn rights(settings: &Settings, api: &ApiServer) -> Vec<Right> {
    let mut rights = Vec::new();
    for (part, question) in questions(settings) {
        let allowed = match api.review_access(&question).await {
            Ok(Access::Allowed) => Ok(()),
            Ok(Access::Denied(reason)) => Err(reason),
            Err(error) => Err(error.to_string()),
        };
        rights.push(Right { part, what: text(&question), allowed });
    }
    rights
}

/// `patch nodes/status`.
fn text(question: &AccessQuestion<'_>) -> String {
    let resource = match question.subresource {
        "" => question.resource.to_owned(),
        sub => format!("{}/{sub}", question.resource),
    };
    format!("{} {resource}", question.verb)
}

/// What the agent does with these settings.
fn questions(settings: &Settings) -> Vec<(Part, AccessQuestion<'_>)> {
    let node = settings.agent.node_name.as_str();
    let none = AccessQuestion::default();
    let of_node = AccessQuestion { resource: "nodes", name: node, ..none };
    let of_pods = AccessQuestion { resource: "pods", field: Some(("spec.nodeName", node)), ..none };
    let heartbeats = |question| (Part::Heartbeats, question);
    let mut questions = vec![
        heartbeats(AccessQuestion { verb: "get", ..of_node }),
        heartbeats(AccessQuestion { verb: "watch", ..of_node }),
        heartbeats(AccessQuestion { verb: "patch", subresource: "status", ..of_node }),
        heartbeats(AccessQuestion { verb: "list", ..of_pods }),
        heartbeats(AccessQuestion { verb: "watch", ..of_pods }),
    ];
    // Of queued pulls in the namespaces of pods, of the Node in default.
    let of_pulls = !settings.pulls.queued_event_after.is_zero();
    if of_pulls || settings.feature_gates.enabled(Gate::NodeEvents) {
        let namespace = if of_pulls { "" } else { "default" };
        let events = AccessQuestion { resource: "events", namespace, ..none };
        questions.push(heartbeats(AccessQuestion { verb: "create", ..events }));
        questions.push(heartbeats(AccessQuestion { verb: "patch", ..events }));
    }
    if node_settings::renews_lease(settings) {
        let lease = AccessQuestion {
            group: "coordination.k8s.io",
            resource: "leases",
            namespace: LEASE_NAMESPACE,
            // Their names differ; the Node authorizer permits the node's own alone.
            name: if settings.node.role == Role::Node { node } else { "" },
            ..none
        };
        questions.extend(["get", "create", "patch"].map(|verb| heartbeats(AccessQuestion { verb, ..lease })));
    }
    if matches!(settings.endpoints.source, EndpointsSource::Auto | EndpointsSource::Kube) {
        let services = AccessQuestion { resource: "services", ..none };
        let slices = AccessQuestion { group: "discovery.k8s.io", resource: "endpointslices", ..none };
        for resource in [services, slices] {
            questions
                .extend(["list", "watch"].map(|verb| (Part::Endpoints, AccessQuestion { verb, ..resource })));
        }
    }
    questions
}

/// kubeadm lets nodes read it.
async fn kubeadm(api: &ApiServer) -> Kubeadm {
    let text = api.config_map_value("kube-system", "kubeadm-config", "ClusterConfiguration").await;
    text.ok().flatten().map(|text| networks(&text)).unwrap_or_default()
}

fn networks(text: &str) -> Kubeadm {
    let Ok(configuration) = serde_saphyr::from_str::<Value>(text) else { return Kubeadm::default() };
    let of = |key: &str| {
        configuration["networking"][key].as_str().filter(|text| !text.is_empty()).map(ToOwned::to_owned)
    };
    Kubeadm { pod_subnet: of("podSubnet"), service_subnet: of("serviceSubnet") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_a_cluster_configuration() {
        let text = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nnetworking:\n  dnsDomain: cluster.local\n  \
                    podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12\n";
        let expected =
            Kubeadm { pod_subnet: Some("10.244.0.0/16".into()), service_subnet: Some("10.96.0.0/12".into()) };
        assert_eq!(networks(text), expected);
        assert_eq!(networks("kind: ClusterConfiguration\n"), Kubeadm::default());
        assert_eq!(networks("- ["), Kubeadm::default());
    }

    #[test]
    fn questions_follow_the_settings() {
        let mut settings = Settings::default();
        settings.agent.node_name = "n1".into();
        let texts = |settings: &Settings| -> Vec<String> {
            questions(settings).iter().map(|(_, question)| text(question)).collect()
        };
        let all = texts(&settings);
        assert!(
            all.contains(&"patch nodes/status".to_owned()) && all.contains(&"create events".to_owned()),
            "{all:?}"
        );
        assert!(!all.contains(&"create leases".to_owned()));
        let of_events = |settings: &Settings| {
            let events = questions(settings).into_iter().find(|(_, question)| question.resource == "events");
            events.map(|(_, question)| question.namespace.to_owned())
        };
        assert_eq!(of_events(&settings).as_deref(), Some(""), "the namespaces of pods");
        settings.pulls.queued_event_after = std::time::Duration::ZERO;
        assert_eq!(of_events(&settings).as_deref(), Some("default"), "that of Events on the Node");
        settings.feature_gates = settings.feature_gates.with(Gate::NodeEvents, false);
        settings.node.companion_lease = true;
        settings.endpoints.source = EndpointsSource::Off;
        let all = texts(&settings);
        assert!(
            all.contains(&"create leases".to_owned()) && !all.contains(&"create events".to_owned()),
            "{all:?}"
        );
        assert!(!all.iter().any(|text| text.contains("services")));
    }
}
