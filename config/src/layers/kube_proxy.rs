//! kube-proxy's configuration file in place of the settings file.
//!
//! Owns: which field of a `KubeProxyConfiguration` (`kubeproxy.config.k8s.io/v1alpha1`, YAML or JSON) is which setting. In: a
//! text. Out: the values of `[proxy]`, and a note for each field that has no effect here.
//!
//! As in kube-proxy, a field with its zero value counts as absent, and an unknown field is ignored with a warning (its strict
//! decoding fails, and the lenient one is used). Source: `pkg/proxy/apis/config/v1alpha1` and `cmd/kube-proxy/app` of 1.36.3.

mod duration;
mod fields;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde_json::{Map, Value};

use super::{Assignment, Findings, Layer, Spelling, assign};
use crate::error::{Fault, quote};
use crate::origin::Origin;
use crate::setting_type::Raw;
use fields::{Field, Kind, Use};

const GROUP: &str = "kubeproxy.config.k8s.io";
const VERSION: &str = "v1alpha1";
const KIND: &str = "KubeProxyConfiguration";
const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;

/// `None`: not a KubeProxyConfiguration. `Some(None)`: not valid YAML.
pub(super) fn read(path: &Path, text: &str, found: &mut Findings) -> Option<Option<Layer>> {
    // Do not parse TOML as YAML.
    if !text.contains(KIND) {
        return None;
    }
    let document: Map<String, Value> = match serde_saphyr::from_str(text) {
        Ok(document) => document,
        Err(error) if text.lines().any(is_kind) => {
            let (line, column) =
                error.location().map_or((0, 0), |at| (at.line() as usize, at.column() as usize));
            let place = Origin::File { path: path.into(), line, column };
            // The parser's message repeats the place, and may have several lines.
            let message = error.without_snippet().to_string();
            let message = message.split(" at line ").next().and_then(|message| message.lines().next());
            let reason = format!("not valid YAML: {}", message.unwrap_or_default());
            found.add(place, None, Fault::Unreadable { reason });
            return Some(None);
        }
        Err(_) => return None,
    };
    if document.get("kind").and_then(Value::as_str) != Some(KIND) {
        return None;
    }
    let mut reader = Reader { path, text, found, layer: Layer::new(), notes: Vec::new() };
    reader.document(&document);
    let Reader { layer, notes, .. } = reader;
    found.kube_proxy = Some(notes);
    Some(Some(layer))
}

/// Whether a line of YAML or JSON sets `kind: KubeProxyConfiguration`.
fn is_kind(line: &str) -> bool {
    let unquoted = |text: &str| text.trim().trim_matches(['"', '\'']).to_owned();
    let value = line.split(" #").next().unwrap_or_default().trim().trim_end_matches(',');
    value.split_once(':').is_some_and(|(key, value)| unquoted(key) == "kind" && unquoted(value) == KIND)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// kube-proxy's default, which is iptables on Linux: it says nothing about what the node needs.
    Unset,
    IpTables,
    Ipvs,
    NfTables,
}

impl Mode {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(Self::Unset),
            "iptables" => Some(Self::IpTables),
            "ipvs" => Some(Self::Ipvs),
            "nftables" => Some(Self::NfTables),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Unset | Self::IpTables => "iptables",
            Self::Ipvs => "ipvs",
            Self::NfTables => "nftables",
        }
    }

    /// Whether kube-proxy reads a field of these sections in this mode.
    fn reads(self, section: &str, field: &str) -> bool {
        match (self, section) {
            (Self::Unset | Self::IpTables, "iptables")
            | (Self::Ipvs, "ipvs")
            | (Self::NfTables, "nftables") => true,
            (Self::Ipvs, "iptables") => field.starts_with("masquerade"),
            (_, "iptables" | "ipvs" | "nftables") => false,
            _ => true,
        }
    }
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    found: &'a mut Findings,
    layer: Layer,
    notes: Vec<String>,
}

