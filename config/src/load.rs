//! Reads the layers, merges them and checks the relations of settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use config::{Config, ConfigError, Source as _, Value};
use serde::Deserialize as _;
use serde_json::Value as Json;

use crate::error::{Errors, Fault, Problem};
use crate::gates::{self, FeatureGates, Gate};
use crate::layers::{self, FileOutcome, Findings, Layer};
use crate::origin::Origin;
use crate::primitives::check_node_name;
use crate::relations;
use crate::setting_type::Raw;
use crate::settings::{GATES_SECTION, Settings, gate_doc, schema};

pub const DEFAULT_FILE: &str = "/etc/keelson/keelson.toml";

const FILE_VARIABLE: &str = "KEELSON_CONFIG";
const NODE_NAME: &str = "agent.node_name";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// File named by `--config`, which must exist. Without it, the variable `KEELSON_CONFIG` names the file.
    pub file: Option<PathBuf>,
    /// Read if it exists and no file is named.
    pub default_file: PathBuf,
    /// The environment; names that do not begin with `KEELSON_` are ignored.
    pub env: BTreeMap<String, String>,
    /// Arguments of `--set`, in order.
    pub sets: Vec<String>,
    /// Arguments of `--feature-gates`, in order.
    pub feature_gates: Vec<String>,
    /// The node name unless one is set.
    pub hostname: String,
}

impl Sources {
    /// Defaults and the default file.
    pub fn new(hostname: impl Into<String>) -> Self {
        Self {
            file: None,
            default_file: DEFAULT_FILE.into(),
            env: BTreeMap::new(),
            sets: Vec::new(),
            feature_gates: Vec::new(),
            hostname: hostname.into(),
        }
    }

