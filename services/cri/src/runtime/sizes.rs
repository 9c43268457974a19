//! Number of bytes that a lease holds.
//!
//! Owns: nothing. In: a lease's id. Out: the sum of the sizes of the blobs, ingests and snapshots that the lease lists.
//! Content shared with other images is counted as well: the sum is an upper bound of what a release frees.

use std::collections::HashMap;

use keelson_proto::containerd::{
    content::{InfoRequest, ListStatusesRequest, content_client::ContentClient},
    leases::{ListResourcesRequest, leases_client::LeasesClient},
    snapshots::{UsageRequest, snapshots_client::SnapshotsClient},
};
use tonic::{Code, Status, transport::Channel};

use super::leases::in_namespace;

fn or_zero(size: Result<i64, Status>) -> Result<u64, Status> {
    match size {
        Ok(size) => Ok(u64::try_from(size).unwrap_or(0)),
        // Deleted since it was listed.
        Err(status) if status.code() == Code::NotFound => Ok(0),
        Err(status) => Err(status),
    }
}

/// 0 if there is no such lease.
pub(super) async fn of_lease(channel: &Channel, lease: &str) -> Result<u64, Status> {
    let list = ListResourcesRequest { id: lease.to_owned() };
    let resources = match LeasesClient::new(channel.clone()).list_resources(in_namespace(list)).await {
        Ok(resources) => resources.into_inner().resources,
        Err(status) if status.code() == Code::NotFound => return Ok(0),
        Err(status) => return Err(status),
    };
    let mut content = ContentClient::new(channel.clone());
    let mut snapshots = SnapshotsClient::new(channel.clone());
    let mut ingests: Option<HashMap<String, i64>> = None;
    let mut bytes = 0_u64;
    for resource in resources {
        let size = match resource.r#type.split_once('/') {
            Some(("snapshots", snapshotter)) => {
                let usage = UsageRequest { snapshotter: snapshotter.to_owned(), key: resource.id };
                or_zero(snapshots.usage(in_namespace(usage)).await.map(|usage| usage.into_inner().size))?
            }
            None if resource.r#type == "content" => {
                let info = content.info(in_namespace(InfoRequest { digest: resource.id })).await;
                or_zero(info.map(|info| info.into_inner().info.map_or(0, |info| info.size)))?
            }
            None if resource.r#type == "ingests" => {
                if ingests.is_none() {
                    ingests = Some(read_ingests(&mut content).await?);
                }
                let offset = ingests.as_ref().and_then(|ingests| ingests.get(&resource.id)).copied();
                or_zero(Ok(offset.unwrap_or(0)))?
            }
            _ => 0,
        };
        bytes = bytes.saturating_add(size);
    }
    Ok(bytes)
}

/// Bytes written so far, by ref.
async fn read_ingests(content: &mut ContentClient<Channel>) -> Result<HashMap<String, i64>, Status> {
    let all = content.list_statuses(in_namespace(ListStatusesRequest { filters: Vec::new() })).await?;
    Ok(all.into_inner().statuses.into_iter().map(|status| (status.r#ref, status.offset)).collect())
}
