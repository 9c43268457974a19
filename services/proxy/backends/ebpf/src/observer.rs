//! Reads both levels without the lock of the backend.
//!
//! Owns: [`EbpfObserver`]. In: the folder of the maps, the observer of the backend nft. Out: what is in the kernel, for the
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
    kernel::{KernelError, Maps},
    sockets::Seen,
};

/// The name in metrics, beside those of the backend nft.
const AFFINITY: &str = "sockets";

pub(crate) struct EbpfObserver {
    packets: Box<dyn Observer>,
    folder: Option<PathBuf>,
    /// `None` until the maps exist.
    maps: Option<Maps>,
    snapshots: Snapshots<Seen>,
    syncs: Arc<AtomicU64>,
}

impl EbpfObserver {
    pub(crate) fn new(
        packets: Box<dyn Observer>,
        folder: Option<PathBuf>,
        snapshots: Snapshots<Seen>,
        syncs: Arc<AtomicU64>,
    ) -> Self {
        Self { packets, folder, maps: None, snapshots, syncs }
    }

    fn maps(&mut self) -> Result<Option<&Maps>, KernelError> {
        let Some(folder) = &self.folder else { return Ok(None) };
        if self.maps.is_none() && folder.exists() {
            self.maps = Some(Maps::open(folder)?);
        }
        Ok(self.maps.as_ref())
    }
}

impl Observer for EbpfObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        self.packets.read(family)?;
        let sync = self.syncs.load(Ordering::SeqCst);
        if let Some(maps) = self.maps()? {
            let contents = maps.read()?;
            self.snapshots.put(family, Seen { contents, sync });
        }
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
