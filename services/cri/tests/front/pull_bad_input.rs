//! Pull requests that cannot be processed: a clear error, nothing reaches the runtime, and the next call works.

use bytes::Bytes;
use keelson_proto::{PULL_OPTION_ANNOTATION, cri};
use prost::Message as _;

use crate::support::{Call, EMPTY, PULL_IMAGE, VERSION, connect, frame, frame_bytes, pull_request, run};

const INVALID_ARGUMENT: i32 = 3;
const UNIMPLEMENTED: i32 = 12;

fn with_option(text: &str) -> Bytes {
    let mut request = pull_request("r.io/x");
    request.image.as_mut().unwrap().annotations.insert(PULL_OPTION_ANNOTATION.into(), text.into());
    frame(&request)
}

fn cases() -> Vec<(&'static str, Bytes, i32, &'static str)> {
    let good = frame(&pull_request("r.io/x"));
    let named = |image: &str| frame(&pull_request(image));
    let mut compressed = good.to_vec();
    compressed[0] = 1;
    let mut flag = good.to_vec();
    flag[0] = 0xff;
    let with_password = named("https://robot:hunter2@r.io/x");
    vec![
        ("no body", Bytes::new(), INVALID_ARGUMENT, "middle of a gRPC message"),
        ("half a prefix", good.slice(..3), INVALID_ARGUMENT, "middle of a gRPC message"),
        ("half a message", good.slice(..good.len() - 1), INVALID_ARGUMENT, "middle of a gRPC message"),
        (
            "two messages",
            [good.clone(), good.clone()].concat().into(),
            INVALID_ARGUMENT,
            "more than one gRPC message",
        ),
        (
            "a byte too many",
            [&good[..], b"x"].concat().into(),
            INVALID_ARGUMENT,
            "more than one gRPC message",
        ),
        ("compressed", compressed.into(), UNIMPLEMENTED, "compressed requests are not supported"),
        ("an unknown flag", flag.into(), UNIMPLEMENTED, "compressed requests are not supported"),
        (
            "an immense prefix",
            Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff, 1]),
            8,
            "larger than 16777216 bytes",
        ),
        ("an empty message", EMPTY, INVALID_ARGUMENT, "names no image"),
        ("no protobuf", frame_bytes(&[0xff; 40]), INVALID_ARGUMENT, "cannot decode"),
        ("a wrong wire type", frame_bytes(&[0x08, 0x01]), INVALID_ARGUMENT, "cannot decode"),
        ("no utf-8", frame_bytes(&[0x0a, 0x04, 0x0a, 0x02, 0xc3, 0x28]), INVALID_ARGUMENT, "cannot decode"),
        ("no image", frame(&cri::PullImageRequest::default()), INVALID_ARGUMENT, "names no image"),
        ("an empty name", named(""), INVALID_ARGUMENT, "the image name is empty"),
        (
            "a long name",
            named(&format!("r.io/{}", "a".repeat(300))),
            INVALID_ARGUMENT,
            "longer than 255 characters",
        ),
        ("an immense name", named(&"a/".repeat(500_000)), INVALID_ARGUMENT, "invalid image reference"),
        (
            "a long tag",
            named(&format!("r.io/x:{}", "a".repeat(129))),
            INVALID_ARGUMENT,
            "a tag is at most 128",
        ),
        ("upper case", named("r.io/X"), INVALID_ARGUMENT, "invalid image reference"),
        ("a space", named("r.io/a b"), INVALID_ARGUMENT, "invalid image reference"),
        ("a digest cut off", named("r.io/x@sha256:123"), INVALID_ARGUMENT, "not a digest"),
        ("a URL with a password", with_password, INVALID_ARGUMENT, "has no scheme"),
        ("an option that is no number", with_option("many"), INVALID_ARGUMENT, "must be a whole number"),
        ("an empty option", with_option(""), INVALID_ARGUMENT, "must be a whole number"),
        ("a negative option", with_option("-1"), INVALID_ARGUMENT, "must be a whole number"),
        ("an immense option", with_option("65536"), INVALID_ARGUMENT, "must be a whole number"),
    ]
}

#[test]
fn bad_requests_are_refused_with_an_error() {
    run(async {
        let (runtime, agent, client) = connect(Call::standard).await;
        for (name, body, code, text) in cases() {
            let reply = client.call(PULL_IMAGE, body).await;
            assert_eq!(reply.code(), code, "{name}: {}", reply.text());
            assert!(reply.text().contains(text), "{name}: {}", reply.text());
            assert!(!reply.text().contains("hunter2"), "{name}: {}", reply.text());
            assert!(reply.text().len() < 300, "{name}: {}", reply.text());
        }
        assert!(client.is_open());
        assert!(runtime.calls(PULL_IMAGE).is_empty());
        assert_eq!((agent.handled("RequestPull"), agent.handled("CallerLeft")), (0, 0));
        assert_eq!(client.pull("r.io/x").await.code(), 0);
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
    });
}

#[test]
fn good_requests_at_the_edge_are_taken() {
    run(async {
        let (runtime, _agent, client) = connect(Call::standard).await;
        let only_image = cri::PullImageRequest { sandbox_config: None, ..pull_request("x") };
        let twice = [only_image.encode_to_vec(), only_image.encode_to_vec()].concat();
        let good = [
            frame(&only_image),
            // Two messages of the same field are merged (protobuf).
            frame_bytes(&twice),
            frame(&pull_request(&format!("r.io/{}:{}", "a".repeat(250), "b".repeat(128)))),
            with_option("0"),
            with_option("65535"),
        ];
        let count = good.len();
        for body in good {
            client.call(PULL_IMAGE, body).await.assert_ok();
        }
        assert_eq!(runtime.calls(PULL_IMAGE).len(), count);
    });
}

#[test]
fn a_caller_that_leaves_during_its_request_starts_no_pull() {
    run(async {
        let (runtime, agent, client) = connect(Call::standard).await;
        let mut call = client.send(PULL_IMAGE, &[], None).await;
        call.body.send_data(frame(&pull_request("r.io/x")).slice(..10), false).unwrap();
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        call.body.send_reset(h2::Reason::CANCEL);
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert_eq!(client.call(VERSION, EMPTY).await.code(), 0);
        let lost = agent.client().await;
        let mut call = lost.send(PULL_IMAGE, &[], None).await;
        call.body.send_data(Bytes::from_static(&[0; 3]), false).unwrap();
        lost.kill();
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert_eq!(agent.handled("RequestPull"), 0);
        assert!(runtime.calls(PULL_IMAGE).is_empty());
    });
}
