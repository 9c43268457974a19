//! Removes chains and sets.
//!
//! Owns: [`remove_all`], [`remove_chains`], [`remove_sets`] and [`destroy`]. In: the programs of a family. Out: the names of what was removed.

use keelson_proxy::model::Family;

use crate::{
    changes::Changes,
    names::{PREFIX, Table, set_prefix},
    programs::{Installed, ProgramError, Programs, Variant, installed},
    save::Found,
};

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

/// Removes the chains of one variant, and the jumps to them.
pub fn remove_chains(
    programs: &mut Installed,
    family: Family,
    removed: &mut dyn FnMut(String),
) -> Result<(), ProgramError> {
    let saved = match programs.save_all() {
        Ok(saved) => saved,
        // The kernel does not support this variant, or the caller has no right to read it.
        Err(error @ ProgramError::Failed { .. }) => {
            tracing::debug!(%family, %error, "cannot list chains");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if !saved.contains(PREFIX) {
        return Ok(());
    }
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
