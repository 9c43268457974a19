//! Facts that do not change while the machine runs.
//!
//! Owns: names, versions and identities of the machine. In: files, uname(2). Out: [`HostFacts`]; an unreadable
//! fact is empty and logged.

use std::ffi::OsStr;

use keelson_heartbeats::host::HostFacts;

use crate::tree::{ReadError, Tree};

const MACHINE_ID: [&str; 2] = ["etc/machine-id", "var/lib/dbus/machine-id"];
/// DMI on most machines, the firmware's device tree on POWER; the first one that exists.
const SYSTEM_UUID: [&str; 3] =
    ["sys/class/dmi/id/product_uuid", "proc/device-tree/system-id", "proc/device-tree/vm,uuid"];
const BOOT_ID: &str = "proc/sys/kernel/random/boot_id";
const OS_RELEASE: [&str; 2] = ["etc/os-release", "usr/lib/os-release"];

pub(crate) fn read(tree: &Tree) -> HostFacts {
    let machine_id = or_omitted(first_readable(tree, &MACHINE_ID)).trim().to_owned();
    let system_uuid =
        first_readable(tree, &SYSTEM_UUID).map(|uuid| uuid.trim_matches(['\0', ' ', '\n']).to_owned());
    let os_image = or_omitted(first_readable(tree, &OS_RELEASE).map(|text| pretty_name(&text)));
    let (kernel_version, hostname) = match nix::sys::utsname::uname() {
        Ok(name) => (lossy(name.release()), lossy(name.nodename())),
        Err(error) => {
            tracing::warn!(%error, "the kernel version is not known");
            Default::default()
        }
    };
    HostFacts {
        // Small virtual machines have no DMI, and in a container it is often hidden.
        system_uuid: system_uuid.ok().filter(|uuid| !uuid.is_empty()).unwrap_or_else(|| machine_id.clone()),
        boot_id: or_omitted(tree.text(BOOT_ID)).trim().to_owned(),
        machine_id,
        kernel_version,
        os_image,
        operating_system: "linux".to_owned(),
        architecture: architecture(std::env::consts::ARCH, cfg!(target_endian = "little")).to_owned(),
        hostname,
    }
}

fn lossy(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

fn or_omitted(read: Result<String, ReadError>) -> String {
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read a fact of the node; node status omits it");
        String::new()
    })
}

/// The first readable file; the error is that of the first.
fn first_readable(tree: &Tree, paths: &[&str]) -> Result<String, ReadError> {
    let mut error = None;
    for path in paths {
        match tree.text(path) {
            Ok(text) => return Ok(text),
            Err(failed) => error = error.or(Some(failed)),
        }
    }
    Err(error.unwrap_or_else(|| tree.content("", "any of the files")))
}

/// `PRETTY_NAME` of os-release, else `Linux` (the default of os-release(5)).
fn pretty_name(text: &str) -> String {
    let value = text.lines().rev().find_map(|line| line.trim().strip_prefix("PRETTY_NAME="));
    let value = value.map(unquote).filter(|value| !value.is_empty());
    value.unwrap_or_else(|| "Linux".to_owned())
}

/// A value of os-release: in quotes or not, with the shell's escapes in double quotes.
fn unquote(value: &str) -> String {
    let value = value.trim();
    if let Some(inner) = value.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')) {
        return inner.to_owned();
    }
    let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
    let mut plain = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        plain.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    plain
}

/// Go's name of an architecture, used in labels of nodes and image indexes.
fn architecture(rust: &'static str, little_endian: bool) -> &'static str {
    match (rust, little_endian) {
        ("x86_64", _) => "amd64",
        ("x86", _) => "386",
        ("aarch64", _) => "arm64",
        ("powerpc64", true) => "ppc64le",
        ("powerpc64", false) => "ppc64",
        ("loongarch64", _) => "loong64",
        ("mips64", true) => "mips64le",
        // The names of arm, riscv64, s390x and others are the same.
        (same, _) => same,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_system_is_unquoted() {
        for (text, name) in [
            ("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n", "Debian GNU/Linux 13 (trixie)"),
            ("PRETTY_NAME='Alpine Linux v3.22'", "Alpine Linux v3.22"),
            ("PRETTY_NAME=Plain\n", "Plain"),
            ("PRETTY_NAME=\"A \\\"quoted\\\" \\$name\"", "A \"quoted\" $name"),
            ("PRETTY_NAME=\"\"\n", "Linux"),
            ("NAME=x\n", "Linux"),
            ("", "Linux"),
            ("PRETTY_NAME=\"\n", "\""),
        ] {
            assert_eq!(pretty_name(text), name, "{text:?}");
        }
    }

    #[test]
    fn architectures_have_gos_names() {
        for (rust, little, go) in [
            ("x86_64", true, "amd64"),
            ("aarch64", true, "arm64"),
            ("powerpc64", true, "ppc64le"),
            ("s390x", false, "s390x"),
            ("riscv64", true, "riscv64"),
        ] {
            assert_eq!(architecture(rust, little), go);
        }
    }
}
