//! The programs: loading and attaching them.
//!
//! Owns: the objects, [`Loader`], [`load`], [`attach`]. In: places. Out: programs that are loaded, links that are pinned.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{CgroupAttachMode, CgroupSock, CgroupSockAddr, Program, links::FdLink},
};
use sha2::{Digest as _, Sha256};

use super::{KernelError, links::HOOKS, places};
use crate::layout::{LAYOUT, MAPS, MapDefinition};

include!(concat!(env!("OUT_DIR"), "/programs.rs"));

/// Maximum numbers of elements, by name of the map. Tests have smaller ones.
pub(crate) type Sizes = BTreeMap<&'static str, u32>;

pub(crate) fn usual_sizes() -> Sizes {
    MAPS.iter().map(|map| (map.name, map.max_entries)).collect()
}

pub(crate) fn maps_folder(own: &Path, sizes: &Sizes) -> PathBuf {
    own.join(maps_name(&format!("{}{LAYOUT}", places::MAPS_PREFIX), &MAPS, sizes))
}

/// Name of a folder of maps: another layout or size has another name.
pub(crate) fn maps_name(prefix: &str, maps: &[MapDefinition], sizes: &Sizes) -> String {
    let lines = maps.iter().map(|map| {
        let size = sizes.get(map.name).copied().unwrap_or(map.max_entries);
        format!("{} {} {} {size}\n", map.name, map.key_size, map.value_size)
    });
    let text: String = lines.collect();
    format!("{prefix}-{}", short_hash(text.as_bytes()))
}

pub(crate) fn links_folder(own: &Path, maps: &Path) -> Result<PathBuf, KernelError> {
    Ok(own.join(links_name(places::LINKS_PREFIX, object()?, maps)))
}

/// Name of a folder of links: other programs, or programs with other maps, have another name.
pub(crate) fn links_name(prefix: &str, object: &[u8], maps: &Path) -> String {
    let mut both = object.to_vec();
    both.extend(maps.file_name().unwrap_or_default().as_encoded_bytes());
    format!("{prefix}{}", short_hash(&both))
}

fn short_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

fn object() -> Result<&'static [u8], KernelError> {
    OBJECT.ok_or(KernelError::NotBuilt)
}

pub(crate) fn direct_object() -> Result<&'static [u8], KernelError> {
    DIRECT_OBJECT.ok_or(KernelError::NotBuilt)
}

pub(crate) fn pods_object() -> Result<&'static [u8], KernelError> {
    PODS_OBJECT.ok_or(KernelError::NotBuilt)
}

