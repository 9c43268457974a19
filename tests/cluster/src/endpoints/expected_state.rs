//! Owns: the state of a node that the objects of an API server must result in. In: the objects, as an administrator
//! lists them in JSON ([`Objects`]). Out: [`ExpectedState`], computed from all of them at once by the agent's own pure function.
//! Everything else of the agent (watches, protobuf, increments, disk, both APIs, clients) has to give the same result.

use super::objects::Kind;
use crate::kube::Cluster;
use anyhow::{Context as _, Result, bail};
use http::Request;
use keelson_endpoint_publisher::{NodeView, ServiceName, view};
use keelson_proto::kubernetes::{EndpointSlice, Service, ServiceCidr};
use keelson_proto::localnetv1::{NodeInfo, ServiceEndpoints};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

const PAGE: usize = 1000;

/// The state of a node that the API server's objects must result in.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedState {
    /// By `namespace/name`.
    pub services: BTreeMap<String, ServiceEndpoints>,
    pub node: NodeInfo,
}

impl ExpectedState {
    /// The expected state now. Nothing may write meanwhile.
    pub async fn of(cluster: &Cluster, node: &str) -> Result<Self> {
        Objects::of(cluster).await?.on(cluster, node).await
    }

    pub fn endpoints(&self) -> usize {
        self.services.values().map(|service| service.endpoints.len()).sum()
    }
}

/// Everything that the state of a node is computed from, but the Node.
#[derive(Debug)]
pub struct Objects {
    services: Vec<Service>,
    slices: HashMap<ServiceName, Vec<EndpointSlice>>,
    cidrs: Vec<ServiceCidr>,
}

impl Objects {
    /// The lists are made one after the other, so nothing may write meanwhile. Tens of thousands of objects take the API server
    /// seconds of processor time.
    pub async fn of(cluster: &Cluster) -> Result<Self> {
        let client = cluster.admin.client();
        let services = list(&client, Kind::Service).await?;
        let mut slices = HashMap::<ServiceName, Vec<EndpointSlice>>::new();
        for slice in list::<EndpointSlice>(&client, Kind::Slice).await? {
            if let Some(owner) = view::owner(&slice) {
                slices.entry(owner).or_default().push(slice);
            }
        }
        Ok(Self { services, slices, cidrs: list(&client, Kind::ServiceCidr).await? })
    }

    /// What they mean on a node as it is now.
    pub async fn on(&self, cluster: &Cluster, node: &str) -> Result<ExpectedState> {
        let object = cluster.admin.node(node).await?;
        let object =
            object.map(|object| serde_json::to_value(object).context("a Node is JSON")).transpose()?;
        let node = node_view(node, object.as_ref())?;
        let mut services = BTreeMap::new();
        for service in &self.services {
            let Some(metadata) = &service.metadata else { continue };
            let name = ServiceName::new(&metadata.namespace, &metadata.name);
            let slices = self.slices.get(&name).map_or(&[][..], Vec::as_slice);
            if let Some(endpoints) = view::view(service, slices, &node) {
                services.insert(name.as_str().to_owned(), endpoints);
            }
        }
        Ok(ExpectedState { services, node: view::node_info(&node, &self.cidrs) })
    }
}

/// The relevant fields of a Node, computed separately, from the JSON.
fn node_view(name: &str, object: Option<&Value>) -> Result<NodeView> {
    let Some(object) = object else { return Ok(NodeView { name: name.to_owned(), ..NodeView::default() }) };
    let array =
        |pointer: &str| object.pointer(pointer).and_then(Value::as_array).cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned).unwrap_or_default();
    let mut ips = Vec::new();
    for kind in ["InternalIP", "ExternalIP"] {
        for address in array("/status/addresses").iter().filter(|address| address["type"] == kind) {
            ips.push(text(&address["address"]).parse().context("a Node's address is one")?);
        }
    }
    let doomed = array("/spec/taints").iter().any(|taint| taint["key"] == "ToBeDeletedByClusterAutoscaler");
    let leaving = object.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null());
    Ok(NodeView {
        name: name.to_owned(),
        exists: true,
        zone: object.pointer("/metadata/labels/topology.kubernetes.io~1zone").map(text),
        ips,
        pod_cidrs: array("/spec/podCIDRs").iter().map(text).collect(),
        eligible: !doomed && !leaving,
    })
}

/// Every object of a kind; none if the API server does not know the kind, like 1.31 for ServiceCIDR. A change between
/// two pages does not affect a list, which is consistent at one revision.
async fn list<T: DeserializeOwned>(client: &kube::Client, kind: Kind) -> Result<Vec<T>> {
    let mut all = Vec::new();
    let mut following = String::new();
    loop {
        let path = format!("{}?limit={PAGE}&continue={following}", kind.cluster_path());
        let request = Request::get(&path).body(Vec::new()).context("not a path")?;
        let page: Value = match client.request(request).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Vec::new()),
            page => page.with_context(|| format!("cannot list {kind:?}"))?,
        };
        let Value::Object(mut page) = page else { bail!("a list of {kind:?} is no object") };
        if let Some(Value::Array(items)) = page.remove("items") {
            for mut item in items {
                without_nulls(&mut item);
                all.push(serde_json::from_value(item).with_context(|| format!("no {kind:?}"))?);
            }
        }
        match page["metadata"]["continue"].as_str().unwrap_or_default() {
            "" => return Ok(all),
            more => more.clone_into(&mut following),
        }
    }
}

/// Drops nulls, which mean the same as missing fields.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}
