//! Reading of JSON documents of which only some fields matter, and which may be of another version.

use serde_json::Value;

/// The text at a JSON pointer; empty if there is none.
pub(super) fn text<'a>(document: &'a Value, pointer: &str) -> &'a str {
    document.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub(super) fn number(document: &Value, pointer: &str) -> u64 {
    document.pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
}

pub(super) fn is_true(document: &Value, pointer: &str) -> bool {
    document.pointer(pointer).and_then(Value::as_bool).unwrap_or_default()
}

pub(super) fn list<'a>(document: &'a Value, pointer: &str) -> &'a [Value] {
    document.pointer(pointer).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// A condition of this type in `/status/conditions`.
pub(super) fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    list(object, "/status/conditions").iter().find(|condition| text(condition, "/type") == kind)
}

/// `: message`, or nothing.
pub(super) fn suffix(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}
