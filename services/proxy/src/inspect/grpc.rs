//! `keelson.proxy.v1.Proxy`.
//!
//! Owns: the server on the unix socket. In: a bound listener, the view, a shutdown future, requests. Out: the view's
//! results, or a status: INVALID_ARGUMENT (the question is invalid), RESOURCE_EXHAUSTED (busy: retry), UNAVAILABLE
//! (nothing is known yet, or the view does not answer).

use std::{future::Future, pin::Pin};

use futures_util::{Stream, StreamExt as _, stream};
use keelson_proto::proxy::{
    self as pb,
    proxy_server::{Proxy, ProxyServer},
};
use keelson_serve::{
    ServeError,
    grpc::{GrpcApi, serve_ready},
};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, service::Routes};

use super::{
    PrintSlots, ProxyView,
    view::{answer, within},
};
use crate::explain::Question;

const API: GrpcApi =
    GrpcApi { name: "proxy debug API", services: &["keelson.proxy.v1.Proxy"], connections: 512, calls: 128 };

/// Serves `keelson.proxy.v1.Proxy`, reflection and health on `listener` until `shutdown`. Health follows
/// [`ProxyView::readyz`].
///
/// # Errors
/// The descriptors are invalid.
pub async fn serve_grpc<V: ProxyView>(
    listener: UnixListener,
    view: V,
    prints: PrintSlots,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let routes = |stop: CancellationToken| {
        Routes::new(ProxyServer::new(Service { view: view.clone(), prints: prints.clone(), stop }))
    };
    let ready =
        || async { within(view.readyz()).await.is_ok_and(|checks| checks.iter().all(|check| check.ok)) };
    serve_ready(listener, API, ready, routes, shutdown).await
}

#[derive(Debug)]
struct Service<V> {
    view: V,
    prints: PrintSlots,
    stop: CancellationToken,
}

type Texts = Pin<Box<dyn Stream<Item = Result<pb::Text, Status>> + Send>>;

#[tonic::async_trait]
impl<V: ProxyView> Proxy for Service<V> {
    type PrintStream = Texts;

    async fn get_state(&self, _: Request<pb::GetStateRequest>) -> Result<Response<pb::State>, Status> {
        Ok(Response::new(answer(self.view.state()).await?))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::Explanation>, Status> {
        let question = Question::try_from(request.into_inner());
        let question = question.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(answer(self.view.explain(question)).await?))
    }

    async fn print(&self, _: Request<pb::PrintRequest>) -> Result<Response<Texts>, Status> {
        let texts = self.prints.print(&self.view).await?.map(|piece| Ok(pb::Text { text: piece? }));
        // An incomplete text ends with an error, so that no client takes it for complete.
        let stopping = Status::unavailable("the proxy is stopping");
        Ok(Response::new(Box::pin(until(texts, self.stop.clone(), Err(stopping)))))
    }
}

