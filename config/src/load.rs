//! From sources to settings: reads the layers, merges them, checks what settings demand of each other.

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

/// Where the settings file is when nobody says otherwise.
pub const DEFAULT_FILE: &str = "/etc/keelson/keelson.toml";

const FILE_VARIABLE: &str = "KEELSON_CONFIG";
const NODE_NAME: &str = "agent.node_name";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// The file named by `--config`; it must exist. The variable `KEELSON_CONFIG` is next in line.
    pub file: Option<PathBuf>,
    /// The file that is read if it exists when none is named.
    pub default_file: PathBuf,
    /// The process's environment; names that do not begin with `KEELSON_` are left alone.
    pub env: BTreeMap<String, String>,
    /// The arguments of `--set`, in order.
    pub sets: Vec<String>,
    /// The arguments of `--feature-gates`, in order.
    pub feature_gates: Vec<String>,
    /// The host's name, which is the node's unless one is set.
    pub hostname: String,
}

impl Sources {
    /// Defaults and the file at its usual place, on a host of this name.
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

    /// The file to read, and whether somebody named it.
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
    /// The value in its canonical form: a bool, a number or a text.
    pub value: Json,
    pub origin: Origin,
    /// Whether a running agent takes over a change of it.
    pub live: bool,
    pub doc: &'static str,
}

/// Settings and where each of them came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub settings: Arc<Settings>,
    /// The same, one by one in the order of the reference, with origins.
    pub entries: Vec<Entry>,
    /// The file that was read, if one was.
    pub file: Option<PathBuf>,
    /// Where the file is a `KubeProxyConfiguration` of kube-proxy: notes on what has no effect of it, each with its place.
    pub kube_proxy: Option<Vec<String>>,
}

/// Reads, merges and checks.
///
/// # Errors
///
/// Every problem in every source, at once.
pub fn load(sources: &Sources) -> Result<Loaded, Errors> {
    let mut found = Findings::default();
    let (path, named) = sources.file();
    let (file, file_read) = match layers::read_file(path, named, &mut found) {
        FileOutcome::Read(layer) => (layer, true),
        FileOutcome::Absent => (Layer::new(), false),
        FileOutcome::Broken => {
            // What stands in the file is not known, so nothing can be said about how settings fit together.
            found.wrong.extend(schema().iter().map(|key| key.path.to_owned()));
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
    found.problems.extend(relations::check(&settings, &|key| merged.origin(key), &found.wrong));
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

/// Merges the layers, which rise in precedence, and reads the result.
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
        if !found.wrong.contains(NODE_NAME)
            && let Err(fault) = check_host_name(&name)
        {
            let place = merged.origin(NODE_NAME);
            found.problems.push(Problem { place, key: Some(NODE_NAME.into()), fault });
        }
        settings.agent.node_name = name;
    }
    Ok((settings, merged))
}

/// A host's name that is no node's name needs a setting, not a better spelling.
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

/// Every setting in force, with its origin.
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

/// The merged layers: value and origin by path.
struct Merged(BTreeMap<String, (Json, Origin)>);

impl Merged {
    fn of(layers: [Layer; 4]) -> Result<Self, Box<Problem>> {
        Self::merge(layers).map_err(|e| {
            let fault = Fault::Merge { reason: e.to_string() };
            Box::new(Problem { place: Origin::Default, key: None, fault })
        })
    }

    /// Sets values path by path, so that a layer replaces values and not whole sections. Origins are more than a text, so
    /// the values have their numbers.
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
