//! Rules of a kube-proxy in nf_tables.
//!
//! Owns: their detection. In: names of tables and chains. Out: descriptions. Rules outside nf_tables are found by
//! [`keelson_proxy::leftovers`].

use keelson_proxy::model::Family;

use super::kernel::{KernelError, Netlink};

pub(crate) const TABLE: &str = "kube-proxy";

/// Chains of its modes iptables and ipvs in iptables-nft: one of each table that they use.
const CHAINS: [(&str, &str); 2] = [("nat", "KUBE-SERVICES"), ("filter", "KUBE-FORWARD")];

/// Rules of a running kube-proxy, or of one that has stopped, by family.
pub(crate) fn found(netlink: &mut Netlink) -> Result<Vec<(Family, String)>, KernelError> {
    let all = netlink.tables()?;
    let theirs = all.into_iter().filter(|(_, name)| name == TABLE);
    let mut found: Vec<_> = theirs
        .map(|(family, name)| (family, format!("table {name} of a kube-proxy (mode nftables)")))
        .collect();
    for (family, (table, chain)) in
        Family::ALL.into_iter().flat_map(|family| CHAINS.map(|chain| (family, chain)))
    {
        if netlink.has_chain(family, table, chain)? {
            found.push((
                family,
                format!("chain {chain} of a kube-proxy (mode iptables or ipvs) in table {table}"),
            ));
        }
    }
    Ok(found)
}
