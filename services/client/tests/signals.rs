//! Cancellation by signals. In a file of its own, because the signals are sent to the whole process.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LONG, place, started};
use keelson_client::{Api, BoxError, Client, Handlers, Options, Position, ServiceEndpoints, ServiceName};
use nix::sys::signal::{Signal, raise};
use tokio::time::timeout;

/// Sends a signal to the process when it receives a state.
struct Raise(Signal);

impl Handlers for Raise {
    fn delete(&mut self, _: &ServiceName) {}
    fn set(&mut self, _: &ServiceName, _: ServiceEndpoints) {}
    async fn sync(&mut self, _: &Position) -> Result<(), BoxError> {
        Ok(raise(self.0)?)
    }
}

#[tokio::test]
async fn both_signals_cancel() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let (mut server, options) = started();
        let serve = async {
            server.expect("Next", 0, 0).await.state(7, 1, &[]).await;
            std::future::pending::<()>().await;
        };
        let options = Options { api: Api::Next, ..options };
        let mut raise = Raise(signal);
        let position = tokio::select! {
            () = serve => unreachable!(),
            ended = timeout(LONG, keelson_client::run(options, &mut raise)) => ended.unwrap().unwrap(),
        };
        assert_eq!((position.instance_id, position.rev), (7, 1));
    }
    let (_folder, _path, options) = place();
    let mut client = Client::new(options);
    client.cancel_on_signals().unwrap();
    raise(Signal::SIGTERM).unwrap();
    assert_eq!(timeout(LONG, client.next()).await.unwrap(), None);
}
