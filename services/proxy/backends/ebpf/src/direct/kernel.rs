//! Maps and programs of direct return in the kernel.
//!
//! Owns: [`DirectKernel`], the [`SocketKernel`] of this level; [`Targets`], the devices and networks. In: places, changes of the
//! plan, targets. Out: elements, links.
//!
//! Networks and devices are maps as well, but not a part of the plan: they are few, and are compared whenever the programs are.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aya::{
    Ebpf,
    maps::{
        HashMap, Map, MapData, PerCpuArray,
        lpm_trie::{Key, LpmTrie},
    },
};
use keelson_proxy::options::DirectReturnHook;

use super::layout::{COUNTERS, DEVICES, DIRECT_MAPS, DirectCounter, LAYOUT, NETWORKS};
use crate::{
    elements::{Change, Contents},
    kernel::{
        Decisions, Hook, KernelError, Loader, ServiceMaps, Shared, SocketKernel, devices, direct_pins_in,
        failed_named, open_named, places,
        programs::{self, Sizes},
    },
    layout::{FlowKey, FlowValue, MapName, PODS, SlotValue},
};

/// `shares`: with the program of pod devices; otherwise nothing is in its map.
pub(crate) fn usual_sizes(shares: bool) -> Sizes {
    let mut sizes: Sizes = DIRECT_MAPS.iter().map(|map| (map.name, map.max_entries)).collect();
    if !shares {
        sizes.insert(PODS.name, 1);
    }
    sizes
}

pub(crate) fn maps_folder(sizes: &Sizes) -> Result<PathBuf, KernelError> {
    let prefix = format!("{}{LAYOUT}", places::DIRECT_MAPS_PREFIX);
    Ok(places::own_folder()?.join(programs::maps_name(&prefix, &DIRECT_MAPS, sizes)))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) hardware_address: [u8; 6],
}

/// Where programs are attached, and what they know about addresses.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Targets {
    /// By number.
    pub(crate) devices: BTreeMap<u32, Device>,
    /// Bits and address of the trie : what the network has.
    pub(crate) networks: BTreeMap<(u32, [u8; 16]), u32>,
    /// The bit in the mark of packets that nftables masquerades.
    pub(crate) masquerade: u32,
}

/// Written by the backend, read when the maps and programs are compared.
#[derive(Debug, Default, Clone)]
pub(crate) struct SharedTargets(Arc<Mutex<Targets>>);

impl SharedTargets {
    pub(crate) fn get(&self) -> MutexGuard<'_, Targets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct DirectMaps {
    services: ServiceMaps,
    networks: LpmTrie<MapData, [u8; 16], u32>,
    devices: HashMap<MapData, u32, [u8; 12]>,
    counters: PerCpuArray<MapData, u64>,
}

impl DirectMaps {
    fn open(folder: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            services: ServiceMaps::open_with_ranges(folder)?,
            networks: open_named(folder, NETWORKS, Map::LpmTrie)?,
            devices: open_named(folder, DEVICES, Map::HashMap)?,
            counters: open_named(folder, COUNTERS, Map::PerCpuArray)?,
        })
    }

    fn read_networks(&self) -> Result<BTreeMap<(u32, [u8; 16]), u32>, KernelError> {
        let entries = self.networks.iter().map(|entry| {
            let (key, value) = entry.map_err(failed_named("read", NETWORKS))?;
            Ok(((key.prefix_len(), key.data()), value))
        });
        entries.collect()
    }

    fn read_devices(&self) -> Result<BTreeMap<u32, [u8; 12]>, KernelError> {
        self.devices.iter().map(|entry| entry.map_err(failed_named("read", DEVICES))).collect()
    }

    /// Whether networks and devices are those of the targets.
    fn has(&self, targets: &Targets) -> Result<bool, KernelError> {
        Ok(self.read_networks()? == targets.networks && self.read_devices()? == targets.device_values())
    }

    /// Networks that are wanted come first: none is unknown in between. Devices that are not come first: they have no programs,
    /// and all others may need their room.
    fn put(&mut self, targets: &Targets) -> Result<(), KernelError> {
        let networks = self.read_networks()?;
        for ((bits, address), value) in &targets.networks {
            let put = self.networks.insert(&Key::new(*bits, *address), value, 0);
            put.map_err(failed_named("write", NETWORKS))?;
        }
        for (bits, address) in networks.keys().filter(|key| !targets.networks.contains_key(key)) {
            let removed = self.networks.remove(&Key::new(*bits, *address));
            removed.map_err(failed_named("write", NETWORKS))?;
        }
        let wanted = targets.device_values();
        let devices = self.read_devices()?;
        for device in devices.keys().filter(|device| !wanted.contains_key(device)) {
            self.devices.remove(device).map_err(failed_named("write", DEVICES))?;
        }
        for (device, value) in &wanted {
            self.devices.insert(device, value, 0).map_err(failed_named("write", DEVICES))?;
        }
        Ok(())
    }
}

