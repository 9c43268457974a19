//! The connections to one API server with one set of credentials.
//!
//! Owns: [`Link`]: the TLS settings, the pool of connections and the headers of every request. In: a
//! source after reading. Out: heads of answers with pending bodies.
//!
//! The pool is hyper-util's: over TLS it offers HTTP/2, and one connection then carries everything, including watches.
//! A server without it, or plain `http://`, gets HTTP/1.1, where a dropped request closes its
//! connection. The pool repeats a request only if none of its bytes was written (the kept
//! connection was found closed), as Go's client does. kube's own client is not used: it supports HTTP/1.1 only and
//! repeats requests by itself.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, Uri, header, uri::PathAndQuery};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::client::ConfigExt as _;
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tower::{BoxError, Layer, ServiceExt as _, util::BoxCloneSyncService};

use crate::source::{ClusterSource, Loaded, SourceError, kubeconfig_error, unusable, without_userinfo};

/// Short, because each request over HTTP/1.1 contains it.
pub const USER_AGENT: &str = concat!("keelson/", env!("CARGO_PKG_VERSION"));

/// Connections that are unused for this long are closed, unless HTTP/2's PINGs keep them; as in Go's client.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Timeout of opening one connection: a list or a watch that may wait for a minute for its answer must not wait as long
/// for an address that does not answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of unanswered TCP probes before the connection is closed.
const TCP_PROBES: u32 = 3;

/// Flow-control window of a stream, in bytes. A watch whose reader is busy holds no more than this,
/// and ten of them leave room on their connection (5 MiB) for the answers of other requests.
const STREAM_WINDOW: u32 = 512 << 10;

/// Probing of a connection on which nothing arrives: HTTP/2 PING and TCP keep-alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Time without data before a probe is sent.
    pub idle: Duration,
    /// Time without an answer to the probe before the connection is closed.
    pub timeout: Duration,
}

impl Default for KeepAlive {
    /// 30 s and 15 s, as in Go's client: a watch on a dead network ends within 45 s.
    fn default() -> Self {
        Self { idle: Duration::from_secs(30), timeout: Duration::from_secs(15) }
    }
}

type Http = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;
type Stack = BoxCloneSyncService<Request<Full<Bytes>>, Response<Incoming>, BoxError>;

/// Everything that the next pool needs.
struct Settings {
    base: Uri,
    connector: HttpsConnector<HttpConnector>,
    auth: Option<kube::client::middleware::AuthLayer>,
    extra_headers: kube::client::middleware::ExtraHeadersLayer,
    keep_alive: KeepAlive,
}

/// A pool of connections. Dropping it closes idle ones; running requests end by themselves.
#[derive(Clone)]
pub(crate) struct Link {
    settings: Arc<Settings>,
    stack: Stack,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("server", &self.server()).finish_non_exhaustive()
    }
}

impl Link {
    /// Builds the TLS settings and a first pool; runs the kubeconfig's plugin if it has one. Blocks.
    ///
    /// # Errors
    /// Certificate and key do not match, or the plugin fails.
    pub(crate) fn new(
        source: &ClusterSource,
        loaded: &Loaded,
        keep_alive: KeepAlive,
    ) -> Result<Self, SourceError> {
        let config = &loaded.config;
        let tls = tls_settings(source, config)?;
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        http.set_keepalive(Some(keep_alive.idle));
        http.set_keepalive_interval(Some(keep_alive.timeout / TCP_PROBES));
        http.set_keepalive_retries(Some(TCP_PROBES));
        http.set_tcp_user_timeout(Some(keep_alive.idle + keep_alive.timeout));
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        let builder = match &config.tls_server_name {
            Some(name) => {
                let name = ServerName::try_from(name.clone())
                    .map_err(|_| unusable(source, "its tls-server-name is not a host name"))?;
                builder.with_server_name_resolver(FixedServerNameResolver::new(name))
            }
            None => builder,
        };
        let connector = builder.enable_all_versions().wrap_connector(http);
        let auth = config.auth_layer().map_err(|err| config_error(source, &err))?;
        let extra_headers = config.extra_headers_layer().map_err(|err| config_error(source, &err))?;
        let settings = Arc::new(Settings {
            base: config.cluster_url.clone(),
            connector,
            auth,
            extra_headers,
            keep_alive,
        });
        Ok(Self { stack: settings.stack(), settings })
    }

