//! Lists and events as protobuf: an event follows its length, and a list is read object by object.
//!
//! Owns: [`Protobuf`], and [`ApiObject`], which gives it the name of a kind. In: bodies. Out: objects.
//!
//! An event is four bytes of length, big-endian, and a `meta/v1.WatchEvent` whose object is in an envelope
//! (`k8s\0` and a `runtime.Unknown`). A list is one envelope, in which each object is a separate field.

use std::marker::PhantomData;

use bytes::{Buf as _, Bytes, BytesMut};
use keelson_proto::kubernetes::ObjectMeta;
use prost::Message;

use super::events::{Encoding, Event, INITIAL_END, ListEnd, ListReader, OBJECT_MAX, Part, too_long};
use crate::{
    answers::{self, Failure, Status},
    protobuf::{ListMeta, MAGIC, TypeMeta, WatchEvent, open_shared, status},
};

/// Bytes of an event's length.
const LENGTH: usize = 4;

/// An object of the API, or the part of it that is read.
pub(crate) trait ApiObject: Message + Default + 'static {
    /// The value of `kind`.
    const KIND: &'static str;

    fn metadata(&mut self) -> &mut Option<ObjectMeta>;

    /// Drops unused fields, right after decoding.
    fn reduce(&mut self);
}

/// The encoding of objects of this kind.
pub(crate) struct Protobuf<T>(PhantomData<fn() -> T>);

/// Decodes an object of a list or an event: its resourceVersion, and the reduced object.
fn object<T: ApiObject>(bytes: impl bytes::Buf) -> Result<(String, T), Failure> {
    let mut object = T::decode(bytes)
        .map_err(|err| answers::invalid_answer(format!("cannot decode a {} ({err})", T::KIND)))?;
    let meta = object.metadata().get_or_insert_default();
    if meta.name.is_empty() || meta.resource_version.is_empty() {
        return Err(answers::invalid_answer(format!("a {} without a name or a resourceVersion", T::KIND)));
    }
    let version = std::mem::take(&mut meta.resource_version);
    object.reduce();
    Ok((version, object))
}

impl<T: ApiObject> Encoding for Protobuf<T> {
    type Object = T;
    type List = List<T>;

    fn split_frame(held: &mut BytesMut, _searched: &mut usize) -> Result<Option<Bytes>, Failure> {
        let Some(length) = held.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
        if length > OBJECT_MAX {
            return Err(too_long("an event"));
        }
        if held.len() < LENGTH + length {
            return Ok(None);
        }
        held.advance(LENGTH);
        Ok(Some(held.split_to(length).freeze()))
    }

    fn event(frame: Bytes) -> Result<Event<T>, Failure> {
        let event = WatchEvent::decode(frame)
            .map_err(|err| answers::invalid_answer(format!("cannot decode an event ({err})")))?;
        let bytes = event.object.unwrap_or_default().raw;
        if event.kind == "ERROR" {
            let status =
                status(&bytes).ok_or_else(|| answers::invalid_answer("an error without a Status"))?;
            return Ok(Event::Error(Status::from(status).failure()));
        }
        let envelope = open_shared(&bytes).filter(|envelope| is_a(envelope.type_meta.as_ref(), T::KIND, ""));
        let Some(envelope) = envelope else {
            return Err(answers::invalid_answer(format!("an event of something else than a {}", T::KIND)));
        };
        match event.kind.as_str() {
            "ADDED" | "MODIFIED" => {
                let (version, object) = object(envelope.raw)?;
                Ok(Event::Put { version, object })
            }
            "DELETED" => {
                let (version, object) = object(envelope.raw)?;
                Ok(Event::Gone { version, object })
            }
            "BOOKMARK" => bookmark::<T>(envelope.raw),
            _ => Err(answers::invalid_answer("an event of an unknown type")),
        }
    }
}

/// A bookmark is an object with only a version, and perhaps an annotation.
fn bookmark<T: ApiObject>(bytes: Bytes) -> Result<Event<T>, Failure> {
    let mut object = T::decode(bytes)
        .map_err(|err| answers::invalid_answer(format!("cannot decode a bookmark ({err})")))?;
    let meta = object.metadata().take().unwrap_or_default();
    if meta.resource_version.is_empty() {
        return Err(answers::invalid_answer("a bookmark without a resourceVersion"));
    }
    let initial_end = meta.annotations.get(INITIAL_END).is_some_and(|value| value == "true");
    Ok(Event::Bookmark { version: meta.resource_version, initial_end })
}

fn is_a(types: Option<&TypeMeta>, kind: &str, suffix: &str) -> bool {
    types.is_some_and(|types| types.kind.strip_suffix(suffix) == Some(kind))
}

#[derive(Debug, Default, PartialEq, Eq)]
enum At {
    #[default]
    Start,
    /// In the envelope, before the list.
    Envelope,
    /// In the list, with the remaining number of bytes.
    List(u64),
    /// In the envelope, after the list.
    End,
}

/// Reads a list in pieces: holds at most one object, and the data that arrived with it.
pub(crate) struct List<T> {
    at: At,
    types: Option<TypeMeta>,
    end: ListEnd,
    object: PhantomData<fn() -> T>,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { at: At::Start, types: None, end: ListEnd::default(), object: PhantomData }
    }
}

