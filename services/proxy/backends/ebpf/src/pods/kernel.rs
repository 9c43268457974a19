//! The maps and the program of pod devices in the kernel.
//!
//! Owns: [`PodsKernel`]. In: networks, devices. Out: elements, links.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, PerCpuArray},
};
use ipnet::IpNet;
use keelson_proxy::model::Family;

use super::{
    devices::PodDevice,
    layout::{
        COUNTERS, DEVICES, FRAGMENTS, LAYOUT, NETWORKS, POD_MAPS, PodCounter, device_value, network_value,
    },
};
use crate::{
    kernel::{
        Decisions, Hook, KernelError, Loader, Shared, devices, failed_named, open_named, places,
        pods_pins_in,
        programs::{self, Sizes},
    },
    layout::REPLIES,
};

/// `shares`: with the programs of direct return; otherwise there are no replies to clients.
pub(crate) fn usual_sizes(shares: bool) -> Sizes {
    let mut sizes: Sizes = POD_MAPS.iter().map(|map| (map.name, map.max_entries)).collect();
    if !shares {
        sizes.extend([(REPLIES.name, 1), (FRAGMENTS, 1)]);
    }
    sizes
}

pub(crate) fn maps_folder(sizes: &Sizes) -> Result<PathBuf, KernelError> {
    let prefix = format!("{}{LAYOUT}", places::PODS_MAPS_PREFIX);
    Ok(places::own_folder()?.join(programs::maps_name(&prefix, &POD_MAPS, sizes)))
}

struct PodMaps {
    devices: HashMap<MapData, u32, [u8; 12]>,
    networks: Array<MapData, [u8; 36]>,
    counters: PerCpuArray<MapData, u64>,
}

impl PodMaps {
    fn open(folder: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            devices: open_named(folder, DEVICES, Map::HashMap)?,
            networks: open_named(folder, NETWORKS, Map::Array)?,
            counters: open_named(folder, COUNTERS, Map::PerCpuArray)?,
        })
    }

    fn read_devices(&self) -> Result<BTreeMap<u32, [u8; 12]>, KernelError> {
        self.devices.iter().map(|entry| entry.map_err(failed_named("read", DEVICES))).collect()
    }

    /// Devices that are not wanted come first: all others may need their room.
    fn put_devices(&mut self, wanted: &BTreeMap<u32, [u8; 12]>) -> Result<(), KernelError> {
        let present = self.read_devices()?;
        for device in present.keys().filter(|device| !wanted.contains_key(device)) {
            self.devices.remove(device).map_err(failed_named("write", DEVICES))?;
        }
        for (device, value) in wanted.iter().filter(|(device, value)| present.get(device) != Some(value)) {
            self.devices.insert(device, value, 0).map_err(failed_named("write", DEVICES))?;
        }
        Ok(())
    }
}

fn values(devices: &BTreeMap<u32, PodDevice>) -> BTreeMap<u32, [u8; 12]> {
    let value = |device: &PodDevice| device_value(device.router, device.router_address);
    devices.iter().map(|(number, device)| (*number, value(device))).collect()
}

fn places_of(devices: &BTreeMap<u32, PodDevice>) -> Vec<(Hook, u32)> {
    devices.keys().map(|device| (Hook::Pods, *device)).collect()
}

pub(crate) struct PodsKernel {
    own: PathBuf,
    maps_folder: PathBuf,
    links_folder: PathBuf,
    sizes: Sizes,
    /// With the programs of direct return, if these are on.
    shared: Option<Shared>,
    maps: Option<PodMaps>,
    /// Kept from [`Self::probe`] to the first [`Self::prepare`]: its maps have no pins.
    probed: Option<Ebpf>,
    /// Kept from [`Self::prepare`] to [`Self::attach`].
    loaded: Option<Ebpf>,
}

impl PodsKernel {
    /// Finds the places. Changes nothing.
    pub(crate) fn find(sizes: Sizes, shared: Option<Shared>) -> Result<Self, KernelError> {
        let own = places::own_folder()?;
        let maps_folder = maps_folder(&sizes)?;
        let object = programs::pods_object()?;
        let links_folder = own.join(programs::links_name(places::PODS_LINKS_PREFIX, object, &maps_folder));
        let maps = PodMaps::open(&maps_folder).ok();
        let (probed, loaded) = (None, None);
        Ok(Self { own, maps_folder, links_folder, sizes, shared, maps, probed, loaded })
    }

    /// Whether an earlier run has attached the same program: then the kernel has checked it.
    pub(crate) fn has_run(&self) -> bool {
        self.maps.is_some() && self.links_folder.exists()
    }

    /// Loads everything, with maps of its own that are empty, and keeps it for the first sync.
    pub(crate) fn probe(&mut self, loader: &mut Loader) -> Result<(), KernelError> {
        self.probed = Some(load(loader, None, &self.sizes)?);
        Ok(())
    }

    /// With the maps by their pins.
    fn load(&mut self) -> Result<Ebpf, KernelError> {
        let is_first = !self.maps_folder.exists() && !self.is_apart()?;
        let probed = self.probed.take().filter(|_| is_first);
        if let Some(pinned) =
            probed.and_then(|probed| programs::pin_maps(probed, &POD_MAPS, &self.maps_folder))
        {
            return Ok(pinned);
        }
        fs::create_dir_all(&self.maps_folder).map_err(KernelError::file("make", &self.maps_folder))?;
        if let Some(shared) = &self.shared {
            shared.take(&self.maps_folder)?;
        }
        load(&mut Loader::default(), Some(&self.maps_folder), &self.sizes)
    }

