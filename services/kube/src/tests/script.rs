//! A scripted API server: plain or with TLS, HTTP/1.1 and HTTP/2.

use std::{
    collections::VecDeque,
    convert::Infallible,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::WebPkiClientVerifier,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
};

use crate::{ApiServer, ApiServerParts, ClusterSource, ExplicitSource, ServerSignals};

#[derive(Debug, Clone)]
pub(super) struct SeenRequest {
    pub(super) line: String,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
    /// Number of the connection, from 0.
    pub(super) connection: usize,
    /// The client certificate's bytes.
    pub(super) client: Option<Vec<u8>>,
}

impl SeenRequest {
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }

    pub(super) fn query(&self, name: &str) -> Option<&str> {
        let query = self.line.split_once('?')?.1;
        query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }
}

pub(super) enum Reply {
    Answer(u16, Vec<(&'static str, String)>, Bytes),
    /// 200 with a body that arrives in pieces, until the sender is dropped.
    Stream(mpsc::UnboundedReceiver<Result<Bytes, std::io::Error>>),
    /// 200 with a body of the test's own.
    Body(Body),
    Silence,
}

impl Reply {
    pub(super) fn json(status: u16, body: impl Into<String>) -> Self {
        Self::Answer(status, vec![("content-type", "application/json".into())], Bytes::from(body.into()))
    }

    pub(super) fn ok() -> Self {
        Self::json(200, r#"{"kind":"PartialObjectMetadata","metadata":{"uid":"u","resourceVersion":"8"}}"#)
    }
}

pub(super) struct Feed(mpsc::UnboundedSender<Result<Bytes, std::io::Error>>);

impl Feed {
    pub(super) fn line(&self, text: &str) {
        self.bytes(format!("{text}\n"));
    }

    pub(super) fn bytes(&self, bytes: impl Into<Bytes>) {
        self.0.send(Ok(bytes.into())).unwrap();
    }

    pub(super) fn event(&self, kind: &str, object: &str) {
        self.line(&format!(r#"{{"type":"{kind}","object":{object}}}"#));
    }

    pub(super) fn cut(self) {
        let _ = self.0.send(Err(std::io::Error::other("cut")));
    }

    pub(super) async fn closed(&self) {
        self.0.closed().await;
    }
}

pub(super) struct Server {
    pub(super) address: SocketAddr,
    replies: mpsc::UnboundedSender<Reply>,
    seen: mpsc::UnboundedReceiver<SeenRequest>,
    connections: Arc<AtomicUsize>,
    /// Aborted on drop, with its connections.
    _task: JoinSet<()>,
}

type Replies = Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Reply>>>;

impl Server {
    pub(super) async fn plain() -> Self {
        Self::start(None).await
    }

    pub(super) async fn tls(config: ServerConfig) -> Self {
        Self::start(Some(config)).await
    }

    async fn start(tls: Option<ServerConfig>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (replies, next) = mpsc::unbounded_channel();
        let next: Replies = Arc::new(tokio::sync::Mutex::new(next));
        let (tell, seen) = mpsc::unbounded_channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let tls = tls.map(|config| tokio_rustls::TlsAcceptor::from(Arc::new(config)));
        let task = JoinSet::from_iter([async move {
            let mut open = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (tls, next, tell, count) = (tls.clone(), next.clone(), tell.clone(), count.clone());
                open.spawn(async move {
                    let Some(tls) = tls else {
                        let id = count.fetch_add(1, Ordering::SeqCst);
                        return speak(stream, id, None, next, tell).await;
                    };
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let client =
                        stream.get_ref().1.peer_certificates().map(|chain| chain[0].as_ref().to_vec());
                    let id = count.fetch_add(1, Ordering::SeqCst);
                    speak(stream, id, client, next, tell).await;
                });
            }
        }]);
        Self { address, replies, seen, connections, _task: task }
    }

    pub(super) fn reply(&self, reply: Reply) {
        self.replies.send(reply).unwrap();
    }

    /// Answers a request with a stream, which the feed fills.
    pub(super) fn begin(&self) -> Feed {
        let (feed, body) = mpsc::unbounded_channel();
        self.reply(Reply::Stream(body));
        Feed(feed)
    }

    pub(super) async fn seen(&mut self) -> SeenRequest {
        self.seen.recv().await.unwrap()
    }

    /// Waits for this number of requests, whatever they are.
    pub(super) async fn skip(&mut self, requests: usize) {
        for _ in 0..requests {
            self.seen().await;
        }
    }

    pub(super) fn nothing_more(&mut self) {
        assert!(self.seen.try_recv().is_err(), "an unexpected request");
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub(super) fn source(&self) -> ExplicitSource {
        ExplicitSource { server: format!("http://{}", self.address), ..ExplicitSource::default() }
    }

    pub(super) fn api(&self) -> ApiServer {
        api(self.source())
    }

    /// A client that shares these signals with others.
    pub(super) fn api_with(&self, signals: &ServerSignals) -> ApiServer {
        let parts = ApiServerParts::new(ClusterSource::Explicit(self.source()));
        ApiServer::new(ApiServerParts { signals: signals.clone(), ..parts })
    }
}

pub(super) fn api(source: ExplicitSource) -> ApiServer {
    ApiServer::new(ApiServerParts::new(ClusterSource::Explicit(source)))
}

/// Signals, and how often a restored etcd was detected.
pub(super) fn counting() -> (ServerSignals, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let signals = ServerSignals::new(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    (signals, count)
}

/// Advances the time at once; no data may be in flight. Time is paused only meanwhile, because the servers are real.
pub(super) async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// A client with short timeouts, for servers that do not answer.
pub(super) fn with_short_timeouts(source: ExplicitSource) -> ApiServer {
    ApiServer::new(ApiServerParts {
        timeout: Duration::from_secs(1),
        ..ApiServerParts::new(ClusterSource::Explicit(source))
    })
}

async fn speak<S>(
    stream: S,
    id: usize,
    client: Option<Vec<u8>>,
    next: Replies,
    tell: mpsc::UnboundedSender<SeenRequest>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let (next, tell, client) = (next.clone(), tell.clone(), client.clone());
        async move {
            let (head, body) = request.into_parts();
            let Ok(body) = body.collect().await else {
                return std::future::pending().await;
            };
            let seen = SeenRequest {
                line: format!("{} {}", head.method, head.uri.path_and_query().unwrap()),
                version: head.version,
                headers: head.headers,
                body: String::from_utf8(body.to_bytes().to_vec()).unwrap(),
                connection: id,
                client,
            };
            let _ = tell.send(seen);
            let Some(reply) = next.lock().await.recv().await else {
                return std::future::pending().await;
            };
            answer(reply).await
        }
    });
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

pub(super) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

async fn answer(reply: Reply) -> Result<Response<Body>, Infallible> {
    match reply {
        Reply::Silence => std::future::pending().await,
        Reply::Answer(status, headers, body) => {
            let mut response =
                Response::new(http_body_util::Full::new(body).map_err(|never| match never {}).boxed_unsync());
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            for (name, value) in headers {
                response.headers_mut().append(name, value.parse().unwrap());
            }
            Ok(response)
        }
        Reply::Body(body) => Ok(Response::new(body)),
        Reply::Stream(pieces) => {
            let stream = futures_util::stream::unfold(pieces, |mut pieces| async {
                let piece = pieces.recv().await?;
                Some((piece.map(Frame::data), pieces))
            });
            Ok(Response::new(BodyExt::boxed_unsync(StreamBody::new(stream))))
        }
    }
}

/// A certificate authority for one test.
pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
    der: CertificateDer<'static>,
    key_der: Vec<u8>,
}

impl Authority {
    pub(super) fn new() -> Self {
        Self::named("kubernetes")
    }

    pub(super) fn named(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    pub(super) fn issue(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            der: certificate.der().clone(),
            key_der: key.serialize_der(),
        }
    }

    /// A server that requests client certificates of this authority and also accepts requests without one, as
    /// kube-apiserver does.
    pub(super) fn server(&self, protocols: &[&str]) -> ServerConfig {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let identity = self.issue("127.0.0.1");
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let verifier =
            WebPkiClientVerifier::builder(Arc::new(roots)).allow_unauthenticated().build().unwrap();
        let key = PrivateKeyDer::Pkcs8(identity.key_der.into());
        let mut config = ServerConfig::builder()
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![identity.der], key)
            .unwrap();
        config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
        config
    }
}

impl Identity {
    pub(super) fn der(&self) -> Vec<u8> {
        self.der.to_vec()
    }
}

/// Writes a file atomically: under another name, then renamed.
pub(super) fn put(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    let draft = directory.join(format!("{name}.new"));
    std::fs::write(&draft, text).unwrap();
    std::fs::rename(&draft, &path).unwrap();
    path
}

/// A network between client and server that can be cut without either noticing.
pub(super) struct Wire {
    pub(super) address: SocketAddr,
    dead: Arc<Mutex<VecDeque<tokio::sync::watch::Sender<bool>>>>,
    opened: Arc<AtomicUsize>,
    /// Aborted on drop, with its connections.
    _task: JoinSet<()>,
}

impl Wire {
    pub(super) async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let dead: Arc<Mutex<VecDeque<_>>> = Arc::default();
        let opened = Arc::new(AtomicUsize::new(0));
        let (all, count) = (dead.clone(), opened.clone());
        let task = JoinSet::from_iter([async move {
            let mut open = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let (kill, killed) = tokio::sync::watch::channel(false);
                all.lock().unwrap().push_back(kill);
                open.spawn(carry(client, server, killed));
            }
        }]);
        Self { address, dead, opened, _task: task }
    }

    /// Drops all data on the connections that are open; new ones work.
    pub(super) fn cut(&self) {
        for kill in self.dead.lock().unwrap().iter() {
            kill.send_replace(true);
        }
    }

    pub(super) fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }
}

async fn carry(mut client: TcpStream, server: SocketAddr, mut killed: tokio::sync::watch::Receiver<bool>) {
    let mut server = TcpStream::connect(server).await.unwrap();
    let cut = tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => false,
        cut = killed.wait_for(|dead| *dead) => cut.is_ok(),
    };
    if cut {
        // Both ends stay open and receive nothing.
        std::future::pending::<()>().await;
    }
}
