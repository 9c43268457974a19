//! The links of programs to the cgroup, once they are pinned.
//!
//! Owns: [`HOOKS`]; which programs are attached, and detaching them. In: a folder of pins. Out: hooks.
//!
//! A link keeps its program attached as long as its pin exists, with or without this process. Two generations of programs may
//! be attached at once: what the first one has translated is no Service for the other.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::programs::links::{FdLink, PinnedLink};
use nix::{errno::Errno, libc};

use super::KernelError;

/// Names of the hooks; the programs have the prefix `keelson_`. First those that choose endpoints, then those that show Services
/// in their place, then the one that forgets them.
pub(crate) const HOOKS: [(&str, &str); 9] = [
    ("connect4", "keelson_connect4"),
    ("connect6", "keelson_connect6"),
    ("sendmsg4", "keelson_sendmsg4"),
    ("sendmsg6", "keelson_sendmsg6"),
    ("recvmsg4", "keelson_recvmsg4"),
    ("recvmsg6", "keelson_recvmsg6"),
    ("getpeername4", "keelson_getpeername4"),
    ("getpeername6", "keelson_getpeername6"),
    ("sock_release", "keelson_sock_release"),
];

/// The hooks whose link is missing, or is not at this cgroup: it was removed or detached.
pub(crate) fn missing(folder: &Path, cgroup_id: u64) -> Result<Vec<&'static str>, KernelError> {
    let mut open = Vec::new();
    let mut missing = Vec::new();
    for (hook, _) in HOOKS {
        let pin = folder.join(hook);
        match PinnedLink::from_pin(&pin).map(FdLink::from) {
            Ok(link) => {
                let id = link.info().map_err(|error| KernelError::link(&pin, &error))?.id();
                open.push((hook, id, link));
            }
            Err(_) => missing.push(hook),
        }
    }
    let cgroups = places_of_links("cgroup_id")?;
    let is_elsewhere = |id: &u32| cgroups.get(id) != Some(&cgroup_id);
    missing.extend(open.iter().filter(|(_, id, _)| is_elsewhere(id)).map(|(hook, ..)| *hook));
    Ok(missing)
}

/// Where each link that this process has open is attached, by the number of the link; 0: detached. `field`: its name for the
/// place.
pub(crate) fn places_of_links(field: &str) -> Result<BTreeMap<u32, u64>, KernelError> {
    let folder = Path::new("/proc/self/fdinfo");
    let entries = fs::read_dir(folder).map_err(KernelError::file("list", folder))?;
    let texts = entries.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    Ok(texts.filter_map(|text| parse_link(&text, field)).collect())
}

fn parse_link(fdinfo: &str, field: &str) -> Option<(u32, u64)> {
    let value = |name: &str| {
        fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    Some((value("link_id")?.parse().ok()?, value(field)?.parse().ok()?))
}

/// Detaches the programs of a folder of links in the order of [`HOOKS`], as far as they have pins there. The kernel also does it
/// once their pins are gone, but later, and in any order: a new connection would show its endpoint if `getpeername4` went
/// before `connect4`. So what cannot be detached here is left to that.
pub(crate) fn detach(folder: &Path) {
    let pins = HOOKS.into_iter().map(|(hook, _)| folder.join(hook)).filter(|pin| pin.exists());
    for pin in pins {
        if let Err(error) = detach_pinned(&pin) {
            tracing::debug!(pin = %pin.display(), %error, "not detached before its pin is removed");
        }
    }
}

/// Detaches at once, also a link that others have open (Linux 5.9 and newer). aya has no call for it.
fn detach_pinned(pin: &Path) -> io::Result<()> {
    /// The parts of `union bpf_attr` for the two commands.
    #[repr(C)]
    struct Pin {
        path: u64,
        descriptor: u32,
        flags: u32,
    }
    #[repr(C)]
    struct Link {
        descriptor: RawFd,
    }
    const OBJ_GET: libc::c_int = 7;
    const LINK_DETACH: libc::c_int = 34;
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let opened = bpf(OBJ_GET, &Pin { path: path.as_ptr().addr() as u64, descriptor: 0, flags: 0 })?;
    #[allow(unsafe_code, reason = "only a number names what the kernel has opened")]
    // SAFETY: the kernel has just made this descriptor for this process, and nothing else knows it.
    let link = unsafe { OwnedFd::from_raw_fd(opened) };
    bpf(LINK_DETACH, &Link { descriptor: link.as_raw_fd() }).map(drop)
}

/// bpf(2) with a command that reads `attributes`, and what these point to, and writes nothing.
fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    #[allow(unsafe_code, reason = "a system call without a wrapper")]
    // SAFETY: the kernel reads `size_of::<T>()` bytes of `attributes`, which is borrowed until it returns.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    let result = Errno::result(result)?;
    RawFd::try_from(result).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_tells_its_cgroup() {
        let text = "pos:\t0\nflags:\t02\nlink_type:\tcgroup\nlink_id:\t17\nprog_id:\t3\ncgroup_id:\t4711\n";
        assert_eq!(parse_link(text, "cgroup_id"), Some((17, 4711)));
        let text = "pos:\t0\nlink_type:\txdp\nlink_id:\t17\nifindex:\t2\n";
        assert_eq!(parse_link(text, "cgroup_id"), None);
        assert_eq!(parse_link(text, "ifindex"), Some((17, 2)));
    }
}
