//! Who else makes rules for Services on this node.
//!
//! Owns: how they are recognised. In: names of tables and chains. Out: words. What is not in nftables is found by
//! [`crate::leftovers`].

use super::kernel::{KernelError, Tables};
use crate::model::Family;

/// The table of kube-proxy's nftables mode.
pub const KUBE_PROXY_TABLE: &str = "kube-proxy";

/// Chains of its modes iptables and ipvs, where iptables speaks to nf_tables: one of each table that they use.
const KUBE_PROXY_CHAINS: [(&str, &str); 2] = [("nat", "KUBE-SERVICES"), ("filter", "KUBE-FORWARD")];

/// What makes Services work besides us, or is left of what did, by family.
///
/// # Errors
/// The kernel does not say.
pub fn strangers(tables: &mut dyn Tables) -> Result<Vec<(Family, String)>, KernelError> {
    let all = tables.tables()?;
    let theirs = all.into_iter().filter(|(_, name)| name == KUBE_PROXY_TABLE);
    let mut found: Vec<_> = theirs
        .map(|(family, name)| (family, format!("table {name} of a kube-proxy (mode nftables)")))
        .collect();
    for (family, (table, chain)) in
        Family::ALL.into_iter().flat_map(|family| KUBE_PROXY_CHAINS.map(|chain| (family, chain)))
    {
        if tables.has_chain(family, table, chain)? {
            found.push((
                family,
                format!("chain {chain} of a kube-proxy (mode iptables or ipvs) in table {table}"),
            ));
        }
    }
    Ok(found)
}