impl<T: ApiObject> ListReader<T> for List<T> {
    fn part(&mut self, held: &mut BytesMut, ended: bool) -> Result<Part<T>, Failure> {
        loop {
            match self.at {
                At::Start => {
                    let Some(start) = held.get(..MAGIC.len()) else { return Ok(Part::More) };
                    if start != MAGIC {
                        return Err(answers::invalid_answer("it is not protobuf"));
                    }
                    held.advance(MAGIC.len());
                    self.at = At::Envelope;
                }
                At::List(0) => self.at = At::End,
                At::End if ended && held.is_empty() => return self.end(),
                At::List(left) => {
                    let Some(field) = field(held, Some(left))? else { return Ok(Part::More) };
                    self.at = At::List(left - field.size as u64);
                    let bytes = field.take(held);
                    match field.number {
                        1 => self.end = list_meta(bytes)?,
                        2 => return Ok(Part::Object(object(bytes)?.1, field.size)),
                        _ => {}
                    }
                }
                At::Envelope | At::End => {
                    if !self.envelope(held)? {
                        return Ok(Part::More);
                    }
                }
            }
        }
    }
}

impl<T: ApiObject> List<T> {
    /// One field of the envelope; false if more bytes are needed.
    fn envelope(&mut self, held: &mut BytesMut) -> Result<bool, Failure> {
        let Some(head) = head(held)? else { return Ok(false) };
        // The list itself, which need not be complete.
        if head.number == 2 && head.delimited {
            if self.at == At::End || !is_a(self.types.as_ref(), T::KIND, "List") {
                return Err(answers::invalid_answer(format!("it is not of kind {}List", T::KIND)));
            }
            held.advance(head.size);
            self.at = At::List(head.payload);
            return Ok(true);
        }
        let Some(field) = field(held, None)? else { return Ok(false) };
        let bytes = field.take(held);
        if field.number == 1 {
            let types = TypeMeta::decode(bytes);
            self.types = Some(types.map_err(|err| answers::invalid_answer(format!("its type ({err})")))?);
        }
        Ok(true)
    }

    fn end(&mut self) -> Result<Part<T>, Failure> {
        if self.end.version.is_empty() {
            return Err(answers::invalid_answer("the list has no resourceVersion"));
        }
        Ok(Part::End(std::mem::take(&mut self.end)))
    }
}

fn list_meta(bytes: Bytes) -> Result<ListEnd, Failure> {
    let meta = ListMeta::decode(bytes);
    let meta = meta.map_err(|err| answers::invalid_answer(format!("the list's metadata ({err})")))?;
    Ok(ListEnd { version: meta.resource_version, continuation: meta.continuation })
}

struct Head {
    number: u64,
    /// Bytes of tag and length, or of a complete integer field.
    size: usize,
    payload: u64,
    /// The payload is bytes, a string or a message.
    delimited: bool,
}

/// A complete field.
struct Field {
    number: u64,
    head: usize,
    size: usize,
}

impl Field {
    /// Takes the field off `held`, and returns its payload.
    fn take(&self, held: &mut BytesMut) -> Bytes {
        let mut bytes = held.split_to(self.size).freeze();
        bytes.advance(self.head);
        bytes
    }
}

/// The complete field that begins here. `left`: bytes left of the message that it belongs to.
fn field(held: &[u8], left: Option<u64>) -> Result<Option<Field>, Failure> {
    let Some(head) = head(held)? else {
        return Ok(None);
    };
    let size = (head.size as u64).saturating_add(head.payload);
    if left.is_some_and(|left| size > left) {
        return Err(answers::invalid_answer("a field is longer than its message"));
    }
    let size = usize::try_from(size).ok().filter(|size| *size <= OBJECT_MAX);
    let size = size.ok_or_else(|| too_long("an object"))?;
    Ok((held.len() >= size).then_some(Field { number: head.number, head: head.size, size }))
}

fn head(held: &[u8]) -> Result<Option<Head>, Failure> {
    let Some((tag, size)) = varint(held)? else { return Ok(None) };
    let (number, rest) = (tag >> 3, &held[size..]);
    Ok(Some(match tag & 7 {
        0 => match varint(rest)? {
            Some((_, more)) => Head { number, size: size + more, payload: 0, delimited: false },
            None => return Ok(None),
        },
        1 => Head { number, size, payload: 8, delimited: false },
        2 => match varint(rest)? {
            Some((payload, more)) => Head { number, size: size + more, payload, delimited: true },
            None => return Ok(None),
        },
        5 => Head { number, size, payload: 4, delimited: false },
        _ => return Err(answers::invalid_answer("a field of no known type")),
    }))
}

/// A varint of up to ten bytes, and its length; `None` if it is incomplete.
fn varint(held: &[u8]) -> Result<Option<(u64, usize)>, Failure> {
    let mut value = 0_u64;
    for (at, byte) in held.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Ok(Some((value, at + 1)));
        }
    }
    if held.len() < 10 { Ok(None) } else { Err(answers::invalid_answer("a number longer than ten bytes")) }
}

#[cfg(test)]
mod tests;
