//! Owns: the objects of a case. In: differences from the usual. Out: dual-stack Services and EndpointSlices at the API
//! server.

use crate::common::Case;
use anyhow::{Context as _, Result, ensure};
use http::Method;
use keelson_cluster::endpoints::Kind;
use keelson_cluster::net::plan::{local, remote};
use keelson_cluster::net::{Dual, Family, Transport};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, Ipv6Addr};

/// The port of a Service that is named `http`.
pub(crate) const PORT: u16 = 80;

/// A pod, on the case's node or another.
#[derive(Clone, Debug)]
pub(crate) struct Ep {
    pub(crate) at: Dual,
    node: Option<String>,
    more: Value,
}

/// A ready pod of the node.
pub(crate) fn on_node(case: &Case, number: u8) -> Ep {
    Ep { at: local(number), node: Some(case.node().to_owned()), more: json!({}) }
}

/// A ready pod of another node.
pub(crate) fn elsewhere(number: u8) -> Ep {
    Ep { at: remote(number), node: Some("other".to_owned()), more: json!({}) }
}

impl Ep {
    /// With fields merged into its slice entry.
    pub(crate) fn with(mut self, more: Value) -> Self {
        if let (Some(own), Some(more)) = (self.more.as_object_mut(), more.as_object()) {
            own.extend(more.clone());
        }
        self
    }

    fn conditions(self, ready: bool, serving: bool, terminating: bool) -> Self {
        self.with(json!({"conditions": {"ready": ready, "serving": serving, "terminating": terminating}}))
    }

    pub(crate) fn unready(self) -> Self {
        self.conditions(false, false, false)
    }

    pub(crate) fn terminating(self) -> Self {
        self.conditions(false, true, true)
    }

    /// Terminating and not serving.
    pub(crate) fn not_serving(self) -> Self {
        self.conditions(false, false, true)
    }

    pub(crate) fn zones(self, zones: &[&str]) -> Self {
        let zones: Vec<Value> = zones.iter().map(|zone| json!({"name": zone})).collect();
        self.hint("forZones", &zones)
    }

    pub(crate) fn nodes(self, nodes: &[&str]) -> Self {
        let nodes: Vec<Value> = nodes.iter().map(|node| json!({"name": node})).collect();
        self.hint("forNodes", &nodes)
    }

    fn hint(mut self, key: &str, names: &[Value]) -> Self {
        self.more["hints"][key] = json!(names);
        self
    }

    pub(crate) fn moved_to(self, at: Dual) -> Self {
        Self { at, ..self }
    }

    pub(crate) fn without_node(mut self) -> Self {
        self.node = None;
        self
    }

    pub(crate) fn object(&self, family: Family) -> Value {
        let mut object = json!({"addresses": [self.at.of(family)], "conditions": {"ready": true}});
        if let Some(node) = &self.node {
            object["nodeName"] = json!(node);
        }
        if let (Some(object), Some(more)) = (object.as_object_mut(), self.more.as_object()) {
            object.extend(more.clone());
        }
        object
    }
}

/// A port of a Service: its index decides its node port.
pub(crate) fn port(name: &str, number: u16, transport: Transport) -> Value {
    json!({"name": name, "protocol": transport.name(), "port": number})
}

pub(crate) fn at_8080() -> Vec<Value> {
    vec![port("http", 8080, Transport::Tcp)]
}

