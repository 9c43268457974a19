//! The two servers that the settings name: health and metrics.
//!
//! Owns: [`BoundServer`], which binds, again and again where that fails, and says how it fares. In: an address, what to serve.
//! Out: `/livez` and `/healthz`, or `/metrics`, `/healthz`, `/proxyMode` and `/configz`.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use http::{Method, StatusCode};
use prometheus_client::registry::Registry;
use tokio::{sync::watch, task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    http::{Answer, LIMITS, Pages, answer, listen_widely, serve},
    status::{Health, Report},
};
use crate::metrics::ProxyMetrics;

/// After a bind that failed, as kube-proxy waits.
const BIND_RETRY: Duration = Duration::from_secs(5);
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
/// What `prometheus-client` writes.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How a server fares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerState {
    /// It has not tried yet.
    Starting,
    /// It answers at this address.
    At(SocketAddr),
    /// It cannot listen, for this reason, and tries again.
    Failing(String),
}

/// A server at an address of the settings. It serves until it is dropped.
#[derive(Debug)]
pub struct BoundServer {
    state: watch::Receiver<ServerState>,
    task: JoinHandle<()>,
}

impl BoundServer {
    /// `/livez` and `/healthz` (`proxy.healthz_bind_address`): whoever asks is counted in `metrics`.
    ///
    /// An address that is not free is tried again every 5 s, and said; nothing else waits for it. Call it within a runtime.
    #[must_use]
    pub fn health(address: SocketAddr, health: Health, metrics: ProxyMetrics) -> Self {
        Self::start("health", address, Arc::new(HealthPages { health, metrics }), BIND_RETRY)
    }

    /// `/metrics`, `/healthz`, `/proxyMode` and `/configz` (`proxy.metrics_bind_address`). As [`Self::health`].
    #[must_use]
    pub fn metrics(address: SocketAddr, pages: MetricsPages) -> Self {
        Self::start("metrics", address, Arc::new(pages), BIND_RETRY)
    }

    /// How it fares, now and from now on.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<ServerState> {
        self.state.clone()
    }

    fn start(what: &'static str, address: SocketAddr, pages: Arc<dyn Pages>, retry: Duration) -> Self {
        let (sender, state) = watch::channel(ServerState::Starting);
        let task = tokio::spawn(async move {
            loop {
                match bind(address) {
                    Ok((listener, at)) => {
                        tracing::info!(%at, "the {what} server listens");
                        sender.send_replace(ServerState::At(at));
                        // It ends with this task alone.
                        serve(listener, pages.clone(), LIMITS, CancellationToken::new()).await;
                    }
                    Err(error) => say_failure(what, address, &error, retry, &sender),
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

/// Once for a reason, however often it is met.
fn say_failure(
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
                %address, %error,
                "the {what} server cannot listen; tried every {retry:?}, and nothing else waits for it"
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

fn document(report: Report) -> Answer {
    let status = StatusCode::from_u16(report.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer(status, JSON, report.body)
}

fn not_found(path: &str, there_is: &str) -> Answer {
    answer(StatusCode::NOT_FOUND, TEXT, format!("there is nothing at {path}; there is: {there_is}\n"))
}

/// What the metrics server shows.
#[derive(Debug, Clone)]
pub struct MetricsPages {
    /// `/metrics`.
    pub registry: Arc<Registry>,
    /// `/proxyMode`: kube-proxy's name of the backend, such as `nftables`.
    pub mode: &'static str,
    /// `/configz`: the settings in force as JSON, without anything secret.
    pub settings: serde_json::Value,
}

impl Pages for MetricsPages {
    fn answer(&self, method: &Method, path: &str) -> Answer {
        if !matches!(*method, Method::GET | Method::HEAD) {
            let text = format!("{method} is not served here; only GET and HEAD are\n");
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
            "/healthz" => answer(StatusCode::OK, TEXT, "ok"),
            "/proxyMode" => answer(StatusCode::OK, TEXT, self.mode),
            "/configz" => answer(StatusCode::OK, JSON, self.settings.to_string()),
            other => not_found(other, "/metrics /healthz /proxyMode /configz"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::tests::get, *};
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
        // A sync period of 0: whatever waits is late.
        let health = Health::new(Duration::ZERO);
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
        let pages = MetricsPages {
            registry: Arc::new(registry),
            mode: "nftables",
            settings: json!({"proxy": {"masquerade_bit": 14}}),
        };
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

    #[tokio::test]
    async fn an_address_that_is_taken_is_tried_until_it_is_free() {
        let other = std::net::TcpListener::bind(any_port()).unwrap();
        let taken = other.local_addr().unwrap();
        let pages = Arc::new(HealthPages {
            health: Health::new(Duration::from_secs(30)),
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
    async fn every_address_is_one_of_both_families() {
        let health = Health::new(Duration::from_secs(30));
        let server = BoundServer::health("0.0.0.0:0".parse().unwrap(), health, ProxyMetrics::default());
        let port = address(&server).await.port();
        assert_eq!(get(SocketAddr::from(([127, 0, 0, 1], port)), "/livez").await.status, 200);
        let v6 = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port));
        if std::net::TcpListener::bind((std::net::Ipv6Addr::LOCALHOST, 0)).is_ok() {
            assert_eq!(get(v6, "/livez").await.status, 200);
        }
    }
}
