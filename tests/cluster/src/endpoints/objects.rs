//! Owns: objects as JSON, and writing them. In: an administrator. Out: requests, one per call.

use crate::kube::Admin;
use anyhow::{Context as _, Result, ensure};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use prost::Message as _;
use serde_json::{Value, json};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Namespace,
    Service,
    Slice,
    Node,
    ServiceCidr,
}

impl Kind {
    /// API path of objects of this kind; cluster-scoped kinds ignore the namespace.
    pub fn path(self, namespace: &str) -> String {
        match self {
            Self::Namespace => "/api/v1/namespaces".to_owned(),
            Self::Node => "/api/v1/nodes".to_owned(),
            Self::ServiceCidr => "/apis/networking.k8s.io/v1/servicecidrs".to_owned(),
            Self::Service => format!("/api/v1/namespaces/{namespace}/services"),
            Self::Slice => format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"),
        }
    }

    /// API path of all objects of this kind, in every namespace.
    pub fn cluster_path(self) -> &'static str {
        match self {
            Self::Namespace => "/api/v1/namespaces",
            Self::Node => "/api/v1/nodes",
            Self::ServiceCidr => "/apis/networking.k8s.io/v1/servicecidrs",
            Self::Service => "/api/v1/services",
            Self::Slice => "/apis/discovery.k8s.io/v1/endpointslices",
        }
    }
}

