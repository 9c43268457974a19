//! The file that keeps session affinity over a restart.
//!
//! Owns: [`AffinityFile`] and its format: JSON with times of the wall clock. In: what is remembered. Out: the same, in the
//! next process. The file is only a help: what cannot be read or written is reported, and affinity begins anew.

use std::{
    fs,
    io::{self, Read as _},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use keelson_client::ServiceName;
use keelson_proxy::model::{Endpoint, Family, PortName, Protocol};
use serde::{Deserialize, Serialize};

use crate::affinity::{Affinity, CAPACITY, Entry};

/// Of the format. A file of another version is ignored.
const VERSION: u32 = 1;

/// A full file of both families has about half of this.
const MAX_BYTES: u64 = 64 << 20;

/// The longest timeout that the API permits. Bounds what a step of the clock adds.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Entries by service port, of each family.
pub(crate) type Entries = [Vec<(PortName, Vec<Entry>)>; 2];

#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("cannot read {}: {error}", .path.display())]
    Read { path: PathBuf, error: io::Error },
    #[error("cannot write {}: {error}", .path.display())]
    Write { path: PathBuf, error: io::Error },
    #[error("{} is not a file of session affinity: {error}", .path.display())]
    Format { path: PathBuf, error: serde_json::Error },
    #[error("{} has version {version}, this program has {VERSION}", .path.display())]
    Version { path: PathBuf, version: u32 },
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    version: u32,
    #[serde(default)]
    ports: Vec<PortRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
struct PortRecord {
    namespace: String,
    service: String,
    port: String,
    protocol: String,
    /// Client, endpoint, and when it is forgotten (seconds since 1970).
    clients: Vec<(IpAddr, SocketAddr, u64)>,
}

#[derive(Debug)]
pub(crate) struct AffinityFile {
    path: PathBuf,
    /// Held while the file is written: the last error.
    failure: Mutex<Option<String>>,
}

impl AffinityFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, failure: Mutex::default() }
    }

    fn failure(&self) -> MutexGuard<'_, Option<String>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> String {
        match self.failure().as_deref() {
            None => self.path.display().to_string(),
            Some(failure) => format!("failing: {failure}"),
        }
    }

    /// What the last process remembered.
    pub(crate) fn load(&self) -> [Affinity; 2] {
        match read(&self.path) {
            Ok(document) => restore(&document, SystemTime::now(), Instant::now()),
            Err(FileError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                Default::default()
            }
            Err(error) => {
                tracing::warn!(%error, "session affinity of the last process is lost");
                Default::default()
            }
        }
    }

    /// Writes what `entries` returns. Errors are logged when they begin.
    pub(crate) fn save(&self, entries: impl FnOnce(Instant) -> Entries) {
        let mut failure = self.failure();
        let document = record(entries(Instant::now()), SystemTime::now());
        match write(&self.path, &document) {
            Ok(()) => *failure = None,
            Err(error) => {
                if failure.is_none() {
                    tracing::warn!(%error, "session affinity will not be kept over a restart");
                }
                *failure = Some(error.to_string());
            }
        }
    }
}

fn read(path: &Path) -> Result<Document, FileError> {
    let unread = |error| FileError::Read { path: path.to_owned(), error };
    let mut text = Vec::new();
    fs::File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut text)).map_err(unread)?;
    let document: Document =
        serde_json::from_slice(&text).map_err(|error| FileError::Format { path: path.to_owned(), error })?;
    match document.version {
        VERSION => Ok(document),
        version => Err(FileError::Version { path: path.to_owned(), version }),
    }
}

/// A reader finds the old file or the new one.
fn write(path: &Path, document: &Document) -> Result<(), FileError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let write = || -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&beside, serde_json::to_vec(document)?)?;
        fs::rename(&beside, path)
    };
    write().map_err(|error| FileError::Write { path: path.to_owned(), error })
}

fn record(entries: Entries, now: SystemTime) -> Document {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let client = |(client, endpoint, rest): Entry| {
        (client, SocketAddr::new(endpoint.ip, endpoint.port), (now + rest).as_secs())
    };
    let port = |(name, clients): (PortName, Vec<Entry>)| PortRecord {
        namespace: name.service.namespace().to_owned(),
        service: name.service.name().to_owned(),
        port: name.port.to_string(),
        protocol: name.protocol.to_string(),
        clients: clients.into_iter().map(client).collect(),
    };
    let ports = entries.into_iter().flatten().filter(|(_, clients)| !clients.is_empty()).map(port).collect();
    Document { version: VERSION, ports }
}

