//! The line of a field.
//!
//! Owns: finding a line. In: a text, the number of a document and the path of a field in it. Out: the line of the
//! field, or of the nearest one. No I/O. Used for faults only, so that valid files do not pay for it.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::Spanned;

use super::{object::Step, yaml};

/// A node of the text with its line.
enum Node {
    Leaf,
    Seq(Vec<Spanned<Node>>),
    Map(Vec<(String, Spanned<Node>)>),
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_i128<E>(self, _: i128) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_u128<E>(self, _: u128) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_str<E>(self, _: &str) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_bytes<E>(self, _: &[u8]) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Leaf)
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Node, D::Error> {
        Node::deserialize(inner)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<Node, D::Error> {
        Node::deserialize(inner)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Node::Seq(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = access.next_entry()? {
            fields.push(field);
        }
        Ok(Node::Map(fields))
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// All documents, of which one is needed.
#[derive(Default)]
struct Documents(Vec<Spanned<Node>>);

impl Extend<Spanned<Node>> for Documents {
    fn extend<I: IntoIterator<Item = Spanned<Node>>>(&mut self, documents: I) {
        self.0.extend(documents);
    }
}

/// The line, from 1, of the field at `path` in document number `document` (from 0, empty ones not counted). If the
/// field does not exist, that of its innermost existing parent. `None` if the text cannot be parsed.
pub(super) fn line(text: &str, document: usize, path: &[Step]) -> Option<u32> {
    let documents: Documents =
        serde_saphyr::from_str_multiple_with_options(text, yaml::options(text)).ok()?;
    let mut at = documents.0.get(document)?;
    for step in path {
        let next = match (&at.value, step) {
            (Node::Seq(items), Step::Item(number)) => items.get(*number),
            (Node::Map(fields), Step::Field(name)) => {
                fields.iter().find(|(key, _)| key == name).map(|(_, value)| value)
            }
            _ => None,
        };
        let Some(next) = next else { break };
        at = next;
    }
    u32::try_from(at.referenced.line()).ok().filter(|line| *line > 0)
}
