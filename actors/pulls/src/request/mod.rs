//! An image pull request.
//!
//! Owns: the decoded form of a CRI `PullImageRequest`, the rule for equal pulls, and the ID of a pull ([`PullId`]). In:
//! the request's bytes from the CRI front. Out: [`PullCall`], whose `Debug` shows no secret. The bytes are passed on to
//! the runtime unchanged, so that fields unknown to this agent survive; they are kept in memory only.

mod image;
mod redact;

use std::{fmt, sync::Arc};

use bytes::{Bytes, BytesMut};
pub use image::{ImageName, ImageNameError, MAX_PATH, MAX_REGISTRY, MAX_TAG};
use keelson_proto::{PULL_OPTION_ANNOTATION, cri};
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use self::redact::{REDACTED, redact};

/// containerd's fallback for an empty runtime handler in the CRI field.
pub const HANDLER_ANNOTATION: &str = "io.containerd.cri.runtime-handler";

/// Sent to the caller as INVALID_ARGUMENT.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("cannot decode the PullImageRequest")]
    Malformed(#[source] prost::DecodeError),
    #[error("the PullImageRequest names no image")]
    NoImage,
    #[error("invalid image reference")]
    Image(#[source] ImageNameError),
    #[error("annotation {PULL_OPTION_ANNOTATION} must be a whole number from 0 (no limit) to 65535")]
    Option,
}

/// Distinguishes credentials without keeping them: a hash salted per process, never stored. Sent only to an agent that
/// takes over.
#[derive(Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct CredentialsId([u8; 32]);

impl fmt::Debug for CredentialsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialsId(..)")
    }
}

/// Held in memory only. An agent that takes over gets its predecessor's.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub struct CredentialsSalt([u8; 32]);

impl fmt::Debug for CredentialsSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialsSalt(..)")
    }
}

impl CredentialsSalt {
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// `None` for an empty message, which is not a credential.
    fn id(&self, auth: &cri::AuthConfig) -> Option<CredentialsId> {
        let fields = secret_fields(auth);
        if fields.iter().all(|field| field.is_empty()) {
            return None;
        }
        let mut hash = Sha256::new();
        hash.update(self.0);
        for field in fields.into_iter().chain([auth.server_address.as_str()]) {
            hash.update((field.len() as u64).to_be_bytes());
            hash.update(field);
        }
        Some(CredentialsId(hash.finalize().into()))
    }
}

fn secret_fields(auth: &cri::AuthConfig) -> [&str; 5] {
    [&auth.username, &auth.password, &auth.auth, &auth.identity_token, &auth.registry_token]
}

/// Requests with equal keys are one pull.
///
/// A runtime may choose credentials and the signature policy by namespace, as CRI-O does: an anonymous pull that
/// succeeds in one namespace proves nothing for another. The core ignores the namespace if the runtime is known not to
/// use it (`Capabilities::ignores_namespace`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PullKey {
    /// Full form.
    pub image: Arc<str>,
    /// Empty: the runtime's default handler.
    pub handler: Arc<str>,
    /// `None`: anonymous.
    pub credentials: Option<CredentialsId>,
    /// From the sandbox config; empty if it names none.
    pub namespace: Arc<str>,
}

/// From the sandbox config.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Pod {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`; for a static pod the kubelet's uid.
    pub uid: String,
}

/// Unique while the agent's state exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PullId(pub u64);

#[derive(Clone)]
pub struct PullCall {
    /// As the caller wrote it.
    pub image: Arc<str>,
    pub name: ImageName,
    pub key: PullKey,
    /// `None` without a sandbox config.
    pub pod: Option<Pod>,
    /// The pull option: the number of pulls in flight at which this one may start. `None`: not set.
    pub option: Option<u32>,
    /// The first caller's custom metadata (trace context and the like), for the runtime. In memory only, and never
    /// shown: it belongs to the caller.
    pub metadata: Vec<(String, Bytes)>,
    wire: Bytes,
}

impl fmt::Debug for PullCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullCall")
            .field("image", &self.name.full())
            .field("handler", &self.key.handler)
            .field("with_credentials", &self.key.credentials.is_some())
            .field("pod", &self.pod)
            .field("option", &self.option)
            .finish_non_exhaustive()
    }
}

impl PullCall {
    /// # Errors
    /// The text repeats no part of the request.
    pub fn decode(wire: Bytes, salt: &CredentialsSalt) -> Result<Self, RequestError> {
        let request = cri::PullImageRequest::decode(wire.clone()).map_err(RequestError::Malformed)?;
        let image = request.image.ok_or(RequestError::NoImage)?;
        let name = ImageName::parse(&image.image).map_err(RequestError::Image)?;
        let option = match image.annotations.get(PULL_OPTION_ANNOTATION) {
            None => None,
            Some(text) => {
                Some(text.parse::<u16>().map_err(|_| RequestError::Option)?).filter(|n| *n > 0).map(u32::from)
            }
        };
        let sandbox = request.sandbox_config.unwrap_or_default();
        let handler = if image.runtime_handler.is_empty() {
            sandbox.annotations.get(HANDLER_ANNOTATION).cloned().unwrap_or_default()
        } else {
            image.runtime_handler
        };
        let credentials = request.auth.as_ref().and_then(|auth| salt.id(auth));
        let namespace = sandbox.metadata.as_ref().map(|m| m.namespace.as_str()).unwrap_or_default().into();
        let key = PullKey { image: name.full().clone(), handler: handler.into(), credentials, namespace };
        let pod = sandbox.metadata.filter(|m| !m.uid.is_empty()).map(|m| Pod {
            namespace: m.namespace,
            name: m.name,
            uid: m.uid,
        });
        Ok(Self { image: image.image.into(), name, key, pod, option, metadata: Vec::new(), wire })
    }

