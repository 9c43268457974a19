//! Programs at devices.
//!
//! Owns: [`attach`], [`missing`], [`others`]. In: programs that are loaded, a folder, devices. Out: links that are pinned; filters,
//! where the kernel has no links for tc.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    programs::{
        LinkOrder, ProgramError, SchedClassifier, TcAttachType, Xdp,
        links::{FdLink, PinnedLink},
        tc::TcAttachOptions,
        xdp::{XdpLink, XdpMode},
    },
    sys::SyscallError,
};

use super::{Hook, KernelError, chain, filters, links, places};

/// Links that are open at the same time, while all are looked at.
const OPEN_LINKS: usize = 64;

/// Loads the programs of these hooks; the verifier checks them.
pub(crate) fn load(loaded: &mut Ebpf, hooks: &[Hook]) -> Result<(), KernelError> {
    for hook in hooks {
        let done = match hook {
            Hook::Xdp => xdp(loaded)?.load(),
            Hook::In | Hook::Out | Hook::Pods => classifier(loaded, *hook)?.load(),
        };
        done.map_err(|error| KernelError::program(hook.program(), &error))?;
    }
    Ok(())
}

fn no_program(hook: Hook) -> KernelError {
    KernelError::Load(format!("the object has no program {}", hook.program()))
}

fn classifier(loaded: &mut Ebpf, hook: Hook) -> Result<&mut SchedClassifier, KernelError> {
    let found = loaded.program_mut(hook.program()).ok_or_else(|| no_program(hook))?;
    found.try_into().map_err(|error| KernelError::program(hook.program(), &error))
}

fn xdp(loaded: &mut Ebpf) -> Result<&mut Xdp, KernelError> {
    let found = loaded.program_mut(Hook::Xdp.program()).ok_or_else(|| no_program(Hook::Xdp))?;
    found.try_into().map_err(|error| KernelError::program(Hook::Xdp.program(), &error))
}

/// The programs that are not attached to their device, by their pins in `folder`.
pub(crate) fn missing(folder: &Path, wanted: &[(Hook, u32)]) -> Result<Vec<(Hook, u32)>, KernelError> {
    let mut missing = Vec::new();
    for places in wanted.chunks(OPEN_LINKS) {
        let mut open = Vec::new();
        for (hook, device) in places.iter().copied() {
            let filter = folder.join(format!("{}{}", filters::PREFIX, hook.pin(device)));
            if filter.exists() {
                if !filters::is_attached(&filter, hook, device)? {
                    missing.push((hook, device));
                }
                continue;
            }
            let pin = folder.join(hook.pin(device));
            match PinnedLink::from_pin(&pin).map(FdLink::from) {
                Ok(link) => {
                    let id = link.info().map_err(|error| KernelError::link(&pin, &error))?.id();
                    open.push((hook, device, id, link));
                }
                Err(_) => missing.push((hook, device)),
            }
        }
        let devices = if open.is_empty() { Default::default() } else { links::places_of_links("ifindex")? };
        let elsewhere = open.iter().filter(|(_, device, id, _)| devices.get(id) != Some(&u64::from(*device)));
        missing.extend(elsewhere.map(|(hook, device, ..)| (*hook, *device)));
    }
    Ok(missing)
}

/// Attaches a program to a device and pins it. A former version's XDP program is replaced in one step.
pub(crate) fn attach(
    loaded: &mut Ebpf,
    folder: &Path,
    hook: Hook,
    (device, name): (u32, &str),
) -> Result<(), KernelError> {
    let pin = folder.join(hook.pin(device));
    let filter = folder.join(format!("{}{}", filters::PREFIX, hook.pin(device)));
    for stale in [&pin, &filter] {
        remove(stale)?;
    }
    let link = match hook {
        Hook::Xdp => Some(attach_xdp(xdp(loaded)?, folder, device, name)?),
        Hook::In | Hook::Out | Hook::Pods => attach_tcx(classifier(loaded, hook)?, hook, name)?,
    };
    match link {
        Some(link) => {
            let pinned = link.pin(&pin);
            pinned.map_err(|error| KernelError::file("pin the link", &pin)(io::Error::other(error)))?;
        }
        None => {
            let program = classifier(loaded, hook)?;
            filters::attach(program, hook, name)?;
            let pinned = program.pin(&filter);
            pinned.map_err(|error| KernelError::file("pin the program", &filter)(io::Error::other(error)))?;
        }
    }
    Ok(())
}

