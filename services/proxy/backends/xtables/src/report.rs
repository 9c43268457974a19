//! What backends report of their rules and sets.
//!
//! Owns: texts and numbers of [`Backend`](keelson_proxy::backend::Backend) and its observer. In: options, the wanted state,
//! what was read. Out: values.

use std::collections::BTreeMap;

use keelson_proxy::{model::Family, options::Options};

use crate::changes::Wanted;

/// Settings that have no effect without flowtables.
#[must_use]
pub fn limitations(options: &Options) -> Vec<String> {
    let text = "established flows are not offloaded: flowtables belong to the backend nft";
    Vec::from_iter((!options.flowtable_interfaces.is_empty()).then(|| text.to_owned()))
}

/// Number of entries by set, without empty sets.
#[must_use]
pub fn set_sizes(wanted: &Wanted) -> BTreeMap<String, u64> {
    let sets = wanted.sets.iter().filter(|(_, entries)| !entries.is_empty());
    sets.map(|(set, entries)| (set.to_string(), entries.len() as u64)).collect()
}

/// Describes chains of a kube-proxy, of which each family was found to have one or none.
#[must_use]
pub fn other_proxies(chains: &[Option<String>; 2]) -> Vec<(Family, String)> {
    let found = Family::ALL.into_iter().zip(chains);
    let named = |(family, chain): (Family, &Option<String>)| {
        Some((family, format!("{} of a kube-proxy (mode iptables or ipvs)", chain.as_ref()?)))
    };
    found.filter_map(named).collect()
}
