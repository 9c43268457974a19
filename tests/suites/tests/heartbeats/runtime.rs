//! Owns: a container runtime inside the test that accepts pods and completes pulls at once: heartbeats only need a
//! healthy one. In: nothing. Out: a CRI socket.

use anyhow::Result;
use keelson_harness::fake_runtime::{FakeAnswers, FakeRuntime};
use keelson_harness::scratch::Scratch;
use keelson_proto::cri::{Image, RuntimeCondition, RuntimeStatus, StatusResponse};

/// A runtime that is always healthy.
pub(crate) fn start_ready_runtime(scratch: &Scratch) -> Result<FakeRuntime> {
    FakeRuntime::start(scratch, Ready)
}

#[derive(Clone)]
struct Ready;

impl FakeAnswers for Ready {
    fn images(&self) -> Vec<Image> {
        vec![Image {
            id: format!("sha256:{:064x}", 1),
            repo_tags: vec!["registry.example/one:1".to_owned()],
            size: 1 << 20,
            ..Image::default()
        }]
    }

    fn status(&self) -> StatusResponse {
        let conditions = ["RuntimeReady", "NetworkReady"].map(|kind| RuntimeCondition {
            r#type: kind.to_owned(),
            status: true,
            ..Default::default()
        });
        let status = RuntimeStatus { conditions: conditions.into() };
        StatusResponse { status: Some(status), ..StatusResponse::default() }
    }
}
