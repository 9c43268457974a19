//! Lists and watches in any encoding.
//!
//! Owns: [`Event`], the trait [`Encoding`] for reading bodies, [`Frames`], which splits the body of a watch into
//! events, and [`Listing`], which splits the body of a list as it arrives. In: the bodies of answers. Out:
//! [`Event`]s and objects, one at a time: no body is held as a whole unless its encoding requires it.

use std::{marker::PhantomData, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use keelson_actor_system::cluster::ApiErrorKind;

use crate::answers::{self, Failure};

/// Maximum size in bytes of an event, and of an object of a list that is read in pieces. Each holds one object, and
/// etcd limits them to 1.5 MiB by default; a greater length means that the peer is not an API server.
pub(crate) const OBJECT_MAX: usize = 8 << 20;

/// A list without data for this long has stopped.
pub(crate) const LIST_SILENCE: Duration = Duration::from_secs(30);

/// The annotation of the bookmark after the initial objects.
pub(crate) const INITIAL_END: &str = "k8s.io/initial-events-end";

#[derive(Debug)]
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

/// The next part of a list.
#[derive(Debug)]
pub(crate) enum Part<T> {
    /// An object, and its length in bytes.
    Object(T, usize),
    /// More bytes are needed.
    More,
    /// The list, or this page of it, is complete.
    End(ListEnd),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ListEnd {
    pub(crate) version: String,
    /// The token for the next page; empty: there is none.
    pub(crate) continuation: String,
}

/// Reads the body of a list.
pub(crate) trait ListReader<T>: Default + Send {
    /// Takes the next part off `held`. `ended`: the body is complete.
    ///
    /// # Errors
    /// It is not a list of such objects, or ended early.
    fn part(&mut self, held: &mut BytesMut, ended: bool) -> Result<Part<T>, Failure>;
}

pub(crate) trait Encoding: Send {
    type Object: Send;
    type List: ListReader<Self::Object>;

    /// Takes the next complete event off `held`; `None` if more bytes are needed. `searched` is private to the
    /// encoding, 0 at first.
    ///
    /// # Errors
    /// The event is too long.
    fn split_frame(held: &mut BytesMut, searched: &mut usize) -> Result<Option<Bytes>, Failure>;

    /// Decodes one event.
    ///
    /// # Errors
    /// It is not an event, or its object is of another kind.
    fn event(frame: Bytes) -> Result<Event<Self::Object>, Failure>;
}

/// The failure of a list that has stopped.
pub(crate) fn silent() -> Failure {
    Failure::new(ApiErrorKind::Timeout, format!("no data of the list was received for {LIST_SILENCE:?}"))
}

/// The failure of an event or object longer than [`OBJECT_MAX`].
pub(crate) fn too_long(what: &str) -> Failure {
    answers::invalid_answer(format!("{what} is longer than {} MiB", OBJECT_MAX >> 20))
}

/// Adds the next data to `held`; false at the end of the body.
async fn fill<B>(body: &mut B, held: &mut BytesMut, what: &str) -> Result<bool, Failure>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
{
    match body.frame().await {
        None => Ok(false),
        Some(Ok(frame)) => {
            if let Ok(data) = frame.into_data() {
                held.extend_from_slice(&data);
            }
            Ok(true)
        }
        Some(Err(err)) => {
            let failure = answers::connection_failure(&err);
            Err(Failure::new(failure.kind, format!("the {what} is incomplete: {}", failure.reason)))
        }
    }
}

#[derive(Debug)]
pub(crate) enum WatchError {
    Broken(Failure),
    InvalidData(Failure),
}

/// The body of a watch, event by event.
pub(crate) struct Frames<B, E> {
    body: B,
    held: BytesMut,
    searched: usize,
    encoding: PhantomData<fn() -> E>,
}

impl<B, E> Frames<B, E>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
    E: Encoding,
{
    pub(crate) fn new(body: B) -> Self {
        Self { body, held: BytesMut::new(), searched: 0, encoding: PhantomData }
    }

    /// The next event, not decoded; `None` at the end of the body. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, WatchError> {
        loop {
            let cut = E::split_frame(&mut self.held, &mut self.searched);
            if let Some(frame) = cut.map_err(WatchError::InvalidData)? {
                return Ok(Some(frame));
            }
            // Bytes left at the end are a partial event, and the watch restarts before it.
            if !fill(&mut self.body, &mut self.held, "watch").await.map_err(WatchError::Broken)? {
                return Ok(None);
            }
        }
    }
}

/// The body of a list, object by object.
pub(crate) struct Listing<B, E: Encoding> {
    body: B,
    held: BytesMut,
    reader: E::List,
    ended: bool,
}

impl<B, E> Listing<B, E>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
    E: Encoding,
{
    pub(crate) fn new(body: B) -> Self {
        Self { body, held: BytesMut::new(), reader: E::List::default(), ended: false }
    }

    /// The next object, or the end; never [`Part::More`].
    ///
    /// # Errors
    /// The list breaks off, stops, or is invalid.
    pub(crate) async fn next(&mut self) -> Result<Part<E::Object>, Failure> {
        loop {
            match self.reader.part(&mut self.held, self.ended)? {
                Part::More if self.ended => {
                    return Err(answers::invalid_answer("the list ended before it was complete"));
                }
                Part::More => {}
                part => return Ok(part),
            }
            let filled = tokio::time::timeout(LIST_SILENCE, fill(&mut self.body, &mut self.held, "list"));
            match filled.await {
                Ok(more) => self.ended = !more?,
                Err(_) => {
                    return Err(silent());
                }
            }
        }
    }
}