impl Targets {
    /// Of networks and of devices.
    pub(super) fn numbers(&self) -> (usize, usize) {
        (self.networks.len(), self.devices.len())
    }

    fn device_values(&self) -> BTreeMap<u32, [u8; 12]> {
        let value = |device: &Device| {
            let [a, b, c, d, e, f] = device.hardware_address;
            let [g, h, i, j] = self.masquerade.to_ne_bytes();
            [a, b, c, d, e, f, 0, 0, g, h, i, j]
        };
        self.devices.iter().map(|(number, device)| (*number, value(device))).collect()
    }
}

pub(crate) struct DirectKernel {
    own: PathBuf,
    maps_folder: PathBuf,
    links_folder: PathBuf,
    sizes: Sizes,
    /// With the program of pod devices, if that is on.
    shared: Option<Shared>,
    hook: DirectReturnHook,
    targets: SharedTargets,
    maps: Option<DirectMaps>,
    /// Kept from [`Self::probe`] to [`SocketKernel::prepare`]: its maps have no pins.
    probed: Option<Ebpf>,
    /// Kept from [`SocketKernel::prepare`] to [`SocketKernel::attach`].
    loaded: Option<Ebpf>,
}

impl DirectKernel {
    /// Finds the places. Changes nothing.
    pub(crate) fn find(
        hook: DirectReturnHook,
        targets: SharedTargets,
        sizes: Sizes,
        shared: Option<Shared>,
    ) -> Result<Self, KernelError> {
        let own = places::own_folder()?;
        let maps_folder = maps_folder(&sizes)?;
        let object = programs::direct_object()?;
        let links_folder = own.join(programs::links_name(places::DIRECT_LINKS_PREFIX, object, &maps_folder));
        let maps = DirectMaps::open(&maps_folder).ok();
        let (probed, loaded) = (None, None);
        Ok(Self { own, maps_folder, links_folder, sizes, shared, hook, targets, maps, probed, loaded })
    }

    /// Whether an earlier run has attached the same programs: then the kernel has checked everything.
    pub(crate) fn has_run(&self) -> bool {
        self.maps.is_some() && self.links_folder.exists()
    }

    /// Loads everything, with maps of its own that are empty, and keeps it for the first sync.
    pub(crate) fn probe(&mut self, loader: &mut Loader) -> Result<(), KernelError> {
        self.probed = Some(load(loader, None, &self.sizes)?);
        Ok(())
    }

    /// Pins the maps of the probe, if neither these programs nor that of pod devices have some. `None`: they are made, or made
    /// whole, by loading again.
    fn pin_probed(&mut self) -> Result<Option<Ebpf>, KernelError> {
        let is_first = !self.maps_folder.exists() && !self.is_apart()?;
        let probed = self.probed.take().filter(|_| is_first);
        let pinned = probed.and_then(|probed| programs::pin_maps(probed, &DIRECT_MAPS, &self.maps_folder));
        if let (Some(_), Some(shared)) = (&pinned, &self.shared) {
            shared.give(&self.maps_folder)?;
        }
        Ok(pinned)
    }

    fn opened(&mut self) -> Result<&mut DirectMaps, KernelError> {
        if self.maps.is_none() {
            self.maps = Some(DirectMaps::open(&self.maps_folder)?);
        }
        self.maps.as_mut().ok_or(KernelError::Print)
    }

    fn load(&mut self) -> Result<&mut Ebpf, KernelError> {
        if self.loaded.is_none() {
            let folder = &self.maps_folder;
            fs::create_dir_all(folder).map_err(KernelError::file("make", folder))?;
            if let Some(shared) = &self.shared {
                shared.take(folder)?;
            }
            self.loaded = Some(load(&mut Loader::default(), Some(folder), &self.sizes)?);
            if let Some(shared) = &self.shared {
                shared.give(folder)?;
            }
        }
        self.loaded.as_mut().ok_or(KernelError::Print)
    }

    fn wanted(&self) -> Vec<(Hook, u32)> {
        let targets = self.targets.get();
        let devices = targets.devices.keys();
        devices.flat_map(|device| Hook::wanted(self.hook).map(|hook| (hook, *device))).collect()
    }

    /// Whether the program of pod devices has got other maps since.
    fn is_apart(&self) -> Result<bool, KernelError> {
        self.shared.as_ref().map_or(Ok(false), |shared| shared.differs(&self.maps_folder))
    }

    /// Takes the maps of pod devices; what is attached uses others.
    fn join(&mut self) -> Result<(), KernelError> {
        self.loaded = None;
        self.load()?;
        if self.links_folder.exists() {
            places::remove(&self.links_folder)?;
        }
        self.maps = Some(DirectMaps::open(&self.maps_folder)?);
        Ok(())
    }

    fn missing(&self) -> Result<Vec<(Hook, u32)>, KernelError> {
        devices::missing(&self.links_folder, &self.wanted())
    }
}