/// The items until `stop`, then `last`.
fn until<T: Send>(
    items: impl Stream<Item = T> + Send,
    stop: CancellationToken,
    last: T,
) -> impl Stream<Item = T> + Send {
    stream::unfold(Some((Box::pin(items), stop, last)), |state| async move {
        let (mut items, stop, last) = state?;
        tokio::select! {
            biased;
            () = stop.cancelled() => Some((last, None)),
            item = items.next() => item.map(|item| (item, Some((items, stop, last)))),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use hyper_util::rt::TokioIo;
    use keelson_proto::proxy::proxy_client::ProxyClient;
    use keelson_serve::ViewError;
    use tempfile::TempDir;
    use tokio::net::UnixStream;
    use tonic::{
        Code,
        transport::{Channel, Endpoint},
    };
    use tonic_health::pb::{
        HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
    };
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };

    use super::*;
    use crate::inspect::{
        fake::{Fake, check, explanation, state},
        view::PRINTS,
    };

    struct Served {
        _folder: TempDir,
        socket: PathBuf,
        stop: CancellationToken,
        server: tokio::task::JoinHandle<Result<(), ServeError>>,
    }

    impl Served {
        fn start(fake: &Fake) -> Self {
            let folder = TempDir::new().unwrap();
            let socket = folder.path().join("proxy.sock");
            let listener = UnixListener::bind(&socket).unwrap();
            let stop = CancellationToken::new();
            let shutdown = stop.clone().cancelled_owned();
            let server = tokio::spawn(serve_grpc(listener, fake.clone(), PrintSlots::default(), shutdown));
            Self { _folder: folder, socket, stop, server }
        }

        async fn client(&self) -> ProxyClient<Channel> {
            ProxyClient::new(channel(&self.socket).await)
        }
    }

    async fn channel(socket: &Path) -> Channel {
        let socket = socket.to_owned();
        let connect = move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        };
        Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(connect))
            .await
            .unwrap()
    }

    fn ask(address: &str) -> pb::ExplainRequest {
        pb::ExplainRequest { address: address.into(), port: 80, ..Default::default() }
    }

    #[tokio::test]
    async fn answers_and_refusals() {
        let fake = Fake::new();
        let served = Served::start(&fake);
        let mut client = served.client().await;
        assert_eq!(client.get_state(pb::GetStateRequest {}).await.unwrap().into_inner(), state());
        assert_eq!(client.explain(ask("10.96.0.10")).await.unwrap().into_inner(), explanation());
        assert_eq!(fake.script().asked[0].target.to_string(), "10.96.0.10:80/TCP");
        let status = client.explain(ask("web")).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("is not an IP address"), "{status}");
        for (error, code) in [
            (ViewError::Busy("full".into()), Code::ResourceExhausted),
            (ViewError::Unavailable("none yet".into()), Code::Unavailable),
        ] {
            fake.script().state = Err(error.clone());
            fake.script().text = Err(error.clone());
            let status = client.get_state(pb::GetStateRequest {}).await.unwrap_err();
            assert_eq!((status.code(), status.message()), (code, error.to_string().as_str()));
            assert_eq!(client.print(pb::PrintRequest {}).await.unwrap_err().code(), code);
        }
        served.stop.cancel();
        served.server.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_large_ruleset_is_sent_in_messages_below_the_default_limit() {
        let fake = Fake::new();
        let large = "element\n".repeat(1 << 20);
        fake.script().text =
            Ok(vec![Ok("head\n".into()), Ok(large.clone()), Ok(String::new()), Ok("tail\n".into())]);
        let served = Served::start(&fake);
        let mut texts = served.client().await.print(pb::PrintRequest {}).await.unwrap().into_inner();
        let mut all = String::new();
        while let Some(text) = texts.message().await.unwrap() {
            assert!(text.text.len() <= 1 << 20);
            all.push_str(&text.text);
        }
        assert_eq!(all, format!("head\n{large}tail\n"));
    }

    #[tokio::test]
    async fn a_truncated_ruleset_is_an_error() {
        let fake = Fake::new();
        fake.script().endless = true;
        let served = Served::start(&fake);
        let mut texts = served.client().await.print(pb::PrintRequest {}).await.unwrap().into_inner();
        assert_eq!(texts.message().await.unwrap().unwrap().text, "table ip keelson {\n");
        assert_eq!(texts.message().await.unwrap().unwrap().text, "}\n");
        served.stop.cancel();
        assert_eq!(texts.message().await.unwrap_err().code(), Code::Unavailable);
        fake.script().endless = false;
        fake.script().text = Ok(vec![Ok("table".into()), Err(ViewError::Unavailable("gone".into()))]);
        let served = Served::start(&fake);
        let mut texts = served.client().await.print(pb::PrintRequest {}).await.unwrap().into_inner();
        assert_eq!(texts.message().await.unwrap().unwrap().text, "table");
        assert_eq!(texts.message().await.unwrap_err().message(), "gone");
    }

    #[tokio::test]
    async fn concurrent_prints_are_bounded() {
        let fake = Fake::new();
        fake.script().endless = true;
        let served = Served::start(&fake);
        let mut client = served.client().await;
        let mut held = Vec::new();
        for _ in 0..PRINTS {
            held.push(client.print(pb::PrintRequest {}).await.unwrap());
        }
        let status = client.print(pb::PrintRequest {}).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    }

    #[tokio::test]
    async fn health_follows_readiness_and_reflection_lists_what_is_served() {
        let fake = Fake::new();
        fake.script().ready = vec![check("kernel", false, "no space left")];
        let served = Served::start(&fake);
        let channel = channel(&served.socket).await;
        let mut health = HealthClient::new(channel.clone());
        for service in ["", API.services[0]] {
            let request = HealthCheckRequest { service: service.into() };
            let mut watched = health.watch(request).await.unwrap().into_inner();
            assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
            fake.script().ready = vec![check("kernel", true, "")];
            assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
            fake.script().ready = vec![check("kernel", false, "")];
            assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
        }
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let asked = futures_util::stream::once(std::future::ready(request));
        let answer = ServerReflectionClient::new(channel).server_reflection_info(asked).await.unwrap();
        let answer = answer.into_inner().message().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
        let mut names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
        names.sort();
        assert_eq!(names, ["grpc.health.v1.Health", "keelson.proxy.v1.Proxy"]);
    }
}
