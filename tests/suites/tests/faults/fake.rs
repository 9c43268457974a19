//! Owns: a CRI server inside the test, for behaviour that no real runtime can be made to show: huge lists, and ten
//! thousand pulls that end when the test lets them. It has no containerd API, like CRI-O.

use anyhow::{Context as _, Result};
use keelson_harness::scratch::Scratch;
use keelson_proto::cri::image_service_server::{ImageService, ImageServiceServer};
use keelson_proto::cri::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use keelson_proto::cri::{
    Image, ImageFsInfoRequest, ImageFsInfoResponse, ImageStatusRequest, ImageStatusResponse,
    ListImagesRequest, ListImagesResponse, PullImageRequest, PullImageResponse, RemoveImageRequest,
    RemoveImageResponse, StatusRequest, StatusResponse, VersionRequest, VersionResponse,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// The error of a pull of an image without `good` in its name.
pub(crate) const REFUSAL: &str = "RegistryUnavailable: no such image";

/// A runtime that does not really pull.
pub(crate) struct FakeRuntime {
    socket: PathBuf,
    shared: Shared,
    server: JoinHandle<()>,
}

#[derive(Clone)]
struct Shared {
    open: watch::Sender<bool>,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    /// Number of images, and length of each tag.
    list: (usize, usize),
    present: BTreeSet<String>,
    pulls: usize,
    running: usize,
    most_running: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FakeRuntime {
    /// Starts one below `scratch`. Its pulls wait until [`FakeRuntime::open`].
    pub(crate) fn start(scratch: &Scratch) -> Result<Self> {
        let socket = scratch.dir("fake")?.join("cri.sock");
        let listener = UnixListener::bind(&socket).context("cannot listen")?;
        let shared = Shared { open: watch::Sender::new(false), inner: Arc::default() };
        // Of any size: others must refuse them.
        let images = ImageServiceServer::new(shared.clone()).max_encoding_message_size(usize::MAX);
        let runtime = RuntimeServiceServer::new(shared.clone());
        let served = Server::builder().add_service(images).add_service(runtime);
        let server = tokio::spawn(async move {
            if let Err(error) = served.serve_with_incoming(UnixListenerStream::new(listener)).await {
                eprintln!("the runtime of the test ended: {error}");
            }
        });
        Ok(Self { socket, shared, server })
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// Sets the number of images that it lists, and the bytes of each tag.
    pub(crate) fn list(&self, images: usize, bytes: usize) {
        self.shared.lock().list = (images, bytes);
    }

    /// Lets pulls continue, also later ones. Images with `good` in their name arrive, others do not exist.
    pub(crate) fn open(&self) {
        self.shared.open.send_replace(true);
    }

    pub(crate) fn pulls(&self) -> usize {
        self.shared.lock().pulls
    }

    pub(crate) fn most_running(&self) -> usize {
        self.shared.lock().most_running
    }
}

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Counts a pull as ended on drop, however it ends.
struct Running(Shared);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
    }
}

fn name_of(image: Option<keelson_proto::cri::ImageSpec>) -> String {
    image.map(|image| image.image).unwrap_or_default()
}

#[tonic::async_trait]
impl ImageService for Shared {
    async fn list_images(
        &self,
        _: Request<ListImagesRequest>,
    ) -> Result<Response<ListImagesResponse>, Status> {
        let (images, bytes) = self.lock().list;
        let image = |n: usize| {
            let id = format!("sha256:{n:064x}");
            let tag = format!("registry.example/{n}:{}", "t".repeat(bytes));
            Image { id, repo_tags: vec![tag], size: 1, ..Image::default() }
        };
        Ok(Response::new(ListImagesResponse { images: (0..images).map(image).collect() }))
    }

    async fn image_status(
        &self,
        request: Request<ImageStatusRequest>,
    ) -> Result<Response<ImageStatusResponse>, Status> {
        let name = name_of(request.into_inner().image);
        let there = self.lock().present.contains(&name);
        let image = there.then(|| Image { id: format!("id of {name}"), size: 1, ..Image::default() });
        Ok(Response::new(ImageStatusResponse { image, ..ImageStatusResponse::default() }))
    }

    async fn pull_image(
        &self,
        request: Request<PullImageRequest>,
    ) -> Result<Response<PullImageResponse>, Status> {
        let name = name_of(request.into_inner().image);
        {
            let mut inner = self.lock();
            inner.pulls += 1;
            inner.running += 1;
            inner.most_running = inner.most_running.max(inner.running);
        }
        let _running = Running(self.clone());
        // The sender is in `self`.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
        if !name.contains("good") {
            return Err(Status::unknown(REFUSAL));
        }
        self.lock().present.insert(name.clone());
        Ok(Response::new(PullImageResponse { image_ref: format!("id of {name}") }))
    }

    async fn remove_image(
        &self,
        request: Request<RemoveImageRequest>,
    ) -> Result<Response<RemoveImageResponse>, Status> {
        self.lock().present.remove(&name_of(request.into_inner().image));
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
impl RuntimeService for Shared {
    async fn version(&self, _: Request<VersionRequest>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(VersionResponse {
            version: "0.1.0".to_owned(),
            runtime_name: "fake".to_owned(),
            runtime_version: "1".to_owned(),
            runtime_api_version: "v1".to_owned(),
        }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        Ok(Response::new(StatusResponse::default()))
    }
}
