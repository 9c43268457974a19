//! The shipped settings file and the reference in the documentation. Both are generated from the table of settings
//! and checked by tests.

use crate::gates::{ALL_ALPHA, ALL_BETA, Gate};
use crate::rendering::toml_value;
use crate::settings::{GATES_SECTION, schema, sections};

/// Every setting with its description, commented out at its default.
pub const EXAMPLE: &str = include_str!("../keelson.toml");

const WIDTH: usize = 100;

pub fn example() -> String {
    let mut text = String::from(
        "# Settings of the Keelson agent.\n\
         #\n\
         # This file lists all settings, commented out, with their defaults. Precedence, lowest first: \
         default, this file, environment\n\
         # (KEELSON_PULLS__WHEN_FULL=reject), flag (--set pulls.when_full=reject). `keelson config check` \
         reports every\n\
         # error at once; `keelson config show` prints the effective values and where each comes from.\n\
         # Settings marked \"live\" are reloaded on SIGHUP; the others require a restart.\n",
    );
    for section in sections() {
        text.push('\n');
        text.push_str(&comment(&section.doc));
        text.push_str(&format!("[{}]\n", section.name));
        for key in schema().iter().filter(|key| key.section == section.name) {
            let live = if key.live { "; live" } else { "" };
            text.push_str(&format!("\n{}", comment(&key.doc)));
            text.push_str(&comment(&format!("({}{live})", key.kind)));
            text.push_str(&format!("#{} = {}\n", key.name, toml_value(&key.default)));
        }
        if section.name == GATES_SECTION {
            text.push_str(&gates());
        }
    }
    text
}

fn gates() -> String {
    let mut text = String::new();
    for gate in Gate::ALL {
        let spec = gate.spec();
        let doc = format!("{} ({} since {})", spec.description, spec.stage, spec.since);
        text.push_str(&format!("\n{}#{} = {}\n", comment(&doc), spec.name, spec.stage.default_on()));
    }
    text
}

fn comment(text: &str) -> String {
    let mut lines = vec![String::from("#")];
    for word in text.split_whitespace() {
        let full = lines.last().is_some_and(|line| line.len() > 1 && line.len() + 1 + word.len() > WIDTH);
        if full {
            lines.push(String::from("#"));
        }
        if let Some(line) = lines.last_mut() {
            line.push(' ');
            line.push_str(word);
        }
    }
    lines.join("\n") + "\n"
}

/// All settings and feature gates as Markdown, for `docs/configuration.md`.
pub fn reference() -> String {
    let mut text = String::new();
    for section in sections().iter().filter(|section| section.name != GATES_SECTION) {
        text.push_str(&format!("### [{}]\n\n{}\n\n", section.name, section.doc));
        text.push_str("| key | type | default | takes effect | description |\n|---|---|---|---|---|\n");
        for key in schema().iter().filter(|key| key.section == section.name) {
            text.push_str(&format!(
                "| `{}` | {} | `{}` | {} | {} |\n",
                key.name,
                cell(&key.kind),
                cell(&toml_value(&key.default)),
                if key.live { "live" } else { "on restart" },
                cell(&key.doc),
            ));
        }
        text.push('\n');
    }
    text.push_str(&format!("### [{GATES_SECTION}]\n\n"));
    text.push_str("| gate | stage | since | default | description |\n|---|---|---|---|---|\n");
    for gate in Gate::ALL {
        let spec = gate.spec();
        text.push_str(&format!(
            "| `{}` | {} | {} | `{}` | {} |\n",
            spec.name,
            spec.stage,
            spec.since,
            spec.stage.default_on(),
            cell(spec.description),
        ));
    }
    text.push_str(&format!(
        "| `{ALL_ALPHA}` | ALPHA | | `false` | All alpha gates that are not set by name. |\n"
    ));
    text.push_str(&format!(
        "| `{ALL_BETA}` | BETA | | `true` | All beta gates that are not set by name. |\n"
    ));
    text
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
