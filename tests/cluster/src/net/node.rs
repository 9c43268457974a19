//! Owns: the Node object of a [`World`](super::World). In: a name and labels. Out: the object, also in an API server.

use super::plan::{NODE, NODE_CIDRS};
use crate::endpoints::{Kind, Writer};
use crate::kube::Admin;
use anyhow::{Context as _, Result};
use serde_json::{Value, json};

pub fn node_object(name: &str, labels: &Value) -> Value {
    let addresses = [NODE.v4.to_string(), NODE.v6.to_string()];
    let addresses = addresses.map(|ip| json!({"type": "InternalIP", "address": ip}));
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDR": NODE_CIDRS[0], "podCIDRs": NODE_CIDRS},
        "status": {"addresses": addresses},
    })
}

/// Creates the Node with its status, unless it exists.
pub async fn create_node(admin: &Admin, name: &str, labels: &Value) -> Result<()> {
    let writer = Writer::new(admin, "default").await?;
    let node = node_object(name, labels);
    match writer.try_create(Kind::Node, &node).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        created => drop(created.context("cannot create the Node")?),
    }
    let status = json!({"status": node["status"]});
    writer.patch(Kind::Node, &format!("{name}/status"), &status).await.map(drop)
}
