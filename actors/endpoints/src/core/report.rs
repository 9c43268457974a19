//! State and explanations for the debug API.
//!
//! Owns: [`pb::State`] as far as the core knows it, and explanations. In: requests. Out: responses; only the
//! requested number of Services is decoded.

use keelson_actor_system::cluster::JobHealth;
use keelson_proto::{endpoints as pb, localnetv1 as ln};
use prost::Message as _;

use super::{Core, DiskState};
use crate::{Item, ServiceName, SourceKind};

impl Core {
    /// Status, and at most `max` Services of a namespace, or of all namespaces if it is empty.
    pub(crate) fn state(&self, namespace: &str, max: usize) -> pb::State {
        let (state, reason, since_unix_ms) = self.status();
        let shown = self.shown.as_ref();
        pb::State {
            state: state.to_owned(),
            reason,
            since_unix_ms,
            instance_id: shown.map(|shown| shown.instance_id.to_string()).unwrap_or_default(),
            rev: self.rev(),
            published_unix_ms: self.shown_unix_ms,
            sources: SourceKind::ALL.into_iter().map(|kind| self.source(kind)).collect(),
            node: shown.map(|shown| node_state(&shown.node)),
            services: self.services() as u64,
            endpoints: self.endpoints,
            list: self.list(namespace, max),
            durable: self.durable(),
            ..pb::State::default()
        }
    }

    fn source(&self, kind: SourceKind) -> pb::SourceState {
        let (health, reason, since_unix_ms) = match self.health.get(&kind) {
            None | Some(JobHealth::Pending) => ("pending", "", 0),
            Some(JobHealth::Healthy) => ("healthy", "", 0),
            Some(JobHealth::Failing { reason, since_unix_ms, .. }) => ("failing", &**reason, *since_unix_ms),
        };
        pb::SourceState {
            resource: kind.resource().to_owned(),
            synced: self.inputs.kind_synced(kind),
            objects: self.inputs.objects(kind) as u64,
            health: health.to_owned(),
            reason: reason.to_owned(),
            since_unix_ms,
        }
    }

    fn list(&self, namespace: &str, max: usize) -> Vec<pb::ServiceSummary> {
        let Some(shown) = &self.shown else { return Vec::new() };
        let first = ServiceName::new(namespace, "");
        let all = namespace.is_empty();
        let from: Box<dyn Iterator<Item = (&ServiceName, &Item)>> =
            if all { Box::new(shown.services.iter()) } else { Box::new(shown.services.range(first..)) };
        let of = from.take_while(|(name, _)| all || name.namespace() == namespace).take(max);
        of.map(|(name, item)| summary(name, item)).collect()
    }

    /// `None`: neither the Service nor a slice of it is known.
    pub(crate) fn explain(&self, name: &ServiceName) -> Option<pb::Explanation> {
        let item = self.shown.as_ref().and_then(|shown| shown.services.get(name));
        let explained = self.inputs.explain(name, &self.policy.node_name);
        let explained =
            explained.or_else(|| item.filter(|_| !self.is_compared).map(|item| from_disk(name, item)));
        Some(pb::Explanation { rev: item.map_or(0, |item| item.rev), ..explained? })
    }

    /// The published revision; 0: none.
    pub(crate) fn rev(&self) -> u64 {
        self.shown.as_ref().map_or(0, |shown| shown.rev)
    }

    pub(crate) fn services(&self) -> usize {
        self.shown.as_ref().map_or(0, |shown| shown.services.size())
    }

    pub(crate) fn endpoints(&self) -> u64 {
        self.endpoints
    }

    /// Whether the published state may be old, or is missing. Without clients it is never stale.
    pub(crate) fn is_stale(&self) -> bool {
        self.is_watched() && self.status().0 != "synced"
    }

    pub(crate) fn durable(&self) -> bool {
        !matches!(self.disk, DiskState::Behind { .. })
    }

    /// For each kind: whether it is synced, and the number of objects.
    pub(crate) fn sources(&self) -> impl Iterator<Item = (SourceKind, bool, usize)> {
        SourceKind::ALL
            .into_iter()
            .map(|kind| (kind, self.inputs.kind_synced(kind), self.inputs.objects(kind)))
    }