fn failed(hook: Hook, device: &str, error: &ProgramError) -> KernelError {
    let program = hook.program();
    let device = device.to_owned();
    match error {
        ProgramError::SyscallError(SyscallError { io_error, .. }) if is(io_error, nix::libc::EBUSY) => {
            KernelError::DeviceBusy { program, device }
        }
        ProgramError::SyscallError(SyscallError { io_error, call })
            if io_error.kind() == io::ErrorKind::PermissionDenied =>
        {
            KernelError::NotPermitted(format!("{call} of {program} at {device}: {io_error}"))
        }
        error => KernelError::Device { program, device, reason: chain(error) },
    }
}

fn is(error: &io::Error, code: i32) -> bool {
    error.raw_os_error() == Some(code)
}

/// `None`: the kernel has no links for tc (before Linux 6.6).
fn attach_tcx(
    program: &mut SchedClassifier,
    hook: Hook,
    device: &str,
) -> Result<Option<FdLink>, KernelError> {
    let side = if hook == Hook::Out { TcAttachType::Egress } else { TcAttachType::Ingress };
    let order = TcAttachOptions::TcxOrder(LinkOrder::default());
    let link = match program.attach_with_options(device, side, order) {
        Ok(id) => program.take_link(id),
        Err(ProgramError::SyscallError(error)) if is(&error.io_error, nix::libc::EINVAL) => return Ok(None),
        Err(error) => Err(error),
    };
    let link = link.map_err(|error| failed(hook, device, &error))?;
    let link = link.try_into().map_err(|error| KernelError::link(Path::new(device), &error))?;
    Ok(Some(link))
}

/// In the driver if it can, otherwise in the generic way.
fn attach_xdp(program: &mut Xdp, folder: &Path, device: u32, name: &str) -> Result<FdLink, KernelError> {
    let is_former = |pin: &PathBuf| pin.exists();
    let former = former_folders(folder)?.into_iter().map(|former| former.join(Hook::Xdp.pin(device)));
    let former = former.filter(is_former).find_map(|pin| {
        let link = XdpLink::try_from(FdLink::from(PinnedLink::from_pin(pin).ok()?)).ok()?;
        program.attach_to_link(link).ok()
    });
    let id = match former {
        Some(id) => Ok(id),
        None => program
            .attach_to_if_index(device, XdpMode::Driver)
            .or_else(|_| program.attach_to_if_index(device, XdpMode::Skb)),
    };
    let link = id.and_then(|id| program.take_link(id));
    let link = link.map_err(|error| failed(Hook::Xdp, name, &error))?;
    link.try_into().map_err(|error| KernelError::link(Path::new(name), &error))
}

fn former_folders(folder: &Path) -> Result<Vec<PathBuf>, KernelError> {
    let own = folder.parent().unwrap_or(folder);
    let mut found = places::folders(own, places::DIRECT_LINKS_PREFIX)?;
    found.retain(|other| other != folder);
    Ok(found)
}

/// Detaches the programs of a folder that are not among `wanted`, and returns their number.
pub(crate) fn remove_others(folder: &Path, wanted: &[(Hook, u32)]) -> Result<usize, KernelError> {
    let mut removed = 0;
    for pin in others(folder, wanted)? {
        remove(&pin)?;
        removed += 1;
    }
    Ok(removed)
}

pub(crate) fn others(folder: &Path, wanted: &[(Hook, u32)]) -> Result<Vec<PathBuf>, KernelError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(KernelError::file("list", folder))?,
    };
    let is_other = |pin: &PathBuf| {
        let name = pin.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let place = Hook::parse(name.strip_prefix(filters::PREFIX).unwrap_or(name));
        place.is_none_or(|place| !wanted.contains(&place))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_other).collect())
}

fn remove(pin: &Path) -> Result<(), KernelError> {
    if pin.exists() {
        filters::detach_pinned(pin)?;
        fs::remove_file(pin).map_err(KernelError::file("remove", pin))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_has_the_name_of_its_place() {
        for hook in Hook::ALL {
            assert_eq!(Hook::parse(&hook.pin(7)), Some((hook, 7)));
        }
        for name in ["", "in", "in-", "in-x", "up-7", "connect4", "filter-in-7"] {
            assert_eq!(Hook::parse(name), None, "{name}");
        }
    }
}
