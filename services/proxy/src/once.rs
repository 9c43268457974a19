//! What is done once and without staying: the ruleset as text, what would change, and clearing up.
//!
//! Owns: [`Offline`], a programmer that is given one state and brings nothing to the kernel. In: a whole state of the agent.
//! Out: text, or the end of our tables.

use std::{fmt, time::Instant};

use keelson_client::State;

use crate::{
    addresses::{AddressError, LocalAddresses},
    model::{Family, service_ports},
    nft::{
        element::{Key, Op, SetName},
        flowtable::FoundFlowtable,
        kernel::{AffinityClients, Change, Content, Elements, Found, Generation, KernelError, TABLE, Tables},
        ruleset::{FLOWTABLE, element_text},
        strangers::KUBE_PROXY_TABLE,
    },
    options::Options,
    programmer::Programmer,
};

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum OnceError {
    /// The kernel does not say what it has.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The node's addresses are not to be had.
    #[error(transparent)]
    Addresses(#[from] AddressError),
    /// What the agent sent is damaged.
    #[error(transparent)]
    State(#[from] keelson_client::Error),
    /// `NodeCIDR` and no pod CIDR.
    #[error("the Node has no spec.podCIDRs, which detect_local_mode NodeCIDR requires")]
    NoPodCidrs,
}

/// What would be in the kernel for one state.
#[derive(Debug)]
pub struct Offline(Programmer);

impl Offline {
    /// Of a whole state. Numbers and places are those of the tables that are in the kernel, as far as these may be read:
    /// without the capability, the text is as it would be on a node without tables.
    ///
    /// # Errors
    /// See [`OnceError`].
    pub fn new(tables: Option<Box<dyn Tables>>, options: Options, state: &State) -> Result<Self, OnceError> {
        let mut programmer =
            Programmer::without_rehearsal(tables.unwrap_or_else(|| Box::new(NoTables)), options)?;
        let now = Instant::now();
        for raw in state.services() {
            let service = raw.decode()?;
            programmer.set(raw.name(), Family::ALL.map(|family| service_ports(&service, family)), now);
        }
        programmer.node(state.node().cloned().unwrap_or_default(), now);
        let local = LocalAddresses::now()?;
        programmer.addresses(local.as_slice(), now);
        programmer.interfaces(local.interfaces());
        programmer.whole(now);
        if programmer.waits_for_pod_cidrs() {
            return Err(OnceError::NoPodCidrs);
        }
        Ok(Self(programmer))
    }

    /// Both tables as text for `nft -f`.
    ///
    /// # Errors
    /// `out` refuses.
    pub fn print(&self, out: &mut impl fmt::Write) -> fmt::Result {
        self.0.enabled().try_for_each(|side| side.programme.ruleset().print(out))
    }

    /// What a proxy would change, a line each.
    ///
    /// # Errors
    /// The tables cannot be read.
    pub fn changes(&mut self) -> Result<Vec<String>, OnceError> {
        let mut lines = Vec::new();
        for (family, difference) in self.0.differences()? {
            if difference.absent {
                lines.push(format!("add table {}", table(family)));
            }
            if difference.rebuild {
                lines.push(format!("replace table {}: it cannot be repaired in place", table(family)));
            }
            lines.extend(
                difference
                    .first
                    .iter()
                    .chain(&difference.last)
                    .chain(&difference.devices)
                    .filter_map(|change| structure(family, change)),
            );
            lines.extend(
                difference.prepared.iter().filter_map(|chain| structure(family, &Change::MakeChain(*chain))),
            );
            lines.extend(difference.ops.iter().flat_map(|op| element(family, op)));
        }
        Ok(lines)
    }
}

/// The family and name of our table, as nft writes them.
pub(crate) const fn table(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip keelson",
        Family::V6 => "ip6 keelson",
    }
}

fn structure(family: Family, change: &Change) -> Option<String> {
    let table = table(family);
    Some(match change {
        Change::MakeSet(set) => format!("add set {table} {set}"),
        Change::MakeChain(chain) => format!("add chain {table} {chain}"),
        Change::Rules(chain, rules) => format!("write the {} rules of chain {table} {chain}", rules.len()),
        Change::DeleteChain(chain) => format!("delete chain {table} {chain}"),
        Change::DeleteChainNamed(name) => format!("delete chain {table} {name}"),
        Change::DeleteSetNamed(name) => format!("delete set {table} {name}"),
        Change::MakeFlowtable => format!("add flowtable {table} {FLOWTABLE}"),
        Change::DeleteFlowtable(name) => format!("delete flowtable {table} {name}"),
        Change::AddDevices(names) => format!("add {} to flowtable {table} {FLOWTABLE}", names.join(", ")),
        Change::RemoveDevices(names) => {
            format!("remove {} from flowtable {table} {FLOWTABLE}", names.join(", "))
        }
        Change::MakeTable | Change::DeleteTable | Change::Element(_) => return None,
    })
}

fn element(family: Family, op: &Op) -> Vec<String> {
    let line = |verb: &str, element| {
        format!("{verb} element {} {} {{ {} }}", table(family), set(op), element_text(family, element))
    };
    match op {
        Op::Add(added) => vec![line("add", added)],
        Op::Delete(deleted) => vec![line("delete", deleted)],
        Op::Replace(deleted, added) => vec![line("delete", deleted), line("add", added)],
    }
}

const fn set(op: &Op) -> crate::nft::element::SetName {
    match op {
        Op::Add(element) | Op::Delete(element) | Op::Replace(_, element) => element.set,
    }
}

/// Whose tables are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftovers {
    /// Ours.
    Keelson,
    /// Those of a kube-proxy in its mode nftables; ours stay.
    KubeProxy,
}

