//! Owns: a CRI server inside the test, for behaviour that no real runtime can be made to show. In: answers. Out: a
//! socket. It has no containerd API, like CRI-O.

use crate::scratch::Scratch;
use anyhow::{Context as _, Result};
use keelson_proto::cri::image_service_server::{ImageService, ImageServiceServer};
use keelson_proto::cri::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use keelson_proto::cri::{
    Image, ImageFsInfoRequest, ImageFsInfoResponse, ImageSpec, ImageStatusRequest, ImageStatusResponse,
    ListImagesRequest, ListImagesResponse, PullImageRequest, PullImageResponse, RemoveImageRequest,
    RemoveImageResponse, StatusRequest, StatusResponse, VersionRequest, VersionResponse,
};
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Answers of a [`FakeRuntime`].
#[tonic::async_trait]
pub trait FakeAnswers: Clone + Send + Sync + 'static {
    /// `runtime_name` of the version.
    fn name(&self) -> &'static str {
        "fake"
    }

    fn status(&self) -> StatusResponse {
        StatusResponse::default()
    }

    fn images(&self) -> Vec<Image> {
        Vec::new()
    }

    fn image(&self, _name: &str) -> Option<Image> {
        None
    }

    /// After success, PullImage returns `id of NAME`.
    async fn pull(&self, _name: &str) -> Result<(), Status> {
        Ok(())
    }

    fn remove(&self, _name: &str) {}
}

/// Stopped on drop.
#[derive(Debug)]
pub struct FakeRuntime {
    socket: PathBuf,
    server: JoinHandle<()>,
}

impl FakeRuntime {
    /// Starts one below `scratch`.
    pub fn start(scratch: &Scratch, answers: impl FakeAnswers) -> Result<Self> {
        Self::serve(&scratch.dir("fake")?.join("cri.sock"), answers)
    }

    pub fn serve(socket: &Path, answers: impl FakeAnswers) -> Result<Self> {
        let listener = UnixListener::bind(socket).context("cannot listen")?;
        // Of any size: others must refuse them.
        let images = ImageServiceServer::new(Served(answers.clone())).max_encoding_message_size(usize::MAX);
        let runtime = RuntimeServiceServer::new(Served(answers));
        let served = Server::builder().add_service(images).add_service(runtime);
        let server = tokio::spawn(async move {
            if let Err(error) = served.serve_with_incoming(UnixListenerStream::new(listener)).await {
                eprintln!("the runtime of the test ended: {error}");
            }
        });
        Ok(Self { socket: socket.to_owned(), server })
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }
}

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Served<T>(T);

type Answer<T> = Result<Response<T>, Status>;

fn name_of(image: Option<ImageSpec>) -> String {
    image.map(|image| image.image).unwrap_or_default()
}

#[tonic::async_trait]
impl<T: FakeAnswers> ImageService for Served<T> {
    async fn list_images(&self, _: Request<ListImagesRequest>) -> Answer<ListImagesResponse> {
        Ok(Response::new(ListImagesResponse { images: self.0.images() }))
    }

    async fn image_status(&self, request: Request<ImageStatusRequest>) -> Answer<ImageStatusResponse> {
        let image = self.0.image(&name_of(request.into_inner().image));
        Ok(Response::new(ImageStatusResponse { image, ..ImageStatusResponse::default() }))
    }

    async fn pull_image(&self, request: Request<PullImageRequest>) -> Answer<PullImageResponse> {
        let name = name_of(request.into_inner().image);
        self.0.pull(&name).await?;
        Ok(Response::new(PullImageResponse { image_ref: format!("id of {name}") }))
    }

    async fn remove_image(&self, request: Request<RemoveImageRequest>) -> Answer<RemoveImageResponse> {
        self.0.remove(&name_of(request.into_inner().image));
        Ok(Response::new(RemoveImageResponse {}))
    }

    async fn image_fs_info(&self, _: Request<ImageFsInfoRequest>) -> Answer<ImageFsInfoResponse> {
        Ok(Response::new(ImageFsInfoResponse::default()))
    }
}

#[tonic::async_trait]
impl<T: FakeAnswers> RuntimeService for Served<T> {
    async fn version(&self, _: Request<VersionRequest>) -> Answer<VersionResponse> {
        Ok(Response::new(VersionResponse {
            version: "0.1.0".to_owned(),
            runtime_name: self.0.name().to_owned(),
            runtime_version: "1".to_owned(),
            runtime_api_version: "v1".to_owned(),
        }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusResponse> {
        Ok(Response::new(self.0.status()))
    }
}
