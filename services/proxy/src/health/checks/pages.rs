//! Responses of a health check node port.
//!
//! Owns: the response to any path and method. In: a count, the proxy's health. Out: 200 or 503 with kube-proxy's
//! headers and body, byte for byte.

use std::sync::atomic::{AtomicU32, Ordering};

use http::{HeaderName, Method, StatusCode};
use keelson_client::ServiceName;
use keelson_serve::http::{
    JSON,
    exposed::{Answer, Pages, answer, with_header},
};

use super::super::status::Health;

/// Load balancers may weigh nodes by it.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

pub(super) struct CheckPages {
    name: ServiceName,
    local: AtomicU32,
    health: Health,
}

impl CheckPages {
    pub(super) fn new(name: ServiceName, local: u32, health: Health) -> Self {
        Self { name, local: AtomicU32::new(local), health }
    }

    pub(super) fn name(&self) -> &ServiceName {
        &self.name
    }

    pub(super) fn set_local(&self, local: u32) {
        self.local.store(local, Ordering::Relaxed);
    }
}

impl Pages for CheckPages {
    fn answer(&self, _: &Method, _: &str) -> Answer {
        let local = self.local.load(Ordering::Relaxed);
        let healthy = self.health.is_healthy() && !self.health.is_too_stale();
        let status = match local > 0 && healthy {
            true => StatusCode::OK,
            false => StatusCode::SERVICE_UNAVAILABLE,
        };
        let page = answer(status, JSON, body(&self.name, local, healthy));
        with_header(page, WEIGHT, local)
    }
}

/// Indented with tabs, without a final newline.
fn body(name: &ServiceName, local: u32, healthy: bool) -> String {
    let (namespace, name) = (quoted(name.namespace()), quoted(name.name()));
    format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace},\n\t\t\"name\": {name}\n\t}},\n\
         \t\"localEndpoints\": {local},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    )
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
