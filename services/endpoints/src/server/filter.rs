//! Which Services and endpoints a caller requests.
//!
//! Owns: [`Filter`]. In: the service proxy and the conditions of a request, and encoded items. Out: whether a Service is the
//! caller's, and its item without the endpoints that do not meet the conditions. One without endpoints is not left out: it
//! rejects its traffic.

use std::{borrow::Cow, sync::Arc};

use keelson_endpoint_publisher::Item;

use keelson_proto::localnetv1::{EndpointConditions, NextItem};
use prost::Message as _;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Filter {
    /// The `RequiredEndpointConditions` of the request.
    required: Option<EndpointConditions>,
    /// Its `ServiceProxyName`; `None`: Services without the label.
    proxy_name: Option<Arc<str>>,
}

impl Filter {
    /// Conditions that are all false are no filter.
    pub(super) fn new(required: Option<EndpointConditions>) -> Self {
        let required = required.filter(|required| *required != EndpointConditions::default());
        Self { required, proxy_name: None }
    }

    /// Empty: Services without the label.
    pub(super) fn of_proxy(self, name: &str) -> Self {
        Self { proxy_name: (!name.is_empty()).then(|| name.into()), ..self }
    }

    /// The conditions, for the answer.
    pub(super) fn required(&self) -> Option<EndpointConditions> {
        self.required
    }

    /// The service proxy; empty: the usual one.
    pub(super) fn proxy_name(&self) -> &str {
        self.proxy_name.as_deref().unwrap_or_default()
    }

    /// Whether the caller serves this Service.
    pub(super) fn selects(&self, item: &Item) -> bool {
        self.proxy_name.as_deref() == item.proxy_name.as_deref()
    }

    /// The item for this caller: the bytes that all callers share, if nothing is left out.
    ///
    /// # Errors
    /// The bytes are no `NextItem`.
    pub(super) fn apply<'m>(&self, message: &'m [u8]) -> Result<Cow<'m, [u8]>, prost::DecodeError> {
        let Some(required) = self.required else { return Ok(Cow::Borrowed(message)) };
        let mut item = NextItem::decode(message)?;
        let Some(service) = &mut item.endpoints else { return Ok(Cow::Borrowed(message)) };
        let all = service.endpoints.len();
        service.endpoints.retain(|endpoint| meets(endpoint.conditions.unwrap_or_default(), required));
        if service.endpoints.len() == all {
            return Ok(Cow::Borrowed(message));
        }
        Ok(Cow::Owned(item.encode_to_vec()))
    }
}

fn meets(has: EndpointConditions, required: EndpointConditions) -> bool {
    let pairs = [
        (has.ready, required.ready),
        (has.selected, required.selected),
        (has.local, required.local),
        (has.serving, required.serving),
        (has.terminating, required.terminating),
    ];
    pairs.iter().all(|(has, required)| *has || !required)
}

#[cfg(test)]
mod tests {
    use keelson_proto::localnetv1::{Endpoint, ServiceEndpoints};

    use super::*;

    fn conditions(bits: u8) -> EndpointConditions {
        EndpointConditions {
            ready: bits & 1 != 0,
            selected: bits & 2 != 0,
            local: bits & 4 != 0,
            serving: bits & 8 != 0,
            terminating: bits & 16 != 0,
        }
    }

    /// A Service with one endpoint for each combination of conditions, named after it.
    fn item() -> NextItem {
        let endpoints = (0..32)
            .map(|bits| Endpoint {
                hostname: bits.to_string(),
                conditions: Some(conditions(bits)),
                ..Endpoint::default()
            })
            .collect();
        let service = ServiceEndpoints { name: "a".into(), endpoints, ..ServiceEndpoints::default() };
        NextItem { endpoints: Some(service), ..NextItem::default() }
    }

    #[test]
    fn endpoints_stay_for_which_every_required_condition_is_true() {
        let message = item().encode_to_vec();
        for required in 0..32_u8 {
            let filter = Filter::new(Some(conditions(required)));
            let got = NextItem::decode(&*filter.apply(&message).expect("applies")).expect("decodes");
            let service = got.endpoints.expect("a Service");
            assert_eq!(service.name, "a");
            let names: Vec<u8> =
                service.endpoints.iter().map(|e| e.hostname.parse().expect("bits")).collect();
            let expect: Vec<u8> = (0..32).filter(|bits| bits & required == required).collect();
            assert_eq!(names, expect, "required {required:05b}");
        }
    }

    #[test]
    fn without_a_required_condition_the_shared_bytes_go_out() {
        let message = item().encode_to_vec();
        for required in [None, Some(EndpointConditions::default())] {
            assert_eq!(Filter::new(required).required(), None);
            assert!(matches!(Filter::new(required).apply(&message), Ok(Cow::Borrowed(_))));
        }
        let mut ready = item();
        ready
            .endpoints
            .as_mut()
            .expect("a Service")
            .endpoints
            .retain(|e| e.conditions.is_some_and(|c| c.ready));
        let ready = ready.encode_to_vec();
        assert!(matches!(Filter::new(Some(conditions(1))).apply(&ready), Ok(Cow::Borrowed(_))));
    }

    #[test]
    fn a_proxy_gets_the_services_of_its_name_only() {
        let item = |name: Option<&str>| Item {
            message: Vec::new().into(),
            rev: 1,
            proxy_name: name.map(Into::into),
        };
        for (requested, selected) in
            [("", [true, false, false]), ("edge", [false, true, false]), ("mesh", [false, false, true])]
        {
            let filter = Filter::new(None).of_proxy(requested);
            let items = [None, Some("edge"), Some("mesh")].map(item);
            assert_eq!(items.map(|item| filter.selects(&item)), selected, "{requested:?}");
            assert_eq!(filter.proxy_name(), requested);
        }
    }

    #[test]
    fn an_endpoint_without_conditions_meets_no_requirement() {
        let mut item = item();
        let service = item.endpoints.as_mut().expect("a Service");
        service.endpoints.truncate(1);
        service.endpoints[0].conditions = None;
        let message = item.encode_to_vec();
        let left = Filter::new(Some(conditions(1))).apply(&message).expect("applies").into_owned();
        assert!(NextItem::decode(&*left).expect("decodes").endpoints.expect("stays").endpoints.is_empty());
    }

    #[test]
    fn invalid_items_are_errors() {
        assert!(Filter::new(Some(conditions(1))).apply(b"\xff\xff\xff").is_err());
    }
}
