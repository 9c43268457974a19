//! Removes chains and sets.
//!
//! Owns: [`remove_chains`] and [`remove_sets`]. In: the programs of a family. Out: the names of what was removed.

use keelson_proxy::model::Family;

use crate::{
    names::{PREFIX, Table, set_prefix},
    plan::Changes,
    probe::destroy,
    programs::{Installed, ProgramError, Programs},
    save::Found,
};

/// All rules of a variant; `None`: it has none, the kernel does not support it, or the caller has no right to read it.
fn saved(programs: &Installed, family: Family) -> Result<Option<String>, ProgramError> {
    match programs.save_all() {
        Ok(saved) => Ok(saved.contains(PREFIX).then_some(saved)),
        Err(error @ ProgramError::Failed { .. }) => {
            tracing::debug!(%family, %error, "cannot list chains");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Number of our chains.
pub(crate) fn count_chains(programs: &Installed, family: Family) -> Result<usize, ProgramError> {
    let saved = saved(programs, family)?.unwrap_or_default();
    Ok(saved
        .lines()
        .filter_map(|line| line.strip_prefix(':'))
        .filter(|chain| chain.starts_with(PREFIX))
        .count())
}

/// Removes the chains of one variant, and the jumps to them.
pub(crate) fn remove_chains(
    programs: &mut Installed,
    family: Family,
    removed: &mut dyn FnMut(String),
) -> Result<(), ProgramError> {
    let Some(saved) = saved(programs, family)? else { return Ok(()) };
    let mut found = Found::default();
    for table in Table::ALL {
        let part = saved.split_once(&format!("*{table}\n")).map_or("", |(_, rest)| rest);
        found.add_rules(table, part.split_once("COMMIT").map_or(part, |(part, _)| part));
    }
    let changes = Changes::removal(&found);
    programs.restore(&changes.rules(usize::MAX))?;
    let chains = changes.delete_chains.len();
    removed(format!("{chains} chains of {family} iptables ({})", programs.variant));
    Ok(())
}

pub(crate) fn remove_sets(
    programs: &mut Installed,
    family: Family,
    removed: &mut dyn FnMut(String),
) -> Result<(), ProgramError> {
    let sets = match programs.count_sets() {
        Ok(sets) => sets,
        Err(ProgramError::Missing { .. } | ProgramError::Failed { .. }) => return Ok(()),
        Err(error) => return Err(error),
    };
    let ours = sets.iter().filter(|(set, _)| set.starts_with(set_prefix(family)));
    let count = ours.filter(|(set, _)| destroy(programs, set)).count();
    if count > 0 {
        removed(format!("{count} IP sets of {family}"));
    }
    Ok(())
}
