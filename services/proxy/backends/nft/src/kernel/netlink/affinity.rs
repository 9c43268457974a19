//! Counts the clients in the maps of session affinity.
//!
//! Owns: the requests. In: a family. Out: [`AffinityClients`]. The kernel counts since 6.16; before, the elements are
//! dumped and counted here, about 2 microseconds each. A dump delays no transaction and no packet.

use keelson_proxy::model::Family;
use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_netfilter::nftables::{NfTablesMessage, SetElementList, SetElementMessage};
use nix::errno::Errno;

use super::{
    AffinityClients, Found, KernelError, Netlink, RequestError, TABLE, dump::Counts, message, protocol,
};
use crate::{element::SetName, kernel::codec::attributes};

impl Netlink {
    /// `None`: the table does not exist, or is being created. Kernels before 6.16 do not count, so all elements are
    /// read.
    pub fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, KernelError> {
        self.retry(WHAT, |netlink| {
            let mut found = Found::default();
            let counts = netlink.read_sets(family, &mut found);
            match counts.and_then(|counts| netlink.count_maps(family, &found, &counts)) {
                // The table does not exist, or it or a map was deleted in the meantime.
                Err(RequestError::Rejected(Errno::ENOENT, _)) => Ok(None),
                counted => counted,
            }
        })
    }

    /// Counts by `counts`, or by a dump for maps that the kernel has not counted.
    fn count_maps(
        &mut self,
        family: Family,
        found: &Found,
        counts: &Counts,
    ) -> Result<Option<AffinityClients>, RequestError> {
        let mut clients = AffinityClients::default();
        for (set, clients) in SetName::AFFINITY.into_iter().zip(&mut clients) {
            if !found.has_set(set) {
                return Ok(None);
            }
            *clients = match counts.get(&set) {
                Some(count) => *count,
                None => self.count_elements(family, set)?,
            };
        }
        Ok(Some(clients))
    }

    /// Counts clients that have not expired.
    fn count_elements(&mut self, family: Family, set: SetName) -> Result<usize, RequestError> {
        /// `NFTA_SET_ELEM_LIST_ELEMENTS`.
        const ELEMENTS: u16 = 3;
        let list = SetElementMessage {
            attributes: vec![
                SetElementList::Table(TABLE.to_owned()),
                SetElementList::Set(set.as_str().to_owned()),
            ],
        };
        let mut count = 0;
        let message = NfTablesMessage::GetSetElement(list);
        self.request(WHAT, protocol(family), NLM_F_DUMP, message, |kind, _, message| {
            if kind == message::NEW_SET_ELEMENT {
                for attribute in attributes(message) {
                    if let (ELEMENTS, list) = attribute? {
                        count += attributes(list).count();
                    }
                }
            }
            Ok(())
        })?;
        Ok(count)
    }
}

const WHAT: &str = "the clients with session affinity";

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::{kernel::Change, testing::in_namespace};

    fn nft(command: &str) {
        let output = Command::new("nft").arg(command).output().expect("the program nft (package nftables)");
        assert!(output.status.success(), "nft {command}: {}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn p8_clients_are_counted_by_the_kernel_and_without_it() {
        in_namespace(|| {
            for (family, ip, client) in [(Family::V4, "ip", "10.0.0."), (Family::V6, "ip6", "fd00::")] {
                let mut netlink = Netlink::open().unwrap();
                assert_eq!(netlink.affinity_clients(family).unwrap(), None, "no table");
                netlink.commit(family, &[Change::MakeTable]).unwrap();
                assert_eq!(netlink.affinity_clients(family).unwrap(), None, "no maps");
                netlink.commit(family, &SetName::ALL.map(Change::MakeSet)).unwrap();
                let mut expected = AffinityClients::default();
                assert_eq!(netlink.affinity_clients(family).unwrap(), Some(expected));
                // More than fit into one message of a dump.
                for (group, clients) in [(0_usize, 1_usize), (3, 150), (7, 2)] {
                    expected[group] = clients;
                    let elements: Vec<String> = (1..=clients)
                        .map(|last| format!("{client}{last} . 8000:0 timeout 1h : 8000:1"))
                        .collect();
                    let elements = elements.join(", ");
                    nft(&format!("add element {ip} keelson affinity-{group} {{ {elements} }}"));
                }
                assert_eq!(netlink.affinity_clients(family).unwrap(), Some(expected));
                // As on a kernel that returns no counts.
                let mut found = Found::default();
                netlink.read_sets(family, &mut found).unwrap();
                let counted = netlink.count_maps(family, &found, &Counts::new()).unwrap();
                assert_eq!(counted, Some(expected));
            }
        });
    }
}
