//! Names of Services on the command line.
//!
//! In: an argument, and the existing Services. Out: namespace and name, and suggestions of
//! similar names.

use keelson_proto::endpoints::ServiceSummary;

use crate::cli::format::clean;

/// Maximum number of suggestions.
const NAMED: usize = 3;
/// The distance of a very long text takes quadratic time and is not useful.
const MAX_NAME_LEN: usize = 253;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServiceRef {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl ServiceRef {
    /// Parses `NAMESPACE/NAME` or `NAME`; the separate namespace is for the latter. An error if there are two
    /// namespaces.
    pub(super) fn parse(text: &str, namespace: Option<&str>) -> Result<Self, String> {
        let (of, name) = match (text.split_once('/'), namespace) {
            (None, of) => (of.unwrap_or("default"), text),
            (Some((of, name)), given) if given.is_none_or(|given| given == of) => (of, name),
            (Some((of, _)), Some(given)) => {
                return Err(format!("{:?} is in the namespace {:?}, but -n says {:?}", text, of, given));
            }
            (Some(_), None) => return Err(format!("{text:?} is not a Service name")),
        };
        if of.is_empty() || name.is_empty() || name.contains('/') {
            return Err(format!("{text:?} is not a Service name; write NAMESPACE/NAME or NAME"));
        }
        Ok(Self { namespace: of.into(), name: name.into() })
    }
}

/// Suggestions for an unknown Service; begins with a semicolon, or is empty.
pub(super) fn hint(wanted: &ServiceRef, known: &[ServiceSummary]) -> String {
    let similar = similar_names(wanted, known);
    match similar.as_slice() {
        [] if known.is_empty() => String::new(),
        [] => "; list Services with keelson endpoints".into(),
        some => format!("; did you mean {}?", some.join(" or ")),
    }
}

/// The same name in other namespaces, and names that differ by at most a third: those of the same namespace first.
fn similar_names(wanted: &ServiceRef, known: &[ServiceSummary]) -> Vec<String> {
    if wanted.name.len() > MAX_NAME_LEN {
        return Vec::new();
    }
    let mut near: Vec<(bool, usize, &ServiceSummary)> = known
        .iter()
        .filter_map(|service| {
            let distance = strsim::damerau_levenshtein(&wanted.name, &service.name);
            let tolerance = (wanted.name.len().min(service.name.len()) / 3).max(1);
            let elsewhere = service.namespace != wanted.namespace;
            (distance <= tolerance).then_some((elsewhere && distance > 0, distance, service))
        })
        .collect();
    near.sort_by_key(|(elsewhere, distance, service)| {
        (*elsewhere, *distance, &service.namespace, &service.name)
    });
    near.iter()
        .take(NAMED)
        .map(|(_, _, service)| format!("{}/{}", clean(&service.namespace), clean(&service.name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(names: &[&str]) -> Vec<ServiceSummary> {
        let service = |name: &&str| {
            let (namespace, name) = name.split_once('/').unwrap();
            ServiceSummary { namespace: namespace.into(), name: name.into(), ..Default::default() }
        };
        names.iter().map(service).collect()
    }

    fn parse_ref(text: &str) -> ServiceRef {
        ServiceRef::parse(text, None).unwrap()
    }

    #[test]
    fn names_with_and_without_a_namespace() {
        let parsed = |text, namespace| {
            ServiceRef::parse(text, namespace)
                .map(|service| format!("{} {}", service.namespace, service.name))
        };
        assert_eq!(parsed("web", None).unwrap(), "default web");
        assert_eq!(parsed("web", Some("shop")).unwrap(), "shop web");
        assert_eq!(parsed("shop/web", None).unwrap(), "shop web");
        assert_eq!(parsed("shop/web", Some("shop")).unwrap(), "shop web");
        assert_eq!(
            parsed("shop/web", Some("other")).unwrap_err(),
            r#""shop/web" is in the namespace "shop", but -n says "other""#
        );
        for wrong in ["", "/", "/web", "shop/", "a/b/c"] {
            assert!(parsed(wrong, None).unwrap_err().contains("write NAMESPACE/NAME"), "{wrong:?}");
        }
        assert!(parsed("web", Some("")).is_err());
    }

    #[test]
    fn similar_names_are_suggested() {
        let services = known(&["blog/web", "shop/cart", "shop/weg", "shop/wen", "test/wob", "x/other"]);
        assert_eq!(
            hint(&parse_ref("shop/web"), &services),
            "; did you mean blog/web or shop/weg or shop/wen?"
        );
        assert_eq!(hint(&parse_ref("shop/crat"), &services), "; did you mean shop/cart?");
        assert_eq!(
            hint(&parse_ref("shop/nothing-like-it"), &services),
            "; list Services with keelson endpoints"
        );
        assert_eq!(hint(&parse_ref("shop/web"), &[]), "");
        assert_eq!(similar_names(&parse_ref(&"w".repeat(100_000)), &services), Vec::<String>::new());
    }
}
