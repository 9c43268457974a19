//! The node's own client certificate, requested from the cluster.
//!
//! Owns: keys, certificate signing requests (PKCS #10) and their status at the API server (`certificates.k8s.io/v1`,
//! signer `kubernetes.io/kube-apiserver-client-kubelet`). In: the node's name. Out: requests, and certificates that
//! match their key. Keys leave this module only as PEM for one file; no error and no `Debug` holds one.

use std::fmt;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::Method;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use keelson_actor_system::cluster::{ApiError, ApiErrorKind};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData as _};
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::{
    answers::{self, bounded},
    bodies,
    identity::certificate_facts,
    server::{ApiServer, Call},
};

/// Signs client certificates of nodes; the controller manager approves the requests by itself if RBAC allows it.
const SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// Never holds any part of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    #[error("cannot generate a private key")]
    Key,
    /// The text is not a private key in PEM.
    #[error("no private key in PEM found")]
    NoKey,
    /// The node's name is not valid in a certificate.
    #[error("cannot create a certificate signing request for this node name")]
    Request,
    /// The text is not a readable certificate in PEM.
    #[error("no valid certificate in PEM found")]
    NoCertificate,
    #[error("certificate and key do not match")]
    Mismatch,
}

/// The user name of a node: the common name of its certificate.
#[must_use]
pub fn node_user(node: &str) -> String {
    format!("system:node:{node}")
}

/// A private key (ECDSA P-256, as in the kubelet).
pub struct ClientKey(KeyPair);

impl fmt::Debug for ClientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientKey")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRequest {
    /// The object's name: the same for the same key, so that a request whose answer was lost is found again.
    pub name: String,
    pem: String,
}

impl ClientKey {
    /// Generates a key.
    pub fn generate() -> Result<Self, CertificateError> {
        KeyPair::generate().map(Self).map_err(|_| CertificateError::Key)
    }

    pub fn from_pem(pem: &str) -> Result<Self, CertificateError> {
        KeyPair::from_pem(pem).map(Self).map_err(|_| CertificateError::NoKey)
    }

    /// For a file that only its owner may read.
    #[must_use]
    pub fn to_pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// The request for a certificate of the node `node`: `CN=system:node:NODE, O=system:nodes`.
    pub fn request(&self, node: &str) -> Result<NodeRequest, CertificateError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, node_user(node));
        let request = params.serialize_request(&self.0).map_err(|_| CertificateError::Request)?;
        let pem = request.pem().map_err(|_| CertificateError::Request)?;
        let digest = Sha256::new().chain_update(self.0.der_bytes()).chain_update(node).finalize();
        let digest: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Ok(NodeRequest { name: format!("node-csr-{digest}"), pem })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestState {
    /// Neither approved nor denied, or not signed yet.
    Pending,
    /// Denied, or the signer failed; with the reason.
    Refused(String),
    Issued(String),
}

impl ApiServer {
    /// Creates a certificate signing request. An existing one of the same name is the same request.
    pub async fn request_certificate(&self, request: &NodeRequest) -> Result<(), ApiError> {
        let body = json!({
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"name": request.name},
            "spec": {
                "request": BASE64_STANDARD.encode(&request.pem),
                "signerName": SIGNER,
                "usages": ["digital signature", "client auth"],
            },
        });
        let call = Call {
            method: Method::POST,
            resource: "certificatesigningrequests",
            target: REQUESTS.to_owned(),
            accept: bodies::ACCEPT_METADATA,
            body: Some((bodies::ACCEPT_JSON, body.to_string())),
        };
        match self.call(call).await {
            Err(error) if error.kind != ApiErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// The status of the request of this name.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`ApiErrorKind::NotFound`] if there is no such request (any more).
    pub async fn certificate_request(&self, name: &str) -> Result<RequestState, ApiError> {
        let target = format!("{REQUESTS}/{}", bodies::escaped(name));
        let call = Call::get("certificatesigningrequests", target, bodies::ACCEPT_JSON);
        let body = self.call(call).await?;
        let request: CertificateSigningRequest =
            answers::json(&body).map_err(|failure| self.error(failure))?;
        Ok(state(&request))
    }
}

fn state(request: &CertificateSigningRequest) -> RequestState {
    let Some(status) = &request.status else { return RequestState::Pending };
    let refused = status.conditions.iter().flatten().find(|condition| {
        matches!(condition.type_.as_str(), "Denied" | "Failed") && condition.status != "False"
    });
    if let Some(condition) = refused {
        let details = [&condition.reason, &condition.message];
        let details: Vec<&str> =
            details.into_iter().flatten().map(String::as_str).filter(|text| !text.is_empty()).collect();
        let verb = if condition.type_ == "Denied" { "denied" } else { "not signed" };
        return RequestState::Refused(bounded(&format!("it was {verb}: {}", details.join(": "))));
    }
    match status.certificate.as_ref().map(|certificate| String::from_utf8_lossy(&certificate.0)) {
        Some(pem) if !pem.is_empty() => RequestState::Issued(pem.into_owned()),
        _ => RequestState::Pending,
    }
}

/// Validity of a checked certificate with its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IssuedValidity {
    /// Unix seconds.
    pub not_before: i64,
    /// Unix seconds.
    pub not_after: i64,
}

