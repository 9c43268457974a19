//! Owns: HTTP requests from inside a namespace. In: a namespace, an address. Out: a complete response.

use super::namespace::Namespace;
use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use keelson_harness::util::Answer;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Gets a path over a new HTTP/1.1 connection. An error if nothing listens.
pub async fn http_get_from(namespace: &Namespace, at: SocketAddr, path: &str) -> Result<Answer> {
    let from = if at.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = namespace.tcp_client(from)?;
    let got = tokio::time::timeout(TIMEOUT, async {
        let stream = socket.connect(at).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::get(path).header("host", at.to_string()).body(Empty::<Bytes>::new())?;
        let exchange = async {
            let (head, body) = sender.send_request(request).await?.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, anyhow::Error>(Answer { status: head.status, headers: head.headers, body })
        };
        // The connection must be polled while the response is awaited.
        tokio::pin!(connection);
        tokio::pin!(exchange);
        tokio::select! {
            answer = &mut exchange => answer,
            ended = &mut connection => {
                ended?;
                exchange.await
            }
        }
    });
    got.await
        .context("no answer in time")?
        .with_context(|| format!("GET {path} at {at} in {}", namespace.name()))
}
