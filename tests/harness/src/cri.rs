//! Owns: a CRI client like the kubelet's, on tonic. In: a socket. Out: responses and gRPC statuses, unmodified.

use crate::registry::User;
use crate::util::{PATIENCE, eventually};
use anyhow::{Context as _, Result, bail};
use hyper_util::rt::TokioIo;
use keelson_proto::cri::image_service_client::ImageServiceClient;
use keelson_proto::cri::runtime_service_client::RuntimeServiceClient;
use keelson_proto::cri::{
    AuthConfig, Image, ImageFsInfoRequest, ImageFsInfoResponse, ImageSpec, ImageStatusRequest,
    ListImagesRequest, PodSandboxConfig, PodSandboxMetadata, PullImageRequest, RemoveImageRequest,
    StatusRequest, StatusResponse, VersionRequest, VersionResponse,
};
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio_util::io::InspectReader;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Limit of kubelet and containerd in both directions, in bytes.
pub const MAX_MESSAGE: usize = 16 << 20;

/// Clones share the connection.
#[derive(Clone, Debug)]
pub struct Cri {
    images: ImageServiceClient<Channel>,
    runtime: RuntimeServiceClient<Channel>,
    channel: Channel,
}

#[derive(Clone, Debug, Default)]
pub struct Pull {
    request: PullImageRequest,
    timeout: Option<Duration>,
}

impl Pull {
    /// A pull without credentials, pod and deadline.
    pub fn new(image: &str) -> Self {
        let image = ImageSpec { image: image.to_owned(), ..ImageSpec::default() };
        Self {
            request: PullImageRequest { image: Some(image), ..PullImageRequest::default() },
            timeout: None,
        }
    }

    pub fn user(self, user: &User) -> Self {
        self.credentials(user.name, user.password)
    }

    pub fn credentials(mut self, name: &str, password: &str) -> Self {
        self.request.auth = Some(AuthConfig {
            username: name.to_owned(),
            password: password.to_owned(),
            ..AuthConfig::default()
        });
        self
    }

    /// For a pod in namespace `default`.
    pub fn pod(self, name: &str, uid: &str) -> Self {
        self.pod_in("default", name, uid)
    }

    pub fn pod_in(mut self, namespace: &str, name: &str, uid: &str) -> Self {
        let metadata = PodSandboxMetadata {
            name: name.to_owned(),
            uid: uid.to_owned(),
            namespace: namespace.to_owned(),
            attempt: 0,
        };
        self.request.sandbox_config =
            Some(PodSandboxConfig { metadata: Some(metadata), ..PodSandboxConfig::default() });
        self
    }

    /// Adds an annotation to the image spec.
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        let image = self.request.image.get_or_insert_default();
        image.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn runtime_handler(mut self, name: &str) -> Self {
        self.request.image.get_or_insert_default().runtime_handler = name.to_owned();
        self
    }

    /// Sets a deadline, which is sent as `grpc-timeout`.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    pub fn request(&self) -> Request<PullImageRequest> {
        let mut request = Request::new(self.request.clone());
        if let Some(timeout) = self.timeout {
            request.set_timeout(timeout);
        }
        request
    }
}

impl Cri {
    /// Connects to a unix socket, which must exist.
    pub async fn connect(socket: &Path) -> Result<Self> {
        let channel = endpoint(socket)?.connect().await;
        Ok(Self::on(channel.with_context(|| format!("cannot connect to {}", socket.display()))?))
    }

    /// A client that connects at the first call, and again after a connection is lost.
    pub fn lazy(socket: &Path) -> Result<Self> {
        Ok(Self::on(endpoint(socket)?.connect_lazy()))
    }

    /// A client for one call, and a token that is cancelled when its connection is closed.
    ///
    /// Hyper's client can lose a call on a connection that is being closed: the call never ends (seen for 2 of 190,000
    /// calls to hyper's own server, which closed connections all the time). A caller that must not wait forever watches
    /// the token.
    pub fn for_one_call(socket: &Path) -> Result<(Self, CancellationToken)> {
        let closed = CancellationToken::new();
        let (path, token) = (socket.to_owned(), closed.clone());
        let connector = tower::service_fn(move |_: http::Uri| {
            let (path, guard) = (path.clone(), token.clone().drop_guard());
            async move {
                let stream = UnixStream::connect(path).await?;
                // The closure, and the guard with it, lives as long as the connection.
                let held = InspectReader::new(stream, move |_: &[u8]| {
                    let _ = &guard;
                });
                Ok::<_, std::io::Error>(TokioIo::new(held))
            }
        });
        Ok((Self::on(endpoint(socket)?.connect_with_connector_lazy(connector)), closed))
    }

