//! Parser of manifests.
//!
//! Owns: the objects of a file ([`parse`]), in YAML or JSON. In: a name, whose extension gives the format, and bytes.
//! Out: every object of a kind that is read; or all faults of the file, with lines. No I/O. If one object of a file is
//! not valid, none of it is used.

use std::collections::{HashMap, hash_map::Entry};

use keelson_endpoint_publisher::SourceKind;
use serde_json::{Value, value::RawValue};

use super::{
    document::{Document, Fault, Fields, Items},
    locate,
    object::{self, Key, Object, ObjectError, Role, Step},
    yaml,
};

/// Maximum number of faults that are reported for one file.
const MAX_FAULTS: usize = 20;

/// Maximum depth of nested lists.
const MAX_DEPTH: usize = 8;

/// The formats, by the extension of a file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Yaml,
    Json,
}

fn format(name: &str) -> Option<Format> {
    match name.rsplit_once('.')?.1 {
        "yaml" | "yml" => Some(Format::Yaml),
        "json" => Some(Format::Json),
        _ => None,
    }
}

/// Whether a file of this name is a manifest. Hidden files are not. Editors and programs leave files with other
/// extensions beside a file while they write it.
pub(super) fn is_manifest(name: &str) -> bool {
    !name.starts_with('.') && format(name).is_some()
}

/// The objects and faults of one file.
struct Reading<'a> {
    /// The text for looking up lines: document number and path in it.
    text: &'a str,
    objects: Vec<Object>,
    lines: HashMap<Key, u32>,
    faults: Vec<Fault>,
}

impl Reading<'_> {
    fn fault(&mut self, line: u32, reason: String) {
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(Fault { line, reason });
        }
    }

    /// `find` looks up the line of a field.
    fn add_fault(&mut self, line: u32, error: &ObjectError, find: impl FnOnce(&[Step]) -> Option<u32>) {
        // Finding a line takes as long as reading the file, so it is not done for faults that are not reported.
        if self.faults.len() < MAX_FAULTS {
            let line = if error.path.is_empty() { line } else { find(&error.path).unwrap_or(line) };
            self.fault(line, error.to_string());
        }
    }

    fn take(
        &mut self,
        kind: SourceKind,
        line: u32,
        object: Result<Object, ObjectError>,
        find: impl FnOnce(&[Step]) -> Option<u32>,
    ) {
        let object = match object {
            Ok(object) => Object { line, ..object },
            Err(error) => return self.add_fault(line, &error, find),
        };
        match self.lines.entry(object.key.clone()) {
            Entry::Occupied(first) => {
                let (kind, name, first) = (object::kind_name(kind), shown(&object.key), *first.get());
                self.fault(line, format!("duplicate {kind} {name}, first defined on line {first}"));
            }
            Entry::Vacant(place) => {
                place.insert(line);
                self.objects.push(object);
            }
        }
    }

    /// `way`: the number of the document, and the path in it.
    fn yaml(&mut self, document: Document, implied: Option<SourceKind>, way: &mut (usize, Vec<Step>)) {
        let text = self.text;
        let number = way.0;
        let find = |path: &[Step]| {
            let full_path: Vec<Step> = way.1.iter().chain(path).cloned().collect();
            locate::line(text, number, &full_path)
        };
        let Fields { line, fields, items } = match document {
            Document::Object(fields) => fields,
            Document::Read { line, kind, object } => return self.take(kind, line, object, find),
            Document::Ignored => return,
            Document::Other { line, what } => {
                return self.fault(line, format!("expected an object, found {what}"));
            }
        };
        match object::role(fields.get("apiVersion"), fields.get("kind"), implied) {
            Err(error) => self.add_fault(line, &error, find),
            Ok(Role::Ignored) => {}
            Ok(Role::Read(kind)) => self.take(kind, line, object::object(kind, fields), find),
            Ok(Role::List(implied)) => self.yaml_items(items, line, implied, way),
        }
    }

    fn yaml_items(
        &mut self,
        items: Items,
        line: u32,
        implied: Option<SourceKind>,
        way: &mut (usize, Vec<Step>),
    ) {
        match items {
            Items::None => {}
            Items::Other => self.fault(line, "items is not a list".to_owned()),
            Items::List(_) if way.1.len() >= 2 * MAX_DEPTH => {
                self.fault(line, "lists are nested too deeply".to_owned());
            }
            Items::List(items) => {
                way.1.push(Step::Field("items".to_owned()));
                for (number, item) in items.into_iter().enumerate() {
                    way.1.push(Step::Item(number));
                    self.yaml(item, implied, way);
                    way.1.pop();
                }
                way.1.pop();
            }
        }
    }

    fn json(&mut self, raw: &RawValue, implied: Option<SourceKind>, depth: usize, lines: &mut Lines<'_>) {
        let line = lines.of(raw.get());
        let find = |path: &[Step]| Some(line + locate::line(raw.get(), 0, path)? - 1);
        let head: Head<'_> = match serde_json::from_str(raw.get()) {
            Ok(head) => head,
            Err(_) => {
                self.fault(line, "expected an object".to_owned());
                return;
            }
        };
        match object::role(head.api_version.as_ref(), head.kind.as_ref(), implied) {
            Err(error) => self.add_fault(line, &error, find),
            Ok(Role::Ignored) => {}
            Ok(Role::Read(kind)) => match serde_json::from_str(raw.get()) {
                Ok(fields) => self.take(kind, line, object::object(kind, fields), find),
                // Syntax errors were found in the first pass; depth and range remain.
                Err(error) => self.fault(line + line_in(&error), without_place(&error)),
            },
            Ok(Role::List(_)) if depth >= MAX_DEPTH => {
                self.fault(line, "lists are nested too deeply".to_owned())
            }
            Ok(Role::List(implied)) => match head.items.map(|items| serde_json::from_str(items.get())) {
                None => {}
                Some(Err(_)) => self.fault(line, "items is not a list".to_owned()),
                Some(Ok(items)) => {
                    let items: Option<Vec<&RawValue>> = items;
                    for item in items.into_iter().flatten() {
                        self.json(item, implied, depth + 1, lines);
                    }
                }
            },
        }
    }
}

