//! Collection of one part of the bundle.
//!
//! Owns: where a part comes from ([`Source`]), and the limits of time and size. In: a [`Part`]. Out: a [`Collected`],
//! which has the text, or why there is none; nothing here fails as a whole.

use std::{
    ffi::OsString,
    fmt,
    net::SocketAddr,
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
};

/// Size of a part; more is cut off.
const MAX_BYTES: u64 = 4 << 20;
/// Size of what a command writes to standard error.
const MAX_ERROR_BYTES: u64 = 16 << 10;

/// Reads text on a blocking thread.
type Reader = Box<dyn FnOnce() -> Result<String, String> + Send>;

pub(super) enum Source {
    /// A subcommand of this program.
    Own(Vec<OsString>),
    /// A program of the system, found in `PATH`, and its arguments.
    Program(&'static str, Vec<String>),
    /// A document of a debug endpoint.
    Http(SocketAddr, &'static str),
    File(PathBuf),
    /// What is read, and how.
    Facts(&'static str, Reader),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(args) => {
                f.write_str("keelson")?;
                args.iter().try_for_each(|arg| write!(f, " {}", arg.to_string_lossy()))
            }
            Self::Program(program, args) => {
                f.write_str(program)?;
                args.iter().try_for_each(|arg| write!(f, " {arg}"))
            }
            Self::Http(address, path) => write!(f, "GET http://{address}{path}"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Facts(what, _) => f.write_str(what),
        }
    }
}

/// A file of the bundle, before it is collected.
pub(super) struct Part {
    /// Path in the bundle.
    pub(super) file: String,
    pub(super) source: Source,
    pub(super) timeout: Duration,
    /// Keeps what is worth keeping of the text.
    pub(super) keep: fn(&str) -> String,
}

/// A part after its collection.
#[derive(Debug, Default)]
pub(super) struct Collected {
    pub(super) text: String,
    pub(super) took: Duration,
    pub(super) is_truncated: bool,
    pub(super) exit_code: Option<i32>,
    /// Why the part is missing or incomplete; empty if it is complete.
    pub(super) error: String,
}

pub(super) async fn collect(source: Source, timeout: Duration) -> Collected {
    let since = Instant::now();
    let mut collected = match tokio::time::timeout(timeout, read(source)).await {
        Ok(collected) => collected,
        Err(_) => failed(format!("not finished within {} s", timeout.as_secs())),
    };
    collected.took = since.elapsed();
    collected
}

fn failed(error: impl fmt::Display) -> Collected {
    Collected { error: error.to_string(), ..Collected::default() }
}

async fn read(source: Source) -> Collected {
    match source {
        Source::Own(args) => {
            // Also after a new version was installed over this one.
            let mut command = Command::new("/proc/self/exe");
            command.arg0("keelson").args(args);
            run(command).await
        }
        Source::Program(program, args) => {
            let mut command = Command::new(program);
            command.args(args).env("LC_ALL", "C.UTF-8").env("SYSTEMD_PAGER", "");
            run(command).await
        }
        Source::Http(address, path) => get(address, path).await.unwrap_or_else(failed),
        Source::File(path) => match tokio::fs::File::open(path).await {
            Ok(file) => match limited(file, MAX_BYTES).await {
                Ok((text, is_truncated)) => Collected { text, is_truncated, ..Collected::default() },
                Err(error) => failed(error),
            },
            Err(error) => failed(error),
        },
        Source::Facts(_, reader) => match tokio::task::spawn_blocking(reader).await {
            Ok(Ok(text)) => Collected { text, ..Collected::default() },
            Ok(Err(error)) => failed(error),
            Err(error) => failed(error),
        },
    }
}

/// The output of a program, which is killed when it takes too long or writes too much.
async fn run(mut command: Command) -> Collected {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return failed("the program is not installed");
        }
        Err(error) => return failed(error),
    };
    let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return failed("no output");
    };
    // Reading ends at the limit, and the pipe is closed then.
    let (out, err) = tokio::join!(limited(out, MAX_BYTES), limited(err, MAX_ERROR_BYTES));
    let (text, is_truncated) = match out {
        Ok(out) => out,
        Err(error) => return failed(error),
    };
    let said = err.map(|(text, _)| text.trim().replace('\n', "; ")).unwrap_or_default();
    if is_truncated {
        let _ = child.start_kill();
    }
    match child.wait().await {
        Ok(status) => {
            let error = match status.code() {
                Some(0) => String::new(),
                _ if is_truncated => String::new(),
                Some(code) if said.is_empty() => format!("exit code {code}"),
                Some(code) => format!("exit code {code}: {said}"),
                None => format!("ended by a signal: {said}"),
            };
            Collected { text, is_truncated, exit_code: status.code(), error, took: Duration::ZERO }
        }
        Err(error) => failed(error),
    }
}

/// HTTP/1.0, so that the answer ends with the connection.
async fn get(address: SocketAddr, path: &str) -> Result<Collected, String> {
    let mut stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: */*\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
    let (answer, is_truncated) = limited(stream, MAX_BYTES).await.map_err(|error| error.to_string())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("the answer is not HTTP")?;
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    let error = if status == "200" { String::new() } else { format!("status {status}") };
    Ok(Collected { text: body.to_owned(), is_truncated, error, ..Collected::default() })
}

/// Whole lines of up to `max` bytes as text, and whether there was more. A secret that is cut in two is not recognised, so a
/// line that is cut is left out.
async fn limited(from: impl AsyncRead + Unpin, max: u64) -> std::io::Result<(String, bool)> {
    let mut bytes = Vec::new();
    from.take(max + 1).read_to_end(&mut bytes).await?;
    let is_truncated = bytes.len() as u64 > max;
    if is_truncated {
        let end = bytes[..max as usize].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(end);
    }
    Ok((String::from_utf8_lossy(&bytes).into_owned(), is_truncated))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(15);

    fn shell(script: &str) -> Source {
        Source::Program("sh", vec!["-c".into(), script.into()])
    }

    #[tokio::test]
    async fn output_exit_code_and_error_are_kept() {
        let collected = collect(shell("echo out; echo why >&2; exit 3"), TIMEOUT).await;
        assert_eq!((collected.text.as_str(), collected.exit_code), ("out\n", Some(3)));
        assert_eq!(collected.error, "exit code 3: why");
        let missing = collect(Source::Program("keelson-no-such-program", vec![]), TIMEOUT).await;
        assert_eq!(missing.error, "the program is not installed");
        let missing = collect(Source::File("/no/such/file".into()), TIMEOUT).await;
        assert!(missing.error.starts_with("No such file"), "{}", missing.error);
    }

    #[tokio::test]
    async fn a_program_without_end_is_cut_off() {
        let collected = collect(shell("while :; do echo 0123456789; done"), TIMEOUT).await;
        let lines = usize::try_from(MAX_BYTES).unwrap() / 11;
        assert_eq!(collected.text.lines().filter(|line| *line == "0123456789").count(), lines);
        assert_eq!(collected.text.len(), lines * 11, "no line is cut");
        assert!(collected.is_truncated && collected.error.is_empty(), "{}", collected.error);
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_does_not_answer_is_given_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let collected = collect(Source::Http(listener.local_addr().unwrap(), "/metrics"), TIMEOUT).await;
        assert_eq!(collected.error, "not finished within 15 s");
    }
}
