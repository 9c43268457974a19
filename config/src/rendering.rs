//! The settings in force as text: for people, for scripts, and as a file that gives the same settings.

use serde_json::{Value as Json, json};

use crate::load::{Entry, Loaded};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Table,
    /// One JSON object: the file, and under `settings` each key with value, origin and whether it is live.
    Json,
    /// A settings file that gives the same settings, with the origins as comments.
    Toml,
}

pub fn render_show(loaded: &Loaded, format: Format) -> String {
    match format {
        Format::Table => table(loaded),
        Format::Json => json_text(loaded),
        Format::Toml => toml(loaded),
    }
}

pub(crate) fn toml_value(value: &Json) -> String {
    match value {
        Json::String(text) => toml_edit::Value::from(text.as_str()).to_string(),
        other => other.to_string(),
    }
}

fn file_line(loaded: &Loaded) -> String {
    match &loaded.file {
        Some(path) => format!("file: {}", crate::origin::escaped(&path.to_string_lossy())),
        None => "file: none read".into(),
    }
}

fn table(loaded: &Loaded) -> String {
    let head = ["KEY", "VALUE", "CHANGES", "FROM"].map(String::from);
    let rows: Vec<[String; 4]> = std::iter::once(head)
        .chain(loaded.entries.iter().map(|entry| {
            let changes = if entry.live { "live" } else { "on restart" };
            [entry.key.clone(), toml_value(&entry.value), changes.into(), entry.origin.to_string()]
        }))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (key, value, changes) = (width(0), width(1), width(2));
    let mut text = format!("{}\n\n", file_line(loaded));
    for [a, b, c, d] in &rows {
        text.push_str(&format!("{a:key$}  {b:value$}  {c:changes$}  {d}\n"));
    }
    text
}

fn json_text(loaded: &Loaded) -> String {
    let settings: serde_json::Map<String, Json> = loaded
        .entries
        .iter()
        .map(|Entry { key, value, origin, live, .. }| {
            let about =
                json!({ "value": value, "source": origin.source(), "from": origin.to_string(), "live": live });
            (key.clone(), about)
        })
        .collect();
    let file = loaded.file.as_ref().map(|path| path.to_string_lossy());
    format!("{:#}\n", json!({ "file": file, "settings": settings }))
}

fn toml(loaded: &Loaded) -> String {
    let mut text = format!("# Settings in force; {}\n", file_line(loaded));
    let mut current = "";
    for entry in &loaded.entries {
        let (section, name) = entry.key.split_once('.').unwrap_or(("", &entry.key));
        if section != current {
            text.push_str(&format!("\n[{section}]\n"));
            current = section;
        }
        text.push_str(&format!("{name} = {}  # {}\n", toml_value(&entry.value), entry.origin));
    }
    text
}
