//! The environment: `KEELSON_SECTION__KEY`, and `KEELSON_FEATURE_GATES` with a list.
//!
//! Names without a double underscore are ignored, because they may belong to another program, unless one is the name
//! of a setting with an underscore missing.

use std::collections::BTreeMap;

use super::{Assignment, Findings, Layer, Spelling, assign, assign_gate_list};
use crate::error::Fault;
use crate::gates;
use crate::origin::Origin;
use crate::setting_type::Raw;
use crate::settings::{GATES_SECTION, schema};

const PREFIX: &str = "KEELSON_";
const GATES: &str = "FEATURE_GATES";

pub(crate) fn read(env: &BTreeMap<String, String>, found: &mut Findings) -> Layer {
    let mut layer = Layer::new();
    for (name, value) in env {
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        // Read each variable separately, to detect two that set the same key to different values.
        let mut own = Layer::new();
        if rest == GATES {
            assign_gate_list(&mut own, found, value, |_| Origin::Env(name.clone()));
        } else if let Some((section, key)) = rest.split_once("__") {
            variable(&mut own, found, name, (section, key), value);
        } else if let Some(right) = one_underscore(rest) {
            found.add(Origin::Env(name.clone()), None, Fault::OneUnderscore { right });
        }
        for (path, (value, origin)) in own {
            match layer.get(&path) {
                Some((earlier, Origin::Env(other))) if *earlier != value => {
                    let fault = Fault::SetTwice { other: other.clone() };
                    found.add(origin, Some(&path), fault);
                }
                _ => {
                    layer.insert(path, (value, origin));
                }
            }
        }
    }
    layer
}

fn variable(layer: &mut Layer, found: &mut Findings, name: &str, (section, key): (&str, &str), value: &str) {
    let section = section.to_lowercase();
    let key = match section == GATES_SECTION {
        true => gates::canonical_name(key).map_or_else(|| key.to_owned(), Into::into),
        false => key.to_lowercase(),
    };
    let at = Origin::Env(name.to_owned());
    let raw = Raw::Untyped(value.trim().to_owned());
    let assignment = Assignment { section: &section, name: &key, raw, key_at: at.clone(), value_at: at };
    assign(layer, found, Spelling::Env, assignment);
}

fn one_underscore(rest: &str) -> Option<String> {
    let rest = rest.to_lowercase();
    schema().iter().find(|key| key.path.replace('.', "_") == rest).map(|key| key.env())
}
