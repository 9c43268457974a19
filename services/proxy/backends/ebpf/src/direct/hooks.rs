//! The programs of direct return at their devices.
//!
//! Owns: [`attach`], [`is_attached`]. In: programs that are loaded, a folder, devices. Out: links
//! that are pinned; filters, where the kernel has no links for tc.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::kernel::{Hook, KernelError, chain, filters, links, places};
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

/// Loads the programs; the verifier checks them.
pub(super) fn load(loaded: &mut Ebpf) -> Result<(), KernelError> {
    let failed = |hook: Hook| {
        move |error: ProgramError| match KernelError::program(hook.program(), &error) {
            KernelError::NotPermitted(reason) => KernelError::NotPermitted(format!(
                "{reason} (direct return needs CAP_PERFMON or CAP_SYS_ADMIN besides)"
            )),
            error => error,
        }
    };
    for hook in [Hook::In, Hook::Out] {
        classifier(loaded, hook)?.load().map_err(failed(hook))?;
    }
    xdp(loaded)?.load().map_err(failed(Hook::Xdp))
}

fn missing(hook: Hook) -> KernelError {
    KernelError::Load(format!("the object has no program {}", hook.program()))
}

fn classifier(loaded: &mut Ebpf, hook: Hook) -> Result<&mut SchedClassifier, KernelError> {
    let found = loaded.program_mut(hook.program()).ok_or_else(|| missing(hook))?;
    found.try_into().map_err(|error| KernelError::program(hook.program(), &error))
}

fn xdp(loaded: &mut Ebpf) -> Result<&mut Xdp, KernelError> {
    let found = loaded.program_mut(Hook::Xdp.program()).ok_or_else(|| missing(Hook::Xdp))?;
    found.try_into().map_err(|error| KernelError::program(Hook::Xdp.program(), &error))
}

/// Whether a program is attached to a device, by its pin in `folder`.
pub(super) fn is_attached(folder: &Path, hook: Hook, device: u32) -> Result<bool, KernelError> {
    let filter = folder.join(format!("{}{}", filters::PREFIX, hook.pin(device)));
    if filter.exists() {
        return filters::is_attached(&filter, hook, device);
    }
    let pin = folder.join(hook.pin(device));
    let Ok(link) = PinnedLink::from_pin(&pin).map(FdLink::from) else { return Ok(false) };
    let id = link.info().map_err(|error| KernelError::link(&pin, &error))?.id();
    Ok(links::places_of_links("ifindex")?.get(&id) == Some(&u64::from(device)))
}

/// Attaches a program to a device and pins it. A former version's XDP program is replaced in one step.
pub(super) fn attach(
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
        Hook::In | Hook::Out => attach_tcx(classifier(loaded, hook)?, hook, name)?,
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
pub(super) fn remove_others(folder: &Path, wanted: &[(Hook, u32)]) -> Result<usize, KernelError> {
    let mut removed = 0;
    for pin in others(folder, wanted)? {
        remove(&pin)?;
        removed += 1;
    }
    Ok(removed)
}

pub(super) fn others(folder: &Path, wanted: &[(Hook, u32)]) -> Result<Vec<PathBuf>, KernelError> {
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