impl Case {
    pub(crate) fn v_address(&self, n: u8) -> Dual {
        let last = u16::from_be_bytes([self.number(), n]);
        Dual {
            v4: Ipv4Addr::new(10, 100, self.number(), n),
            v6: Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, last),
        }
    }

    fn external(&self, net: u8, n: u8) -> Dual {
        let (number, last) = (u16::from(self.number()), u16::from(n));
        Dual {
            v4: Ipv4Addr::new(172, 30 + net, self.number(), n),
            v6: Ipv6Addr::new(0xfd00, 0xee, u16::from(net), 0, 0, 0, number, last),
        }
    }

    pub(crate) fn w_address(&self, n: u8) -> Dual {
        self.external(0, n)
    }

    pub(crate) fn x_address(&self, n: u8) -> Dual {
        self.external(1, n)
    }

    /// NP of the port `http`; a case has those of 0 to 9, where 10 - n is the health check port of Service n.
    pub(crate) fn node_port(&self, n: u8) -> u16 {
        30_000 + u16::from(self.number()) * 10 + u16::from(n)
    }

    /// A Service of type LoadBalancer with V, W and NP of both families, one port `http`; `spec` replaces any part of
    /// its spec. A `null` removes it.
    pub(crate) fn service(&self, name: &str, n: u8, spec: &Value) -> Value {
        let v = self.v_address(n);
        let mut http = port("http", PORT, Transport::Tcp);
        http["nodePort"] = json!(self.node_port(n));
        let mut merged = json!({
            "type": "LoadBalancer",
            "clusterIP": v.v4, "clusterIPs": [v.v4, v.v6],
            "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack",
            "ports": [http],
        });
        if let (Some(merged), Some(spec)) = (merged.as_object_mut(), spec.as_object()) {
            merged.extend(spec.clone());
            merged.retain(|_, value| !value.is_null());
            // The API server might allocate the address or port of another case.
            if merged["type"] == "LoadBalancer"
                && merged.get("externalTrafficPolicy").is_some_and(|policy| policy == "Local")
            {
                merged.entry("healthCheckNodePort").or_insert_with(|| json!(self.node_port(10 - n)));
            }
            if merged["type"] == "ClusterIP" && !spec.contains_key("ports") {
                merged.insert("ports".to_owned(), json!([port("http", PORT, Transport::Tcp)]));
            }
        }
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": merged})
    }

    /// Creates such a Service, with W in its status if it is of type LoadBalancer.
    pub(crate) async fn make(&self, name: &str, n: u8, spec: &Value) -> Result<()> {
        let service = self.service(name, n, spec);
        self.writer.create(Kind::Service, &service).await?;
        if service["spec"]["type"] == "LoadBalancer" {
            let w = self.w_address(n);
            self.ingress(name, &[json!({"ip": w.v4}), json!({"ip": w.v6})]).await?;
        }
        Ok(())
    }

    /// The same with its slices.
    pub(crate) async fn make_with(&self, name: &str, n: u8, spec: &Value, endpoints: &[Ep]) -> Result<()> {
        self.make(name, n, spec).await?;
        self.slices(name, endpoints).await
    }

    /// The same, and waits until the proxy has applied it.
    pub(crate) async fn serve(&self, name: &str, n: u8, spec: &Value, endpoints: &[Ep]) -> Result<()> {
        self.make_with(name, n, spec, endpoints).await?;
        self.synced().await
    }

    pub(crate) async fn ingress(&self, name: &str, ingress: &[Value]) -> Result<()> {
        let status = json!({"status": {"loadBalancer": {"ingress": ingress}}});
        self.writer.patch(Kind::Service, &format!("{name}/status"), &status).await.map(drop)
    }

    pub(crate) async fn respec(&self, name: &str, spec: &Value) -> Result<()> {
        self.writer.patch(Kind::Service, name, &json!({"spec": spec})).await.map(drop)
    }

    pub(crate) fn slice(
        &self,
        service: &str,
        suffix: &str,
        family: Family,
        ports: &[Value],
        endpoints: &[Ep],
    ) -> Value {
        let endpoints: Vec<Value> = endpoints.iter().map(|endpoint| endpoint.object(family)).collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": slice_name(service, suffix, family),
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": family.as_str(), "ports": ports, "endpoints": endpoints,
        })
    }

    /// Creates or replaces the slices of a Service, one per family.
    pub(crate) async fn slices(&self, service: &str, endpoints: &[Ep]) -> Result<()> {
        self.slices_of(service, "a", &at_8080(), endpoints).await
    }

    /// The same with another name and other ports.
    pub(crate) async fn slices_of(
        &self,
        service: &str,
        suffix: &str,
        ports: &[Value],
        endpoints: &[Ep],
    ) -> Result<()> {
        for family in Family::ALL {
            self.put(Kind::Slice, &self.slice(service, suffix, family, ports, endpoints)).await?;
        }
        Ok(())
    }

    /// Creates or replaces an object.
    pub(crate) async fn put(&self, kind: Kind, object: &Value) -> Result<()> {
        match self.writer.try_create(kind, object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {
                self.writer.replace(kind, object).await.map(drop)
            }
            other => other.map(drop).with_context(|| format!("cannot make {object}")),
        }
    }

    pub(crate) async fn delete_slices(&self, service: &str, suffix: &str) -> Result<()> {
        for family in Family::ALL {
            self.writer.delete(Kind::Slice, &slice_name(service, suffix, family)).await?;
        }
        Ok(())
    }

    /// Fails unless the API server refuses an object as invalid. For objects that only [`Case::put_unchecked`] can
    /// write.
    pub(crate) async fn refused(&self, kind: Kind, object: &Value) -> Result<()> {
        let outcome = self.writer.request(Method::POST, kind, "", Some(object)).await;
        ensure!(
            matches!(&outcome, Err(kube::Error::Api(status)) if status.code == 422),
            "the API server took {object}: {outcome:?}"
        );
        Ok(())
    }
}

fn slice_name(service: &str, suffix: &str, family: Family) -> String {
    format!("{service}-{suffix}-{}", family.as_str().to_lowercase())
}