fn restore(document: &Document, now: SystemTime, instant: Instant) -> [Affinity; 2] {
    let mut affinity = <[Affinity; 2]>::default();
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    for record in &document.ports {
        let protocol =
            [Protocol::Tcp, Protocol::Udp].into_iter().find(|it| it.to_string() == record.protocol);
        let Some(protocol) = protocol else { continue };
        let service = ServiceName::new(&record.namespace, &record.service);
        let name = PortName { service, port: record.port.as_str().into(), protocol };
        for (client, endpoint, until) in record.clients.iter().take(CAPACITY) {
            let rest = Duration::from_secs(*until).saturating_sub(now).min(MAX_TIMEOUT);
            if rest.is_zero() || endpoint.port() == 0 {
                continue;
            }
            let endpoint = Endpoint { ip: endpoint.ip(), port: endpoint.port() };
            affinity[Family::of(*client) as usize].remember(&name, *client, endpoint, rest, instant);
        }
    }
    affinity
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(port: &str, protocol: Protocol) -> PortName {
        PortName { service: ServiceName::new("default", "web"), port: port.into(), protocol }
    }

    fn endpoint(ip: &str) -> Endpoint {
        Endpoint { ip: ip.parse().unwrap(), port: 8080 }
    }

    fn client(last: u8) -> IpAddr {
        [198, 51, 100, last].into()
    }

    #[test]
    fn what_is_remembered_is_found_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/affinity.json");
        let file = AffinityFile::new(path.clone());
        assert_eq!(file.load().map(|affinity| affinity.clients()), [0, 0], "there is none yet");
        let (http, dns) = (name("http", Protocol::Tcp), name("dns", Protocol::Udp));
        let (first, second) = (endpoint("10.244.1.1"), endpoint("fd00::1"));
        let now = Instant::now();
        let mut before = <[Affinity; 2]>::default();
        before[0].remember(&http, client(1), first, Duration::from_secs(600), now);
        before[0].remember(&dns, client(1), first, Duration::from_secs(600), now);
        before[0].remember(&http, client(2), first, Duration::ZERO, now);
        let v6: IpAddr = "2001:db8::7".parse().unwrap();
        before[1].remember(&http, v6, second, Duration::from_secs(600), now);
        let save = || file.save(|now| [0, 1].map(|family: usize| before[family].entries(now)));
        save();
        save();
        let after = AffinityFile::new(path).load();
        assert_eq!(after.each_ref().map(Affinity::clients), [2, 1], "one had no time left");
        let now = Instant::now();
        assert_eq!(after[0].find(&http, client(1), &[first], now), Some(first));
        assert_eq!(after[0].find(&dns, client(1), &[first], now), Some(first));
        assert_eq!(after[1].find(&http, v6, &[second], now), Some(second));
        assert_eq!(after[0].find(&http, client(1), &[first], now + Duration::from_secs(601)), None);
        assert!(file.status().ends_with("affinity.json"), "{}", file.status());
    }

    #[test]
    fn the_time_between_two_processes_counts() {
        let entries = [
            vec![(name("http", Protocol::Tcp), vec![(client(1), endpoint("10.244.1.1"), MAX_TIMEOUT / 2)])],
            vec![],
        ];
        let written = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let document = record(entries, written);
        let at = Instant::now();
        for (later, clients) in [(0, 1), (43_199, 1), (43_200, 0), (90_000, 0)] {
            let restored = restore(&document, written + Duration::from_secs(later), at);
            assert_eq!(restored[0].clients(), clients, "{later} s later");
        }
        // A clock that was set back cannot keep a client for longer than the API permits.
        let restored = restore(&document, UNIX_EPOCH, at);
        let find =
            |at| restored[0].find(&name("http", Protocol::Tcp), client(1), &[endpoint("10.244.1.1")], at);
        assert!(find(at + MAX_TIMEOUT / 2).is_some());
        assert_eq!(find(at + MAX_TIMEOUT), None);
    }

    #[test]
    fn a_damaged_file_is_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("affinity.json");
        let entries = [
            vec![(name("http", Protocol::Tcp), vec![(client(1), endpoint("10.244.1.1"), MAX_TIMEOUT)])],
            vec![],
        ];
        let whole = serde_json::to_string(&record(entries, SystemTime::now())).unwrap();
        let load = |text: &str| {
            fs::write(&path, text).unwrap();
            AffinityFile::new(path.clone()).load()[0].clients()
        };
        assert_eq!(load(&whole), 1);
        for length in 0..whole.len() {
            assert_eq!(load(&whole[..length]), 0, "{}", &whole[..length]);
        }
        assert_eq!(load(&whole.replace("\"version\":1", "\"version\":2")), 0);
        assert_eq!(load(&whole.replace("TCP", "SCTP")), 0);
        assert_eq!(load(&whole.replace(":8080", ":0")), 0);
        assert_eq!(load(&whole.replace("198.51.100.1", "client")), 0);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let file = AffinityFile::new(folder.path().join("file/affinity.json"));
        file.save(|_| Entries::default());
        assert!(file.status().starts_with("failing: cannot write "), "{}", file.status());
    }
}
