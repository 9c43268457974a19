//! What a list and a watch are made of, whatever their encoding.
//!
//! Owns: [`Event`], the trait [`Encoding`] by which bodies are read, [`Frames`], which cuts the body of a watch into
//! events, and [`Listing`], which takes the body of a list apart as it arrives. In: the bodies of answers. Out:
//! [`Event`]s and objects, one at a time: no body is held whole unless its encoding needs that.

use std::{marker::PhantomData, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use keelson_actor_system::cluster::ApiErrorKind;

use crate::answers::{self, Failure};

/// No event, and no object of a list that is read piece by piece, is longer, in bytes. Each holds one object, and etcd
/// takes none over 1.5 MiB unless it is told to; a length beyond this is a sign of something else than an API server.
pub(crate) const OBJECT_MAX: usize = 8 << 20;

/// A list of which nothing came for so long has stopped.
pub(crate) const LIST_SILENCE: Duration = Duration::from_secs(30);

/// The annotation of the bookmark after the objects that there were.
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

/// What the next bytes of a list are.
#[derive(Debug)]
pub(crate) enum Part<T> {
    /// An object, and its length in bytes.
    Object(T, usize),
    /// There is more to be read before anything can be said.
    More,
    /// The list, or this page of it, was complete.
    End(ListEnd),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ListEnd {
    pub(crate) version: String,
    /// What to ask for the next page with; empty: there is none.
    pub(crate) continuation: String,
}

/// Reads the body of a list.
pub(crate) trait ListReader<T>: Default + Send {
    /// The next part of what is held; what was read is taken away. `ended`: nothing more will come.
    ///
    /// # Errors
    /// When it is no list of such objects, or ended before it was whole.
    fn part(&mut self, held: &mut BytesMut, ended: bool) -> Result<Part<T>, Failure>;
}

pub(crate) trait Encoding: Send {
    type Object: Send;
    type List: ListReader<Self::Object>;

    /// Takes the next whole event off `held`; none when more is needed. `searched` is for the encoding's own use, 0 at
    /// first.
    ///
    /// # Errors
    /// When no event is so long.
    fn cut(held: &mut BytesMut, searched: &mut usize) -> Result<Option<Bytes>, Failure>;

    /// Reads one event.
    ///
    /// # Errors
    /// When it is no event, or its object none of those asked for.
    fn event(frame: Bytes) -> Result<Event<Self::Object>, Failure>;
}

/// The failure of a list of which nothing more comes.
pub(crate) fn silent() -> Failure {
    Failure::new(ApiErrorKind::Timeout, format!("no data of the list was received for {LIST_SILENCE:?}"))
}

/// The failure of an event or object longer than [`OBJECT_MAX`].
pub(crate) fn too_long(what: &str) -> Failure {
    answers::senseless(format!("{what} is longer than {} MiB", OBJECT_MAX >> 20))
}

/// Adds what comes next to `held`; false at the end of the body.
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
            let failure = answers::broken(&err);
            Err(Failure::new(failure.kind, format!("the {what} is incomplete: {}", failure.reason)))
        }
    }
}

/// Why no more events can be read.
#[derive(Debug)]
pub(crate) enum Trouble {
    Broken(Failure),
    Senseless(Failure),
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

    /// The next event, unread, or none at the end of the body. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Trouble> {
        loop {
            let cut = E::cut(&mut self.held, &mut self.searched);
            if let Some(frame) = cut.map_err(Trouble::Senseless)? {
                return Ok(Some(frame));
            }
            // What is left over at the end is half an event, and the watch begins again before it.
            if !fill(&mut self.body, &mut self.held, "watch").await.map_err(Trouble::Broken)? {
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
    /// When the list breaks off, stops, or makes no sense.
    pub(crate) async fn next(&mut self) -> Result<Part<E::Object>, Failure> {
        loop {
            match self.reader.part(&mut self.held, self.ended)? {
                Part::More if self.ended => {
                    return Err(answers::senseless("the list ended before it was complete"));
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