    /// Connects as soon as the socket answers, and waits for ImageFsInfo to succeed.
    pub async fn ready(socket: &Path) -> Result<Self> {
        eventually(PATIENCE, &format!("{} answers ImageFsInfo", socket.display()), || async {
            let cri = Self::connect(socket).await?;
            cri.fs_info().await?;
            Ok(cri)
        })
        .await
    }

    fn on(channel: Channel) -> Self {
        Self {
            images: ImageServiceClient::new(channel.clone())
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
            runtime: RuntimeServiceClient::new(channel.clone())
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE),
            channel,
        }
    }

    /// For methods that are not in the generated clients.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub fn images(&self) -> ImageServiceClient<Channel> {
        self.images.clone()
    }

    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        self.runtime.clone()
    }

    /// Pulls without credentials and returns the image reference.
    pub async fn pull_image(&self, image: &str) -> Result<String, Status> {
        self.pull(&Pull::new(image)).await
    }

    /// Returns the image reference.
    pub async fn pull(&self, pull: &Pull) -> Result<String, Status> {
        Ok(self.images().pull_image(pull.request()).await?.into_inner().image_ref)
    }

    /// None if the runtime does not have the image.
    pub async fn image_status(&self, image: &str) -> Result<Option<Image>, Status> {
        let request = ImageStatusRequest { image: Some(spec(image)), verbose: false };
        Ok(self.images().image_status(request).await?.into_inner().image)
    }

    pub async fn list_images(&self) -> Result<Vec<Image>, Status> {
        Ok(self.images().list_images(ListImagesRequest::default()).await?.into_inner().images)
    }

    pub async fn remove(&self, image: &str) -> Result<(), Status> {
        self.images().remove_image(RemoveImageRequest { image: Some(spec(image)) }).await.map(drop)
    }

    pub async fn fs_info(&self) -> Result<ImageFsInfoResponse, Status> {
        Ok(self.images().image_fs_info(ImageFsInfoRequest {}).await?.into_inner())
    }

    pub async fn version(&self) -> Result<VersionResponse, Status> {
        let request = VersionRequest { version: "v1".to_owned() };
        Ok(self.runtime().version(request).await?.into_inner())
    }

    pub async fn status(&self) -> Result<StatusResponse, Status> {
        Ok(self.runtime().status(StatusRequest { verbose: false }).await?.into_inner())
    }
}

/// Returns the status of a call that must have failed.
pub fn failed<T: std::fmt::Debug>(result: Result<T, Status>, why: &str) -> Result<Status> {
    match result {
        Err(status) => Ok(status),
        Ok(answer) => bail!("the call succeeded with {answer:?}, though {why}"),
    }
}

fn spec(image: &str) -> ImageSpec {
    ImageSpec { image: image.to_owned(), ..ImageSpec::default() }
}

/// A gRPC server on a unix socket.
pub fn endpoint(socket: &Path) -> Result<Endpoint> {
    let address = format!("unix://{}", socket.display());
    let endpoint =
        Endpoint::from_shared(address).with_context(|| format!("not a socket: {}", socket.display()))?;
    // The kubelet calls every CRI server `localhost`.
    Ok(endpoint.origin(http::Uri::from_static("http://localhost")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    #[tokio::test]
    async fn the_token_of_a_call_is_cancelled_when_its_connection_closes() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("cri.sock");
        let listener = UnixListener::bind(&socket)?;
        let (cri, closed) = Cri::for_one_call(&socket)?;
        let call = tokio::spawn(async move { cri.version().await });
        let (server, _) = listener.accept().await?;
        // The client has sent something, so the connection is in use.
        server.readable().await?;
        assert!(!closed.is_cancelled() && !call.is_finished());
        drop(server);
        tokio::time::timeout(PATIENCE, closed.cancelled()).await?;
        call.abort();
        Ok(())
    }
}
