//! Checks of every request and headers of every answer.
//!
//! Owns: the check of the `Host` against DNS rebinding, the methods that are served, and the headers
//! that keep a browser from doing more with an answer than showing it.
//! In: requests. Out: 400, 405 or 421, or the answer of the routes behind it, with headers.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{
    Router,
    extract::Request,
    http::{
        HeaderName, HeaderValue, Method, StatusCode, Version,
        header::{
            ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
        },
        uri::Authority,
    },
    middleware::{Next, from_fn},
    response::{IntoResponse as _, Response},
};

use super::Failure;

/// Own scripts and styles, requests to this server, and nothing else; no framing.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The hosts that requests to a server may name.
#[derive(Debug, Clone)]
pub struct Hosts {
    /// The address of the listener.
    pub bound: SocketAddr,
    /// Names besides its addresses and `localhost`; in lower case, without a trailing dot.
    pub names: Arc<[String]>,
    /// The setting that holds the names, for the error.
    pub setting: &'static str,
}

/// Routes behind the gate: only GET and HEAD, only this server's hosts, and headers that keep a browser from doing more
/// with an answer than showing it.
pub fn gated(routes: Router, own: Hosts) -> Router {
    let own = Arc::new(own);
    routes.layer(from_fn(move |request: Request, next: Next| {
        let own = own.clone();
        async move { Ok::<_, Infallible>(pass(&own, request, next).await) }
    }))
}

async fn pass(own: &Hosts, request: Request, next: Next) -> Response {
    let mut response = match check(own, &request) {
        Ok(()) => next.run(request).await,
        Err(failure) => failure.into_response(),
    };
    let refused_method = response.status() == StatusCode::METHOD_NOT_ALLOWED;
    let headers = response.headers_mut();
    if refused_method {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn check(own: &Hosts, request: &Request) -> Result<(), Failure> {
    let hosts = hosts(request)?;
    if let Some(host) = hosts.iter().find(|host| !host_allowed(own, host.host())) {
        let Hosts { bound, setting, .. } = own;
        let text = format!(
            "the host {:?} is not allowed; use localhost or the address {bound}, or add the host to {setting}",
            host.host()
        );
        return Err(Failure::new(StatusCode::MISDIRECTED_REQUEST, text));
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let text = format!("method {} is not allowed; use GET or HEAD", request.method());
        return Err(Failure::new(StatusCode::METHOD_NOT_ALLOWED, text));
    }
    Ok(())
}

/// Every host that the request names. HTTP/1.0 clients may name none; browsers always do.
fn hosts(request: &Request) -> Result<Vec<Authority>, Failure> {
    let bad = |text: &str| Failure::new(StatusCode::BAD_REQUEST, text);
    let mut hosts: Vec<Authority> = request.uri().authority().cloned().into_iter().collect();
    for header in request.headers().get_all(HOST) {
        let host = Authority::try_from(header.as_bytes());
        hosts.push(host.map_err(|_| bad("the Host header is not HOST or HOST:PORT"))?);
    }
    match hosts.is_empty() && request.version() >= Version::HTTP_11 {
        true => Err(bad("the Host header is missing")),
        false => Ok(hosts),
    }
}

/// A page of another site reaches this server only through a name that its owner controls. Names are therefore refused,
/// except those that always mean this machine and those of the settings. Of addresses, loopback and the bound one are
/// served; on a wildcard address, every address of the machine.
fn host_allowed(own: &Hosts, host: &str) -> bool {
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_listed = |name: &str| own.names.iter().any(|own| own == name);
    match host.parse::<IpAddr>() {
        Ok(address) => {
            let bound = own.bound.ip();
            let is_own = address.is_loopback() || address == bound || bound.is_unspecified();
            is_own || is_listed(&address.to_string())
        }
        Err(_) => {
            let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
            name == "localhost" || name.ends_with(".localhost") || is_listed(&name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(bound: IpAddr, names: &[&str]) -> Hosts {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Hosts { bound: (bound, 9440).into(), names, setting: "debug.http_hosts" }
    }

    #[test]
    fn e21_only_host_names_of_the_settings_are_served() {
        let own = own("0.0.0.0".parse().unwrap(), &["node-7", "node-7.example.com", "fd00::7"]);
        for (host, allowed) in [
            ("node-7", true),
            ("NODE-7.Example.COM.", true),
            ("[fd00:0::7]", true),
            ("node-7.evil.example", false),
            ("xnode-7", false),
            ("node-7.example.com.evil.example", false),
            ("example.com", false),
        ] {
            assert_eq!(host_allowed(&own, host), allowed, "{host:?}");
        }
        let lan = Hosts { bound: "192.0.2.7:9440".parse().unwrap(), ..own };
        assert!(host_allowed(&lan, "[fd00::7]"), "an address in front of this machine");
        assert!(!host_allowed(&lan, "[fd00::8]"));
    }

    #[test]
    fn hosts() {
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let lan: IpAddr = "192.0.2.7".parse().unwrap();
        let all: IpAddr = "::".parse().unwrap();
        for (bound, host, allowed) in [
            (loopback, "localhost", true),
            (loopback, "LocalHost.", true),
            (loopback, "node.localhost", true),
            (loopback, "127.0.0.1", true),
            (loopback, "127.9.9.9", true),
            (loopback, "[::1]", true),
            (loopback, "192.0.2.7", false),
            (loopback, "evil.example", false),
            (loopback, "localhost.evil.example", false),
            (loopback, "notlocalhost", false),
            (loopback, "127.0.0.1.evil.example", false),
            (loopback, "", false),
            (lan, "192.0.2.7", true),
            (lan, "192.0.2.8", false),
            (lan, "node-7", false),
            (all, "192.0.2.7", true),
            (all, "[2001:db8::1]", true),
            (all, "evil.example", false),
        ] {
            assert_eq!(host_allowed(&own(bound, &[]), host), allowed, "{host:?} on {bound}");
        }
    }
}
