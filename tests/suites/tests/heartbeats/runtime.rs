//! Owns: a container runtime inside the test that accepts pods and completes pulls at once: heartbeats only need a
//! healthy one. In: nothing. Out: a CRI socket.

use anyhow::{Context as _, Result};
use keelson_harness::scratch::Scratch;
use keelson_proto::cri::image_service_server::{ImageService, ImageServiceServer};
use keelson_proto::cri::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use keelson_proto::cri::{
    Image, ImageFsInfoRequest, ImageFsInfoResponse, ImageStatusRequest, ImageStatusResponse,
    ListImagesRequest, ListImagesResponse, PullImageRequest, PullImageResponse, RemoveImageRequest,
    RemoveImageResponse, RuntimeCondition, RuntimeStatus, StatusRequest, StatusResponse, VersionRequest,
    VersionResponse,
};
use std::path::PathBuf;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// A runtime that is always healthy. Stopped on drop.
pub(crate) struct ReadyRuntime {
    socket: PathBuf,
    server: JoinHandle<()>,
}

impl ReadyRuntime {
    pub(crate) fn start(scratch: &Scratch) -> Result<Self> {
        let socket = scratch.dir("runtime")?.join("cri.sock");
        let listener = UnixListener::bind(&socket).context("cannot listen")?;
        let served = Server::builder()
            .add_service(ImageServiceServer::new(Answers))
            .add_service(RuntimeServiceServer::new(Answers));
        let server = tokio::spawn(async move {
            if let Err(error) = served.serve_with_incoming(UnixListenerStream::new(listener)).await {
                eprintln!("the runtime of the test ended: {error}");
            }
        });
        Ok(Self { socket, server })
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }
}

impl Drop for ReadyRuntime {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Answers;

#[tonic::async_trait]
impl ImageService for Answers {
    async fn list_images(
        &self,
        _: Request<ListImagesRequest>,
    ) -> Result<Response<ListImagesResponse>, Status> {
        let image = Image {
            id: format!("sha256:{:064x}", 1),
            repo_tags: vec!["registry.example/one:1".to_owned()],
            size: 1 << 20,
            ..Image::default()
        };
        Ok(Response::new(ListImagesResponse { images: vec![image] }))
    }

    async fn image_status(
        &self,
        _: Request<ImageStatusRequest>,
    ) -> Result<Response<ImageStatusResponse>, Status> {
        Ok(Response::new(ImageStatusResponse::default()))
    }

    async fn pull_image(
        &self,
        request: Request<PullImageRequest>,
    ) -> Result<Response<PullImageResponse>, Status> {
        let image = request.into_inner().image.unwrap_or_default().image;
        Ok(Response::new(PullImageResponse { image_ref: format!("id of {image}") }))
    }

    async fn remove_image(
        &self,
        _: Request<RemoveImageRequest>,
    ) -> Result<Response<RemoveImageResponse>, Status> {
        Ok(Response::new(RemoveImageResponse {}))
    }

    async fn image_fs_info(
        &self,
        _: Request<ImageFsInfoRequest>,
    ) -> Result<Response<ImageFsInfoResponse>, Status> {
        Ok(Response::new(ImageFsInfoResponse::default()))
    }
}

#[tonic::async_trait]
impl RuntimeService for Answers {
    async fn version(&self, _: Request<VersionRequest>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(VersionResponse {
            version: "0.1.0".to_owned(),
            runtime_name: "ready".to_owned(),
            runtime_version: "1.0.0".to_owned(),
            runtime_api_version: "v1".to_owned(),
        }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let conditions = ["RuntimeReady", "NetworkReady"].map(|kind| RuntimeCondition {
            r#type: kind.to_owned(),
            status: true,
            ..Default::default()
        });
        let status = RuntimeStatus { conditions: conditions.into() };
        Ok(Response::new(StatusResponse { status: Some(status), ..StatusResponse::default() }))
    }
}
