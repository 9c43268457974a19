//! Reads both levels without the lock of the backend.
//!
//! Owns: [`EbpfObserver`]. In: the folders of the maps, the observer of the backend nft. Out: what is in the kernel, for the
//! checks.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use keelson_proxy::{
    backend::{AffinityClients, BackendError, Observer, Snapshots},
    model::Family,
};

use crate::{
    elements::family_of,
    kernel::{KernelError, Maps, ServiceMaps, SocketKernel},
    sockets::{Seen, Sockets},
};

/// The name in metrics, beside those of the backend nft.
const AFFINITY: &str = "sockets";

/// The maps of Services of a level.
struct LevelReader {
    folder: Option<PathBuf>,
    /// `None` until the maps exist.
    maps: Option<ServiceMaps>,
    snapshots: Snapshots<Seen>,
    syncs: Arc<AtomicU64>,
}

impl LevelReader {
    fn new(level: &Sockets) -> Self {
        Self {
            folder: level.kernel().map(SocketKernel::maps_folder),
            maps: None,
            snapshots: level.snapshots.clone(),
            syncs: level.syncs.clone(),
        }
    }

    fn read(&mut self, family: Family) -> Result<(), KernelError> {
        let sync = self.syncs.load(Ordering::SeqCst);
        if let Some(folder) = self.folder.as_ref().filter(|folder| self.maps.is_none() && folder.exists()) {
            self.maps = Some(ServiceMaps::open(folder)?);
        }
        if let Some(maps) = &self.maps {
            self.snapshots.put(family, Seen { contents: maps.read()?, sync });
        }
        Ok(())
    }
}

pub(crate) struct EbpfObserver {
    packets: Box<dyn Observer>,
    sockets: LevelReader,
    direct: Option<LevelReader>,
    /// Those of the socket level; `None` until they exist.
    maps: Option<Maps>,
}

impl EbpfObserver {
    /// `direct`: `None` if it is off.
    pub(crate) fn new(packets: Box<dyn Observer>, sockets: &Sockets, direct: Option<&Sockets>) -> Self {
        Self { packets, sockets: LevelReader::new(sockets), direct: direct.map(LevelReader::new), maps: None }
    }

    fn maps(&mut self) -> Result<Option<&Maps>, KernelError> {
        let Some(folder) = &self.sockets.folder else { return Ok(None) };
        if self.maps.is_none() && folder.exists() {
            self.maps = Some(Maps::open(folder)?);
        }
        Ok(self.maps.as_ref())
    }
}

impl Observer for EbpfObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        self.packets.read(family)?;
        self.sockets.read(family)?;
        self.direct.as_mut().map_or(Ok(()), |direct| direct.read(family))?;
        Ok(())
    }

    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError> {
        let packets = self.packets.affinity_clients(family)?;
        let sockets = self
            .maps()?
            .map(|maps| maps.affinity_numbers().filter(|number| family_of(*number) == family).count());
        Ok(packets.map(|mut clients| {
            clients.extend(sockets.map(|number| (AFFINITY, number)));
            clients
        }))
    }

    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError> {
        self.packets.other_proxies()
    }
}
