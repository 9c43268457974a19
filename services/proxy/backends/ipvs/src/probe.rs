//! Tries what the backend needs.
//!
//! Owns: [`probe`]. In: kernel and programs of a family. Out: an [`OpenError`] that names what is missing. Each thing is created once,
//! where nothing meets it, and removed again; what an earlier run has shown to work is not tried.

use std::net::IpAddr;

use keelson_proxy::{
    addresses::Match,
    backend::BackendError,
    model::{Family, Protocol},
    options::Detector,
};
use keelson_proxy_xtables::{
    changes::Changes,
    names::{SetName, Table, set_prefix},
    programs::{ProgramError, Programs},
    removal::destroy,
    rule::{Rule, Target, chain_text},
};

use crate::{
    kernel::{Kernel, KernelError},
    plan::{NodeFacts, SETS, chains},
    servers::{ServerChange, ServerKey, Socket, Spec},
};

const CHAIN: &str = "KEELSON-PROBE";

/// Why a family cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    Programs(#[from] ProgramError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl OpenError {
    /// Whether a later attempt may succeed on the same node.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Programs(error) => error.is_passing(),
            Self::Kernel(error) => error.is_passing(),
        }
    }
}

impl From<OpenError> for BackendError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Programs(error) => error.into(),
            OpenError::Kernel(error) => error.into(),
        }
    }
}

pub(crate) fn probe(
    kernel: &mut dyn Kernel,
    programs: &mut dyn Programs,
    family: Family,
    scheduler: &str,
) -> Result<(), OpenError> {
    probe_scheduler(kernel, family, scheduler)?;
    if kernel.addresses(family)?.is_none() {
        kernel.create_interface()?;
    }
    let sets = programs.count_sets()?;
    if !sets.iter().any(|(set, _)| set.starts_with(set_prefix(family))) {
        probe_rules(programs, family)?;
    }
    Ok(())
}

/// An address for documentation.
fn unused(family: Family) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, 1].into(),
        Family::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(),
    }
}

fn probe_scheduler(kernel: &mut dyn Kernel, family: Family, scheduler: &str) -> Result<(), KernelError> {
    let key = ServerKey::Socket(Socket { ip: unused(family), protocol: Protocol::Tcp, port: 1 });
    let spec = Spec::new(scheduler, Protocol::Tcp, 0);
    // One that a killed process left would be in the way.
    kernel.change_servers(family, &[ServerChange::DeleteServer(key)])?;
    kernel.change_servers(family, &[ServerChange::AddServer(key, spec)])?;
    kernel.change_servers(family, &[ServerChange::DeleteServer(key)])
}

/// Every rule of the plan in one chain of its table, without those that lead to other chains.
fn probe_rules(programs: &mut dyn Programs, family: Family) -> Result<(), ProgramError> {
    let facts = NodeFacts {
        mark: 1,
        masquerade_all: false,
        detector: Some(Detector::Bridge("lo".into())),
        node_ips: Vec::new(),
        node_ports: Match::AllLocal,
        local: [unused(family)].into(),
        scheduler: String::new(),
    };
    let mut made =
        Changes { create_sets: SETS.map(|kind| SetName::fixed(family, kind)).into(), ..Changes::default() };
    for of in Table::ALL {
        let rules = chains(family, &facts).into_iter().filter(|(table, ..)| *table == of);
        let rules: Vec<Rule> = rules
            .flat_map(|(_, _, rules)| rules)
            .map(|rule| match rule.target {
                Target::Jump(_) | Target::Goto(_) => Rule::new(rule.matches, Target::Return),
                _ => rule,
            })
            .collect();
        made.chains.push((of, CHAIN.to_owned(), chain_text(CHAIN, &rules)));
    }
    let removed = Changes {
        delete_chains: Table::ALL.map(|table| (table, CHAIN.to_owned())).into(),
        ..Changes::default()
    };
    let result = programs
        .restore_sets(&made.sets_before(family))
        .and_then(|()| programs.restore(&made.rules(usize::MAX)));
    // If nothing was made, this removes nothing.
    let unmade = programs.restore(&removed.rules(usize::MAX));
    for set in &made.create_sets {
        destroy(programs, set.as_str());
    }
    result.and(unmade)
}
