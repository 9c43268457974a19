//! A runtime that answers every pull with one error, for errors that containerd never returns, and under other names.

use crate::common::{begin, wait_for_pulls};
use anyhow::Result;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::cri::{Pull, failed};
use keelson_harness::driver::Driver;
use keelson_harness::fake_runtime::{FakeAnswers, FakeRuntime};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::until;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::watch;
use tonic::{Code, Status};

/// Fails every pull with a copy of its status, when its gate is open.
#[derive(Clone)]
struct Scripted {
    name: &'static str,
    status: Status,
    asked: Arc<AtomicUsize>,
    gate: watch::Receiver<bool>,
}

impl Scripted {
    /// A runtime of this name, and the sender that opens its gate.
    fn new(name: &'static str, status: Status) -> (Self, watch::Sender<bool>) {
        let (open, gate) = watch::channel(false);
        (Self { name, status, asked: Arc::default(), gate }, open)
    }
}

#[tonic::async_trait]
impl FakeAnswers for Scripted {
    fn name(&self) -> &'static str {
        self.name
    }

    async fn pull(&self, _name: &str) -> Result<(), Status> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut gate = self.gate.clone();
        let opened = gate.wait_for(|open| *open).await;
        opened.map_err(|_| Status::internal("the test has ended"))?;
        Err(self.status.clone())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_16_special_errors_keep_text_details_and_metadata() -> Result<()> {
    let cases = [
        (Code::Unknown, "RegistryUnavailable: x"),
        (
            Code::Unknown,
            "SignatureValidationFailed: no signature at 100 % of the mirrors, größer\nand a second line",
        ),
        (Code::ResourceExhausted, "TooManyPullingInParallel: this runtime has a limit of its own"),
        (Code::Internal, ""),
    ];
    for (code, message) in cases {
        let scratch = Scratch::new()?;
        let mut status = Status::with_details(code, message, b"\x0a\x03abc\xff\x00".as_slice().into());
        status.metadata_mut().insert("x-runtime-hint", "try-again".parse()?);
        status
            .metadata_mut()
            .insert_bin("x-runtime-bin", tonic::metadata::MetadataValue::from_bytes(&[0, 159, 146]));
        let (scripted, open) = Scripted::new("scripted", status.clone());
        open.send_replace(true);
        let runtime = FakeRuntime::start(&scratch, scripted)?;
        let agent = Agent::start(&scratch, &runtime.endpoint(), &Settings::new()).await?;

        let got =
            failed(agent.cri().await?.pull_image("registry.example/app:v1").await, "the runtime returns it")?;
        assert_eq!((got.code(), got.message(), got.details()), (code, message, status.details()));
        for name in ["x-runtime-hint", "x-runtime-bin"] {
            let of = |status: &Status| status.metadata().clone().into_headers().get(name).cloned();
            assert_eq!(of(&got), of(&status), "{name}");
        }
        // The kubelet looks for the reason at the beginning of the error, if the code is Unknown.
        let go =
            Driver::new(&agent.endpoint())?.run(&["pull", "registry.example/app:v1"]).await?.failure()?;
        assert_eq!((go.number, go.message.as_str()), (code as u32, message));
        if code == Code::Unknown {
            assert_eq!(go.text, message);
        }
    }
    Ok(())
}

/// I2: the name in the runtime's Version decides whether two namespaces share a pull; before it has answered, and with
/// an unknown name, they do not.
#[tokio::test(flavor = "multi_thread")]
async fn namespaces_share_only_under_a_name_known_to_ignore_them() -> Result<()> {
    for (name, answers_first, expected) in
        [("containerd", true, 1), ("cri-o", true, 2), ("scripted", true, 2), ("containerd", false, 2)]
    {
        let scratch = Scratch::new()?;
        let socket = scratch.dir("runtime")?.join("cri.sock");
        let (scripted, open) = Scripted::new(name, Status::unknown("no"));
        let asked = scripted.asked.clone();
        let mut servers = Vec::new();
        if answers_first {
            servers.push(FakeRuntime::serve(&socket, scripted.clone())?);
        }
        let endpoint = format!("unix://{}", socket.display());
        let mut agent = Agent::new(&scratch, &endpoint, &Settings::new())?;
        if answers_first { agent.start_again().await } else { agent.start_live().await }?;

        let cri = agent.cri().await?;
        let going = ["one", "two"].map(|namespace| {
            begin(&cri, Pull::new("registry.example/app:v1").pod_in(namespace, "web", namespace))
        });
        let seen = wait_for_pulls(&agent, "two callers wait", |pulls| pulls.callers == 2).await?;
        assert_eq!(seen.pulls.len(), expected, "{name}, answers first: {answers_first}");
        if servers.is_empty() {
            servers.push(FakeRuntime::serve(&socket, scripted)?);
        }
        until("the runtime is asked", || asked.load(Ordering::SeqCst) == expected).await?;
        open.send_replace(true);
        for pull in going {
            assert_eq!(failed(pull.await?, "the runtime returns it")?.message(), "no");
        }
        assert_eq!(asked.load(Ordering::SeqCst), expected);
    }
    Ok(())
}
