//! The kernel: pinned maps and programs of this network namespace.
//!
//! Owns: [`SocketKernel`], what the backend needs of it; [`Pinned`], the real one; removal. In: places, changes. Out: elements,
//! links.
//!
//! Nothing is in the kernel before the first sync ([`SocketKernel::prepare`]), and nothing is attached before a family is
//! whole ([`SocketKernel::attach`]).

pub(crate) mod devices;
mod error;
pub(crate) mod filters;
mod hook;
pub(crate) mod links;
mod maps;
pub(crate) mod places;
pub(crate) mod programs;
mod shared;
mod slots;

use std::{
    fs,
    path::{Path, PathBuf},
};

use aya::Ebpf;

pub(crate) use self::{
    error::{KernelError, chain},
    hook::Hook,
    maps::{Maps, ServiceMaps, failed_named, found, open_named},
    places::unsuitable_cgroup,
    programs::{Loader, Sizes, usual_sizes},
    shared::Shared,
};
use crate::{
    elements::{Change, Contents},
    layout::{FlowKey, FlowValue, MAPS, MapName, SlotValue},
};

/// How often the programs have decided in one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decisions {
    /// The label in metrics.
    pub(crate) label: &'static str,
    pub(crate) text: &'static str,
    pub(crate) total: u64,
}

/// What a level of programs needs of the kernel: that of sockets, or direct return.
pub(crate) trait SocketKernel: Send {
    /// Makes the maps, or opens those of an earlier run. Returns whether they are new, and so empty.
    fn prepare(&mut self) -> Result<bool, KernelError>;

    /// What is in the maps; empty before [`Self::prepare`] if no earlier run left some.
    fn read(&self) -> Result<Contents, KernelError>;

    fn apply(&mut self, change: &Change) -> Result<(), KernelError>;

    /// Writes many slots at once, which no set has.
    fn put_slots(&mut self, slots: &[(u32, SlotValue)]) -> Result<(), KernelError>;

    /// Whether programs may read the maps: these exist, and programs of another version may have them too.
    fn is_read(&self) -> bool;

    /// The programs that are not attached.
    fn detached(&self) -> Result<Vec<String>, KernelError>;

    /// Attaches what is not attached, and returns the number of programs. Fails if the maps have lost their pins: programs
    /// would be loaded with other maps.
    fn attach(&mut self) -> Result<usize, KernelError>;

    /// Folders with programs and maps of other versions.
    fn former(&self) -> Result<Vec<PathBuf>, KernelError>;

    /// Removes these, and returns the number of pins.
    fn remove_former(&mut self) -> Result<usize, KernelError>;

    /// Removes the program of pod devices that a former setting has left, and returns the number of pins.
    fn remove_former_pods(&mut self) -> Result<usize, KernelError> {
        Ok(0)
    }

    fn udp_replies(&self) -> Result<Vec<(FlowKey, FlowValue)>, KernelError>;

    fn counters(&self) -> Result<Vec<Decisions>, KernelError>;

    /// For people: where the programs are attached.
    fn describe(&self) -> String;

    /// The folder of the maps, for an observer.
    fn maps_folder(&self) -> PathBuf;
}

/// The pins below the BPF file system.
pub(crate) struct Pinned {
    own: PathBuf,
    maps_folder: PathBuf,
    links_folder: PathBuf,
    cgroup: PathBuf,
    sizes: Sizes,
    /// Direct return looks after its own pins; otherwise they are those of a former setting.
    pub(crate) has_direct_return: bool,
    /// Pod devices, too.
    pub(crate) has_pod_devices: bool,
    maps: Option<Maps>,
    /// Kept from [`Self::probe`] to [`SocketKernel::prepare`]: its maps have no pins.
    probed: Option<Ebpf>,
    /// Kept from [`SocketKernel::prepare`] to [`SocketKernel::attach`].
    loaded: Option<Ebpf>,
}

