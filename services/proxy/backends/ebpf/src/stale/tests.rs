//! Sweeps through network namespaces of the test's own.

use std::{net::UdpSocket, path::PathBuf, sync::mpsc};

use nix::unistd::{getpid, gettid};

use super::*;
use crate::testing::in_namespace;

/// A connected socket and the path of its namespace, while `during` runs.
fn with_socket(during: impl FnOnce(&UdpSocket, PathBuf) + Send) {
    let (told, found) = mpsc::channel();
    let (done, ends) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            in_namespace(move || {
                let server = UdpSocket::bind("127.0.0.1:0").unwrap();
                let client = UdpSocket::bind("127.0.0.1:0").unwrap();
                client.connect(server.local_addr().unwrap()).unwrap();
                let path = format!("/proc/{}/task/{}/ns/net", getpid(), gettid());
                told.send((client, PathBuf::from(path))).unwrap();
                let _ = ends.recv();
            });
        });
        let (client, path) = found.recv().unwrap();
        scope.spawn(move || in_namespace(|| during(&client, path))).join().unwrap();
        drop(done);
    });
}

fn stale(socket: &UdpSocket) -> Stale {
    let peer = socket.peer_addr().unwrap();
    let remote = Remote { address: peer.ip().into(), port: peer.port() };
    Stale { socket: socket2::SockRef::from(socket).cookie().unwrap(), remote }
}

#[test]
fn a_namespace_that_has_just_ended_hides_no_other() {
    let file = tempfile::NamedTempFile::new().unwrap();
    with_socket(|socket, path| {
        let gone = || PathBuf::from("/proc/4294967295/ns/net");
        let namespaces = vec![
            NetNamespace::at(vec![gone()]),
            NetNamespace::at(vec![file.path().to_owned()]),
            // Of two processes in it, one has ended.
            NetNamespace::at(vec![gone(), path]),
            NetNamespace::at(vec![gone()]),
        ];
        let swept = sweep(&[stale(socket)], namespaces);
        assert_eq!(swept, Swept { destroyed: 1, failure: None, needs_retry: false });
    });
}

#[test]
fn a_failure_is_retried_unless_it_lasts() {
    for (kind, needs_retry, text) in [
        (io::ErrorKind::PermissionDenied, false, "here: permission denied; it needs CAP_SYS_ADMIN"),
        (io::ErrorKind::Unsupported, false, "here: unsupported"),
        (io::ErrorKind::OutOfMemory, true, "here: out of memory"),
    ] {
        let mut swept = Swept::default();
        swept.fail("here", &kind.into());
        let expected = Swept { destroyed: 0, failure: Some(text.to_owned()), needs_retry };
        assert_eq!(swept, expected);
        let sweeper = Sweeper::default();
        sweeper.record(swept);
        assert_eq!((sweeper.take_retry(), sweeper.take_retry()), (needs_retry, false), "{text}");
        assert_eq!(sweeper.status().failure.as_deref(), Some(text));
    }
}
