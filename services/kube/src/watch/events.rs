//! The events of a watch, one line of JSON each.
//!
//! Owns: [`Lines`], which cuts a body into lines, and [`parse`]. In: the body of an answer. Out: [`Event`]s.

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::answers::{self, Failure, Status};

/// No event is longer, in bytes: the API server's own limit for an object is far below.
const LINE_MAX: usize = 8 << 20;

/// The annotation of the bookmark after the objects that there were.
const INITIAL_END: &str = "k8s.io/initial-events-end";

/// Something that happened.
pub(crate) enum Event<T> {
    /// `ADDED` or `MODIFIED`.
    Put { version: String, object: T },
    /// `DELETED`.
    Gone { version: String, object: T },
    /// `BOOKMARK`.
    Bookmark { version: String, initial_end: bool },
    /// `ERROR`.
    Error(Failure),
}

/// The part of any object's metadata that a watch lives by.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Meta {
    pub(crate) resource_version: String,
    annotations: Option<std::collections::BTreeMap<String, String>>,
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

/// Reads one line.
///
/// # Errors
/// When it is no event, or its object none of those asked for.
pub(crate) fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<Event<T>, Failure> {
    let line: Line<'_> = answers::json(line)?;
    let object = line.object.get().as_bytes();
    if line.kind == "ERROR" {
        return Ok(Event::Error(answers::json::<Status>(object)?.failure()));
    }
    let Meta { resource_version: version, annotations } = answers::json::<Any>(object)?.metadata;
    if version.is_empty() {
        return Err(answers::senseless("an event without a resourceVersion"));
    }
    match line.kind {
        "ADDED" | "MODIFIED" => Ok(Event::Put { version, object: answers::json(object)? }),
        "DELETED" => Ok(Event::Gone { version, object: answers::json(object)? }),
        "BOOKMARK" => {
            let initial_end = annotations.is_some_and(|a| a.get(INITIAL_END).is_some_and(|v| v == "true"));
            Ok(Event::Bookmark { version, initial_end })
        }
        _ => Err(answers::senseless("an event of an unknown type")),
    }
}

/// A body, line by line.
pub(crate) struct Lines<B> {
    body: B,
    held: BytesMut,
    searched: usize,
}

impl<B> Lines<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
{
    pub(crate) fn new(body: B) -> Self {
        Self { body, held: BytesMut::new(), searched: 0 }
    }

    /// The next line that is not empty, or none at the end of the body. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            while let Some(at) = self.held[self.searched..].iter().position(|b| *b == b'\n') {
                let line = self.held.split_to(self.searched + at).freeze();
                self.held.advance(1);
                self.searched = 0;
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(line));
                }
            }
            self.searched = self.held.len();
            if self.held.len() > LINE_MAX {
                return Err(answers::senseless(format!("an event is longer than {} MiB", LINE_MAX >> 20)));
            }
            match self.body.frame().await {
                // What is left over is half an event, and the watch begins again before it.
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.held.extend_from_slice(&data);
                    }
                }
                Some(Err(err)) => {
                    let failure = answers::broken(&err);
                    return Err(Failure::new(
                        failure.kind,
                        format!("the watch broke off: {}", failure.reason),
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, convert::Infallible};

    use futures_util::{FutureExt as _, stream};
    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;

    fn lines_of(chunks: &[&str]) -> Vec<String> {
        let chunks: VecDeque<_> = chunks.iter().map(|c| Bytes::copy_from_slice(c.as_bytes())).collect();
        let body =
            StreamBody::new(stream::iter(chunks.into_iter().map(|c| Ok::<_, Infallible>(Frame::data(c)))));
        let mut lines = Lines::new(body);
        let mut out = Vec::new();
        while let Some(line) = lines.next().now_or_never().unwrap().unwrap() {
            out.push(String::from_utf8(line.to_vec()).unwrap());
        }
        out
    }

    #[test]
    fn a_body_falls_into_lines_however_it_is_cut() {
        let whole = "{\"a\":1}\n\n{\"b\":2}\r\n{\"half";
        let want = vec!["{\"a\":1}".to_owned(), "{\"b\":2}\r".to_owned()];
        assert_eq!(lines_of(&[whole]), want);
        for at in 0..whole.len() {
            assert_eq!(lines_of(&[&whole[..at], &whole[at..]]), want, "cut at {at}");
        }
        let single: Vec<_> = (0..whole.len()).map(|i| &whole[i..=i]).collect();
        assert_eq!(lines_of(&single), want);
    }

    #[test]
    fn an_event_too_long_is_refused() {
        let piece = "x".repeat(1 << 20);
        let chunks: Vec<_> = std::iter::repeat_n(Bytes::from(piece), 10).collect();
        let body =
            StreamBody::new(stream::iter(chunks.into_iter().map(|c| Ok::<_, Infallible>(Frame::data(c)))));
        let failure = Lines::new(body).next().now_or_never().unwrap().unwrap_err();
        assert!(failure.reason.contains("8 MiB"), "{}", failure.reason);
    }

    #[test]
    fn events_are_told_apart() {
        type Any = serde_json::Value;
        let of = |text: &str| parse::<Any>(text.as_bytes());
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
}
