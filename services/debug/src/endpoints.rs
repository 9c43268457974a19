//! Validation of requests about service endpoints, before the agent is asked.
//!
//! Owns: the maximum number of Services in a list, which texts can be names, and the error for an unknown Service.
//! In: namespaces, names and numbers of requests. Out: the view's answers, or an error.

use keelson_proto::endpoints::{Explanation, ServiceSummary, State};

use crate::{AgentView, ViewError, view::answer};

/// Several times what a cluster can have, and still a message that the CLI accepts.
pub(crate) const MAX_SERVICES: u32 = 100_000;
/// The longest name of any object.
const NAME_BYTES: usize = 253;
/// No line is longer.
const FILTER_BYTES: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ExplainError {
    /// Neither a Service nor an EndpointSlice of that name is known.
    #[error("{0}")]
    NotKnown(String),
    /// The request is not valid, or the agent did not answer.
    #[error(transparent)]
    View(#[from] ViewError),
}

/// Returns up to `max` Services of `namespace`, or of all namespaces if it is empty.
pub(crate) async fn state(view: &impl AgentView, namespace: &str, max: u32) -> Result<State, ViewError> {
    check_list(namespace, max)?;
    answer(view.endpoints(namespace, max)).await
}

fn check_list(namespace: &str, max: u32) -> Result<(), ViewError> {
    if !namespace.is_empty() {
        check_name("namespace", namespace)?;
    }
    if max > MAX_SERVICES {
        let text = format!("cannot list {max} Services; the maximum is {MAX_SERVICES}");
        return Err(ViewError::Invalid(text));
    }
    Ok(())
}

/// As [`state`], but only Services that match `filter`; also returns their number, listed or not.
pub(crate) async fn search(
    view: &impl AgentView,
    namespace: &str,
    filter: &str,
    max: u32,
) -> Result<(State, u64), ViewError> {
    check_list(namespace, max)?;
    if filter.len() > FILTER_BYTES {
        return Err(ViewError::Invalid(format!("the filter is longer than {FILTER_BYTES} bytes")));
    }
    if namespace.is_empty() && filter.is_empty() {
        let state = answer(view.endpoints("", max)).await?;
        let all = state.services;
        return Ok((state, all));
    }
    let mut state = answer(view.endpoints(namespace, MAX_SERVICES)).await?;
    let wanted = filter.to_lowercase();
    state.list.retain(|service| finds(&wanted, service));
    let found = u64::try_from(state.list.len()).unwrap_or(u64::MAX);
    state.list.truncate(usize::try_from(max).unwrap_or(usize::MAX));
    Ok((state, found))
}

/// `wanted` is in lower case.
fn finds(wanted: &str, service: &ServiceSummary) -> bool {
    let has = |text: &str| text.to_lowercase().contains(wanted);
    has(&format!("{}/{}", service.namespace, service.name))
        || has(&service.r#type)
        || service.cluster_ips.iter().chain(&service.ports).any(|text| has(text))
}

pub(crate) async fn explain(
    view: &impl AgentView,
    namespace: &str,
    name: &str,
) -> Result<Explanation, ExplainError> {
    check_name("namespace", namespace)?;
    check_name("name", name)?;
    if let Some(explanation) = answer(view.explain(namespace, name)).await? {
        return Ok(explanation);
    }
    let state = answer(view.endpoints("", 0)).await?;
    Err(not_there(namespace, name, &state))
}

/// The error for an unknown Service. The cause may be that no Service is known yet.
fn not_there(namespace: &str, name: &str, state: &State) -> ExplainError {
    let because = if state.reason.is_empty() { String::new() } else { format!(": {}", state.reason) };
    match state.state.as_str() {
        "disabled" => ExplainError::NotKnown(format!("service endpoints are disabled{because}")),
        "not-watched" => ViewError::Unavailable(format!("Services are not watched{because}")).into(),
        "pending" => ViewError::Unavailable(format!("no Service is known yet{because}")).into(),
        _ => ExplainError::NotKnown(format!(
            "neither a Service {namespace}/{name} nor an EndpointSlice of it exists; {} are known",
            state.services
        )),
    }
}

/// Names of objects and values of labels consist of these characters.
fn check_name(what: &str, name: &str) -> Result<(), ViewError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if (1..=NAME_BYTES).contains(&name.len()) && name.bytes().all(fits) {
        return Ok(());
    }
    // An invalid name may also be very long.
    let shown: String = name.chars().take(80).collect();
    Err(ViewError::Invalid(format!(
        "{shown:?} is not a valid {what}: use 1 to {NAME_BYTES} letters, digits, '-', '_' and '.'"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for name in ["web", "a", "0", "kube-system", "x.y_z-9", &"n".repeat(NAME_BYTES)] {
            assert_eq!(check_name("name", name), Ok(()), "{name}");
        }
        for name in ["", "a b", "a/b", "..%2f", "\u{e9}", "a\n", "<b>", &"n".repeat(NAME_BYTES + 1)] {
            let error = check_name("namespace", name).unwrap_err().to_string();
            assert!(error.contains("is not a valid namespace: use 1 to 253 letters"), "{error}");
            assert!(error.len() < 250, "{error}");
        }
    }

    #[test]
    fn a_filter_finds_what_a_line_shows() {
        let service = ServiceSummary {
            namespace: "shop".into(),
            name: "Web-1".into(),
            r#type: "NodePort".into(),
            cluster_ips: vec!["10.96.0.10".into()],
            ports: vec!["http 80:30080/TCP".into()],
            ..Default::default()
        };
        for filter in ["", "shop", "shop/web", "eb-1", "nodeport", "10.96.0.1", "30080/tcp"] {
            assert!(finds(filter, &service), "{filter}");
        }
        for filter in ["shop web", "10.97", "udp", "clusterip"] {
            assert!(!finds(filter, &service), "{filter}");
        }
    }

    #[test]
    fn the_error_for_an_unknown_service_depends_on_the_status() {
        let not_known = |text: &str| ExplainError::NotKnown(text.into());
        let unavailable = |text: &str| ExplainError::View(ViewError::Unavailable(text.into()));
        let absent = not_known("neither a Service a/b nor an EndpointSlice of it exists; 7 are known");
        for (status, reason, expected) in [
            ("disabled", "no source", not_known("service endpoints are disabled: no source")),
            ("pending", "", unavailable("no Service is known yet")),
            (
                "not-watched",
                "no client is connected",
                unavailable("Services are not watched: no client is connected"),
            ),
            ("synced", "x", absent.clone()),
            ("stale", "x", absent),
        ] {
            let state = State { services: 7, ..crate::fake::without_endpoints(status, reason) };
            assert_eq!(not_there("a", "b", &state), expected, "{status}");
        }
    }
}
