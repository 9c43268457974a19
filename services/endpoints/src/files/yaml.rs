//! Manifests in YAML.
//!
//! Owns: documents of a YAML text, and limits of memory. In: a text. Out: [`Document`]s with the
//! lines on which they begin; or the first [`Fault`] of the text. No I/O.

use std::fmt;

use keelson_serve::text::one_line;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use serde_saphyr::{Options, Spanned};

use super::document::{Document, Fault, Fields, Items};

/// Limits of the expansion of a text: nested aliases would fill the memory.
pub(super) fn options(text: &str) -> Options {
    let length = text.len();
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: length / 2 + 1_000,
            max_events: length + 1_000,
            max_documents: length / 4 + 16,
            max_total_scalar_bytes: 2 * length + 100_000,
            max_recorded_anchor_bytes: 2 * length + 100_000,
            max_depth: 100,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 100_000,
            max_replay_stack_depth: 16,
        },
        with_snippet: false,
    }
}

/// One document, or one item of a list.
struct Node(Document);

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut fields = Fields { line: 0, fields: Map::new(), items: Items::None };
        while let Some(key) = access.next_key::<String>()? {
            if key == "items" {
                fields.items = access.next_value::<NodeItems>()?.0;
            } else {
                let value = access.next_value::<Value>()?;
                if fields.fields.insert(key, value).is_some() {
                    return Err(A::Error::custom("duplicate key"));
                }
            }
        }
        Ok(Node(Document::Object(fields).reduced()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        while access.next_element::<Value>()?.is_some() {}
        Ok(Node(Document::other("a list")))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node(Document::other("true or false")))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node(Document::other("a number")))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node(Document::other("a number")))
    }

    fn visit_i128<E>(self, _: i128) -> Result<Node, E> {
        Ok(Node(Document::other("a number")))
    }

    fn visit_u128<E>(self, _: u128) -> Result<Node, E> {
        Ok(Node(Document::other("a number")))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node(Document::other("a number")))
    }

    fn visit_str<E>(self, _: &str) -> Result<Node, E> {
        Ok(Node(Document::other("text")))
    }

    fn visit_bytes<E>(self, _: &[u8]) -> Result<Node, E> {
        Ok(Node(Document::other("bytes")))
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node(Document::other("null")))
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node(Document::other("null")))
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Node, D::Error> {
        Node::deserialize(inner)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// The value of `items`: the objects of a list; ignored for other types.
struct NodeItems(Items);

struct ItemsVisitor;

impl<'de> Visitor<'de> for ItemsVisitor {
    type Value = NodeItems;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<NodeItems, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element::<Spanned<Node>>()? {
            items.push(placed(item));
        }
        Ok(NodeItems(Items::List(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<NodeItems, A::Error> {
        while access.next_entry::<String, Value>()?.is_some() {}
        Ok(NodeItems(Items::Other))
    }

    fn visit_unit<E>(self) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::None))
    }

    fn visit_none<E>(self) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::None))
    }

    fn visit_bool<E>(self, _: bool) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::Other))
    }

    fn visit_i64<E>(self, _: i64) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::Other))
    }

    fn visit_u64<E>(self, _: u64) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::Other))
    }

    fn visit_f64<E>(self, _: f64) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::Other))
    }

    fn visit_str<E>(self, _: &str) -> Result<NodeItems, E> {
        Ok(NodeItems(Items::Other))
    }
}

impl<'de> Deserialize<'de> for NodeItems {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemsVisitor)
    }
}

fn placed(node: Spanned<Node>) -> Document {
    let line = u32::try_from(node.referenced.line()).unwrap_or(0);
    match node.value.0 {
        Document::Object(fields) => Document::Object(Fields { line, ..fields }),
        Document::Read { kind, object, .. } => Document::Read { line, kind, object },
        Document::Ignored => Document::Ignored,
        Document::Other { what, .. } => Document::Other { line, what },
    }
}

/// All documents of a text but empty ones.
///
/// # Errors
/// The text is not YAML, or needs more memory than its length justifies.
pub(super) fn documents(text: &str) -> Result<Vec<Document>, Fault> {
    let documents: Vec<Spanned<Node>> = serde_saphyr::from_multiple_with_options(text, options(text))
        .map_err(|error| {
            let line = error.location().and_then(|location| u32::try_from(location.line()).ok());
            Fault { line: line.unwrap_or(0), reason: one_line(&error.without_snippet().to_string()) }
        })?;
    Ok(documents.into_iter().map(placed).collect())
}
