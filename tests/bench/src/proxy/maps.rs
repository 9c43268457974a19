//! When the maps of the backend ebpf change, observed from outside.
//!
//! Owns: [`Maps`], [`Flows`], [`has_programs`]. In: the folder of their pins. Out: where the endpoints of a frontend are, which a change of them moves. Two look-ups cost a
//! few microseconds; a request to the proxy would cost more than the change.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, net::IpAddr};

use anyhow::{Context as _, Result};
use aya::maps::{HashMap, Map, MapData, MapError};
use tokio::task::JoinHandle;

const TCP: u8 = 6;
/// Of programs.
const HOOKS: usize = 9;
const BETWEEN: Duration = Duration::from_micros(200);

pub(super) struct Maps {
    frontends: HashMap<MapData, [u8; 20], [u8; 8]>,
    sets: HashMap<MapData, [u8; 8], [u8; 16]>,
}

impl Maps {
    /// `pins`: the folder of a network namespace, in which one folder has maps of Services.
    pub(super) fn open(pins: &Path) -> Result<Self> {
        let folder =
            folder(pins, "maps-").with_context(|| format!("cannot find maps in {}", pins.display()))?;
        let open = |name| {
            let data = MapData::from_pin(folder.join(name));
            data.with_context(|| format!("cannot open the map {name} in {}", folder.display()))
        };
        Ok(Self {
            frontends: Map::HashMap(open("frontends")?).try_into()?,
            sets: Map::HashMap(open("sets")?).try_into()?,
        })
    }

    /// The value of the set that TCP to an address leads to; `None`: to none.
    fn set(&self, at: SocketAddr) -> Result<Option<[u8; 16]>> {
        let Some(set) = found(self.frontends.get(&key(at), 0))? else { return Ok(None) };
        Ok(found(self.sets.get(&set, 0))?)
    }

    /// Watches an address on a thread of its own: the result is when its set is another one than now; `None`: not within `patience`.
    pub(super) fn watch(
        self: &Arc<Self>,
        at: SocketAddr,
        patience: Duration,
    ) -> Result<JoinHandle<Result<Option<Instant>>>> {
        let (maps, before, begun) = (self.clone(), self.set(at)?, Instant::now());
        Ok(tokio::task::spawn_blocking(move || {
            while begun.elapsed() < patience {
                if maps.set(at)? != before {
                    return Ok(Some(Instant::now()));
                }
                thread::sleep(BETWEEN);
            }
            Ok(None)
        }))
    }
}

/// What direct return remembers. Each map of it has elements of one size.
pub(super) struct Flows([HashMap<MapData, [u8; 44], [u8; 32]>; 2]);

impl Flows {
    /// `None`: direct return is off.
    pub(super) fn open(pins: &Path) -> Result<Option<Self>> {
        let Ok(folder) = folder(pins, "direct-maps-") else { return Ok(None) };
        let open = |name| {
            let data = MapData::from_pin(folder.join(name));
            let data = data.with_context(|| format!("cannot open the map {name} in {}", folder.display()))?;
            anyhow::Ok(Map::HashMap(data).try_into()?)
        };
        Ok(Some(Self([open("direct_flows")?, open("direct_replies")?])))
    }

    /// As `conntrack -F` does it with those of conntrack.
    pub(super) fn forget(&mut self) -> Result<()> {
        for map in &mut self.0 {
            let keys: Vec<[u8; 44]> =
                map.keys().filter_map(|key| found(key).transpose()).collect::<Result<_, _>>()?;
            for key in keys {
                found(map.remove(&key))?;
            }
        }
        Ok(())
    }
}

/// Whether the programs of the socket level are attached: they are once the maps are filled.
pub(super) fn has_programs(pins: &Path) -> bool {
    let links = folder(pins, "links-").and_then(|links| Ok(fs::read_dir(links)?.count()));
    links.is_ok_and(|links| links >= HOOKS)
}

fn folder(pins: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(pins)?.collect::<Result<Vec<_>, _>>()?;
    let found =
        entries.iter().find(|entry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()));
    Ok(found.with_context(|| format!("no folder {prefix}*"))?.path())
}

/// Address (IPv4 is mapped), port, protocol and scope.
fn key(at: SocketAddr) -> [u8; 20] {
    let ip: Ipv6Addr = match at.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let parts = ip.octets().into_iter().chain(at.port().to_be_bytes()).chain([TCP, 0]);
    let mut key = [0; 20];
    key.iter_mut().zip(parts).for_each(|(byte, part)| *byte = part);
    key
}

fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_programs() {
        let key = key("10.96.0.10:80".parse().unwrap());
        assert_eq!(key, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 96, 0, 10, 0, 80, 6, 0]);
    }
}
