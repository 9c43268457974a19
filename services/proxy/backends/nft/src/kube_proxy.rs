//! Rules of a kube-proxy in nf_tables.
//!
//! Owns: how they are recognised. In: names of tables and chains. Out: descriptions. What is not in nf_tables is found by
//! [`keelson_proxy::leftovers`].

use keelson_proxy::model::Family;

use super::kernel::{KernelError, Netlink};

/// The table of kube-proxy's nftables mode.
pub(crate) const TABLE: &str = "kube-proxy";

/// Chains of its modes iptables and ipvs, where iptables speaks to nf_tables: one of each table that they use.
const CHAINS: [(&str, &str); 2] = [("nat", "KUBE-SERVICES"), ("filter", "KUBE-FORWARD")];

/// Rules of a kube-proxy that runs, or that it left, by family.
///
/// # Errors
/// The kernel does not answer.
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
