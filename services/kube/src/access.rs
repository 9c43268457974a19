//! Questions about what these credentials permit, and other reads of a preflight.
//!
//! Owns: the bodies of SelfSubjectAccessReviews. In: [`AccessQuestion`]s. Out: whether the API server's authorizers permit it.
//! A review changes nothing at the API server; admission is not asked.

use http::Method;
use keelson_actor_system::cluster::ApiError;
use serde_json::{Value, json};

use crate::{
    answers, bodies,
    server::{ApiServer, Call},
};

const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// One verb on one resource. Empty texts are left out: all names, all namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AccessQuestion<'a> {
    pub verb: &'a str,
    pub group: &'a str,
    pub resource: &'a str,
    pub subresource: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    /// `field=value`, as in lists and watches. The Node authorizer permits nodes to list only their own pods (since 1.32).
    pub field: Option<(&'a str, &'a str)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    Allowed,
    /// The authorizers' reason, often empty.
    Denied(String),
}

fn review(question: &AccessQuestion<'_>) -> String {
    let mut attributes = json!({
        "verb": question.verb,
        "group": question.group,
        "resource": question.resource,
        "subresource": question.subresource,
        "namespace": question.namespace,
        "name": question.name,
    });
    if let Some((field, value)) = question.field {
        let requirement = json!({"key": field, "operator": "In", "values": [value]});
        attributes["fieldSelector"] = json!({"requirements": [requirement]});
    }
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    })
    .to_string()
}

impl ApiServer {
    /// # Errors
    /// The server does not answer or refuses: the credentials are not valid.
    pub async fn review_access(&self, question: &AccessQuestion<'_>) -> Result<Access, ApiError> {
        let body = (bodies::ACCEPT_JSON, review(question));
        let call =
            Call::write(Method::POST, "selfsubjectaccessreviews", REVIEWS.into(), bodies::ACCEPT_JSON, body);
        let answer = self.call(call).await?;
        let answer: Value = answers::json(&answer).map_err(|failure| self.error(failure))?;
        let status = &answer["status"];
        match status["allowed"].as_bool() {
            Some(true) => Ok(Access::Allowed),
            _ => Ok(Access::Denied(status["reason"].as_str().unwrap_or_default().to_owned())),
        }
    }

    /// A value of a ConfigMap; `None`: it has no such key.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`ApiErrorKind::NotFound`](keelson_actor_system::cluster::ApiErrorKind::NotFound).
    pub async fn config_map_value(
        &self,
        namespace: &str,
        name: &str,
        key: &str,
    ) -> Result<Option<String>, ApiError> {
        let (space, map) = (bodies::escaped(namespace), bodies::escaped(name));
        let target = format!("/api/v1/namespaces/{space}/configmaps/{map}");
        let answer = self.call(Call::get("configmaps", target, bodies::ACCEPT_JSON)).await?;
        let answer: Value = answers::json(&answer).map_err(|failure| self.error(failure))?;
        Ok(answer["data"][key].as_str().map(ToOwned::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_review_names_one_right() {
        let question = AccessQuestion {
            verb: "watch",
            resource: "pods",
            field: Some(("spec.nodeName", "n1")),
            ..AccessQuestion::default()
        };
        let body: Value = serde_json::from_str(&review(&question)).expect("JSON");
        let attributes = &body["spec"]["resourceAttributes"];
        assert_eq!((&attributes["verb"], &attributes["name"]), (&json!("watch"), &json!("")));
        assert_eq!(
            attributes["fieldSelector"]["requirements"],
            json!([{"key": "spec.nodeName", "operator": "In", "values": ["n1"]}])
        );
        let plain: Value = serde_json::from_str(&review(&AccessQuestion::default())).expect("JSON");
        assert!(plain["spec"]["resourceAttributes"]["fieldSelector"].is_null());
    }
}