impl Pinned {
    /// Finds the places. Changes nothing.
    pub(crate) fn find(cgroup: Option<&Path>, sizes: Sizes) -> Result<Self, KernelError> {
        let own = places::own_folder()?;
        let maps_folder = programs::maps_folder(&own, &sizes);
        let links_folder = programs::links_folder(&own, &maps_folder)?;
        let cgroup = places::cgroup(cgroup)?;
        let maps = Maps::open(&maps_folder).ok();
        Ok(Self {
            own,
            maps_folder,
            links_folder,
            cgroup,
            sizes,
            has_direct_return: false,
            has_pod_devices: false,
            maps,
            probed: None,
            loaded: None,
        })
    }

    /// Whether an earlier run of the same programs goes on: then the kernel has checked everything.
    pub(crate) fn is_running(&self) -> bool {
        self.maps.is_some() && self.detached().is_ok_and(|missing| missing.is_empty())
    }

    /// Loads everything, with maps of its own that are empty. `attaches`: also attaches the programs for a moment, makes the folder of
    /// the pins, and keeps what is loaded for the first sync.
    pub(crate) fn probe(&mut self, loader: &mut Loader, attaches: bool) -> Result<(), KernelError> {
        let mut loaded = programs::load(loader, None, &self.sizes)?;
        if attaches {
            programs::try_attach(&mut loaded, &self.cgroup)?;
            fs::create_dir_all(&self.own).map_err(KernelError::file("make", &self.own))?;
            remove_empty_folders(&self.own);
            self.probed = Some(loaded);
        }
        Ok(())
    }

    /// Pins the maps of the probe, if there are none yet. `None`: they are made, or made whole, by loading again.
    fn pin_probed(&mut self) -> Option<Ebpf> {
        let probed = self.probed.take().filter(|_| !self.maps_folder.exists())?;
        programs::pin_maps(probed, &MAPS, &self.maps_folder)
    }

    fn missing(&self) -> Result<Vec<&'static str>, KernelError> {
        links::missing(&self.links_folder, places::cgroup_id(&self.cgroup)?)
    }

    fn opened(&mut self) -> Result<&mut Maps, KernelError> {
        if self.maps.is_none() {
            self.maps = Some(Maps::open(&self.maps_folder)?);
        }
        self.maps.as_mut().ok_or(KernelError::Print)
    }

    /// With the maps by their pins. Maps of which only some are pinned are made whole.
    fn load(&mut self) -> Result<&mut Ebpf, KernelError> {
        if self.loaded.is_none() {
            let make = |folder: &Path| fs::create_dir_all(folder).map_err(KernelError::file("make", folder));
            make(&self.maps_folder)?;
            let pins = Some(self.maps_folder.as_path());
            self.loaded = Some(programs::load(&mut Loader::default(), pins, &self.sizes)?);
        }
        self.loaded.as_mut().ok_or(KernelError::Print)
    }
}