impl Reader<'_> {
    fn document(&mut self, document: &Map<String, Value>) {
        let version = document.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
        if version != format!("{GROUP}/{VERSION}") {
            let reason = format!("apiVersion {} is not known; write {GROUP}/{VERSION}", quote(version));
            self.fault("apiVersion", Fault::Unreadable { reason });
            return;
        }
        let mode = document.get("mode").and_then(Value::as_str).unwrap_or_default();
        let Some(mode) = Mode::parse(mode) else {
            let allowed = ["iptables", "ipvs", "nftables"].map(quote).into();
            self.fault("mode", Fault::NotAChoice { value: quote(mode), allowed, nearest: None });
            return;
        };
        self.object(mode, "", document);
        self.note_mode(mode);
        self.node_port_addresses(mode, document);
        self.addresses(document);
    }

    fn object(&mut self, mode: Mode, section: &str, object: &Map<String, Value>) {
        for (name, value) in object {
            let place = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
            match fields::find(&place) {
                Some(field) => self.field(mode, section, field, value),
                None if matches!(place.as_str(), "apiVersion" | "kind") => {}
                None => self.notes.push(format!(
                    "{}: unknown field {} ignored, as by kube-proxy",
                    self.at(&place),
                    quote(&place)
                )),
            }
        }
    }

    fn field(&mut self, mode: Mode, section: &str, field: &Field, value: &Value) {
        let counts = field.zero_counts || matches!(field.used, Use::Section);
        if value.is_null() || (!counts && is_zero(value)) {
            return;
        }
        if let Use::Section = field.used {
            match value.as_object() {
                Some(object) => self.object(mode, field.place, object),
                None => self.wrong(field.place, "an object", value),
            }
            return;
        }
        let own = field.place.rsplit('.').next().unwrap_or(field.place);
        if !mode.reads(section, own) {
            let mode = mode.name();
            let text = format!("{}: {} has no effect in mode {mode}", self.at(field.place), field.place);
            return self.notes.push(text);
        }
        match field.used {
            Use::Setting(setting, kind) => self.setting(field.place, setting, kind, value),
            Use::No(reason) => {
                let text = format!("{}: {} has no effect: {reason}", self.at(field.place), field.place);
                self.notes.push(text);
            }
            Use::InIptables(setting) if mode == Mode::IpTables => {
                self.setting(field.place, setting, Kind::Plain, value);
            }
            Use::InIptables(_) => {
                let (at, place) = (self.at(field.place), field.place);
                self.notes.push(format!(
                    "{at}: {place} has no effect: node ports are not served at 127.0.0.1, as in kube-proxy's mode \
                     nftables; set mode: iptables"
                ));
            }
            Use::Gates => self.gates(value),
            Use::Verbosity => self.verbosity(value),
            Use::Separately | Use::Section => {}
        }
    }

    fn setting(&mut self, place: &str, setting: &'static str, kind: Kind, value: &Value) {
        let raw = match (kind, value) {
            (Kind::Plain, Value::Bool(is)) => Raw::Bool(*is),
            (Kind::Plain, Value::Number(number)) => match number.as_i64() {
                Some(number) => Raw::Int(number),
                None => return self.wrong(place, "a whole number", value),
            },
            (Kind::Plain, Value::String(text)) => Raw::Text(text.clone()),
            (Kind::Commas, Value::String(text)) => {
                Raw::List(text.split(',').map(|item| item.trim().to_owned()).collect())
            }
            (Kind::Duration, Value::String(text)) => match duration::parse(text) {
                Some(duration) => Raw::Text(humantime::format_duration(duration).to_string()),
                None => return self.wrong(place, "a duration in Go syntax, such as \"1h30m\"", value),
            },
            _ => return self.wrong(place, kind.words(), value),
        };
        self.assign(place, setting, raw);
    }

    fn assign(&mut self, place: &str, setting: &'static str, raw: Raw) {
        let (section, name) = setting.split_once('.').unwrap_or(("proxy", setting));
        let at = self.origin(place);
        let assignment = Assignment { section, name, raw, key_at: at.clone(), value_at: at };
        assign(&mut self.layer, self.found, Spelling::File, assignment);
    }

    fn note_mode(&mut self, mode: Mode) {
        if matches!(mode, Mode::IpTables | Mode::Ipvs) {
            self.assign("mode", "proxy.backend", Raw::Text(mode.name().to_owned()));
        } else if mode != Mode::NfTables {
            self.notes.push(format!(
                "{}: mode {}: Services are programmed with nftables and behave as in kube-proxy's mode \
                 nftables (docs/kube-proxy-differences.md)",
                self.at("mode"),
                mode.name()
            ));
        }
    }

    /// Without the field, node ports are served at all addresses in the modes iptables and ipvs (and without a mode), at
    /// the primary ones in nftables.
    fn node_port_addresses(&mut self, mode: Mode, document: &Map<String, Value>) {
        const PLACE: &str = "nodePortAddresses";
        let items = match document.get(PLACE) {
            None | Some(Value::Null) => &Vec::new(),
            Some(Value::Array(items)) => items,
            Some(other) => return self.wrong(PLACE, "a list of strings", other),
        };
        let Some(mut texts) =
            items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        else {
            return self.fault(
                PLACE,
                Raw::Other("a list with a value that is not a string").wrong("a list of strings"),
            );
        };
        if texts.is_empty() {
            // The backends nft, iptables and ipvs have kube-proxy's defaults.
            if mode != Mode::Unset {
                return;
            }
            self.notes.push(format!(
                "{}: nodePortAddresses is not set: node ports are served at all addresses of the node, as in \
                 mode {}, except 127.0.0.1; set primary to use only the primary node addresses",
                self.at(PLACE),
                mode.name()
            ));
            texts = vec!["0.0.0.0/0".to_owned(), "::/0".to_owned()];
        }
        self.assign(PLACE, "proxy.nodeport_addresses", Raw::List(texts));
    }

    /// The addresses of the servers: the port may be missing, and an unset address follows the family of
    /// `bindAddress`.
    fn addresses(&mut self, document: &Map<String, Value>) {
        let text = |name: &str| document.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let is_v6 =
            text("bindAddress").and_then(|text| text.parse::<IpAddr>().ok()).is_some_and(|ip| ip.is_ipv6());
        for (place, setting, port, of_v6) in [
            ("healthzBindAddress", "proxy.healthz_bind_address", HEALTHZ_PORT, "[::]"),
            ("metricsBindAddress", "proxy.metrics_bind_address", METRICS_PORT, "[::1]"),
        ] {
            match (text(place), document.get(place)) {
                (Some(address), _) => self.assign(place, setting, Raw::Text(with_port(address, port))),
                (None, None | Some(Value::Null | Value::String(_))) => {
                    if is_v6 {
                        self.assign("bindAddress", setting, Raw::Text(format!("{of_v6}:{port}")));
                    }
                }
                (None, Some(other)) => self.wrong(place, "a string", other),
            }
        }
    }

    fn gates(&mut self, value: &Value) {
        const PLACE: &str = "featureGates";
        let Some(gates) = value.as_object() else { return self.wrong(PLACE, "an object", value) };
        for (name, on) in gates {
            let place = format!("{PLACE}.{name}");
            match (name.as_str(), on) {
                (_, other) if !other.is_boolean() => self.wrong(&place, "true or false", other),
                ("AllowServiceExternalIPs", on) => {
                    self.setting(&place, "proxy.allow_external_ips", Kind::Plain, on);
                }
                _ => self.notes.push(format!(
                    "{}: {place} has no effect: Keelson has no such feature gate",
                    self.at(&place)
                )),
            }
        }
    }

    /// kube-proxy logs what operators need at 0 to 3, what helps to debug at 4 and 5, and everything above.
    fn verbosity(&mut self, value: &Value) {
        const PLACE: &str = "logging.verbosity";
        let level = match value.as_i64() {
            None => return self.wrong(PLACE, "a whole number", value),
            Some(..4) => return,
            Some(4..6) => "debug",
            Some(6..) => "trace",
        };
        self.assign(PLACE, "agent.log", Raw::Text(level.to_owned()));
    }

    fn wrong(&mut self, place: &str, expected: &str, value: &Value) {
        let raw = match value {
            Value::Array(_) => Raw::Other("a list"),
            other => other.clone().into(),
        };
        self.fault(place, raw.wrong(format!("{expected} in {place}")));
    }

    fn fault(&mut self, place: &str, fault: Fault) {
        let at = self.origin(place);
        self.found.add(at, None, fault);
    }

    fn origin(&self, place: &str) -> Origin {
        Origin::File { path: self.path.into(), line: line_of(self.text, place), column: 0 }
    }

    fn at(&self, place: &str) -> String {
        self.origin(place).to_string()
    }
}

fn with_port(address: &str, port: u16) -> String {
    match address.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port).to_string(),
        Err(_) => address.to_owned(),
    }
}

/// Whether a value is a zero value of Go.
fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is) => !is,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || duration::parse(text).is_some_and(|time| time.is_zero()),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_zero),
    }
}

/// Line of `a` or `a.b` in block style; 0 in other styles.
fn line_of(text: &str, place: &str) -> usize {
    let mut lines = (1..).zip(text.lines());
    let mut line = 0;
    for (depth, name) in place.split('.').enumerate() {
        let is_key = |text: &str| {
            let trimmed = text.trim_start();
            let indented = trimmed.len() < text.len();
            (indented || depth == 0)
                && (!indented || depth > 0)
                && trimmed.strip_prefix(name).is_some_and(|rest| rest.trim_start().starts_with(':'))
        };
        match lines.find(|(_, text)| is_key(text)) {
            Some((number, _)) => line = number,
            None => return 0,
        }
    }
    line
}