/// Makes or finds the maps of objects. The first object takes longest: the types of the kernel are read, which aya does for
/// each loader of its own.
#[derive(Debug, Default)]
pub(crate) struct Loader(Option<EbpfLoader<'static>>);

impl Loader {
    /// `pins`: the folder in which maps are found, or made and pinned; `None`: they end with the result.
    pub(crate) fn load(
        &mut self,
        object: &[u8],
        maps: &[MapDefinition],
        pins: Option<&Path>,
        sizes: &Sizes,
    ) -> Result<Ebpf, KernelError> {
        let loader = self.0.get_or_insert_with(EbpfLoader::new);
        for map in maps {
            loader.map_max_entries(map.name, sizes.get(map.name).copied().unwrap_or(map.max_entries));
            if let Some(folder) = pins {
                loader.map_pin_path(map.name, folder.join(map.name));
            }
        }
        let loaded = loader.load(object).map_err(|error| KernelError::load(&error));
        if pins.is_some() {
            // It would pin what is loaded next, too.
            self.0 = None;
        }
        loaded
    }
}

/// Pins the maps of what was loaded without pins. `None`: not all of them could be pinned.
pub(crate) fn pin_maps(loaded: Ebpf, maps: &[MapDefinition], folder: &Path) -> Option<Ebpf> {
    fs::create_dir_all(folder).ok()?;
    let pin = |name: &str| loaded.map(name)?.pin(folder.join(name)).ok();
    maps.iter().try_for_each(|map| pin(map.name))?;
    Some(loaded)
}

/// Loads all programs of the socket level; the verifier checks them.
pub(crate) fn load(loader: &mut Loader, pins: Option<&Path>, sizes: &Sizes) -> Result<Ebpf, KernelError> {
    let mut loaded = loader.load(object()?, &MAPS, pins, sizes)?;
    for (_, name) in HOOKS {
        let loading = match program(&mut loaded, name)? {
            SocketProgram::Call(program) => program.load(),
            SocketProgram::End(program) => program.load(),
        };
        loading.map_err(|error| KernelError::program(name, &error))?;
    }
    Ok(loaded)
}

enum SocketProgram<'a> {
    /// At a call with an address.
    Call(&'a mut CgroupSockAddr),
    /// At the end of a socket.
    End(&'a mut CgroupSock),
}

fn program<'a>(loaded: &'a mut Ebpf, name: &'static str) -> Result<SocketProgram<'a>, KernelError> {
    match loaded.program_mut(name) {
        Some(Program::CgroupSockAddr(program)) => Ok(SocketProgram::Call(program)),
        Some(Program::CgroupSock(program)) => Ok(SocketProgram::End(program)),
        _ => Err(KernelError::Load(format!("the object has no program {name} for sockets"))),
    }
}

impl SocketProgram<'_> {
    /// It is attached as long as the link exists.
    fn attach(self, name: &'static str, cgroup: &Path, opened: &fs::File) -> Result<FdLink, KernelError> {
        let failed = |error| KernelError::attach(name, cgroup, &error);
        let mode = CgroupAttachMode::Single;
        let link = match self {
            Self::Call(program) => {
                let id = program.attach(opened, mode).map_err(failed)?;
                program.take_link(id).map_err(failed)?.try_into()
            }
            Self::End(program) => {
                let id = program.attach(opened, mode).map_err(failed)?;
                program.take_link(id).map_err(failed)?.try_into()
            }
        };
        link.map_err(|error| KernelError::link(cgroup, &error))
    }
}

/// Attaches the programs of these hooks, and pins their links: what shows Services before what chooses endpoints.
pub(crate) fn attach(
    loaded: &mut Ebpf,
    hooks: &[&'static str],
    cgroup: &Path,
    folder: &Path,
) -> Result<usize, KernelError> {
    let opened = fs::File::open(cgroup).map_err(KernelError::file("open", cgroup))?;
    let wanted: Vec<_> = HOOKS.into_iter().rev().filter(|(hook, _)| hooks.contains(hook)).collect();
    for (hook, name) in &wanted {
        let link = program(loaded, name)?.attach(name, cgroup, &opened)?;
        let pin = folder.join(hook);
        // One that does not lead to the cgroup any more.
        if pin.exists() {
            fs::remove_file(&pin).map_err(KernelError::file("remove", &pin))?;
        }
        link.pin(&pin)
            .map_err(|error| KernelError::file("pin the link", &pin)(std::io::Error::other(error)))?;
    }
    Ok(wanted.len())
}

/// Attaches all programs for a moment. Another program at the cgroup may exclude others, or a security module refuse it.
pub(crate) fn try_attach(loaded: &mut Ebpf, cgroup: &Path) -> Result<(), KernelError> {
    let opened = fs::File::open(cgroup).map_err(KernelError::file("open", cgroup))?;
    for (_, name) in HOOKS {
        program(loaded, name)?.attach(name, cgroup, &opened)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_have_the_names_of_what_is_in_them() {
        let own = Path::new("/sys/fs/bpf/keelson/netns-1");
        let usual = maps_folder(own, &usual_sizes());
        let mut others = usual_sizes();
        others.insert("slots", 7);
        assert_ne!(usual, maps_folder(own, &others));
        assert_eq!(usual, maps_folder(own, &Sizes::new()), "the sizes of the table are the usual ones");
        assert!(usual.to_str().unwrap().starts_with("/sys/fs/bpf/keelson/netns-1/maps-2-"), "{usual:?}");
        let links = |maps| links_folder(own, maps).unwrap();
        assert_ne!(links(&usual), links(&maps_folder(own, &others)));
    }
}
