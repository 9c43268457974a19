//! The claims of a service account's token.
//!
//! Owns: reading a JWT's payload (RFC 7519). In: a token. Out: when it was issued, when it expires, its subject and its
//! node. No part of the token itself leaves this module, and no error: a text that is not a JWT has no claims.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::Deserialize;

/// Times are Unix seconds.
#[derive(Default, PartialEq, Eq, Debug)]
pub(crate) struct TokenClaims {
    pub(crate) subject: String,
    pub(crate) issued_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) node: Option<String>,
}

#[derive(Deserialize)]
struct Payload {
    sub: Option<String>,
    /// NumericDate: seconds, which may have a fraction.
    exp: Option<f64>,
    iat: Option<f64>,
    nbf: Option<f64>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Option<Kubernetes>,
}

/// The API server's private claims (`pkg/serviceaccount/claims.go`).
#[derive(Deserialize)]
struct Kubernetes {
    node: Option<Reference>,
}

#[derive(Deserialize)]
struct Reference {
    name: String,
}

/// The claims of `token`; empty if it is not a JWT.
pub(crate) fn token_claims(token: &str) -> Option<TokenClaims> {
    let mut parts = token.split('.');
    let (_header, payload, _signature) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let payload = BASE64_URL_SAFE_NO_PAD.decode(payload.trim_end_matches('=')).ok()?;
    let payload: Payload = serde_json::from_slice(&payload).ok()?;
    // An out-of-range number becomes the nearest in range.
    #[allow(clippy::cast_possible_truncation)]
    let seconds = |date: Option<f64>| date.map(|date| date.floor() as i64);
    Some(TokenClaims {
        subject: payload.sub.unwrap_or_default(),
        issued_at: seconds(payload.iat.or(payload.nbf)),
        expires_at: seconds(payload.exp),
        node: payload.kubernetes.and_then(|claims| claims.node).map(|node| node.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(payload: &str) -> String {
        format!("eyJhbGciOiJSUzI1NiJ9.{}.c2lnbmF0dXJl", BASE64_URL_SAFE_NO_PAD.encode(payload))
    }

    #[test]
    fn e4_a_token_of_a_pod_states_its_end_and_its_node() {
        let payload = r#"{"aud":["https://kubernetes.default.svc"],"exp":1700003600,"iat":1700000000,
            "kubernetes.io":{"namespace":"kube-system","node":{"name":"a","uid":"1"},"pod":{"name":"p","uid":"2"},
            "serviceaccount":{"name":"keelson-agent","uid":"3"}},"nbf":1700000000,
            "sub":"system:serviceaccount:kube-system:keelson-agent"}"#;
        let expected = TokenClaims {
            subject: "system:serviceaccount:kube-system:keelson-agent".into(),
            issued_at: Some(1_700_000_000),
            expires_at: Some(1_700_003_600),
            node: Some("a".into()),
        };
        assert_eq!(token_claims(&token(payload)), Some(expected));
    }

    #[test]
    fn e4_invalid_jwts_have_no_claims() {
        let unknown = Some(TokenClaims::default());
        for (text, expected) in [
            (String::new(), None),
            ("abcdef.0123456789abcdef".into(), None),
            ("a.b.c.d".into(), None),
            ("a.!.c".into(), None),
            (token("no json"), None),
            (token(r#"{"exp":"tomorrow"}"#), None),
            (token("{}"), unknown),
        ] {
            assert_eq!(token_claims(&text), expected, "{text}");
        }
        let claims = token_claims(&token(r#"{"nbf":1.5,"exp":1e300}"#)).unwrap();
        assert_eq!((claims.issued_at, claims.expires_at), (Some(1), Some(i64::MAX)));
    }
}
