//! Owns: very many Services and EndpointSlices, the same in every run. In: a cluster, or a folder. Out: objects at its
//! API server, or manifests.
//!
//! ```ignore
//! let made = bulk::make(&cluster, 10_000, 10).await?;       // some seconds
//! bulk::touch(&cluster, 17, 4711).await?;                   // one change: the slice of bulk/svc-00017 gets another port
//! bulk::manifests(&folder, "node", 1_000, 10)?;             // the same objects, for `endpoints.manifests`
//! bulk::remove(&cluster, 10_000).await?;
//! ```
//!
//! Service `N` is `bulk/svc-NNNNN`: ClusterIP, port `http` 80, and every fourth also `https` 443. Its only slice is
//! `bulk/svc-NNNNN-a`; its endpoints have unique addresses of 10.128.0.0/9, and are spread over 100 nodes
//! `bulk-node-NNN`, of which the test may be one, and three zones. Every tenth Service has zone hints.

use super::objects::{Kind, Writer, endpoint, enveloped, port, service, slice, wrapped};
use crate::kube::Cluster;
use crate::manifests::ManifestFolder;
use anyhow::{Context as _, Result, ensure};
use keelson_proto::kubernetes::{EndpointSlice, Service};
use prost::Message as _;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;

pub const NAMESPACE: &str = "bulk";
/// More of them only make each request slower on a busy machine.
const WORKERS: usize = 8;
const IN_A_FILE: usize = 100;
const HOUR: Duration = Duration::from_secs(3600);

