use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures_util::{FutureExt as _, stream};
use http_body::Frame;
use http_body_util::StreamBody;
use keelson_proto::kubernetes::EndpointSlice;

use super::*;
use crate::{
    tests::wire,
    watch::events::{Frames, Listing, WatchError},
};

type Slices = Protobuf<EndpointSlice>;

fn body(chunks: Vec<Bytes>) -> impl http_body::Body<Data = Bytes, Error = Infallible> + Unpin {
    StreamBody::new(stream::iter(chunks.into_iter().map(|chunk| Ok(Frame::data(chunk)))))
}

/// Names and version of a list that arrives in these chunks.
async fn read(chunks: Vec<Bytes>) -> Result<(Vec<String>, String), Failure> {
    let mut listing = Listing::<_, Slices>::new(body(chunks));
    let mut names = Vec::new();
    loop {
        match listing.next().await? {
            Part::Object(object, _) => names.push(object.metadata.unwrap().name),
            Part::End(end) => return Ok((names, end.version)),
            Part::More => unreachable!("more is read then"),
        }
    }
}

fn full_list() -> Bytes {
    wire::list("EndpointSlice", "77", &[wire::slice("a", 1), wire::slice("b", 2), wire::slice("c", 3)])
}

#[tokio::test]
async fn a_list_is_read_at_any_chunk_size() {
    let full = full_list();
    let want = (vec!["a".to_owned(), "b".to_owned(), "c".to_owned()], "77".to_owned());
    assert_eq!(read(vec![full.clone()]).await.unwrap(), want);
    for at in 0..full.len() {
        assert_eq!(read(vec![full.slice(..at), full.slice(at..)]).await.unwrap(), want, "cut at {at}");
    }
    let single = (0..full.len()).map(|at| full.slice(at..=at)).collect();
    assert_eq!(read(single).await.unwrap(), want);
    assert_eq!(
        read(vec![wire::list::<EndpointSlice>("EndpointSlice", "5", &[])]).await.unwrap(),
        (vec![], "5".into())
    );
}

#[tokio::test]
async fn a_truncated_list_is_refused() {
    let full = full_list();
    for at in 0..full.len() {
        read(vec![full.slice(..at)]).await.expect_err("half a list");
    }
}

#[tokio::test]
async fn a_list_of_other_objects_is_refused() {
    for (bytes, why) in [
        (Bytes::from_static(b"<html></html>"), "not protobuf"),
        (Bytes::from_static(b"{\"kind\":\"EndpointSliceList\"}"), "not protobuf"),
        (wire::list("Service", "5", &[wire::slice("a", 1)]), "not of kind EndpointSliceList"),
        (wire::enveloped("EndpointSlice", &wire::slice("a", 1)), "not of kind EndpointSliceList"),
        (wire::list("EndpointSlice", "", &[wire::slice("a", 1)]), "no resourceVersion"),
        (wire::list("EndpointSlice", "5", &[EndpointSlice::default()]), "without a name"),
        (wire::list("EndpointSlice", "5", &["no object".to_owned()]), "cannot decode"),
        // The list claims to be longer than any, and so does an object in it.
        ([MAGIC, b"\x0a\x13\x12\x11EndpointSliceList\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x12\xff\xff\xff\xff\x7f"].concat().into(), "8 MiB"),
        ([MAGIC, b"\x0a\x13\x12\x11EndpointSliceList\x12\x05\x12\x7f"].concat().into(), "longer than its \
                                                                                         message"),
        ([MAGIC, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"].concat().into(), "ten bytes"),
        ([MAGIC, b"\x0f"].concat().into(), "no known type"),
    ] {
        let failure = read(vec![bytes]).await.unwrap_err();
        assert!(failure.reason.contains(why), "{why}: {}", failure.reason);
    }
}

/// A wrong byte anywhere leads to a list or to a failure, and to nothing else.
#[tokio::test]
async fn a_list_with_a_changed_byte_does_not_panic() {
    let full = full_list();
    for at in 0..full.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = full.to_vec();
            bytes[at] ^= flip;
            let _ = read(vec![bytes.into()]).await;
        }
    }
}

/// Of 50,000 slices at most one piece and one object are held at a time.
#[tokio::test]
async fn a_huge_list_is_never_held_completely() {
    const SLICES: usize = 50_000;
    const PIECE: usize = 16 << 10;
    let objects: Vec<_> = (0..100).map(|n| wire::slice(&format!("slice-{n}"), n)).collect();
    let full = wire::list("EndpointSlice", "9", &vec![objects.clone(); SLICES / 100].concat());
    let longest = objects.iter().map(|slice| slice.encoded_len()).max().unwrap();
    let pulled = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&pulled);
    let total = full.len();
    let pieces = stream::iter((0..total).step_by(PIECE).map(move |at| {
        let piece = full.slice(at..total.min(at + PIECE));
        count.fetch_add(piece.len(), Ordering::SeqCst);
        Ok::<_, Infallible>(Frame::data(piece))
    }));
    let mut listing = Listing::<_, Slices>::new(StreamBody::new(pieces));
    let (mut seen, mut read) = (0, 0);
    while let Part::Object(_, bytes) = listing.next().await.unwrap() {
        seen += 1;
        read += bytes;
        let held = pulled.load(Ordering::SeqCst) - read;
        assert!(held <= PIECE + longest + 64, "{held} bytes are held after {seen} slices");
    }
    assert_eq!(seen, SLICES);
    assert!(total > 64 * PIECE, "the list is no larger than what may be held: {total}");
}

