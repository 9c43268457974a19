//! `/flagz`, `/statusz` and `/metrics/slis`, as in Kubernetes components.
//!
//! Owns: [`Zpages`]: the documents and the negotiation of their form. In: the settings in force, the Accept header.
//! Out: plain text, or `Flagz` and `Statusz` of `config.k8s.io` in JSON or YAML. Source:
//! `k8s.io/apiserver/pkg/server/flagz` and `statusz`, `k8s.io/component-base/metrics/prometheus/slis` (1.36).

use std::{collections::BTreeMap, fmt::Write as _};

use http::{HeaderName, HeaderValue, Method, StatusCode, header::WARNING};
use keelson_serve::http::{
    JSON, OPEN_METRICS, TEXT,
    exposed::{Answer, answer, with_header},
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family as Metric, gauge::Gauge},
    registry::Registry,
};
use serde_json::{Value, json};

use super::status::Moment;

const COMPONENT: &str = "keelson-proxy";
const YAML: &str = "application/yaml";
const GROUP: &str = "config.k8s.io";
const NOTICE: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and \
                      is for debugging purposes only.";
/// The check of `/healthz` at the metrics address. Source: kube-proxy.
const PING: CheckLabel = CheckLabel { name: "ping", r#type: "healthz" };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Flagz,
    Statusz,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Flagz => "Flagz",
            Self::Statusz => "Statusz",
        }
    }

    const fn path(self) -> &'static str {
        match self {
            Self::Flagz => "flagz",
            Self::Statusz => "statusz",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    Json(Version),
    Yaml(Version),
}

/// Of the group `config.k8s.io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1Alpha1,
    V1Beta1,
}

impl Version {
    const fn name(self) -> &'static str {
        match self {
            Self::V1Alpha1 => "v1alpha1",
            Self::V1Beta1 => "v1beta1",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::V1Alpha1, Self::V1Beta1].into_iter().find(|version| version.name() == text)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabel {
    name: &'static str,
    r#type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    name: &'static str,
    r#type: &'static str,
    status: &'static str,
}

#[derive(Debug)]
pub(super) struct Zpages {
    flags: BTreeMap<String, String>,
    paths: Vec<&'static str>,
    started: Moment,
    check: Metric<CheckLabel, Gauge>,
    checks: Metric<ResultLabel, Counter>,
}

impl Zpages {
    /// `settings`: as in `/configz`. `paths`: the other pages at the address.
    pub(super) fn new(settings: &Value, paths: &[&'static str]) -> Self {
        Self {
            flags: flags(settings),
            paths: paths.to_vec(),
            started: Moment::now(),
            check: Metric::default(),
            checks: Metric::default(),
        }
    }

    /// Counts a request of `/healthz` at the metrics address, which always succeeds.
    pub(super) fn pinged(&self) {
        self.check.get_or_create(&PING).set(1);
        let CheckLabel { name, r#type } = PING;
        self.checks.get_or_create(&ResultLabel { name, r#type, status: "success" }).inc();
    }

    pub(super) fn flagz(&self, accept: &str) -> Answer {
        let lines = self.flags.iter().fold(String::new(), |mut text, (name, value)| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name}={value}");
            text
        });
        page(Kind::Flagz, accept, &lines, &json!({"flags": self.flags}))
    }

    pub(super) fn statusz(&self, accept: &str, now: Moment) -> Answer {
        let up = now.instant.saturating_duration_since(self.started.instant).as_secs();
        let version = env!("CARGO_PKG_VERSION");
        let paths = self.paths.join(" ");
        let lines = format!(
            "\nStarted: {}\nUp: {} hr {:02} min {:02} sec\nBinary version: {version}\n\nPaths: {paths}\n",
            self.started.wall.strftime("%a %b %e %H:%M:%S UTC %Y"),
            up / 3600,
            up / 60 % 60,
            up % 60,
        );
        let document = json!({
            "startTime": self.started.wall.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            "uptimeSeconds": up,
            "goVersion": "",
            "binaryVersion": version,
            "paths": self.paths,
        });
        page(Kind::Statusz, accept, &lines, &document)
    }

    /// DELETE resets the counters.
    pub(super) fn slis(&self, method: &Method) -> Answer {
        if method == Method::DELETE {
            self.check.clear();
            self.checks.clear();
            return answer(StatusCode::OK, TEXT, "metrics reset\n");
        }
        let mut registry = Registry::default();
        let (check, checks) = (self.check.clone(), self.checks.clone());
        registry.register(
            "kubernetes_healthcheck",
            "This metric records the result of a single healthcheck",
            check,
        );
        registry.register(
            "kubernetes_healthchecks",
            "This metric records the results of all healthcheck",
            checks,
        );
        let start: Gauge = Gauge::default();
        start.set(self.started.wall.as_second());
        registry.register(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds",
            start,
        );
        let mut text = String::new();
        match prometheus_client::encoding::text::encode(&mut text, &registry) {
            Ok(()) => answer(StatusCode::OK, OPEN_METRICS, text),
            Err(error) => answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
        }
    }
}

/// The settings of the proxy and of logging by name, as in `keelson config show -o json`.
fn flags(settings: &Value) -> BTreeMap<String, String> {
    let all = settings.get("settings").and_then(Value::as_object);
    let ours = all
        .into_iter()
        .flatten()
        .filter(|(key, _)| key.starts_with("proxy.") || key.starts_with("agent.log"));
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            items.iter().map(|item| item.as_str().unwrap_or_default()).collect::<Vec<_>>().join(",")
        }
        other => other.to_string(),
    };
    ours.filter_map(|(key, about)| Some((key.clone(), text(about.get("value")?)))).collect()
}

fn page(kind: Kind, accept: &str, lines: &str, document: &Value) -> Answer {
    let Some(form) = negotiate(accept, kind) else { return not_acceptable() };
    let (version, content_type) = match form {
        Form::Text => {
            let text = format!("\n{COMPONENT} {}\n{NOTICE}\n{lines}", kind.path());
            return answer(StatusCode::OK, TEXT, text);
        }
        Form::Json(version) => (version, JSON),
        // JSON is YAML.
        Form::Yaml(version) => (version, YAML),
    };
    let mut whole = json!({
        "kind": kind.name(),
        "apiVersion": format!("{GROUP}/{}", version.name()),
        "metadata": {"name": COMPONENT},
    });
    if let (Some(whole), Some(fields)) = (whole.as_object_mut(), document.as_object()) {
        whole.extend(fields.clone());
    }
    let page = answer(StatusCode::OK, content_type, format!("{whole}\n"));
    match version {
        Version::V1Beta1 => page,
        Version::V1Alpha1 => deprecated(page, kind),
    }
}

fn deprecated(page: Answer, kind: Kind) -> Answer {
    let text = format!(
        "299 - \"This version of the {} endpoint is deprecated. Please use a newer version.\"",
        kind.path()
    );
    let name: HeaderName = WARNING;
    match HeaderValue::from_str(&text) {
        Ok(value) => with_header(page, name, value),
        Err(_) => page,
    }
}

fn not_acceptable() -> Answer {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "only the following media types are accepted: application/json, application/yaml, text/plain",
        "reason": "NotAcceptable", "code": 406,
    });
    answer(StatusCode::NOT_ACCEPTABLE, JSON, format!("{status}\n"))
}