    /// The file to read, and whether it was named explicitly.
    fn file(&self) -> (&Path, bool) {
        let named = self.env.get(FILE_VARIABLE).filter(|name| !name.is_empty()).map(Path::new);
        match self.file.as_deref().or(named) {
            Some(path) => (path, true),
            None => (&self.default_file, false),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// `section.key`.
    pub key: String,
    /// In canonical form, see `Setting::show`.
    pub value: Json,
    pub origin: Origin,
    pub live: bool,
    pub doc: &'static str,
}

#[derive(Clone, Debug)]
pub struct Loaded {
    pub settings: Arc<Settings>,
    /// In the order of the reference.
    pub entries: Vec<Entry>,
    pub file: Option<PathBuf>,
    /// Set if the file is a `KubeProxyConfiguration` of kube-proxy: notes on fields without effect, each with its
    /// place.
    pub kube_proxy: Option<Vec<String>>,
}

/// # Errors
///
/// All problems of all sources.
pub fn load(sources: &Sources) -> Result<Loaded, Errors> {
    let mut found = Findings::default();
    let (path, named) = sources.file();
    let (file, file_read) = match layers::read_file(path, named, &mut found) {
        FileOutcome::Read(layer) => (layer, true),
        FileOutcome::Absent => (Layer::new(), false),
        FileOutcome::Broken => {
            // The values of the file are unknown, so the relations cannot be checked.
            found.invalid_keys.extend(schema().iter().map(|key| key.path.to_owned()));
            (Layer::new(), false)
        }
    };
    let env = layers::read_env(&sources.env, &mut found);
    let flags = layers::read_flags(&sources.sets, &sources.feature_gates, &mut found);
    let (settings, merged) = match build([defaults(), file, env, flags], &sources.hostname, &mut found) {
        Ok(built) => built,
        Err(problem) => {
            found.problems.push(*problem);
            return Err(Errors::sorted(found.problems));
        }
    };
    found.problems.extend(relations::check(&settings, &|key| merged.origin(key), &found.invalid_keys));
    if !found.problems.is_empty() {
        return Err(Errors::sorted(found.problems));
    }
    Ok(Loaded {
        entries: entries(&settings, &merged),
        settings: Arc::new(settings),
        file: file_read.then(|| path.to_owned()),
        kube_proxy: found.kube_proxy,
    })
}

fn defaults() -> Layer {
    schema().iter().map(|key| (key.path.to_owned(), (key.default.clone(), Origin::Default))).collect()
}

/// `layers` are in rising precedence.
fn build(
    layers: [Layer; 4],
    hostname: &str,
    found: &mut Findings,
) -> Result<(Settings, Merged), Box<Problem>> {
    let merged = Merged::of(layers)?;
    let gates = FeatureGates::resolve(&merged.gates());
    let mut settings = Settings::build(&|path| merged.raw(path), gates).map_err(|(path, fault)| {
        Box::new(Problem { place: merged.origin(path), key: Some(path.into()), fault })
    })?;
    if settings.agent.node_name.is_empty() {
        let name = hostname.trim().to_lowercase();
        if !found.invalid_keys.contains(NODE_NAME)
            && let Err(fault) = check_host_name(&name)
        {
            let place = merged.origin(NODE_NAME);
            found.problems.push(Problem { place, key: Some(NODE_NAME.into()), fault });
        }
        settings.agent.node_name = name;
    }
    Ok((settings, merged))
}

/// A host name that is not a valid node name cannot be corrected, so the error asks for the setting.
fn check_host_name(name: &str) -> Result<(), Fault> {
    check_node_name(name).map_err(|fault| match fault {
        Fault::Malformed { value, reason, .. } => Fault::Malformed {
            what: "a node name (from the host name)",
            value,
            reason,
            right: format!("set {NODE_NAME} to the node's name"),
        },
        other => other,
    })
}

fn entries(settings: &Settings, merged: &Merged) -> Vec<Entry> {
    let set = merged.gates();
    let docs = schema().iter().map(|key| key.doc.as_str()).chain(Gate::ALL.map(gate_doc));
    let deciding = schema().iter().map(|key| key.path.to_owned()).chain(Gate::ALL.map(|gate| {
        let (_, by) = gates::resolve_one(gate.spec(), &set);
        format!("{GATES_SECTION}.{}", by.unwrap_or(gate.name()))
    }));
    let flat = settings.flatten();
    flat.into_iter()
        .zip(docs)
        .zip(deciding)
        .map(|((flat, doc), decider)| Entry {
            origin: merged.origin(&decider),
            key: flat.key,
            value: flat.value,
            live: flat.live,
            doc,
        })
        .collect()
}

/// Value and origin by path.
struct Merged(BTreeMap<String, (Json, Origin)>);

impl Merged {
    fn of(layers: [Layer; 4]) -> Result<Self, Box<Problem>> {
        Self::merge(layers).map_err(|e| {
            let fault = Fault::Merge { reason: e.to_string() };
            Box::new(Problem { place: Origin::Default, key: None, fault })
        })
    }

    /// Sets values path by path, so that a layer replaces values and not entire sections. The builder keeps a text as
    /// the origin of a value; here it is an index into `origins`.
    fn merge(layers: [Layer; 4]) -> Result<Self, ConfigError> {
        let mut origins = Vec::new();
        let mut builder = Config::builder();
        for (path, (value, origin)) in layers.into_iter().flatten() {
            let number = origins.len().to_string();
            let value = Value::deserialize(value).map_err(|e| ConfigError::Message(e.to_string()))?;
            builder = builder.set_override(path, Value::new(Some(&number), value.kind))?;
            origins.push(origin);
        }
        let mut merged = BTreeMap::new();
        for (section, table) in builder.build()?.collect()? {
            for (name, value) in table.into_table()? {
                let number = value.origin().and_then(|number| number.parse::<usize>().ok());
                let origin = number.and_then(|n| origins.get(n)).cloned().unwrap_or(Origin::Default);
                merged.insert(format!("{section}.{name}"), (value.try_deserialize()?, origin));
            }
        }
        Ok(Self(merged))
    }

    fn raw(&self, path: &str) -> Raw {
        self.0.get(path).map_or(Raw::Other("nothing"), |(value, _)| value.clone().into())
    }

    fn origin(&self, path: &str) -> Origin {
        self.0.get(path).map_or(Origin::Default, |(_, origin)| origin.clone())
    }

    fn gates(&self) -> BTreeMap<String, bool> {
        let gate = |(path, (value, _)): (&String, &(Json, Origin))| {
            let name = path.strip_prefix(GATES_SECTION)?.strip_prefix('.')?;
            Some((name.to_owned(), value.as_bool()?))
        };
        self.0.iter().filter_map(gate).collect()
    }
}
