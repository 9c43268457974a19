//! Reads the settings file, TOML or kube-proxy's, into checked values with line and column.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use toml_edit::{Document, Item, TableLike, Value};

use super::{Assignment, Findings, Layer, Spelling, assign, kube_proxy, unknown_key, unknown_section};
use crate::error::Fault;
use crate::origin::Origin;
use crate::setting_type::Raw;
use crate::settings::sections;

/// More than any settings file needs; rejects a path to another kind of file.
const MAX_BYTES: u64 = 1 << 20;

pub(crate) enum Outcome {
    /// Read, except for values that were reported.
    Read(Layer),
    /// Missing, and not named explicitly.
    Absent,
    /// Unreadable, or neither TOML nor YAML: no value is known.
    Broken,
}

/// `required`: the file was named explicitly.
pub(crate) fn read(path: &Path, required: bool, found: &mut Findings) -> Outcome {
    let file_error = |reason: String| {
        let place = Origin::File { path: path.into(), line: 0, column: 0 };
        (place, Fault::Unreadable { reason })
    };
    let bytes = match read_bytes(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound && !required => return Outcome::Absent,
        Err(e) => {
            let (place, fault) = file_error(e.to_string());
            found.add(place, None, fault);
            return Outcome::Broken;
        }
    };
    if bytes.len() as u64 > MAX_BYTES {
        let (place, fault) = file_error(format!("the file is larger than {MAX_BYTES} bytes"));
        found.add(place, None, fault);
        return Outcome::Broken;
    }
    match String::from_utf8(bytes) {
        Ok(text) => parse(path, &text, found),
        Err(e) => {
            let valid = e.utf8_error().valid_up_to();
            let head = String::from_utf8_lossy(&e.as_bytes()[..valid]).into_owned();
            let reason = "invalid UTF-8".to_owned();
            found.add(
                Source { path, text: &head }.at(Some(valid..valid)),
                None,
                Fault::Unreadable { reason },
            );
            Outcome::Broken
        }
    }
}

fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

struct Source<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Source<'_> {
    fn at(&self, span: Option<Range<usize>>) -> Origin {
        let (line, column) = span.map(|span| self.line_column(span.start)).unwrap_or((0, 0));
        Origin::File { path: self.path.into(), line, column }
    }

    fn line_column(&self, offset: usize) -> (usize, usize) {
        let mut end = offset.min(self.text.len());
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let head = &self.text[..end];
        let line = head.matches('\n').count() + 1;
        let start = head.rfind('\n').map_or(0, |i| i + 1);
        (line, head[start..].chars().count() + 1)
    }
}

fn parse(path: &Path, text: &str, found: &mut Findings) -> Outcome {
    if let Some(layer) = kube_proxy::read(path, text, found) {
        return layer.map_or(Outcome::Broken, Outcome::Read);
    }
    let source = Source { path, text };
    let document = match Document::parse(text) {
        Ok(document) => document,
        Err(e) => {
            // The parser's message may have several lines; a problem has one.
            let message = e.message().lines().map(str::trim).collect::<Vec<_>>().join("; ");
            found.add(source.at(e.span()), None, Fault::Syntax { message });
            return Outcome::Broken;
        }
    };
    let mut layer = Layer::new();
    let root: &dyn TableLike = document.as_table();
    for (name, item) in root.iter() {
        let key_at = source.at(root.key(name).and_then(|key| key.span()));
        if !sections().iter().any(|section| section.name == name) {
            let fault = match item.as_table_like() {
                Some(_) => unknown_section(Spelling::File, name, ""),
                None => unknown_key(Spelling::File, "", name),
            };
            found.add(key_at, None, fault);
            continue;
        }
        match item.as_table_like() {
            Some(table) => section(&mut layer, found, &source, name, table),
            None => {
                let expected = format!("a table [{name}]");
                let fault = Fault::WrongType { expected, found: describe(item).into() };
                found.add(source.at(item.span()), None, fault);
            }
        }
    }
    Outcome::Read(layer)
}

fn section(
    layer: &mut Layer,
    found: &mut Findings,
    source: &Source<'_>,
    section: &str,
    table: &dyn TableLike,
) {
    for (name, item) in table.iter() {
        let key_at = source.at(table.key(name).and_then(|key| key.span()));
        let value_at = item.span().map_or_else(|| key_at.clone(), |span| source.at(Some(span)));
        let assignment = Assignment { section, name, raw: raw(item), key_at, value_at };
        assign(layer, found, Spelling::File, assignment);
    }
}

fn raw(item: &Item) -> Raw {
    match item {
        Item::Value(Value::Boolean(b)) => Raw::Bool(*b.value()),
        Item::Value(Value::Integer(i)) => Raw::Int(*i.value()),
        Item::Value(Value::String(s)) => Raw::Text(s.value().clone()),
        Item::Value(Value::Array(items)) => {
            let texts: Option<Vec<_>> = items.iter().map(|item| item.as_str().map(str::to_owned)).collect();
            texts.map_or(Raw::Other("a list with a value that is not a string"), Raw::List)
        }
        other => Raw::Other(describe(other)),
    }
}

fn describe(item: &Item) -> &'static str {
    match item {
        Item::None => "nothing",
        Item::Value(Value::String(_)) => "a string",
        Item::Value(Value::Integer(_)) => "a number",
        Item::Value(Value::Boolean(_)) => "true or false",
        Item::Value(Value::Float(_)) => "a number with a fraction",
        Item::Value(Value::Datetime(_)) => "a date or time",
        Item::Value(Value::Array(_)) => "a list",
        Item::Value(Value::InlineTable(_)) | Item::Table(_) => "a table",
        Item::ArrayOfTables(_) => "a list of tables",
    }
}
