//! The content of a manifest before it is known whether all of it is valid. No I/O.

use keelson_endpoint_publisher::SourceKind;
use serde_json::{Map, Value};

use super::object::{self, Object, ObjectError, Role};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// From 1; 0 if it concerns the whole file.
    pub(super) line: u32,
    pub(super) reason: String,
}

/// A document, or an item of a list.
#[derive(Debug)]
pub(super) enum Document {
    /// A list, or an item whose kind follows from its list.
    Object(Fields),
    /// An object of a kind that is read. It is packed at once: as JSON it takes several times the memory.
    Read { line: u32, kind: SourceKind, object: Result<Object, ObjectError> },
    /// An object of another kind.
    Ignored,
    /// Not an object.
    Other { line: u32, what: &'static str },
}

impl Document {
    pub(super) fn other(what: &'static str) -> Self {
        Self::Other { line: 0, what }
    }

    /// Packs an object of a kind that is read, and drops one of another kind.
    pub(super) fn reduced(self) -> Self {
        let Self::Object(fields) = self else { return self };
        match object::role(fields.fields.get("apiVersion"), fields.fields.get("kind"), None) {
            Ok(Role::Read(kind)) => {
                let Fields { line, fields, .. } = fields;
                Self::Read { line, kind, object: object::object(kind, fields) }
            }
            Ok(Role::Ignored) => Self::Ignored,
            Ok(Role::List(_)) | Err(_) => Self::Object(fields),
        }
    }
}

/// The fields of an object, except `items`.
#[derive(Debug)]
pub(super) struct Fields {
    pub(super) line: u32,
    pub(super) fields: Map<String, Value>,
    pub(super) items: Items,
}

/// The value of `items`.
#[derive(Debug)]
pub(super) enum Items {
    None,
    List(Vec<Document>),
    Other,
}
