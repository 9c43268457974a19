//! The health server and the metrics server.
//!
//! Owns: [`BoundServer`], which retries to bind and reports its state. In: an address, the pages. Out: `/livez` and
//! `/healthz`, or the pages of kube-proxy's metrics address.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use http::{Method, StatusCode};
use keelson_serve::{
    http::{
        JSON, OPEN_METRICS, TEXT,
        exposed::{Answer, Pages, answer, serve},
    },
    tcp::listen_widely,
};
use prometheus_client::registry::Registry;
use tokio::{sync::watch, task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    status::{Health, HealthResponse, Moment},
    zpages::Zpages,
};
use crate::metrics::ProxyMetrics;

/// Pause after a failed bind. Source: kube-proxy.
const BIND_RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServerState {
    /// No bind was attempted yet.
    Starting,
    At(SocketAddr),
    /// It cannot listen, for this reason, and retries.
    Failing(String),
}

/// A server at an address of the settings. It serves until it is dropped.
#[derive(Debug)]
pub(crate) struct BoundServer {
    state: watch::Receiver<ServerState>,
    task: JoinHandle<()>,
}

impl BoundServer {
    /// Serves `/livez` and `/healthz` (`proxy.healthz_bind_address`), and counts requests in `metrics`.
    ///
    /// A failed bind is logged and retried every 5 s; nothing else waits for it. Must be called within a runtime.
    pub(crate) fn health(address: SocketAddr, health: Health, metrics: ProxyMetrics) -> Self {
        Self::start("health", address, Arc::new(HealthPages { health, metrics }), BIND_RETRY)
    }

    /// Serves [`MetricsPages`] (`proxy.metrics_bind_address`). As [`Self::health`].
    pub(crate) fn metrics(address: SocketAddr, pages: MetricsPages) -> Self {
        Self::start("metrics", address, Arc::new(pages), BIND_RETRY)
    }

    /// Waits for the first attempt to listen.
    ///
    /// # Errors
    /// Why the bind failed.
    pub(crate) async fn bound(&self) -> Result<SocketAddr, String> {
        let mut state = self.state();
        let tried = state.wait_for(|state| *state != ServerState::Starting).await;
        match tried.map(|state| state.clone()) {
            Ok(ServerState::At(address)) => Ok(address),
            Ok(ServerState::Failing(reason)) => Err(reason),
            Ok(ServerState::Starting) | Err(_) => Err("the server exited".to_owned()),
        }
    }

    pub(crate) fn state(&self) -> watch::Receiver<ServerState> {
        self.state.clone()
    }

    fn start(what: &'static str, address: SocketAddr, pages: Arc<dyn Pages>, retry: Duration) -> Self {
        let (sender, state) = watch::channel(ServerState::Starting);
        let task = tokio::spawn(async move {
            loop {
                match bind(address) {
                    Ok((listener, at)) => {
                        tracing::info!(server = what, address = %at, "listening");
                        sender.send_replace(ServerState::At(at));
                        // The server ends with this task only.
                        serve(listener, pages.clone(), CancellationToken::new()).await;
                    }
                    Err(error) => report_failure(what, address, &error, retry, &sender),
                }
                sleep(retry).await;
            }
        });
        Self { state, task }
    }
}

impl Drop for BoundServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn bind(address: SocketAddr) -> io::Result<(tokio::net::TcpListener, SocketAddr)> {
    let listener = listen_widely(address)?;
    let at = listener.local_addr()?;
    Ok((listener, at))
}

/// Logs a failure once per reason.
fn report_failure(
    what: &str,
    address: SocketAddr,
    error: &io::Error,
    retry: Duration,
    sender: &watch::Sender<ServerState>,
) {
    let failing = ServerState::Failing(error.to_string());
    sender.send_if_modified(|state| {
        let changed = *state != failing;
        if changed {
            tracing::warn!(
                server = what, %address, %error, retry_in = ?retry,
                "cannot listen; retrying, Services are not affected"
            );
            *state = failing;
        }
        changed
    });
}

struct HealthPages {
    health: Health,
    metrics: ProxyMetrics,
}

