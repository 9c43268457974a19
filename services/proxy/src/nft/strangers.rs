//! Who else makes rules for Services on this node.
//!
//! Owns: how they are recognised. In: names of tables. Out: words.

use super::kernel::{KernelError, Tables};
use crate::model::Family;

/// The table of kube-proxy's nftables mode.
pub const KUBE_PROXY_TABLE: &str = "kube-proxy";

/// Tables that make Services work, or are left of what did, by family.
///
/// # Errors
/// The kernel does not say.
pub fn strangers(tables: &mut dyn Tables) -> Result<Vec<(Family, String)>, KernelError> {
    let all = tables.tables()?;
    let theirs = all.into_iter().filter(|(_, name)| name == KUBE_PROXY_TABLE);
    Ok(theirs.map(|(family, name)| (family, format!("the table {name} of a kube-proxy (mode nftables)"))).collect())
}
