//! Lists and events as JSON: an event is a line.
//!
//! Owns: [`Json`]. In: bodies. Out: objects. A list is held as a whole before it is read, so this is for short ones.

use std::{collections::BTreeMap, marker::PhantomData};

use bytes::{Buf as _, Bytes, BytesMut};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::events::{Encoding, Event, INITIAL_END, ListEnd, ListReader, OBJECT_MAX, Part, too_long};
use crate::answers::{self, Failure, Status};

/// Maximum size of a list in bytes: more than any list of one node's pods.
const LIST_MAX: usize = 8 << 20;

/// The encoding of objects that deserialize as `T`.
pub(crate) struct Json<T>(PhantomData<fn() -> T>);

/// The part of any object's metadata that a watch needs.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Meta {
    resource_version: String,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Any {
    metadata: Meta,
}

impl<T: DeserializeOwned + Send> Encoding for Json<T> {
    type Object = T;
    type List = List<T>;

    fn split_frame(held: &mut BytesMut, searched: &mut usize) -> Result<Option<Bytes>, Failure> {
        while let Some(at) = held[*searched..].iter().position(|b| *b == b'\n') {
            let line = held.split_to(*searched + at).freeze();
            held.advance(1);
            *searched = 0;
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
        *searched = held.len();
        if held.len() > OBJECT_MAX { Err(too_long("an event")) } else { Ok(None) }
    }

    fn event(line: Bytes) -> Result<Event<T>, Failure> {
        let line: Line<'_> = answers::json(&line)?;
        let object = line.object.get().as_bytes();
        if line.kind == "ERROR" {
            return Ok(Event::Error(answers::json::<Status>(object)?.failure()));
        }
        let Meta { resource_version: version, annotations } = answers::json::<Any>(object)?.metadata;
        if version.is_empty() {
            return Err(answers::invalid_answer("an event without a resourceVersion"));
        }
        match line.kind {
            "ADDED" | "MODIFIED" => Ok(Event::Put { version, object: answers::json(object)? }),
            "DELETED" => Ok(Event::Gone { version, object: answers::json(object)? }),
            "BOOKMARK" => {
                let initial_end =
                    annotations.is_some_and(|a| a.get(INITIAL_END).is_some_and(|v| v == "true"));
                Ok(Event::Bookmark { version, initial_end })
            }
            _ => Err(answers::invalid_answer("an event of an unknown type")),
        }
    }
}

/// The metadata of a list, in part.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMeta {
    resource_version: String,
    #[serde(rename = "continue")]
    continuation: String,
}

/// A list on the wire, in part.
#[derive(Deserialize)]
struct ListOf<T> {
    metadata: ListMeta,
    /// `null` when there are none.
    items: Option<Vec<T>>,
}

/// Reads a list after all of it has arrived.
pub(crate) struct List<T> {
    read: Option<(ListEnd, std::vec::IntoIter<T>)>,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { read: None }
    }
}