pub(super) fn load(loader: &mut Loader, pins: Option<&Path>, sizes: &Sizes) -> Result<Ebpf, KernelError> {
    let mut loaded = loader.load(programs::direct_object()?, &DIRECT_MAPS, pins, sizes)?;
    devices::load(&mut loaded, &[Hook::In, Hook::Out, Hook::Xdp])?;
    Ok(loaded)
}

impl SocketKernel for DirectKernel {
    fn prepare(&mut self) -> Result<bool, KernelError> {
        // By their pins, and not those that this process knows: another program may have removed or replaced them.
        self.maps = DirectMaps::open(&self.maps_folder).ok();
        let is_new = !self.maps_folder.exists();
        if self.maps.is_none() {
            self.loaded = self.pin_probed()?;
            self.load()?;
            // What is attached uses maps that no pin leads to any more.
            if self.links_folder.exists() {
                places::remove(&self.links_folder)?;
            }
        }
        self.opened()?;
        Ok(is_new)
    }

    fn read(&self) -> Result<Contents, KernelError> {
        self.maps.as_ref().map_or_else(|| Ok(Contents::default()), |maps| maps.services.read())
    }

    fn apply(&mut self, change: &Change) -> Result<(), KernelError> {
        self.opened()?.services.apply(change)
    }

    fn put_slots(&mut self, slots: &[(u32, SlotValue)]) -> Result<(), KernelError> {
        self.opened()?.services.put_slots(slots)
    }

    fn is_read(&self) -> bool {
        self.maps_folder.exists()
    }

    fn detached(&self) -> Result<Vec<String>, KernelError> {
        let targets = self.targets.get().clone();
        let mut texts: Vec<String> = (self.missing()?.into_iter())
            .map(|(hook, device)| {
                let name = targets.devices.get(&device).map_or("", |device| device.name.as_str());
                format!("{} at {name}", hook.program())
            })
            .collect();
        let others = devices::others(&self.links_folder, &self.wanted())?;
        texts.extend(others.into_iter().map(|pin| format!("{} is not wanted any more", pin.display())));
        let Some(maps) = &self.maps else { return Ok(texts) };
        if !maps.has(&targets)? {
            texts.push(format!("the maps {NETWORKS} and {DEVICES} differ"));
        }
        if self.is_apart()? {
            texts.push("pod devices have other maps".to_owned());
        }
        Ok(texts)
    }

    fn attach(&mut self) -> Result<usize, KernelError> {
        if self.detached()?.is_empty() {
            return Ok(0);
        }
        if !self.maps_folder.join(MapName::Frontends.as_str()).exists() {
            return Err(KernelError::MapsRemoved(self.maps_folder.clone()));
        }
        if self.is_apart()? {
            self.join()?;
        }
        let targets = self.targets.get().clone();
        self.opened()?.put(&targets)?;
        let (missing, folder) = (self.missing()?, self.links_folder.clone());
        fs::create_dir_all(&folder).map_err(KernelError::file("make", &folder))?;
        for (hook, device) in &missing {
            let name = targets.devices.get(device).map_or("", |device| device.name.as_str());
            devices::attach(self.load()?, &folder, *hook, (*device, name))?;
        }
        // What is pinned keeps the programs.
        self.loaded = None;
        Ok(missing.len() + devices::remove_others(&folder, &self.wanted())?)
    }

    fn former(&self) -> Result<Vec<PathBuf>, KernelError> {
        let mut found = direct_pins_in(&self.own)?;
        found.retain(|folder| *folder != self.links_folder && *folder != self.maps_folder);
        Ok(found)
    }

    fn remove_former(&mut self) -> Result<usize, KernelError> {
        self.former()?.iter().map(|folder| places::remove(folder)).sum()
    }

    /// Each datagram looks whether its endpoint serves: nothing becomes stale.
    fn udp_replies(&self) -> Result<Vec<(FlowKey, FlowValue)>, KernelError> {
        Ok(Vec::new())
    }

    fn counters(&self) -> Result<Vec<Decisions>, KernelError> {
        let Some(maps) = &self.maps else { return Ok(Vec::new()) };
        let read = |counter: DirectCounter| {
            let values = maps.counters.get(&(counter as u32), 0).map_err(failed_named("read", COUNTERS))?;
            let total = values.iter().sum();
            Ok(Decisions { label: counter.as_str(), text: counter.describe(), total })
        };
        DirectCounter::ALL.into_iter().map(read).collect()
    }

    fn describe(&self) -> String {
        let targets = self.targets.get();
        let devices: Vec<&str> = targets.devices.values().map(|device| device.name.as_str()).collect();
        let devices = if devices.is_empty() { "no device".to_owned() } else { devices.join(", ") };
        format!("{} of {devices}, maps in {}", self.hook.as_str(), self.maps_folder.display())
    }

    fn maps_folder(&self) -> PathBuf {
        self.maps_folder.clone()
    }
}