impl Pages for HealthPages {
    fn answer(&self, _: &Method, path: &str) -> Answer {
        match path {
            "/livez" => {
                let report = self.health.livez();
                self.metrics.livez(report.status);
                document(report)
            }
            "/healthz" => {
                let report = self.health.healthz();
                self.metrics.healthz(report.status);
                document(report)
            }
            other => not_found(other, "/livez /healthz"),
        }
    }
}

fn document(report: HealthResponse) -> Answer {
    let status = StatusCode::from_u16(report.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer(status, JSON, report.body)
}

fn not_found(path: &str, there_is: &str) -> Answer {
    answer(StatusCode::NOT_FOUND, TEXT, format!("path {path} not found; available: {there_is}\n"))
}

/// The pages of the metrics server, as `/statusz` lists them.
const PATHS: &str = "/metrics /metrics/slis /healthz /proxyMode /configz /flagz /statusz";
const LISTED: [&str; 5] = ["/configz", "/flagz", "/healthz", "/metrics", "/proxyMode"];

#[derive(Debug)]
pub(crate) struct MetricsPages {
    registry: Arc<Registry>,
    mode: &'static str,
    settings: serde_json::Value,
    zpages: Zpages,
}

impl MetricsPages {
    /// `mode`: kube-proxy's name of the backend, such as `nftables`. `settings`: the settings in force as JSON, without
    /// secrets.
    pub(crate) fn new(registry: Arc<Registry>, mode: &'static str, settings: serde_json::Value) -> Self {
        let zpages = Zpages::new(&settings, &LISTED);
        Self { registry, mode, settings, zpages }
    }
}

impl Pages for MetricsPages {
    fn answer(&self, method: &Method, path: &str) -> Answer {
        self.answer_in(method, path, "")
    }

    fn answer_in(&self, method: &Method, path: &str, accept: &str) -> Answer {
        if path == "/metrics/slis" && matches!(*method, Method::GET | Method::HEAD | Method::DELETE) {
            return self.zpages.slis(method);
        }
        if !matches!(*method, Method::GET | Method::HEAD) {
            let text = format!("method {method} not allowed; use GET or HEAD\n");
            return answer(StatusCode::METHOD_NOT_ALLOWED, TEXT, text);
        }
        match path {
            "/metrics" => {
                let mut text = String::new();
                match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
                    Ok(()) => answer(StatusCode::OK, OPEN_METRICS, text),
                    Err(error) => answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
                }
            }
            "/healthz" => {
                self.zpages.pinged();
                answer(StatusCode::OK, TEXT, "ok")
            }
            "/flagz" => self.zpages.flagz(accept),
            "/statusz" => self.zpages.statusz(accept, Moment::now()),
            "/proxyMode" => answer(StatusCode::OK, TEXT, self.mode),
            "/configz" => answer(StatusCode::OK, JSON, self.settings.to_string()),
            other => not_found(other, PATHS),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::tests::{get, request, request_with},
        *,
    };
    use crate::model::Family;

    async fn address(server: &BoundServer) -> SocketAddr {
        let mut state = server.state();
        let bound = state.wait_for(|state| matches!(state, ServerState::At(_))).await.unwrap().clone();
        match bound {
            ServerState::At(address) => address,
            other => unreachable!("{other:?}"),
        }
    }

    fn any_port() -> SocketAddr {
        "127.0.0.1:0".parse().unwrap()
    }

    #[tokio::test]
    async fn case_54_and_55_over_http() {
        // With a sync period of 0, every pending change is late.
        let health = Health::new(Duration::ZERO, None);
        let metrics = ProxyMetrics::default();
        let server = BoundServer::health(any_port(), health.clone(), metrics.clone());
        let at = address(&server).await;
        for family in Family::ALL {
            health.synced(family);
        }
        let (healthz, livez) = (get(at, "/healthz").await, get(at, "/livez").await);
        assert_eq!((healthz.status, livez.status), (503, 200), "no Node is known");
        for headers in [&healthz.headers, &livez.headers] {
            assert!(headers.contains("content-type: application/json\r\n"), "{headers}");
            assert!(headers.contains("x-content-type-options: nosniff\r\n"), "{headers}");
        }
        let document: serde_json::Value = serde_json::from_str(&healthz.body).unwrap();
        assert_eq!(document["nodeEligible"], json!(false));
        assert_eq!(document["healthy"], json!(true));
        let document: serde_json::Value = serde_json::from_str(&livez.body).unwrap();
        assert!(document.get("nodeEligible").is_none(), "{document}");
        assert_eq!(document["lastUpdated"], document["currentTime"]);

        let mut node = keelson_client::NodeInfo { exists: true, eligible: true, ..Default::default() };
        health.node(Some(&node));
        assert_eq!(get(at, "/healthz?verbose").await.status, 200);
        health.queued(Family::V6);
        health.synced(Family::V4);
        assert_eq!((get(at, "/healthz").await.status, get(at, "/livez").await.status), (503, 503));
        health.synced(Family::V6);
        assert_eq!((get(at, "/healthz").await.status, get(at, "/livez").await.status), (200, 200));
        node.eligible = false;
        health.node(Some(&node));
        assert_eq!((get(at, "/healthz").await.status, get(at, "/livez").await.status), (503, 200));
        assert_eq!(get(at, "/metrics").await.status, 404);

        let mut registry = Registry::default();
        metrics.register(&mut registry, "nftables");
        let pages =
            MetricsPages::new(Arc::new(registry), "nftables", json!({"proxy": {"masquerade_bit": 14}}));
        let server = BoundServer::metrics(any_port(), pages);
        let at = address(&server).await;
        let shown = get(at, "/metrics").await;
        assert_eq!(shown.status, 200);
        for line in [
            "kubeproxy_proxy_healthz_total{code=\"200\"} 2",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 3",
            "kubeproxy_proxy_livez_total{code=\"200\"} 3",
            "kubeproxy_proxy_livez_total{code=\"503\"} 1",
            "# EOF",
        ] {
            assert!(shown.body.lines().any(|have| have == line), "{line} in {}", shown.body);
        }
        assert_eq!(get(at, "/healthz").await.body, "ok");
        assert_eq!(get(at, "/proxyMode").await.body, "nftables");
        assert_eq!(get(at, "/configz").await.body, "{\"proxy\":{\"masquerade_bit\":14}}");
        assert_eq!(get(at, "/").await.status, 404);
    }

    /// As in kube-proxy 1.36.
    #[tokio::test]
    async fn p20_flagz_statusz_and_slis_are_served_at_the_metrics_address() {
        let settings = json!({"file": null, "settings": {
            "proxy.masquerade_bit": {"value": 14}, "proxy.bind_address": {"value": ["192.0.2.1", "::"]},
            "proxy.backend": {"value": "nft"}, "agent.log": {"value": "info"}, "cri.listen": {"value": "x"},
        }});
        let pages = MetricsPages::new(Arc::default(), "nftables", settings);
        let server = BoundServer::metrics(any_port(), pages);
        let at = server.bound().await.unwrap();

        let flagz = get(at, "/flagz").await;
        assert!(flagz.headers.contains("content-type: text/plain; charset=utf-8\r\n"), "{}", flagz.headers);
        assert!(flagz.body.starts_with("\nkeelson-proxy flagz\nWarning: "), "{}", flagz.body);
        let flags =
            "agent.log=info\nproxy.backend=nft\nproxy.bind_address=192.0.2.1,::\nproxy.masquerade_bit=14\n";
        assert!(flagz.body.ends_with(&format!("only.\n{flags}")), "{}", flagz.body);
        let form = "application/json;as=Flagz;v=v1beta1;g=config.k8s.io";
        let flagz = request_with(at, "GET", "/flagz", &format!("Accept: {form}\r\n")).await;
        let document: serde_json::Value = serde_json::from_str(&flagz.body).unwrap();
        assert_eq!(document["apiVersion"], "config.k8s.io/v1beta1");
        assert_eq!(document["flags"]["proxy.masquerade_bit"], "14");
        let old = form.replace("v1beta1", "v1alpha1");
        let flagz = request_with(at, "GET", "/flagz", &format!("Accept: {old}\r\n")).await;
        assert!(flagz.headers.contains("warning: 299 - \"This version of the flagz"), "{}", flagz.headers);
        let refused = request_with(at, "GET", "/flagz", "Accept: application/json\r\n").await;
        assert_eq!(refused.status, 406, "{}", refused.body);

        let statusz = get(at, "/statusz").await;
        assert!(statusz.body.contains("\nUp: 0 hr 00 min "), "{}", statusz.body);
        assert!(
            statusz.body.ends_with("Paths: /configz /flagz /healthz /metrics /proxyMode\n"),
            "{}",
            statusz.body
        );
        let form = "Accept: application/yaml;as=Statusz;v=v1beta1;g=config.k8s.io\r\n";
        let statusz = request_with(at, "GET", "/statusz", form).await;
        assert!(statusz.headers.contains("content-type: application/yaml\r\n"), "{}", statusz.headers);
        let document: serde_json::Value = serde_json::from_str(&statusz.body).unwrap();
        assert_eq!(
            (&document["kind"], &document["metadata"]["name"]),
            (&json!("Statusz"), &json!("keelson-proxy"))
        );

        let none = get(at, "/metrics/slis").await;
        assert!(!none.body.contains("kubernetes_healthcheck{"), "{}", none.body);
        get(at, "/healthz").await;
        get(at, "/healthz").await;
        let slis = get(at, "/metrics/slis").await;
        for line in [
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1",
            "kubernetes_healthchecks_total{name=\"ping\",type=\"healthz\",status=\"success\"} 2",
        ] {
            assert!(slis.body.lines().any(|have| have == line), "{line} in {}", slis.body);
        }
        assert_eq!(request(at, "DELETE", "/metrics/slis").await.body, "metrics reset\n");
        assert_eq!(get(at, "/metrics/slis").await.body, none.body);
    }

    #[tokio::test]
    async fn p20_bind_failures_are_known_at_once() {
        let other = std::net::TcpListener::bind(any_port()).unwrap();
        let health = Health::new(Duration::from_secs(30), None);
        let taken = other.local_addr().unwrap();
        let server = BoundServer::health(taken, health.clone(), ProxyMetrics::default());
        let refused = server.bound().await;
        assert!(refused.as_ref().is_err_and(|reason| reason.contains("in use")), "{refused:?}");
        let server = BoundServer::health(any_port(), health, ProxyMetrics::default());
        assert!(server.bound().await.is_ok());
    }

    #[tokio::test]
    async fn a_used_address_is_retried_until_it_is_free() {
        let other = std::net::TcpListener::bind(any_port()).unwrap();
        let taken = other.local_addr().unwrap();
        let pages = Arc::new(HealthPages {
            health: Health::new(Duration::from_secs(30), None),
            metrics: ProxyMetrics::default(),
        });
        let server = BoundServer::start("health", taken, pages, Duration::from_millis(20));
        let mut state = server.state();
        let failing = state.wait_for(|state| matches!(state, ServerState::Failing(_))).await.unwrap().clone();
        assert!(matches!(&failing, ServerState::Failing(why) if why.contains("in use")), "{failing:?}");
        drop(other);
        assert_eq!(address(&server).await, taken);
        assert_eq!(get(taken, "/livez").await.status, 200);
    }

    #[tokio::test]
    async fn the_unspecified_address_listens_on_both_families() {
        let health = Health::new(Duration::from_secs(30), None);
        let server = BoundServer::health("0.0.0.0:0".parse().unwrap(), health, ProxyMetrics::default());
        let port = address(&server).await.port();
        assert_eq!(get(SocketAddr::from(([127, 0, 0, 1], port)), "/livez").await.status, 200);
        let v6 = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port));
        if std::net::TcpListener::bind((std::net::Ipv6Addr::LOCALHOST, 0)).is_ok() {
            assert_eq!(get(v6, "/livez").await.status, 200);
        }
    }
}
