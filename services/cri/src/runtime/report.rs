//! What node status reads from the runtime.
//!
//! Owns: three short CRI calls and the conversion of their answers. In: the channel. Out: conditions, images and
//! the directory of the images; each call is bounded.

use std::path::PathBuf;

use keelson_actor_system::reports::{RuntimeCondition, RuntimeImage};
use keelson_proto::cri::{
    self, image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient,
};
use keelson_serve::grpc::frame::MAX_MESSAGE;
use tonic::{Status, transport::Channel};

use super::short;

/// CRI `Status`.
pub(super) async fn status(channel: &Channel) -> Result<Vec<RuntimeCondition>, Status> {
    let mut client = RuntimeServiceClient::new(channel.clone());
    let answer = short(client.status(cri::StatusRequest { verbose: false })).await?.into_inner();
    // The kubelet also treats an answer without a status as an error.
    let status = answer.status.ok_or_else(|| Status::internal("the runtime's Status response is empty"))?;
    Ok(status.conditions.into_iter().map(condition).collect())
}

fn condition(condition: cri::RuntimeCondition) -> RuntimeCondition {
    RuntimeCondition {
        kind: condition.r#type,
        ok: condition.status,
        reason: condition.reason,
        message: condition.message,
    }
}

/// CRI `ListImages`, without a filter.
pub(super) async fn images(channel: &Channel) -> Result<Vec<RuntimeImage>, Status> {
    let mut client = ImageServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
    let answer = short(client.list_images(cri::ListImagesRequest { filter: None })).await?;
    Ok(answer.into_inner().images.into_iter().map(image).collect())
}

fn image(image: cri::Image) -> RuntimeImage {
    let mut names = image.repo_digests;
    names.extend(image.repo_tags);
    RuntimeImage { names, size_bytes: image.size }
}

/// CRI `ImageFsInfo`: where the first file system of images is mounted.
pub(super) async fn image_fs(channel: &Channel) -> Result<Option<PathBuf>, Status> {
    let mut client = ImageServiceClient::new(channel.clone());
    let answer = short(client.image_fs_info(cri::ImageFsInfoRequest {})).await?;
    let first = answer.into_inner().image_filesystems.into_iter().next();
    let mountpoint = first.and_then(|first| first.fs_id).map(|id| id.mountpoint);
    Ok(mountpoint.filter(|path| !path.is_empty()).map(PathBuf::from))
}
