//! Owns: containerd's leases of the CRI namespace. In: a runtime. Out: its leases, and a garbage collection.

use crate::containerd::Containerd;
use anyhow::Result;
use keelson_proto::containerd::leases::leases_client::LeasesClient;
use keelson_proto::containerd::leases::{CreateRequest, DeleteRequest, Lease, ListRequest};
use tonic::Request;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};

async fn client(containerd: &Containerd) -> Result<LeasesClient<Channel>> {
    Ok(LeasesClient::new(Endpoint::from_shared(containerd.endpoint())?.connect().await?))
}

fn in_cri_namespace<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static("k8s.io"));
    request
}

pub async fn leases(containerd: &Containerd) -> Result<Vec<Lease>> {
    let list = client(containerd).await?.list(in_cri_namespace(ListRequest::default())).await?;
    Ok(list.into_inner().leases)
}

pub async fn create_lease(containerd: &Containerd, id: &str, label: Option<(&str, &str)>) -> Result<()> {
    let labels = label.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect();
    let request = CreateRequest { id: id.to_owned(), labels };
    client(containerd).await?.create(in_cri_namespace(request)).await?;
    Ok(())
}

/// Makes containerd collect garbage, and waits for that: the end of a lease may request it.
pub async fn collect_garbage(containerd: &Containerd) -> Result<()> {
    create_lease(containerd, "of-the-test", None).await?;
    let request = DeleteRequest { id: "of-the-test".to_owned(), sync: true };
    client(containerd).await?.delete(in_cri_namespace(request)).await?;
    Ok(())
}