    /// The call for an anonymous pull that a restarted agent finds in its journal.
    ///
    /// # Errors
    /// The image is not a reference (only if the journal was edited).
    pub fn rebuild(image: &str, handler: &str, pod: Option<Pod>) -> Result<Self, ImageNameError> {
        let name = ImageName::parse(image)?;
        let metadata = pod.clone().map(|pod| cri::PodSandboxMetadata {
            name: pod.name,
            uid: pod.uid,
            namespace: pod.namespace,
            attempt: 0,
        });
        // containerd obeys the handler only together with a sandbox config.
        let sandbox = (metadata.is_some() || !handler.is_empty())
            .then(|| cri::PodSandboxConfig { metadata, ..Default::default() });
        let spec = cri::ImageSpec {
            image: image.to_owned(),
            runtime_handler: handler.to_owned(),
            ..Default::default()
        };
        let request = cri::PullImageRequest { image: Some(spec), auth: None, sandbox_config: sandbox };
        let namespace = pod.as_ref().map(|pod| pod.namespace.as_str()).unwrap_or_default().into();
        let key =
            PullKey { image: name.full().clone(), handler: handler.into(), credentials: None, namespace };
        let wire = request.encode_to_vec().into();
        Ok(Self { image: image.into(), name, key, pod, option: None, metadata: Vec::new(), wire })
    }

    #[must_use]
    pub fn with_metadata(mut self, metadata: Vec<(String, Bytes)>) -> Self {
        self.metadata = metadata;
        self
    }

    /// The request's bytes for the runtime: unchanged, plus the pull option if one is given. An appended message of the
    /// same field merges into the first, and of two equal map keys the last wins (the protobuf encoding rules), so
    /// nothing has to be decoded and encoded again.
    #[must_use]
    pub fn wire(&self, option: Option<u32>) -> Bytes {
        let Some(option) = option else { return self.wire.clone() };
        let annotations = [(PULL_OPTION_ANNOTATION.to_owned(), option.to_string())].into();
        let extra = cri::PullImageRequest {
            image: Some(cri::ImageSpec { annotations, ..Default::default() }),
            ..Default::default()
        };
        let mut wire = BytesMut::with_capacity(self.wire.len() + 64);
        wire.extend_from_slice(&self.wire);
        wire.extend_from_slice(&extra.encode_to_vec());
        wire.freeze()
    }

    /// Replaces every secret of this request, and parts of URLs that may be secret, for logs and the debug endpoint: a
    /// runtime's error may quote its input, and the redirects of a registry.
    #[must_use]
    pub fn scrub(&self, text: &str) -> String {
        let mut text = redact(text);
        if self.key.credentials.is_none() {
            return text;
        }
        let Ok(request) = cri::PullImageRequest::decode(self.wire.clone()) else { return String::new() };
        let auth = request.auth.unwrap_or_default();
        let mut secrets: Vec<&str> = secret_fields(&auth).into_iter().filter(|s| !s.is_empty()).collect();
        // Longest first: one secret may be part of another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        for secret in secrets {
            text = text.replace(secret, REDACTED);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(auth: Option<cri::AuthConfig>) -> cri::PullImageRequest {
        let metadata = cri::PodSandboxMetadata {
            name: "p".into(),
            uid: "u1".into(),
            namespace: "ns".into(),
            attempt: 2,
        };
        cri::PullImageRequest {
            image: Some(cri::ImageSpec { image: "r.io/x".into(), ..Default::default() }),
            auth,
            sandbox_config: Some(cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() }),
        }
    }

    fn decode(request: &cri::PullImageRequest, salt: &CredentialsSalt) -> Result<PullCall, RequestError> {
        PullCall::decode(request.encode_to_vec().into(), salt)
    }

    fn auth(username: &str, password: &str) -> Option<cri::AuthConfig> {
        let (username, password) = (username.into(), password.into());
        Some(cri::AuthConfig { username, password, ..Default::default() })
    }

    fn password(password: &str) -> Option<cri::AuthConfig> {
        auth("robot", password)
    }