fn shown(key: &Key) -> &str {
    key.1.as_str().trim_start_matches('/')
}

/// Only the fields of a JSON object that identify its kind.
#[derive(serde::Deserialize)]
struct Head<'a> {
    #[serde(rename = "apiVersion")]
    api_version: Option<Value>,
    kind: Option<Value>,
    #[serde(borrow)]
    items: Option<&'a RawValue>,
}

/// Counts the lines of a text from front to back.
struct Lines<'a> {
    text: &'a str,
    offset: usize,
    line: u32,
}

impl<'a> Lines<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, offset: 0, line: 1 }
    }

    /// The line on which a part of the text begins; parts must be passed in order.
    fn of(&mut self, part: &str) -> u32 {
        let start = (part.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        if let Some(between) = self.text.as_bytes().get(self.offset..start) {
            let newlines = between.iter().filter(|byte| **byte == b'\n').count();
            self.line = self.line.saturating_add(u32::try_from(newlines).unwrap_or(u32::MAX));
            self.offset = start;
        }
        self.line
    }
}

/// Number of lines from the beginning of a text to an error in it.
fn line_in(error: &serde_json::Error) -> u32 {
    u32::try_from(error.line()).unwrap_or(u32::MAX).saturating_sub(1)
}

/// The text of an error without its position.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_owned()
}

/// The objects of a file; or all of its faults, at least one.
pub(super) fn parse(name: &str, bytes: &[u8]) -> Result<Vec<Object>, Vec<Fault>> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = bytes.get(..error.valid_up_to()).unwrap_or_default();
        let newlines = before.iter().filter(|byte| **byte == b'\n').count();
        let line = u32::try_from(newlines).unwrap_or(u32::MAX).saturating_add(1);
        vec![Fault { line, reason: "the file is not valid UTF-8".to_owned() }]
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reading = Reading { text, objects: Vec::new(), lines: HashMap::new(), faults: Vec::new() };
    match format(name) {
        Some(Format::Json) => {
            let mut lines = Lines::new(text);
            for raw in serde_json::Deserializer::from_str(text).into_iter::<&RawValue>() {
                match raw {
                    Ok(raw) => reading.json(raw, None, 0, &mut lines),
                    Err(error) => {
                        let line = line_in(&error).saturating_add(1);
                        return Err(vec![Fault { line, reason: without_place(&error) }]);
                    }
                }
            }
        }
        Some(Format::Yaml) | None => {
            let documents = yaml::documents(text).map_err(|fault| vec![fault])?;
            for (number, document) in documents.into_iter().enumerate() {
                reading.yaml(document, None, &mut (number, Vec::new()));
            }
        }
    }
    if reading.faults.is_empty() { Ok(reading.objects) } else { Err(reading.faults) }
}
