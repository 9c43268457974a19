//! Reads each source into a layer and checks every value.

mod env;
mod file;
mod flags;
mod kube_proxy;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

use crate::error::{Fault, Problem, quote};
use crate::gates;
use crate::origin::Origin;
use crate::setting_type::{Raw, Setting};
use crate::settings::{GATES_SECTION, env_name, schema, sections};
use crate::suggest::nearest;

pub(crate) use env::read as read_env;
pub(crate) use file::{Outcome as FileOutcome, read as read_file};
pub(crate) use flags::read as read_flags;

/// Checked values of one source, by path.
pub(crate) type Layer = BTreeMap<String, (Json, Origin)>;

/// Problems so far, and the settings whose value is unknown because of them.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) problems: Vec<Problem>,
    pub(crate) invalid_keys: BTreeSet<String>,
    /// Set if the file is kube-proxy's configuration: notes on fields without effect.
    pub(crate) kube_proxy: Option<Vec<String>>,
}

impl Findings {
    fn add(&mut self, place: Origin, key: Option<&str>, fault: Fault) {
        if let Some(key) = key {
            self.invalid_keys.insert(key.to_owned());
        }
        self.problems.push(Problem { place, key: key.map(Into::into), fault });
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// `key`, within its section.
    File,
    /// `KEELSON_SECTION__KEY`.
    Env,
    /// `section.key`.
    Flag,
}

impl Spelling {
    fn spell(self, here: &str, section: &str, name: &str) -> String {
        match self {
            Self::Env => env_name(section, name),
            Self::File if section == here => name.into(),
            Self::File if here.is_empty() => format!("{name} under [{section}]"),
            Self::File => format!("{section}.{name}, a key of section [{section}]"),
            Self::Flag => format!("{section}.{name}"),
        }
    }
}

struct Assignment<'a> {
    section: &'a str,
    name: &'a str,
    raw: Raw,
    key_at: Origin,
    value_at: Origin,
}

fn assign(layer: &mut Layer, found: &mut Findings, spelling: Spelling, a: Assignment<'_>) {
    if a.section == GATES_SECTION {
        return assign_gate(layer, found, a);
    }
    if !sections().iter().any(|section| section.name == a.section) {
        return found.add(a.key_at, None, unknown_section(spelling, a.section, a.name));
    }
    match schema().iter().find(|key| key.section == a.section && key.name == a.name) {
        None => found.add(a.key_at, None, unknown_key(spelling, a.section, a.name)),
        Some(key) => match key.check(&a.raw) {
            Ok(value) => {
                layer.insert(key.path.into(), (value, a.key_at));
            }
            Err(fault) => found.add(a.value_at, Some(key.path), fault),
        },
    }
}

fn assign_gate(layer: &mut Layer, found: &mut Findings, a: Assignment<'_>) {
    let path = |name: &str| format!("{GATES_SECTION}.{name}");
    // Check the name first, with a value that every gate takes, so that an unknown gate is what is reported.
    if let Err(fault) = gates::check(gates::specs(), a.name, true) {
        return found.add(a.key_at, None, fault);
    }
    let on = match bool::read(&a.raw, &crate::setting_type::Any) {
        Ok(on) => on,
        Err(fault) => return found.add(a.value_at, Some(&path(a.name)), fault),
    };
    match gates::check(gates::specs(), a.name, on) {
        Ok(name) => {
            layer.insert(path(name), (Json::Bool(on), a.key_at));
        }
        Err(fault) => found.add(a.value_at, Some(&path(a.name)), fault),
    }
}

/// Assigns `A=true,B=false`, the form of `--feature-gates` and `KEELSON_FEATURE_GATES`.
fn assign_gate_list(layer: &mut Layer, found: &mut Findings, text: &str, place: impl Fn(&str) -> Origin) {
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let Some((name, value)) = item.split_once('=') else {
            found.add(place(""), None, Fault::MalformedGate { text: quote(item) });
            continue;
        };
        let (name, at) = (name.trim(), place(name.trim()));
        let raw = Raw::Untyped(value.trim().into());
        let assignment = Assignment { section: GATES_SECTION, name, raw, key_at: at.clone(), value_at: at };
        assign_gate(layer, found, assignment);
    }
}

fn unknown_section(spelling: Spelling, section: &str, name: &str) -> Fault {
    let known = || sections().iter().map(|section| section.name);
    let near = nearest(section, known());
    let nearest = match spelling {
        Spelling::File => near.map(|s| format!("[{s}]")),
        // Section and key are one word here, so suggest the complete word.
        _ => near.map(|s| {
            let keys = schema().iter().filter(|key| key.section == s);
            let key = nearest(name, keys.map(|key| key.name));
            key.map(|key| spelling.spell("", s, key)).unwrap_or_else(|| s.into())
        }),
    };
    Fault::UnknownSection { section: quote(section), nearest, known: known().map(Into::into).collect() }
}

/// Suggests the nearest key of the section, else one of the same name in another section.
fn unknown_key(spelling: Spelling, section: &str, name: &str) -> Fault {
    let here = || schema().iter().filter(|key| key.section == section).map(|key| key.name);
    let near = nearest(name, here()).map(|key| spelling.spell(section, section, key)).or_else(|| {
        // In another section, only a close match is helpful.
        let folded = |s: &str| s.replace(['_', '-'], "").to_lowercase();
        schema()
            .iter()
            .find(|key| folded(key.name) == folded(name))
            .map(|key| spelling.spell(section, key.section, key.name))
    });
    let known = match section {
        "" => schema().iter().map(|key| key.path.to_owned()).collect(),
        _ => here().map(Into::into).collect(),
    };
    Fault::UnknownKey { key: quote(name), nearest: near, known }
}
