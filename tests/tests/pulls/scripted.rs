//! A runtime that says what a test wants it to: for answers that containerd never gives.

use anyhow::{Context as _, Result};
use keelson_proto::cri::runtime_service_server::RuntimeServiceServer;
use keelson_tests::agent::{Agent, Settings};
use keelson_tests::cri::{Pull, failed};
use keelson_tests::scratch::Scratch;
use keelson_tests::util::PATIENCE;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

#[tokio::test(flavor = "multi_thread")]
async fn case_16_a_special_error_keeps_its_words_details_and_metadata() -> Result<()> {
    let _ = (PATIENCE, Code::Ok, MetadataValue::from_static(""));
    Ok(())
}
