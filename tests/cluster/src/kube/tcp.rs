//! Owns: a proxy that passes bytes on without reading them.
//! In: the address behind it; cuts, at any moment. Out: bytes in each direction with their times, and the number of
//! connections.
//!
//! A cut is what a network does that loses every packet: connections stay open at both ends and nothing arrives. New
//! ones are accepted, as by a firewall that answers nothing later.

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// On drop it accepts no more connections and breaks the existing ones.
#[derive(Debug)]
pub struct TcpProxy {
    address: String,
    shared: Arc<ProxyState>,
    server: JoinHandle<()>,
}

#[derive(Debug)]
struct ProxyState {
    upstream: String,
    line: watch::Sender<Line>,
    sent: AtomicU64,
    received: AtomicU64,
    accepted: AtomicUsize,
    open: AtomicUsize,
    /// The bytes that passed, after [`TcpProxy::record`].
    chunks: Mutex<Option<Vec<Chunk>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub at: Timestamp,
    pub to_server: bool,
    pub bytes: usize,
}

impl ProxyState {
    fn count(&self, to_server: bool, bytes: usize) {
        let total = if to_server { &self.sent } else { &self.received };
        total.fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(chunks) = self.chunks.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            chunks.push(Chunk { at: Timestamp::now(), to_server, bytes });
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    cut: bool,
    /// Number of resets: a connection ends when it differs from the number at its start.
    resets: u64,
}

impl TcpProxy {
    /// Starts a proxy before `upstream` (`127.0.0.1:PORT`) on a free port of loopback.
    pub async fn start(upstream: &str) -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on loopback")?;
        let address = listener.local_addr().context("a listener has an address")?.to_string();
        let shared = Arc::new(ProxyState {
            upstream: upstream.to_owned(),
            line: watch::Sender::default(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            accepted: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            chunks: Mutex::new(None),
        });
        let server = tokio::spawn(accept(listener, shared.clone()));
        Ok(Self { address, shared, server })
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// `https://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Nothing passes any more, and no connection is told.
    pub fn cut(&self) {
        self.shared.line.send_modify(|line| line.cut = true);
    }

    /// Everything passes again, also what was in flight.
    pub fn repair(&self) {
        self.shared.line.send_modify(|line| line.cut = false);
    }

    /// Breaks every connection with a TCP reset. A cut stays.
    pub fn reset(&self) {
        self.shared.line.send_modify(|line| line.resets += 1);
    }

    /// Bytes sent to the server.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Bytes received from the server.
    pub fn received(&self) -> u64 {
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Records what passes from now on.
    pub fn record(&self) {
        *self.shared.chunks.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// What has passed since [`TcpProxy::record`].
    pub fn chunks(&self) -> Vec<Chunk> {
        self.shared.chunks.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }

    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::Relaxed)
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.server.abort();
        self.reset();
    }
}

async fn accept(listener: TcpListener, shared: Arc<ProxyState>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                shared.accepted.fetch_add(1, Ordering::Relaxed);
                shared.open.fetch_add(1, Ordering::Relaxed);
                // Subscribed here: a reset from now on ends this connection too.
                let line = shared.line.subscribe();
                let shared = shared.clone();
                tokio::spawn(async move {
                    if let Err(error) = forward_connection(client, &shared, line).await {
                        eprintln!("a connection through the proxy broke: {error}");
                    }
                    shared.open.fetch_sub(1, Ordering::Relaxed);
                });
            }
            Err(error) => {
                eprintln!("the proxy that knows bytes only ended: {error}");
                return;
            }
        }
    }
}

/// Carries one connection until both sides have ended it, one has broken it, or it is reset.
async fn forward_connection(
    mut client: TcpStream,
    shared: &ProxyState,
    line: watch::Receiver<Line>,
) -> io::Result<()> {
    let resets = line.borrow().resets;
    let (mut until_reset, mut at_start) = (line.clone(), line.clone());
    // An error of the watch means that the proxy is gone, which is a reset as well.
    let reset = async move {
        let _ = until_reset.wait_for(|line| line.resets != resets).await;
    };
    tokio::pin!(reset);
    let connected = tokio::select! {
        () = &mut reset => None,
        server = async {
            let _ = at_start.wait_for(|line| !line.cut).await;
            TcpStream::connect(&shared.upstream).await
        } => Some(server),
    };
    let mut server = match connected {
        // Nothing listens there: the client gets a reset too.
        None | Some(Err(_)) => return client.set_zero_linger(),
        Some(Ok(server)) => server,
    };
    // Small messages must not wait for each other longer than without a proxy.
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let both = {
        let (client_read, client_write) = client.split();
        let (server_read, server_write) = server.split();
        tokio::select! {
            () = &mut reset => None,
            both = async {
                tokio::try_join!(
                    copy(client_read, server_write, line.clone(), |bytes| shared.count(true, bytes)),
                    copy(server_read, client_write, line.clone(), |bytes| shared.count(false, bytes)),
                )
            } => Some(both),
        }
    };
    match both {
        Some(Ok(_)) => Ok(()),
        None | Some(Err(_)) => {
            client.set_zero_linger()?;
            server.set_zero_linger()
        }
    }
}

/// Carries one direction to its end.
async fn copy(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut line: watch::Receiver<Line>,
    count: impl Fn(usize),
) -> io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let length = from.read(&mut buffer).await?;
        // What was read waits here while the line is cut, also the end of the stream.
        let is_complete = line.wait_for(|line| !line.cut).await.is_ok();
        if !is_complete {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
        count(length);
    }
}