fn frames_of(chunks: Vec<Bytes>) -> Result<Vec<Bytes>, WatchError> {
    let mut frames = Frames::<_, Slices>::new(body(chunks));
    let mut out = Vec::new();
    while let Some(frame) = frames.next().now_or_never().unwrap()? {
        out.push(frame);
    }
    Ok(out)
}

#[test]
fn a_body_is_split_into_events_at_any_chunk_size() {
    let first = wire::event("ADDED", "EndpointSlice", &wire::slice("a", 1));
    let second = wire::event("BOOKMARK", "EndpointSlice", &wire::bookmark(9, true));
    let full = Bytes::from([&first[..], &second[..], &first[..20]].concat());
    let want = vec![first.slice(LENGTH..), second.slice(LENGTH..)];
    for at in 0..full.len() {
        assert_eq!(frames_of(vec![full.slice(..at), full.slice(at..)]).unwrap(), want, "cut at {at}");
    }
    assert_eq!(frames_of((0..full.len()).map(|at| full.slice(at..=at)).collect()).unwrap(), want);
}

#[test]
fn an_event_too_long_is_refused_by_its_length() {
    for length in [u32::try_from(OBJECT_MAX).unwrap() + 1, u32::MAX] {
        let error = frames_of(vec![Bytes::copy_from_slice(&length.to_be_bytes())]).unwrap_err();
        let WatchError::InvalidData(failure) = error else { panic!("{error:?}") };
        assert!(failure.reason.contains("8 MiB"), "{}", failure.reason);
    }
    assert!(frames_of(vec![Bytes::from_static(b"<html>")]).is_err());
}

fn event(frame: &Bytes) -> Result<Event<EndpointSlice>, Failure> {
    Slices::event(frame.slice(LENGTH..))
}

#[test]
fn event_types_are_distinguished() {
    let slice = wire::slice("a", 4);
    for kind in ["ADDED", "MODIFIED"] {
        let Event::Put { version, object } = event(&wire::event(kind, "EndpointSlice", &slice)).unwrap()
        else {
            panic!("{kind}")
        };
        assert_eq!((version.as_str(), object.endpoints), ("4", slice.endpoints.clone()));
        let meta = object.metadata.unwrap();
        assert_eq!(
            (meta.name.as_str(), meta.namespace.as_str(), meta.resource_version.as_str()),
            ("a", "ns", "")
        );
        assert_eq!(meta.labels.keys().collect::<Vec<_>>(), ["kubernetes.io/service-name"]);
        let kept: Vec<_> = meta.annotations.keys().collect();
        assert_eq!(kept, ["endpoints.kubernetes.io/last-change-trigger-time"]);
    }
    assert!(matches!(
        event(&wire::event("DELETED", "EndpointSlice", &slice)),
        Ok(Event::Gone { version, object }) if version == "4" && object.metadata.as_ref().unwrap().name == "a"
    ));
    for end in [true, false] {
        assert!(matches!(
            event(&wire::event("BOOKMARK", "EndpointSlice", &wire::bookmark(9, end))),
            Ok(Event::Bookmark { version, initial_end }) if version == "9" && initial_end == end
        ));
    }
    let Ok(Event::Error(failure)) = event(&wire::event("ERROR", "Status", &wire::status(410, "Expired")))
    else {
        panic!("an error is one")
    };
    assert_eq!(failure.kind, keelson_actor_system::cluster::ApiErrorKind::Gone);
    assert!(failure.reason.contains("Expired is what it said"), "{}", failure.reason);
}

#[test]
fn events_of_other_objects_are_refused() {
    let of = |frame: Bytes| event(&frame).unwrap_err().reason;
    let slice = wire::slice("a", 4);
    let nameless = EndpointSlice::default();
    for (frame, why) in [
        (wire::framed(b""), "something else than a EndpointSlice"),
        (wire::framed(b"\xff\xff"), "cannot decode"),
        (wire::event("ADDED", "Service", &slice), "something else than a EndpointSlice"),
        (wire::event("LATER", "EndpointSlice", &slice), "unknown type"),
        (wire::event("ADDED", "EndpointSlice", &nameless), "without a name or a resourceVersion"),
        (wire::event("BOOKMARK", "EndpointSlice", &nameless), "without a resourceVersion"),
        (wire::event("ADDED", "EndpointSlice", &"no object".to_owned()), "cannot decode"),
        (wire::event("ERROR", "EndpointSlice", &slice), "without a Status"),
    ] {
        let reason = of(frame);
        assert!(reason.contains(why), "{why}: {reason}");
    }
}