/// The form that an Accept header requests; `None` if none is supported. Without a header it is text. JSON and YAML
/// need the kind: `application/json;as=Flagz;v=v1beta1;g=config.k8s.io`. Source:
/// `negotiation.NegotiateOutputMediaType`.
fn negotiate(accept: &str, kind: Kind) -> Option<Form> {
    if accept.trim().is_empty() {
        return Some(Form::Text);
    }
    let mut clauses: Vec<(f32, Option<Form>)> = accept.split(',').map(|clause| form(clause, kind)).collect();
    clauses.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    clauses.into_iter().find_map(|(quality, form)| form.filter(|_| quality > 0.0))
}

/// The quality of a clause of an Accept header, and its form.
fn form(clause: &str, kind: Kind) -> (f32, Option<Form>) {
    let mut parts = clause.split(';').map(str::trim);
    let media_type = parts.next().unwrap_or_default();
    let parameters: BTreeMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
    let quality = parameters.get("q").and_then(|q| q.parse().ok()).unwrap_or(1.0);
    let transforms = ["as", "v", "g"].into_iter().any(|name| parameters.contains_key(name));
    let version = parameters
        .get("v")
        .and_then(|version| Version::parse(version))
        .filter(|_| parameters.get("as") == Some(&kind.name()) && parameters.get("g") == Some(&GROUP));
    let form = match media_type {
        "text/plain" | "text/*" | "*/*" if !transforms => Some(Form::Text),
        JSON | "application/*" | "*/*" => version.map(Form::Json),
        YAML => version.map(Form::Yaml),
        _ => None,
    };
    (quality, form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p20_the_form_is_negotiated_as_in_kube_proxy() {
        let beta = "as=Flagz;v=v1beta1;g=config.k8s.io";
        for (accept, expected) in [
            (String::new(), Some(Form::Text)),
            ("*/*".to_owned(), Some(Form::Text)),
            ("text/plain".to_owned(), Some(Form::Text)),
            ("text/html,application/xml;q=0.9,*/*;q=0.8".to_owned(), Some(Form::Text)),
            (format!("application/json;{beta}"), Some(Form::Json(Version::V1Beta1))),
            (format!("application/yaml; {beta}"), Some(Form::Yaml(Version::V1Beta1))),
            (
                "application/json;as=Flagz;v=v1alpha1;g=config.k8s.io".to_owned(),
                Some(Form::Json(Version::V1Alpha1)),
            ),
            (format!("text/plain;q=0.5, application/json;{beta}"), Some(Form::Json(Version::V1Beta1))),
            // Kubernetes serves no JSON without a version, or of another kind.
            ("application/json".to_owned(), None),
            ("application/json;as=Statusz;v=v1beta1;g=config.k8s.io".to_owned(), None),
            ("application/json;as=Flagz;v=v1;g=config.k8s.io".to_owned(), None),
            ("application/json;as=Flagz;v=v1beta1;g=apps".to_owned(), None),
            ("text/html".to_owned(), None),
            ("text/plain;q=0".to_owned(), None),
        ] {
            assert_eq!(negotiate(&accept, Kind::Flagz), expected, "{accept}");
        }
    }
}
