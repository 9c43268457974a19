//! Who else makes rules for Services on this node.
//!
//! Owns: how they are recognised. In: names of tables and chains. Out: words.

use super::kernel::{KernelError, Tables};
use crate::model::Family;

/// The table of kube-proxy's nftables mode.
pub const KUBE_PROXY_TABLE: &str = "kube-proxy";

/// The chains by which its modes iptables and ipvs begin, where iptables speaks to nf_tables. What an iptables of the
/// old kind keeps is not seen.
const KUBE_PROXY_CHAIN: (&str, &str) = ("nat", "KUBE-SERVICES");

/// What makes Services work besides us, or is left of what did, by family.
///
/// # Errors
/// The kernel does not say.
pub fn strangers(tables: &mut dyn Tables) -> Result<Vec<(Family, String)>, KernelError> {
    let all = tables.tables()?;
    let theirs = all.into_iter().filter(|(_, name)| name == KUBE_PROXY_TABLE);
    let mut found: Vec<_> = theirs
        .map(|(family, name)| (family, format!("the table {name} of a kube-proxy (mode nftables)")))
        .collect();
    let (table, chain) = KUBE_PROXY_CHAIN;
    for family in Family::ALL {
        if tables.has_chain(family, table, chain)? {
            found.push((
                family,
                format!("the chain {chain} of a kube-proxy (mode iptables or ipvs) in table {table}"),
            ));
        }
    }
    Ok(found)
}