impl SocketKernel for Pinned {
    fn prepare(&mut self) -> Result<bool, KernelError> {
        // By their pins, and not those that this process knows: another program may have removed or replaced them.
        self.maps = Maps::open(&self.maps_folder).ok();
        let is_new = !self.maps_folder.exists();
        let probed = self.pin_probed();
        if self.maps.is_none() {
            self.loaded = probed;
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
        match &self.maps {
            Some(maps) => maps.services.read(),
            None => Ok(Contents::default()),
        }
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
        Ok(self.missing()?.into_iter().map(str::to_owned).collect())
    }

    fn attach(&mut self) -> Result<usize, KernelError> {
        let missing = self.missing()?;
        if missing.is_empty() {
            return Ok(0);
        }
        if !self.maps_folder.join(MapName::Frontends.as_str()).exists() {
            return Err(KernelError::MapsRemoved(self.maps_folder.clone()));
        }
        fs::create_dir_all(&self.links_folder).map_err(KernelError::file("make", &self.links_folder))?;
        let (cgroup, folder) = (self.cgroup.clone(), self.links_folder.clone());
        let attached = programs::attach(self.load()?, &missing, &cgroup, &folder);
        // The links keep what is attached.
        self.loaded = None;
        attached
    }

    fn former(&self) -> Result<Vec<PathBuf>, KernelError> {
        let mut found = pins_in(&self.own)?;
        if self.has_direct_return {
            let of_direct = direct_pins_in(&self.own)?;
            found.retain(|folder| !of_direct.contains(folder));
        }
        if self.has_pod_devices {
            let of_pods = pods_pins_in(&self.own)?;
            found.retain(|folder| !of_pods.contains(folder));
        }
        found.retain(|folder| *folder != self.links_folder && *folder != self.maps_folder);
        Ok(found)
    }

    fn remove_former(&mut self) -> Result<usize, KernelError> {
        self.former()?.iter().map(|folder| places::remove(folder)).sum()
    }

    fn remove_former_pods(&mut self) -> Result<usize, KernelError> {
        if self.has_pod_devices {
            return Ok(0);
        }
        pods_pins_in(&self.own)?.iter().map(|folder| places::remove(folder)).sum()
    }

    fn udp_replies(&self) -> Result<Vec<(FlowKey, FlowValue)>, KernelError> {
        self.maps.as_ref().map_or_else(|| Ok(Vec::new()), Maps::udp_replies)
    }

    fn counters(&self) -> Result<Vec<Decisions>, KernelError> {
        self.maps.as_ref().map_or_else(|| Ok(Vec::new()), Maps::counters)
    }

    fn describe(&self) -> String {
        format!("cgroup {}, maps in {}", self.cgroup.display(), self.maps_folder.display())
    }

    fn maps_folder(&self) -> PathBuf {
        self.maps_folder.clone()
    }
}

/// The folders of programs and maps of this network namespace, of any version.
pub(crate) fn find_pins() -> Result<Vec<PathBuf>, KernelError> {
    let own = match places::own_folder() {
        // Then there are none.
        Err(KernelError::NoBpfMount) => return Ok(Vec::new()),
        own => own?,
    };
    match pins_in(&own) {
        // Who may not see them has none of them, and other backends need no right to.
        Err(KernelError::NotPermitted(_)) => Ok(Vec::new()),
        found => found,
    }
}

/// Links first: without maps no program would translate, but it would still run. Those of pod devices before all others: they skip
/// the rules that the backend nft makes for them.
fn pins_in(own: &Path) -> Result<Vec<PathBuf>, KernelError> {
    let mut found = pods_pins_in(own)?;
    found.extend(places::folders(own, places::LINKS_PREFIX)?);
    found.extend(places::folders(own, places::MAPS_PREFIX)?);
    found.extend(direct_pins_in(own)?);
    Ok(found)
}

/// Those of direct return.
pub(crate) fn direct_pins_in(own: &Path) -> Result<Vec<PathBuf>, KernelError> {
    let mut found = places::folders(own, places::DIRECT_LINKS_PREFIX)?;
    found.extend(places::folders(own, places::DIRECT_MAPS_PREFIX)?);
    Ok(found)
}

/// Those of pod devices.
pub(crate) fn pods_pins_in(own: &Path) -> Result<Vec<PathBuf>, KernelError> {
    let mut found = places::folders(own, places::PODS_LINKS_PREFIX)?;
    found.extend(places::folders(own, places::PODS_MAPS_PREFIX)?);
    Ok(found)
}

/// Detaches all programs of this network namespace and removes their maps.
pub(crate) fn remove_pins(removed: &mut dyn FnMut(String)) -> Result<(), KernelError> {
    for folder in find_pins()? {
        let pins = places::remove(&folder)?;
        removed(format!("{} with {pins} pins", folder.display()));
    }
    if let Ok(own) = places::own_folder() {
        remove_empty_folders(&own);
    }
    Ok(())
}

fn remove_empty_folders(own: &Path) {
    places::remove_empty(own);
    own.parent().into_iter().for_each(places::remove_empty);
}

#[cfg(test)]
mod tests;
