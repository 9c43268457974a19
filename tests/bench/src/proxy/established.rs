//! Established connections through the rules.
//!
//! Owns: what a client and a server do with one connection of TCP. In: a socket. Out: requests a second and bytes a second.
//! The first byte that a client sends says which of the two it measures.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

const REQUESTS: u8 = b'r';
const STREAM: u8 = b's';
/// Bytes that are written or read at once.
const PIECE: usize = 256 * 1024;
/// Timeout of a response.
const ANSWER: Duration = Duration::from_secs(10);

/// Answers until the client closes the connection.
pub(super) fn serve(mut connection: TcpStream) -> Result<()> {
    // The listening socket may have a time limit, which this one has inherited.
    connection.set_read_timeout(None)?;
    connection.set_nodelay(true)?;
    let mut kind = [0];
    connection.read_exact(&mut kind)?;
    let mut buffer = vec![0; PIECE];
    let mut received: u64 = 0;
    loop {
        let length = connection.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        received += length as u64;
        if kind == [REQUESTS] {
            connection.write_all(&buffer[..length])?;
        }
    }
    if kind == [STREAM] {
        connection.write_all(&received.to_be_bytes())?;
    }
    Ok(())
}

/// One byte, and one in response, on one connection for `long`: how many a second.
pub(super) fn requests(to: SocketAddr, long: Duration) -> Result<f64> {
    let mut connection = open(to, REQUESTS)?;
    let (started, mut answered, mut byte) = (Instant::now(), 0_u32, [0]);
    while started.elapsed() < long {
        connection.write_all(&byte)?;
        connection.read_exact(&mut byte)?;
        answered += 1;
    }
    Ok(f64::from(answered) / started.elapsed().as_secs_f64())
}

/// As much as one connection takes for `long`: bytes a second, until the server has all.
pub(super) fn stream(to: SocketAddr, long: Duration) -> Result<f64> {
    let mut connection = open(to, STREAM)?;
    let (started, mut sent, piece) = (Instant::now(), 0_u64, vec![0; PIECE]);
    while started.elapsed() < long {
        connection.write_all(&piece)?;
        sent += piece.len() as u64;
    }
    connection.shutdown(Shutdown::Write)?;
    let mut received = [0; 8];
    connection.read_exact(&mut received).context("the server did not answer how much it has received")?;
    let took = started.elapsed();
    let received = u64::from_be_bytes(received);
    ensure!(received == sent, "{to}: {sent} bytes were sent, and {received} received");
    Ok(received as f64 / took.as_secs_f64())
}

fn open(to: SocketAddr, kind: u8) -> Result<TcpStream> {
    let mut connection = TcpStream::connect(to).with_context(|| format!("cannot connect to {to}"))?;
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(ANSWER))?;
    connection.set_write_timeout(Some(ANSWER))?;
    connection.write_all(&[kind])?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    #[test]
    fn a_server_answers_requests_and_counts_a_stream() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            for _ in 0..2 {
                serve(listener.accept().unwrap().0).unwrap();
            }
        });
        let long = Duration::from_millis(20);
        assert!(requests(at, long).unwrap() > 0.0);
        assert!(stream(at, long).unwrap() > 0.0);
        server.join().unwrap();
    }
}
