//! Removes chains and sets.
//!
//! Owns: [`find_chains`], [`remove_all`], [`remove_chains`], [`remove_sets`] and [`destroy`]. In: the programs of
//! a family. Out: the names of what was found or removed.

use keelson_proxy::model::Family;

use crate::{
    changes::Changes,
    names::{PREFIX, Table, set_prefix},
    programs::{Installed, ProgramError, Programs, Variant, installed},
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

/// What there is of our chains, for a person; nothing without `own`, a chain that only the backend has that asks.
///
/// # Errors
/// A program cannot be run.
pub fn find_chains(own: &str) -> Result<Vec<String>, ProgramError> {
    let mut found = Vec::new();
    for family in Family::ALL {
        for variant in Variant::ALL {
            let Ok(programs) = installed(family, variant) else { continue };
            let chains = count_chains(&saved(&programs, family)?.unwrap_or_default(), own);
            if chains > 0 {
                found.push(format!("{chains} chains of {family} iptables ({variant})"));
            }
        }
    }
    Ok(found)
}

fn count_chains(saved: &str, own: &str) -> usize {
    let names = saved.lines().filter_map(|line| line.strip_prefix(':')?.split(' ').next());
    let ours = names.filter(|chain| chain.starts_with(PREFIX));
    if ours.clone().any(|chain| chain == own) { ours.count() } else { 0 }
}

/// Removes the chains of both variants and all sets, of both families.
///
/// # Errors
/// A program cannot be run, or the kernel refuses.
pub fn remove_all(removed: &mut dyn FnMut(String)) -> Result<(), ProgramError> {
    for family in Family::ALL {
        let variants: Vec<Installed> =
            Variant::ALL.into_iter().filter_map(|variant| installed(family, variant).ok()).collect();
        for mut programs in variants.iter().cloned() {
            remove_chains(&mut programs, family, removed)?;
        }
        if let Some(mut programs) = variants.into_iter().next() {
            remove_sets(&mut programs, family, removed)?;
        }
    }
    Ok(())
}

/// Removes the chains of both variants and families in one table.
///
/// # Errors
/// As for [`remove_all`].
pub fn remove_table(table: Table, removed: &mut dyn FnMut(String)) -> Result<(), ProgramError> {
    for family in Family::ALL {
        for mut programs in Variant::ALL.into_iter().filter_map(|variant| installed(family, variant).ok()) {
            remove_chains_of(&[table], &mut programs, family, removed)?;
        }
    }
    Ok(())
}

/// Removes the chains of one variant, and the jumps to them.
pub fn remove_chains(
    programs: &mut Installed,
    family: Family,
    removed: &mut dyn FnMut(String),
) -> Result<(), ProgramError> {
    remove_chains_of(&Table::ALL, programs, family, removed)
}

fn remove_chains_of(
    tables: &[Table],
    programs: &mut Installed,
    family: Family,
    removed: &mut dyn FnMut(String),
) -> Result<(), ProgramError> {
    let Some(saved) = saved(programs, family)? else { return Ok(()) };
    let mut found = Found::default();
    for &table in tables {
        let part = saved.split_once(&format!("*{table}\n")).map_or("", |(_, rest)| rest);
        found.add_rules(table, part.split_once("COMMIT").map_or(part, |(part, _)| part));
    }
    let changes = Changes::removal(&found);
    let chains = changes.delete_chains.len();
    if chains == 0 {
        return Ok(());
    }
    programs.restore(&changes.rules(usize::MAX))?;
    removed(format!("{chains} chains of {family} iptables ({})", programs.variant));
    Ok(())
}

pub fn remove_sets(
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

/// A set that a rule of iptables-nft used is free a moment after the rule is gone. What stays is used or destroyed by
/// the first sync.
pub fn destroy(programs: &mut dyn Programs, set: &str) -> bool {
    for _ in 0..10 {
        match programs.restore_sets(&format!("destroy {set}\n")) {
            Ok(()) => return true,
            Err(ProgramError::Failed { message, .. }) if message.contains("does not exist") => return false,
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(50)),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_those_of_the_backend_that_has_one_of_its_own() {
        let saved = "*nat\n:POSTROUTING ACCEPT [0:0]\n:KEELSON-SERVICES - [0:0]\n:KEELSON-NODE-PORTS - [0:0]\n\
                     -A POSTROUTING -j KEELSON-SERVICES\nCOMMIT\n";
        for (own, chains) in [("KEELSON-NODE-PORTS", 2), ("KEELSON-ADDRESSES", 0), ("KEELSON-NODE", 0)] {
            assert_eq!(count_chains(saved, own), chains, "{own}");
        }
    }
}