    #[test]
    fn credentials_separate_keys_and_empty_ones_count_as_none() {
        let salt = CredentialsSalt::random();
        let key = |auth| decode(&request(auth), &salt).expect("valid").key;
        assert_eq!(key(password("a")), key(password("a")));
        assert_ne!(key(password("a")), key(password("b")));
        assert_ne!(key(password("a")), key(None));
        assert_eq!(key(Some(cri::AuthConfig::default())), key(None));
        let other = CredentialsSalt::random();
        assert_ne!(key(password("a")), decode(&request(password("a")), &other).expect("valid").key);
    }

    #[test]
    fn fields_of_credentials_do_not_run_into_each_other() {
        let salt = CredentialsSalt::random();
        let key = |auth| decode(&request(auth), &salt).expect("valid").key;
        assert_ne!(key(auth("ab", "c")), key(auth("a", "bc")));
    }

    #[test]
    fn neither_debug_nor_scrubbed_text_shows_a_secret() {
        let salt = CredentialsSalt::random();
        let call = decode(&request(password("hunter2hunter2")), &salt).expect("valid");
        assert!(!format!("{call:?}{salt:?}").contains("hunter2"));
        assert_eq!(call.scrub("401 for robot:hunter2hunter2"), "401 for [redacted]:[redacted]");
        // I15: an anonymous pull has no credentials, but its errors may hold a secret.
        let anonymous = decode(&request(None), &salt).expect("valid");
        assert_eq!(
            anonymous.scrub("GET https://cdn.io/b?sig=5ecret: EOF"),
            "GET https://cdn.io/b?[redacted]: EOF"
        );
    }

    #[test]
    fn the_option_is_read_and_written_without_touching_the_rest() {
        let salt = CredentialsSalt::random();
        let call = decode(&request(password("pw")), &salt).expect("valid");
        assert_eq!(call.option, None);
        let with = PullCall::decode(call.wire(Some(4)), &salt).expect("valid");
        assert_eq!((with.option, with.key, with.pod), (Some(4), call.key.clone(), call.pod.clone()));
        let over = PullCall::decode(
            PullCall::decode(call.wire(Some(4)), &salt).expect("valid").wire(Some(2)),
            &salt,
        );
        assert_eq!(over.expect("valid").option, Some(2));
        for (text, expect) in
            [("0", Some(None)), ("7", Some(Some(7))), ("-1", None), ("x", None), ("70000", None)]
        {
            let mut request = request(None);
            let spec = request.image.as_mut().expect("set above");
            spec.annotations.insert(PULL_OPTION_ANNOTATION.into(), text.into());
            assert_eq!(decode(&request, &salt).ok().map(|call| call.option), expect, "{text}");
        }
    }

    #[test]
    fn unknown_fields_survive() {
        let mut wire = request(None).encode_to_vec();
        wire.extend_from_slice(&[0xfa, 0x3f, 3, b'n', b'e', b'w']); // field 1023, bytes "new"
        let call = PullCall::decode(wire.clone().into(), &CredentialsSalt::random()).expect("valid");
        assert_eq!(call.wire(None), wire);
        assert!(call.wire(Some(1)).starts_with(&wire));
    }

    #[test]
    fn the_handler_comes_from_the_field_or_the_annotation() {
        let salt = CredentialsSalt::random();
        let mut request = request(None);
        let sandbox = request.sandbox_config.as_mut().expect("set above");
        sandbox.annotations.insert(HANDLER_ANNOTATION.into(), "kata".into());
        assert_eq!(&*decode(&request, &salt).expect("valid").key.handler, "kata");
        request.image.as_mut().expect("set above").runtime_handler = "gvisor".into();
        assert_eq!(&*decode(&request, &salt).expect("valid").key.handler, "gvisor");
    }

    /// I2: a runtime may authorize pods by namespace.
    #[test]
    fn the_namespace_is_part_of_the_key() {
        let salt = CredentialsSalt::random();
        let key = |namespace: Option<&str>, uid: &str| {
            let mut request = request(None);
            let sandbox = request.sandbox_config.as_mut().expect("set above");
            sandbox.metadata = namespace.map(|namespace| cri::PodSandboxMetadata {
                uid: uid.into(),
                namespace: namespace.into(),
                ..Default::default()
            });
            decode(&request, &salt).expect("valid").key
        };
        assert_eq!(key(Some("a"), "u1"), key(Some("a"), "u2"), "another pod of the namespace");
        assert_ne!(key(Some("a"), "u1"), key(Some("b"), "u1"));
        assert_ne!(key(Some("a"), "u1"), key(None, ""), "no sandbox config");
        assert_ne!(key(Some("a"), ""), key(Some("b"), ""), "no pod is known, its namespace is");
    }

    #[test]
    fn a_rebuilt_call_has_the_same_key() {
        let salt = CredentialsSalt::random();
        let call = decode(&request(None), &salt).expect("valid");
        let again = PullCall::rebuild(&call.image, &call.key.handler, call.pod.clone()).expect("valid");
        assert_eq!((&again.key, &again.pod), (&call.key, &call.pod));
        assert_eq!(PullCall::decode(again.wire(None), &salt).expect("valid").key, call.key);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(wire in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = PullCall::decode(wire.into(), &CredentialsSalt::random());
        }
    }
}