/// The validity of the certificate in `pem`, if it is that of the node `node` and its key is in `pem` too; `None` if it
/// is another node's.
///
/// # Errors
/// [`CertificateError`]: one of the two is missing or unreadable, or they do not match.
pub fn issued_validity(pem: &str, node: &str) -> Result<Option<IssuedValidity>, CertificateError> {
    let facts = certificate_facts(pem.as_bytes()).ok_or(CertificateError::NoCertificate)?;
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(pem.as_bytes()).filter_map(Result::ok).collect();
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| CertificateError::NoKey)?;
    let provider = rustls::crypto::ring::default_provider();
    CertifiedKey::from_der(chain, key, &provider).map_err(|_| CertificateError::Mismatch)?;
    Ok((facts.common_name == node_user(node))
        .then_some(IssuedValidity { not_before: facts.not_before, not_after: facts.not_after }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(key: &ClientKey, node: &str) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, node_user(node));
        params.self_signed(&key.0).unwrap().pem()
    }

    #[test]
    fn e4_a_request_has_the_name_of_its_key_and_node() {
        let (one, two) = (ClientKey::generate().unwrap(), ClientKey::generate().unwrap());
        let request = one.request("a").unwrap();
        assert_eq!(request.name.len(), "node-csr-".len() + 32);
        assert!(request.pem.starts_with("-----BEGIN CERTIFICATE REQUEST-----"), "{}", request.pem);
        let again = ClientKey::from_pem(&one.to_pem()).unwrap();
        assert_eq!(again.request("a").unwrap().name, request.name);
        assert_ne!(one.request("b").unwrap().name, request.name);
        assert_ne!(two.request("a").unwrap().name, request.name);
        assert_eq!(format!("{one:?}"), "ClientKey");
        assert_eq!(ClientKey::from_pem("hush").unwrap_err(), CertificateError::NoKey);
    }

    #[test]
    fn e4_a_certificate_is_taken_with_its_own_key_and_name_only() {
        let (own, other) = (ClientKey::generate().unwrap(), ClientKey::generate().unwrap());
        let certificate = signed(&own, "a");
        let both = format!("{certificate}{}", own.to_pem());
        assert!(issued_validity(&both, "a").unwrap().is_some());
        assert_eq!(issued_validity(&both, "b"), Ok(None));
        for (pem, error) in [
            (String::new(), CertificateError::NoCertificate),
            (own.to_pem(), CertificateError::NoCertificate),
            (certificate.clone(), CertificateError::NoKey),
            (format!("{certificate}{}", other.to_pem()), CertificateError::Mismatch),
        ] {
            assert_eq!(issued_validity(&pem, "a"), Err(error));
        }
    }

    #[test]
    fn e4_outcomes_of_a_certificate_request() {
        let request = |status: serde_json::Value| -> RequestState {
            let object = json!({"metadata": {"name": "n"}, "spec": {"request": "", "signerName": SIGNER}, "status": status});
            state(&serde_json::from_value(object).unwrap())
        };
        let approved = json!({"type": "Approved", "status": "True", "reason": "AutoApproved"});
        assert_eq!(request(json!({})), RequestState::Pending);
        assert_eq!(request(json!({"conditions": [approved]})), RequestState::Pending);
        assert_eq!(
            request(json!({"conditions": [approved], "certificate": BASE64_STANDARD.encode("PEM")})),
            RequestState::Issued("PEM".into())
        );
        let denied = json!({"type": "Denied", "status": "True", "reason": "NotOurs", "message": "no"});
        assert_eq!(
            request(json!({"conditions": [denied]})),
            RequestState::Refused("it was denied: NotOurs: no".into())
        );
        let failed = json!({"type": "Failed", "status": "True", "reason": "SignerValidationFailure"});
        assert_eq!(
            request(json!({"conditions": [approved, failed]})),
            RequestState::Refused("it was not signed: SignerValidationFailure".into())
        );
    }
}