    /// The same server and credentials with no connection yet.
    pub(crate) fn renewed(&self) -> Self {
        Self { stack: self.settings.stack(), settings: Arc::clone(&self.settings) }
    }

    /// The server's URL without userinfo.
    pub(crate) fn server(&self) -> String {
        without_userinfo(&self.settings.base.to_string())
    }

    /// `host:port`, for labels.
    pub(crate) fn host(&self) -> String {
        let base = &self.settings.base;
        let host = base.host().unwrap_or_default();
        base.port_u16().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
    }

    /// Sends one request. `target` is path and query below the server's URL.
    ///
    /// # Errors
    /// The libraries' errors; see [`crate::answers::broken`].
    pub(crate) async fn send(
        &self,
        target: &str,
        request: http::request::Builder,
        body: Bytes,
    ) -> Result<Response<Incoming>, BoxError> {
        let mut parts = self.settings.base.clone().into_parts();
        // Userinfo in the URL is no credential of the API's and must not get into a Host header.
        let authority = parts.authority.take().ok_or("the server's address has no host")?;
        let host = authority.as_str().rsplit_once('@').map_or(authority.as_str(), |(_, host)| host);
        let path = self.settings.base.path().trim_end_matches('/');
        parts.authority = Some(host.parse()?);
        parts.path_and_query = Some(PathAndQuery::try_from(format!("{path}{target}"))?);
        let request = request
            .uri(Uri::from_parts(parts)?)
            .header(header::USER_AGENT, USER_AGENT)
            .body(Full::new(body))?;
        self.stack.clone().oneshot(request).await
    }
}

impl Settings {
    fn stack(&self) -> Stack {
        let http = self.extra_headers.layer(self.pool()).map_err(Into::<BoxError>::into);
        match &self.auth {
            Some(auth) => BoxCloneSyncService::new(auth.layer(http)),
            None => BoxCloneSyncService::new(http),
        }
    }

    fn pool(&self) -> Http {
        Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .http2_keep_alive_interval(self.keep_alive.idle)
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_keep_alive_timeout(self.keep_alive.timeout)
            .build(self.connector.clone())
    }
}

fn tls_settings(source: &ClusterSource, config: &kube::Config) -> Result<ClientConfig, SourceError> {
    // kube uses the process's default crypto provider, and panics if none of several was chosen.
    // An error means that one was chosen already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    if config.cluster_url.scheme_str() == Some("http") {
        // Nothing is verified, so the system's certificates need not be read.
        return Ok(ClientConfig::builder()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth());
    }
    config.rustls_client_config().map_err(|err| config_error(source, &err))
}

/// kube's error without quotations, such as the output of a plugin.
fn config_error(source: &ClusterSource, err: &kube::Error) -> SourceError {
    match err {
        kube::Error::Auth(kube::client::AuthError::AuthExecStart(err)) => {
            unusable(source, format!("cannot start its exec plugin: {err}"))
        }
        kube::Error::Auth(kube::client::AuthError::AuthExecRun { out, .. }) => unusable(
            source,
            format!("its exec plugin failed with {}; run it manually to see the error", out.status),
        ),
        kube::Error::Auth(_) => unusable(
            source,
            "cannot get the credentials of its user; check that the auth plugin is supported",
        ),
        kube::Error::InferKubeconfig(err) => kubeconfig_error(source, err),
        kube::Error::RustlsTls(err) => unusable(source, tls_error(err)),
        _ => unusable(source, "it is not usable"),
    }
}

fn tls_error(err: &kube::client::RustlsTlsError) -> String {
    use kube::client::RustlsTlsError as E;
    match err {
        E::InvalidIdentityPem(_) | E::UnknownPrivateKeyFormat => {
            "the client certificate or key is not valid PEM; check that the file is complete".to_owned()
        }
        E::MissingPrivateKey => "the client key file contains no private key".to_owned(),
        E::MissingCertificate => "the client certificate file contains no certificate".to_owned(),
        E::InvalidPrivateKey(rustls::Error::InconsistentKeys(_)) => {
            "the client certificate and key do not match; check that both files are complete".to_owned()
        }
        E::InvalidPrivateKey(_) => "the client certificate or key is not usable".to_owned(),
        E::AddRootCertificate(_) => "a certificate authority is not usable".to_owned(),
        E::NoValidNativeRootCA(_) => {
            "no certificate authority is configured, and the system has none".to_owned()
        }
        E::InvalidServerName(_) => "its tls-server-name is not a host name".to_owned(),
    }
}
