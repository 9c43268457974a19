//! An HTTP client for tests of the servers, which returns responses byte for byte.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

#[derive(Debug)]
pub(super) struct Got {
    pub(super) status: u16,
    /// Includes the status line; names in lower case.
    pub(super) headers: String,
    pub(super) body: String,
}

/// GET on a connection of its own.
pub(super) async fn get(at: SocketAddr, path: &str) -> Got {
    request(at, "GET", path).await
}

/// Any method, without a body.
pub(super) async fn request(at: SocketAddr, method: &str, path: &str) -> Got {
    request_with(at, method, path, "").await
}

/// `headers`: each with its end of line.
pub(super) async fn request_with(at: SocketAddr, method: &str, path: &str, headers: &str) -> Got {
    let mut stream = TcpStream::connect(at).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    let request = format!("{method} {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (headers, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{at} {path}: {answer:?}"));
    let status = headers.split(' ').nth(1).and_then(|status| status.parse().ok());
    Got { status: status.unwrap(), headers: format!("{headers}\r\n"), body: body.to_owned() }
}
