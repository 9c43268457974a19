//! The flags `--set section.key=value` and `--feature-gates A=true,B=false`, in the order given; the last one wins.

use super::{Assignment, Findings, Layer, Spelling, assign, assign_gate_list, unknown_key};
use crate::error::{Fault, quote};
use crate::origin::Origin;
use crate::setting_type::Raw;

pub(crate) fn read(sets: &[String], feature_gates: &[String], found: &mut Findings) -> Layer {
    let mut layer = Layer::new();
    for text in sets {
        set(&mut layer, found, text);
    }
    for text in feature_gates {
        assign_gate_list(&mut layer, found, text, |name| {
            Origin::Flag(format!("--feature-gates {name}").trim_end().to_owned())
        });
    }
    layer
}

fn set(layer: &mut Layer, found: &mut Findings, text: &str) {
    let Some((path, value)) = text.split_once('=') else {
        let fault = Fault::MalformedSet { text: quote(text) };
        return found.add(Origin::Flag("--set".into()), None, fault);
    };
    let path = path.trim();
    // The place omits the value, because the error contains it.
    let at = Origin::Flag(format!("--set {path}").trim_end().to_owned());
    let Some((section, name)) = path.split_once('.') else {
        let fault = match path.is_empty() {
            true => Fault::MalformedSet { text: quote(text) },
            false => unknown_key(Spelling::Flag, "", path),
        };
        return found.add(at, None, fault);
    };
    let raw = Raw::Untyped(value.trim().to_owned());
    let assignment = Assignment { section, name, raw, key_at: at.clone(), value_at: at };
    assign(layer, found, Spelling::Flag, assignment);
}