/// Writes objects as an administrator. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    client: kube::Client,
    namespace: String,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl Writer {
    /// A writer for this namespace, which is created if necessary.
    pub async fn new(admin: &Admin, namespace: &str) -> Result<Self> {
        let writer = Self { client: admin.client(), namespace: namespace.to_owned() };
        let object = json!({"metadata": {"name": namespace}});
        match writer.try_create(Kind::Namespace, &object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            other => {
                other.with_context(|| format!("cannot make the namespace {namespace}"))?;
            }
        }
        Ok(writer)
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// One request for an object, or for the collection if the name is empty. Returns the response of the API server.
    pub async fn request(
        &self,
        method: Method,
        kind: Kind,
        name: &str,
        body: Option<&Value>,
    ) -> kube::Result<Value> {
        let mut path = kind.path(&self.namespace);
        if !name.is_empty() {
            path = format!("{path}/{name}");
        }
        let content =
            if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let request = Request::builder().method(method).uri(path).header("content-type", content);
        let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let request = request.body(body).map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }

    pub async fn try_create(&self, kind: Kind, object: &Value) -> kube::Result<Value> {
        self.request(Method::POST, kind, "", Some(object)).await
    }

    /// Creates an object from its protobuf encoding, which costs an API server less than JSON. The created object is
    /// not returned. A server that is too busy (429, 5xx) is asked again; it may have created the object all the same.
    pub async fn create_encoded(&self, kind: Kind, object: Vec<u8>) -> Result<()> {
        let object = wrapped(kind, object);
        for attempt in 1..=ATTEMPTS {
            let (status, text) = self.post_encoded(kind, object.clone()).await?;
            let is_busy = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            match status {
                _ if status.is_success() => return Ok(()),
                StatusCode::CONFLICT if attempt > 1 => return Ok(()),
                _ => ensure!(is_busy && attempt < ATTEMPTS, "cannot make a {kind:?}: {status}: {text}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn post_encoded(&self, kind: Kind, object: Vec<u8>) -> Result<(StatusCode, String)> {
        let request = Request::post(kind.path(&self.namespace))
            .header("content-type", PROTOBUF)
            .header("accept", PROTOBUF)
            .body(kube::client::Body::from(object))
            .context("not a request")?;
        let answer = self.client.send(request).await.with_context(|| format!("cannot make a {kind:?}"))?;
        let status = answer.status();
        // Read to its end, so that the connection can be reused.
        let body = answer.into_body().collect().await.context("the answer broke off")?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }

    /// Creates an object, which must not exist.
    pub async fn create(&self, kind: Kind, object: &Value) -> Result<Value> {
        self.try_create(kind, object).await.with_context(|| format!("cannot make {object}"))
    }

    /// Replaces an object, which must exist, in any version.
    pub async fn replace(&self, kind: Kind, object: &Value) -> Result<Value> {
        let name = object["metadata"]["name"].as_str().context("an object has a name")?;
        let done = self.request(Method::PUT, kind, name, Some(object)).await;
        done.with_context(|| format!("cannot replace {object}"))
    }

    /// Changes parts of an object (JSON merge patch). `name` may end in `/status`.
    pub async fn patch(&self, kind: Kind, name: &str, patch: &Value) -> Result<Value> {
        let done = self.request(Method::PATCH, kind, name, Some(patch)).await;
        done.with_context(|| format!("cannot patch {kind:?} {name} with {patch}"))
    }

    /// Deletes an object, which must exist.
    pub async fn delete(&self, kind: Kind, name: &str) -> Result<()> {
        let done = self.request(Method::DELETE, kind, name, None).await;
        done.map(drop).with_context(|| format!("cannot delete {kind:?} {name}"))
    }
}

/// How often a busy API server is asked to create an object.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// Media type of Kubernetes protobuf.
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// `runtime.Unknown`: every object's envelope, after a magic number.
#[derive(Clone, PartialEq, prost::Message)]
struct Unknown {
    #[prost(message, optional, tag = "1")]
    type_meta: Option<TypeMeta>,
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TypeMeta {
    #[prost(string, tag = "1")]
    api_version: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// An object with its envelope, as it is sent and stored.
pub(super) fn wrapped(kind: Kind, object: Vec<u8>) -> Vec<u8> {
    let (api_version, kind) = match kind {
        Kind::Namespace => ("v1", "Namespace"),
        Kind::Service => ("v1", "Service"),
        Kind::Node => ("v1", "Node"),
        Kind::Slice => ("discovery.k8s.io/v1", "EndpointSlice"),
        Kind::ServiceCidr => ("networking.k8s.io/v1", "ServiceCIDR"),
    };
    enveloped(api_version, kind, object)
}

/// The same for a kind that no writer writes.
pub(super) fn enveloped(api_version: &str, kind: &str, object: Vec<u8>) -> Vec<u8> {
    let type_meta = TypeMeta { api_version: api_version.to_owned(), kind: kind.to_owned() };
    let mut wrapped = b"k8s\0".to_vec();
    wrapped.extend(Unknown { type_meta: Some(type_meta), raw: object }.encode_to_vec());
    wrapped
}

/// A named TCP port of a Service.
pub fn port(name: &str, number: u16) -> Value {
    json!({"name": name, "protocol": "TCP", "port": number})
}

/// A Service without a selector: only the test makes its slices. `spec` may replace any part of its spec.
pub fn service(name: &str, ports: &[Value], spec: &Value) -> Value {
    let mut merged = json!({"ports": ports});
    if let (Some(merged), Some(spec)) = (merged.as_object_mut(), spec.as_object()) {
        merged.extend(spec.clone());
    }
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": merged})
}

/// A ready endpoint on a node. `more` may replace any part of it.
pub fn endpoint(address: &str, node: &str, more: &Value) -> Value {
    let mut merged = json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}});
    if let (Some(merged), Some(more)) = (merged.as_object_mut(), more.as_object()) {
        merged.extend(more.clone());
    }
    merged
}

/// Slice `SERVICE-SUFFIX` of a Service. Its family is that of its first address.
pub fn slice(service: &str, suffix: &str, ports: &[Value], endpoints: &[Value]) -> Value {
    let v6 = endpoints
        .first()
        .and_then(|endpoint| endpoint["addresses"][0].as_str())
        .is_some_and(|address| address.contains(':'));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": format!("{service}-{suffix}"), "labels": {"kubernetes.io/service-name": service}},
        "addressType": if v6 { "IPv6" } else { "IPv4" },
        "ports": ports,
        "endpoints": endpoints,
    })
}