/// Removes tables, and names each once it is gone.
///
/// # Errors
/// The kernel refuses.
pub fn cleanup(
    tables: &mut dyn Tables,
    whose: Leftovers,
    mut removed: impl FnMut(String),
) -> Result<(), KernelError> {
    let wanted = match whose {
        Leftovers::Keelson => TABLE,
        Leftovers::KubeProxy => KUBE_PROXY_TABLE,
    };
    for (family, name) in tables.tables()? {
        if name == wanted {
            tables.delete_table(family, &name)?;
            let prefix = match family {
                Family::V4 => "ip",
                Family::V6 => "ip6",
            };
            removed(format!("{prefix} {name}"));
        }
    }
    Ok(())
}

/// A kernel without any table.
#[derive(Debug)]
struct NoTables;

impl Tables for NoTables {
    fn commit(&mut self, _: Family, _: &[Change]) -> Result<(), KernelError> {
        Err(KernelError::NotPermitted)
    }

    fn read(&mut self, _: Family) -> Result<Option<Found>, KernelError> {
        Ok(None)
    }

    fn read_structure(&mut self, _: Family) -> Result<Option<Found>, KernelError> {
        Ok(None)
    }

    fn read_flowtable(&mut self, _: Family) -> Result<Option<FoundFlowtable>, KernelError> {
        Ok(None)
    }

    fn try_flowtable(&mut self, _: Family) -> Result<(), KernelError> {
        Ok(())
    }

    fn read_set(&mut self, _: Family, _: SetName) -> Result<Elements, KernelError> {
        Ok(Elements::new())
    }

    fn get(&mut self, _: Family, _: SetName, _: &Key) -> Result<Option<Content>, KernelError> {
        Ok(None)
    }

    fn affinity_clients(&mut self, _: Family) -> Result<Option<AffinityClients>, KernelError> {
        Ok(None)
    }

    fn generation(&mut self) -> Result<Generation, KernelError> {
        Ok(Generation::default())
    }

    fn tables(&mut self) -> Result<Vec<(Family, String)>, KernelError> {
        Ok(Vec::new())
    }

    fn has_chain(&mut self, _: Family, _: &str, _: &str) -> Result<bool, KernelError> {
        Ok(false)
    }

    fn delete_table(&mut self, _: Family, _: &str) -> Result<(), KernelError> {
        Err(KernelError::NotPermitted)
    }
}
