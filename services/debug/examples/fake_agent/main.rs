//! A lively agent without actors or a runtime, to look at the page and the commands with.
//!
//! In: `--http ADDRESS`, `--socket PATH`, `--idle` (nothing to do, heartbeats and endpoints off), `--down` (runtime
//! and API server are away).
//! Out: the debug API on both, until Ctrl-C.
//!
//! ```text
//! cargo run -p keelson-debug --example fake_agent -- --http 127.0.0.1:9440 --socket /tmp/debug.sock
//! ```

mod endpoints;
mod heartbeats;
mod view;
mod world;

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, UnixListener};

#[derive(Debug)]
struct Options {
    http: String,
    socket: String,
    scene: world::Scene,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options {
        http: "127.0.0.1:9440".into(),
        socket: "fake-debug.sock".into(),
        scene: world::Scene::Busy,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--http" => options.http = value()?,
            "--socket" => options.socket = value()?,
            "--idle" => options.scene = world::Scene::Idle,
            "--down" => options.scene = world::Scene::Down,
            other => bail!("unknown argument {other}; there are --http, --socket, --idle and --down"),
        }
    }
    Ok(options)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let options = options()?;
    let view = view::FakeView::start(options.scene);
    let http = TcpListener::bind(&options.http).await.with_context(|| options.http.clone())?;
    if std::fs::exists(&options.socket)? {
        std::fs::remove_file(&options.socket)?;
    }
    let grpc = UnixListener::bind(&options.socket).with_context(|| options.socket.clone())?;
    let end = || async {
        let _ = tokio::signal::ctrl_c().await;
    };
    let served = tokio::join!(
        keelson_debug::serve_http(http, view.clone(), [].into(), end()),
        keelson_debug::serve_grpc(grpc, view, end())
    );
    std::fs::remove_file(&options.socket)?;
    served.0?;
    Ok(served.1?)
}
