//! TCP sockets that listen on this node, and the programs behind them.
//!
//! In: `/proc/net/tcp`, `/proc/net/tcp6`, and the descriptors of processes. Out: [`Listener`]s. Descriptors of other users'
//! processes need root.

use std::{
    collections::HashMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use super::super::facts::Listener;

/// `TCP_LISTEN`.
const LISTENS: &str = "0A";

pub(super) fn all(proc: &Path) -> Vec<Listener> {
    let read = |file: &str| fs::read_to_string(proc.join(file)).unwrap_or_default();
    let found: Vec<(SocketAddr, u64)> =
        ["net/tcp", "net/tcp6"].iter().flat_map(|file| parse(&read(file))).collect();
    let owners = owners(proc);
    found
        .into_iter()
        .map(|(address, inode)| Listener { address, owner: owners.get(&inode).cloned() })
        .collect()
}

/// Addresses and inodes of listening sockets.
fn parse(table: &str) -> Vec<(SocketAddr, u64)> {
    let line = |line: &str| {
        let mut fields = line.split_whitespace();
        let local = fields.nth(1)?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?.parse().ok()?;
        (state == LISTENS).then_some((address(local)?, inode))
    };
    table.lines().skip(1).filter_map(line).collect()
}

/// Hexadecimal words in the byte order of the machine, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words: Option<Vec<u32>> =
        (0..ip.len() / 8).map(|word| u32::from_str_radix(ip.get(word * 8..word * 8 + 8)?, 16).ok()).collect();
    let bytes: Vec<u8> = words?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let ip = match <[u8; 4]>::try_from(bytes.as_slice()) {
        Ok(v4) => IpAddr::from(Ipv4Addr::from(v4)),
        Err(_) => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.as_slice()).ok()?)),
    };
    Some(SocketAddr::new(ip, port))
}

/// Program and process ID by the inode of a socket.
fn owners(proc: &Path) -> HashMap<u64, (String, i32)> {
    let mut owners = HashMap::new();
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let program = fs::read_to_string(entry.path().join("comm")).unwrap_or_default().trim().to_owned();
        for descriptor in fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(descriptor.path()) else { continue };
            let target = target.to_string_lossy();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
            if let Some(inode) = inode {
                owners.entry(inode).or_insert_with(|| (program.clone(), pid));
            }
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_kernel() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:24E0 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n   \
                     1: 0100007F:24E1 00000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0\n";
        let found = parse(table);
        if cfg!(target_endian = "little") {
            assert_eq!(found, [("127.0.0.1:9440".parse().expect("an address"), 4711)]);
        }
        let six = "00000000000000000000000001000000:24E0";
        if cfg!(target_endian = "little") {
            assert_eq!(address(six), "[::1]:9440".parse().ok());
        }
        assert_eq!(address("0100007F"), None);
        assert_eq!(address("01:24E0"), None);
    }

    #[test]
    fn a_socket_of_this_process_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("an address");
        let found = all(Path::new("/proc"));
        let owner = found.iter().find(|found| found.address == address).and_then(|found| found.owner.clone());
        assert_eq!(owner.map(|(_, pid)| pid), i32::try_from(std::process::id()).ok());
    }
}
