//! Names of Services as people write them.
//!
//! In: what stands on the command line, and the Services that there are. Out: namespace and name, and those that may
//! have been meant instead.

use keelson_proto::endpoints::ServiceSummary;

use crate::cli::format::clean;

/// No more names than one reads.
const NAMED: usize = 3;
/// A distance over a very long text costs its square and finds nothing.
const LONGEST: usize = 253;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServiceRef {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl ServiceRef {
    /// Reads `NAMESPACE/NAME` or `NAME`; the namespace given apart is for the latter.
    ///
    /// # Errors
    /// It is neither, or it names a namespace twice.
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

/// What to try instead of a Service that is not there; begins with a semicolon, or is empty.
pub(super) fn hint(wanted: &ServiceRef, known: &[ServiceSummary]) -> String {
    let similar = similar(wanted, known);
    match similar.as_slice() {
        [] if known.is_empty() => String::new(),
        [] => "; list Services with keelson endpoints".into(),
        some => format!("; did you mean {}?", some.join(" or ")),
    }
}

/// The same name elsewhere, and names of which at most a third differs: those of the same namespace first.
fn similar(wanted: &ServiceRef, known: &[ServiceSummary]) -> Vec<String> {
    if wanted.name.len() > LONGEST {
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

    fn wanted(text: &str) -> ServiceRef {
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
    fn what_may_have_been_meant() {
        let services = known(&["blog/web", "shop/cart", "shop/weg", "shop/wen", "test/wob", "x/other"]);
        assert_eq!(hint(&wanted("shop/web"), &services), "; did you mean blog/web or shop/weg or shop/wen?");
        assert_eq!(hint(&wanted("shop/crat"), &services), "; did you mean shop/cart?");
        assert_eq!(
            hint(&wanted("shop/nothing-like-it"), &services),
            "; list Services with keelson endpoints"
        );
        assert_eq!(hint(&wanted("shop/web"), &[]), "");
        assert_eq!(similar(&wanted(&"w".repeat(100_000)), &services), Vec::<String>::new());
    }
}