    /// Makes the maps, or opens those of an earlier run.
    fn prepare(&mut self) -> Result<&mut PodMaps, KernelError> {
        // By their pins, and not those that this process knows: another program may have removed or replaced them.
        self.maps = PodMaps::open(&self.maps_folder).ok();
        if self.maps.is_none() || self.is_apart()? {
            self.loaded = Some(self.load()?);
            // What is attached uses maps that no pin leads to any more.
            if self.links_folder.exists() {
                places::remove(&self.links_folder)?;
            }
            self.maps = Some(PodMaps::open(&self.maps_folder)?);
        }
        self.maps.as_mut().ok_or(KernelError::Print)
    }

    /// Whether the programs of direct return have got other maps since.
    fn is_apart(&self) -> Result<bool, KernelError> {
        self.shared.as_ref().map_or(Ok(false), |shared| shared.differs(&self.maps_folder))
    }

    /// Whether packets in this network, or in none, are handed over. Without maps, there are none.
    pub(crate) fn has_network(&self, family: Family, network: Option<IpNet>) -> Result<bool, KernelError> {
        let Some(maps) = &self.maps else { return Ok(network.is_none()) };
        let value = maps.networks.get(&(family as u32), 0).map_err(failed_named("read", NETWORKS))?;
        Ok(value == network_value(network))
    }

    pub(crate) fn set_network(&mut self, family: Family, network: Option<IpNet>) -> Result<(), KernelError> {
        if self.has_network(family, network)? {
            return Ok(());
        }
        let maps = self.prepare()?;
        maps.networks.set(family as u32, network_value(network), 0).map_err(failed_named("write", NETWORKS))
    }

    /// The places at which the program is not attached, the devices that the maps do not have, and what is left of others.
    pub(crate) fn differences(&self, wanted: &BTreeMap<u32, PodDevice>) -> Result<Vec<String>, KernelError> {
        let missing = devices::missing(&self.links_folder, &places_of(wanted))?.into_iter();
        let mut texts: Vec<String> = missing
            .map(|(hook, device)| {
                let name = wanted.get(&device).map_or("", |device| device.name.as_str());
                format!("attach the program {} at {name}", hook.program())
            })
            .collect();
        let others = devices::others(&self.links_folder, &places_of(wanted))?;
        texts.extend(others.into_iter().chain(self.former()?).map(|pin| format!("remove {}", pin.display())));
        let has_devices = match &self.maps {
            Some(maps) => maps.read_devices()? == values(wanted),
            None => wanted.is_empty(),
        };
        if !has_devices {
            texts.push(format!("write the map {DEVICES}"));
        }
        if self.is_apart()? {
            texts.push("use the maps of direct return".to_owned());
        }
        Ok(texts)
    }

    /// Makes them the devices with the program, and returns how many programs were attached or detached.
    pub(crate) fn attach(&mut self, wanted: &BTreeMap<u32, PodDevice>) -> Result<usize, KernelError> {
        self.prepare()?.put_devices(&values(wanted))?;
        let missing = devices::missing(&self.links_folder, &places_of(wanted))?;
        let mut failure = None;
        let loaded = self.loaded.take();
        if !missing.is_empty() {
            let folder = &self.links_folder;
            fs::create_dir_all(folder).map_err(KernelError::file("make", folder))?;
            let mut loaded = match loaded {
                Some(loaded) => loaded,
                None => load(&mut Loader::default(), Some(&self.maps_folder), &self.sizes)?,
            };
            for (hook, device) in &missing {
                let name = wanted.get(device).map_or("", |device| device.name.as_str());
                let attached = devices::attach(&mut loaded, folder, *hook, (*device, name));
                // One that has gone meanwhile is no failure, and one failure does not keep others from the program.
                if let Err(error) = attached
                    && nix::net::if_::if_indextoname(*device).is_ok()
                {
                    failure = failure.or(Some(error));
                }
            }
        }
        let removed = devices::remove_others(&self.links_folder, &places_of(wanted))?;
        let former = self.remove_former()?;
        failure.map_or(Ok(missing.len() + removed + former), Err)
    }

    /// Folders of other versions.
    fn former(&self) -> Result<Vec<PathBuf>, KernelError> {
        let mut found = pods_pins_in(&self.own)?;
        found.retain(|folder| *folder != self.links_folder && *folder != self.maps_folder);
        Ok(found)
    }

    /// Removes these, and returns the number of pins.
    pub(crate) fn remove_former(&self) -> Result<usize, KernelError> {
        self.former()?.iter().map(|folder| places::remove(folder)).sum()
    }

    pub(crate) fn counters(&self) -> Result<Vec<Decisions>, KernelError> {
        let Some(maps) = &self.maps else { return Ok(Vec::new()) };
        let read = |counter: PodCounter| {
            let values = maps.counters.get(&(counter as u32), 0).map_err(failed_named("read", COUNTERS))?;
            Ok(Decisions { label: counter.as_str(), text: counter.describe(), total: values.iter().sum() })
        };
        PodCounter::ALL.into_iter().map(read).collect()
    }

    pub(crate) fn maps_folder(&self) -> &Path {
        &self.maps_folder
    }
}

pub(super) fn load(loader: &mut Loader, pins: Option<&Path>, sizes: &Sizes) -> Result<Ebpf, KernelError> {
    let mut loaded = loader.load(programs::pods_object()?, &POD_MAPS, pins, sizes)?;
    devices::load(&mut loaded, &[Hook::Pods])?;
    Ok(loaded)
}