    pub(crate) fn summary(&self) -> String {
        let (state, reason, _) = self.status();
        let mut text = match &self.shown {
            None => "no state to serve".to_owned(),
            Some(shown) => format!("{} services at revision {}, {state}", shown.services.size(), shown.rev),
        };
        if !reason.is_empty() {
            text = format!("{text}: {reason}");
        }
        if !self.durable() {
            text.push_str("; not on disk");
        }
        text
    }

    pub(crate) fn inspect(&self, state: &pb::State) -> serde_json::Value {
        let mut value = serde_json::to_value(state).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            let disk = match self.disk {
                DiskState::Synced => "the same".to_owned(),
                DiskState::Unusable => "nothing usable".to_owned(),
                DiskState::Behind { failures, .. } => format!("behind after {failures} failures"),
            };
            fields.insert("on_disk".into(), disk.into());
            fields.insert("writing".into(), self.pending_write.is_some().into());
            fields.insert("changes_waiting".into(), self.inputs.is_dirty().into());
            fields.insert("deleted_remembered".into(), self.deleted.len().into());
            fields.insert("input_bytes".into(), self.inputs.bytes().into());
        }
        value
    }
}

fn addresses(set: Option<&ln::IpSet>) -> Vec<String> {
    set.map(|set| set.v4.iter().chain(&set.v6).cloned().collect()).unwrap_or_default()
}

fn node_state(node: &ln::NodeInfo) -> pb::NodeState {
    pb::NodeState {
        name: node.name.clone(),
        exists: node.exists,
        zone: node.zone.clone(),
        ips: addresses(node.i_ps.as_ref()),
        pod_cidrs: node.pod_cid_rs.clone(),
        eligible: node.eligible,
        service_cidrs: node.service_cid_rs.clone(),
    }
}

fn decode(item: &Item) -> ln::ServiceEndpoints {
    // Encoded here or validated when read from disk; if decoding fails, the Service is shown as empty.
    let message = ln::NextItem::decode(item.message.clone()).unwrap_or_default();
    message.endpoints.unwrap_or_default()
}

fn cluster_ips(service: &ln::ServiceEndpoints) -> Vec<String> {
    addresses(service.i_ps.as_ref().and_then(|ips| ips.cluster_i_ps.as_ref()))
}

fn summary(name: &ServiceName, item: &Item) -> pb::ServiceSummary {
    let service = decode(item);
    let count = |which: fn(&ln::EndpointConditions) -> bool| {
        let endpoints = service.endpoints.iter().filter_map(|endpoint| endpoint.conditions.as_ref());
        u32::try_from(endpoints.filter(|conditions| which(conditions)).count()).unwrap_or(u32::MAX)
    };
    pb::ServiceSummary {
        namespace: name.namespace().to_owned(),
        name: name.name().to_owned(),
        r#type: service.r#type.clone(),
        cluster_ips: cluster_ips(&service),
        ports: service.ports.iter().map(port).collect(),
        ready: count(|conditions| conditions.ready),
        local_ready: count(|conditions| conditions.ready && conditions.local),
        selected: count(|conditions| conditions.selected),
        rev: item.rev,
    }
}

/// Such as `http 80:30080/TCP`.
fn port(port: &ln::PortMapping) -> String {
    let name = if port.name.is_empty() { String::new() } else { format!("{} ", port.name) };
    let node = if port.node_port == 0 { String::new() } else { format!(":{}", port.node_port) };
    format!("{name}{}{node}/{}", port.port, port.protocol().as_str_name())
}

/// The explanation of a Service that no source has reported since the start.
fn from_disk(name: &ServiceName, item: &Item) -> pb::Explanation {
    let service = decode(item);
    pb::Explanation {
        namespace: name.namespace().to_owned(),
        name: name.name().to_owned(),
        served: true,
        reason: "served from disk as before the agent started; the source has not confirmed it yet"
            .to_owned(),
        cluster_ips: cluster_ips(&service),
        r#type: service.r#type,
        ..pb::Explanation::default()
    }
}
