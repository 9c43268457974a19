//! The body of a `PullImage` request, from the socket to the wire of the runtime.

#![no_main]

use std::sync::LazyLock;

use bytes::Bytes;
use keelson_pulls::request::{CredentialsSalt, ImageName, PullCall};
use keelson_serve::grpc::frame;
use keelson_proto::{PULL_OPTION_ANNOTATION, cri};
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

static SALT: LazyLock<CredentialsSalt> = LazyLock::new(CredentialsSalt::random);

fuzz_target!(|data: &[u8]| {
    let body = Bytes::copy_from_slice(data);
    if let Ok(message) = frame::unframe(body.clone()) {
        assert_eq!(frame::frame(&message), body, "a message that was taken is the whole body");
        decode(message);
    }
    // Nearly all inputs break the five bytes of the prefix: decode the body directly as well.
    decode(body);
});

fn decode(message: Bytes) {
    let call = match PullCall::decode(message.clone(), &SALT) {
        Ok(call) => call,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert_eq!(call.wire(None), message, "without an option the bytes pass as they came");
    assert_eq!(ImageName::parse(&call.image).as_ref(), Ok(&call.name));
    assert_eq!(call.key.image, *call.name.full());
    let request = cri::PullImageRequest::decode(message).expect("decoded a moment ago");
    shows_no_secret(&call, &request);
    for option in [0, 3, 65_535] {
        let with = call.wire(Some(option));
        let mut expected = request.clone();
        let image = expected.image.as_mut().expect("a call has an image");
        image.annotations.insert(PULL_OPTION_ANNOTATION.to_owned(), option.to_string());
        assert_eq!(cri::PullImageRequest::decode(with.clone()).expect("decodes"), expected);
        let again = PullCall::decode(with, &SALT).expect("still a request");
        assert_eq!((&again.key, &again.pod), (&call.key, &call.pod));
        assert_eq!(again.option, (option > 0).then_some(option));
    }
}

fn shows_no_secret(call: &PullCall, request: &cri::PullImageRequest) {
    let Some(auth) = &request.auth else { return assert!(call.key.credentials.is_none()) };
    // A shorter one may be part of anything; the rest of the request may repeat a secret.
    let secret = &auth.password;
    let public = format!("{:?}{:?}{:?}", call.name, call.key.handler, call.pod);
    if secret.len() >= 8 && !public.contains(secret.as_str()) {
        assert!(!format!("{call:?}").contains(secret.as_str()), "Debug shows the password");
        let quoted = call.scrub(&format!("refused: {secret}"));
        assert!(!quoted.contains(secret.as_str()) || "refused: [redacted]".contains(secret.as_str()));
    }
}