impl<T: DeserializeOwned + Send> ListReader<T> for List<T> {
    fn part(&mut self, held: &mut BytesMut, ended: bool) -> Result<Part<T>, Failure> {
        if held.len() > LIST_MAX {
            return Err(answers::invalid_answer(format!("it is longer than {} MiB", LIST_MAX >> 20)));
        }
        if !ended {
            return Ok(Part::More);
        }
        let (end, items) = match &mut self.read {
            Some(read) => read,
            None => {
                let list: ListOf<T> = answers::json(held)?;
                held.clear();
                let ListMeta { resource_version: version, continuation } = list.metadata;
                if version.is_empty() {
                    return Err(answers::invalid_answer("the list has no resourceVersion"));
                }
                let items = list.items.unwrap_or_default().into_iter();
                self.read.insert((ListEnd { version, continuation }, items))
            }
        };
        Ok(match items.next() {
            Some(object) => Part::Object(object, 0),
            None => Part::End(std::mem::take(end)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{FutureExt as _, stream};
    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;
    use crate::watch::events::{Frames, Listing, WatchError};

    type AnyJson = Json<serde_json::Value>;

    fn body(chunks: Vec<Bytes>) -> impl http_body::Body<Data = Bytes, Error = Infallible> + Unpin {
        StreamBody::new(stream::iter(chunks.into_iter().map(|chunk| Ok(Frame::data(chunk)))))
    }

    fn lines_of(chunks: &[&str]) -> Vec<String> {
        let chunks = chunks.iter().map(|c| Bytes::copy_from_slice(c.as_bytes())).collect();
        let mut lines = Frames::<_, AnyJson>::new(body(chunks));
        let mut out = Vec::new();
        while let Some(line) = lines.next().now_or_never().unwrap().unwrap() {
            out.push(String::from_utf8(line.to_vec()).unwrap());
        }
        out
    }

    #[test]
    fn a_body_is_split_into_lines_at_any_chunk_size() {
        let full = "{\"a\":1}\n\n{\"b\":2}\r\n{\"half";
        let want = vec!["{\"a\":1}".to_owned(), "{\"b\":2}\r".to_owned()];
        assert_eq!(lines_of(&[full]), want);
        for at in 0..full.len() {
            assert_eq!(lines_of(&[&full[..at], &full[at..]]), want, "cut at {at}");
        }
        let single: Vec<_> = (0..full.len()).map(|i| &full[i..=i]).collect();
        assert_eq!(lines_of(&single), want);
    }

    #[test]
    fn an_event_too_long_is_refused() {
        let body = body(vec![Bytes::from("x".repeat(1 << 20)); 10]);
        let error = Frames::<_, AnyJson>::new(body).next().now_or_never().unwrap().unwrap_err();
        let WatchError::InvalidData(failure) = error else { panic!("{error:?}") };
        assert!(failure.reason.contains("8 MiB"), "{}", failure.reason);
    }

    #[test]
    fn event_types_are_distinguished() {
        let of = |text: &str| AnyJson::event(Bytes::copy_from_slice(text.as_bytes()));
        assert!(matches!(
            of(r#"{"type":"ADDED","object":{"metadata":{"resourceVersion":"1"}}}"#),
            Ok(Event::Put { version, .. }) if version == "1"
        ));
        assert!(matches!(
            of(r#"{"type":"DELETED","object":{"metadata":{"resourceVersion":"2"}}}"#),
            Ok(Event::Gone { version, .. }) if version == "2"
        ));
        assert!(matches!(
            of(r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"3"}}}"#),
            Ok(Event::Bookmark { initial_end: false, .. })
        ));
        assert!(matches!(
            of(
                r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"3","annotations":{"k8s.io/initial-events-end":"true"}}}}"#
            ),
            Ok(Event::Bookmark { initial_end: true, .. })
        ));
        assert!(matches!(of(r#"{"type":"ERROR","object":{"code":410}}"#), Ok(Event::Error(_))));
        for text in [
            "",
            "null",
            "{}",
            r#"{"type":"ADDED"}"#,
            r#"{"type":"ADDED","object":{}}"#,
            r#"{"type":"ADDED","object":{"metadata":{}}}"#,
            r#"{"type":"LATER","object":{"metadata":{"resourceVersion":"1"}}}"#,
        ] {
            assert!(of(text).is_err(), "{text}");
        }
    }

    async fn listed(text: &str) -> Result<(Vec<serde_json::Value>, ListEnd), Failure> {
        let body = http_body_util::Full::new(Bytes::copy_from_slice(text.as_bytes()));
        let mut listing = Listing::<_, AnyJson>::new(body);
        let mut objects = Vec::new();
        loop {
            match listing.next().await? {
                Part::Object(object, _) => objects.push(object),
                Part::End(end) => return Ok((objects, end)),
                Part::More => unreachable!("more is read then"),
            }
        }
    }

    #[tokio::test]
    async fn a_list_is_read_when_it_is_complete() {
        let (objects, end) =
            listed(r#"{"metadata":{"resourceVersion":"7"},"items":[{"a":1},{"b":2}]}"#).await.unwrap();
        assert_eq!((objects.len(), end.version.as_str(), end.continuation.as_str()), (2, "7", ""));
        let page =
            r#"{"metadata":{"resourceVersion":"7","continue":"on","remainingItemCount":3},"items":[]}"#;
        assert_eq!(listed(page).await.unwrap().1.continuation, "on");
        assert_eq!(listed(r#"{"metadata":{"resourceVersion":"7"},"items":null}"#).await.unwrap().0.len(), 0);
        for text in
            ["", "{}", r#"{"metadata":{},"items":[]}"#, r#"{"metadata":{"resourceVersion":"7"},"items":["#]
        {
            assert!(listed(text).await.is_err(), "{text}");
        }
        assert!(listed(&"x".repeat(LIST_MAX + 1)).await.unwrap_err().reason.contains("8 MiB"));
    }
}