/// The fields of `ObjectMeta` that an API server adds.
#[derive(Clone, PartialEq, prost::Message)]
struct StoredMeta {
    #[prost(string, tag = "5")]
    uid: String,
    #[prost(int64, tag = "7")]
    generation: i64,
    #[prost(message, optional, tag = "8")]
    made: Option<Time>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Time {
    #[prost(int64, tag = "1")]
    seconds: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Stored {
    #[prost(message, optional, tag = "1")]
    metadata: Option<StoredMeta>,
}

/// `networking.k8s.io/v1` `IPAddress`: an allocated cluster IP.
#[derive(Clone, PartialEq, prost::Message)]
struct IpAddress {
    #[prost(message, optional, tag = "1")]
    metadata: Option<AddressMeta>,
    #[prost(message, optional, tag = "2")]
    spec: Option<IpAddressSpec>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AddressMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(map = "string, string", tag = "11")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct IpAddressSpec {
    #[prost(message, optional, tag = "1")]
    parent: Option<Parent>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Parent {
    #[prost(string, tag = "1")]
    group: String,
    #[prost(string, tag = "2")]
    resource: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(string, tag = "4")]
    name: String,
}

#[derive(Clone, Copy, Debug)]
pub struct BulkObjects {
    pub services: usize,
    pub endpoints: usize,
    pub took: Duration,
}

pub fn name(number: usize) -> String {
    format!("svc-{number:05}")
}

/// The address of an endpoint, by its number within its Service.
fn address(service: usize, each: usize, number: usize) -> String {
    let at = service * each + number;
    format!("10.{}.{}.{}", 128 + (at >> 16) % 128, (at >> 8) & 255, at & 255)
}

fn ports(number: usize) -> Vec<Value> {
    let mut ports = vec![port("http", 80)];
    if number.is_multiple_of(4) {
        ports.push(port("https", 443));
    }
    ports
}

fn service_object(number: usize) -> Value {
    service(&name(number), &ports(number), &json!({}))
}

/// The slice of a Service; `http` is the number of its port `http`.
fn slice_object(number: usize, each: usize, http: u16) -> Value {
    let mut ports = vec![port("http", http)];
    if number.is_multiple_of(4) {
        ports.push(port("https", 8443));
    }
    slice(&name(number), "a", &ports, &endpoints(number, each, 0))
}

/// The endpoints of a Service: `each`, like every Service, and `more`. The additional ones are also endpoints of the
/// next Services.
pub fn endpoints(number: usize, each: usize, more: usize) -> Vec<Value> {
    (0..each + more)
        .map(|n| {
            let zone = ["zone-a", "zone-b", "zone-c"][n % 3];
            let mut more =
                json!({"zone": zone, "targetRef": {"kind": "Pod", "name": format!("pod-{number}-{n}")}});
            if number.is_multiple_of(10) {
                more["hints"] = json!({"forZones": [{"name": zone}]});
            }
            endpoint(&address(number, each, n), &format!("bulk-node-{:03}", (number + n) % 100), &more)
        })
        .collect()
}

/// Makes Services with their slices, written to etcd as an API server stores them: creating each through the API server
/// takes minutes.
pub async fn make(cluster: &Cluster, services: usize, endpoints_each: usize) -> Result<BulkObjects> {
    let started = Instant::now();
    ensure!(services <= 1 << 16, "{services} Services have no addresses here");
    Writer::new(&cluster.admin, NAMESPACE).await?;
    // Everything is made before anything is written, so that an error leaves nothing behind.
    let keys: Vec<_> = (0..services).map(|number| stored(number, endpoints_each)).collect::<Result<_>>()?;
    let (addresses, objects): (Vec<_>, Vec<_>) = keys.into_iter().map(|[ip, of @ ..]| (ip, of)).unzip();
    // First: the API server allocates the address of a Service again that it sees before its IPAddress.
    cluster.etcd.put_all(addresses.into_iter()).await?;
    cluster.etcd.put_all(objects.into_iter().flatten()).await?;
    Ok(BulkObjects { services, endpoints: services * endpoints_each, took: started.elapsed() })
}

/// Key and value, as an API server stores them, of the IPAddress that allocates a Service's address, the Service and its slice.
fn stored(number: usize, each: usize) -> Result<[(String, Vec<u8>); 3]> {
    let (name, ip) = (name(number), cluster_ip(number));
    let [service, slice] = complete_objects(number, each);
    let service: Service = serde_json::from_value(service)?;
    let slice: EndpointSlice = serde_json::from_value(slice)?;
    let address = IpAddress {
        metadata: Some(AddressMeta {
            name: ip.clone(),
            labels: [("ip-family", "IPv4"), ("managed-by", "ipallocator.k8s.io")]
                .map(|(key, value)| (format!("ipaddress.kubernetes.io/{key}"), value.to_owned()))
                .into(),
        }),
        spec: Some(IpAddressSpec {
            parent: Some(Parent {
                group: String::new(),
                resource: "services".to_owned(),
                namespace: NAMESPACE.to_owned(),
                name: name.clone(),
            }),
        }),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let value = |kind, message: Vec<u8>, id| wrapped(kind, [message, identity(number, id, now)].concat());
    // In the future: the API server frees addresses that were allocated more than a minute ago if it has not seen their Services.
    let address = [address.encode_to_vec(), identity(number, 2, now + HOUR)].concat();
    Ok([
        (format!("/registry/ipaddresses/{ip}"), enveloped("networking.k8s.io/v1", "IPAddress", address)),
        (
            format!("/registry/services/specs/{NAMESPACE}/{name}"),
            value(Kind::Service, service.encode_to_vec(), 0),
        ),
        (
            format!("/registry/endpointslices/{NAMESPACE}/{name}-a"),
            value(Kind::Slice, slice.encode_to_vec(), 1),
        ),
    ])
}

/// The address of a Service if no API server allocates one: 10.100.0.0 and following.
fn cluster_ip(number: usize) -> String {
    format!("10.100.{}.{}", number >> 8, number & 255)
}

/// A Service and its slice with the fields that an API server would add.
fn complete_objects(number: usize, each: usize) -> [Value; 2] {
    let (mut service, mut slice, ip) =
        (service_object(number), slice_object(number, each, 8080), cluster_ip(number));
    service["spec"]["clusterIP"] = json!(ip);
    service["spec"]["clusterIPs"] = json!([ip]);
    service["spec"]["ipFamilies"] = json!(["IPv4"]);
    service["spec"]["type"] = json!("ClusterIP");
    for object in [&mut service, &mut slice] {
        object["metadata"]["namespace"] = json!(NAMESPACE);
    }
    [service, slice]
}

/// Further fields of an object's metadata, to be appended to it: fields of a message that occurs twice are merged. `made`:
/// the time of its creation, since the Unix epoch.
fn identity(number: usize, kind: usize, made: Duration) -> Vec<u8> {
    let uid = format!("00000000-0000-4000-800{kind}-{number:012}");
    let made = Time { seconds: i64::try_from(made.as_secs()).unwrap_or(i64::MAX) };
    Stored { metadata: Some(StoredMeta { uid, generation: 1, made: Some(made) }) }.encode_to_vec()
}

pub async fn make_more(
    cluster: &Cluster,
    numbers: Range<usize>,
    endpoints_each: usize,
) -> Result<BulkObjects> {
    let writer = Writer::new(&cluster.admin, NAMESPACE).await?;
    let (services, first, started) = (numbers.len(), numbers.start, Instant::now());
    for_all(services, move |number| {
        let (writer, number) = (writer.clone(), first + number);
        async move {
            let service: Service = serde_json::from_value(service_object(number))?;
            writer.create_encoded(Kind::Service, service.encode_to_vec()).await?;
            let slice: EndpointSlice = serde_json::from_value(slice_object(number, endpoints_each, 8080))?;
            writer.create_encoded(Kind::Slice, slice.encode_to_vec()).await
        }
    })
    .await?;
    Ok(BulkObjects { services, endpoints: services * endpoints_each, took: started.elapsed() })
}

/// Changes the port number of the endpoints of one Service.
pub async fn touch(cluster: &Cluster, number: usize, http: u16) -> Result<()> {
    let writer = Writer::new(&cluster.admin, NAMESPACE).await?;
    let mut ports = vec![port("http", http)];
    if number.is_multiple_of(4) {
        ports.push(port("https", 8443));
    }
    writer.patch(Kind::Slice, &format!("{}-a", name(number)), &json!({"ports": ports})).await.map(drop)
}

pub async fn remove(cluster: &Cluster, services: usize) -> Result<()> {
    let writer = Writer::new(&cluster.admin, NAMESPACE).await?;
    for_all(services, move |number| {
        let writer = writer.clone();
        async move {
            writer.delete(Kind::Slice, &format!("{}-a", name(number))).await?;
            writer.delete(Kind::Service, &name(number)).await
        }
    })
    .await
}

/// Runs `each` for every number, [`WORKERS`] at the same time.
async fn for_all<F>(count: usize, each: impl Fn(usize) -> F + Clone + Send + 'static) -> Result<()>
where
    F: Future<Output = Result<()>> + Send,
{
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        let (next, each) = (next.clone(), each.clone());
        workers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return anyhow::Ok(());
                }
                each(number).await?;
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.context("a writer panicked")??;
    }
    Ok(())
}

/// Writes the same objects as manifests, and a Node `node` in zone `zone-a`. The folder must exist.
pub fn manifests(folder: &Path, node: &str, services: usize, endpoints_each: usize) -> Result<BulkObjects> {
    let started = Instant::now();
    ensure!(services <= 1 << 16, "{services} Services have no addresses here");
    let of_node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": node, "labels": {"topology.kubernetes.io/zone": "zone-a"}},
    });
    let folder = ManifestFolder::new(folder.to_owned());
    folder.put("node.json", &[of_node])?;
    for first in (0..services).step_by(IN_A_FILE) {
        let mut items = Vec::new();
        for number in first..services.min(first + IN_A_FILE) {
            items.extend(complete_objects(number, endpoints_each));
        }
        folder.put(&format!("bulk-{first:05}.json"), &items)?;
    }
    Ok(BulkObjects { services, endpoints: services * endpoints_each, took: started.elapsed() })
}
