//! Removes chains and sets.
//!
//! Owns: [`find_chains`], [`remove_all`], [`remove_chains`], [`remove_sets`] and [`destroy`]. In: the programs of
//! a family. Out: the names of what was found or removed.

use keelson_proxy::{
    leftovers::{self, Places},
    model::Family,
};

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
        note_unlistable(&variants, family);
        if let Some(mut programs) = variants.into_iter().next() {
            remove_sets(&mut programs, family, removed)?;
        }
    }
    Ok(())
}

/// Without the right to list its rules, there is nothing to remove and no error. If the kernel has tables of iptables-legacy,
/// that is logged.
fn note_unlistable(variants: &[Installed], family: Family) {
    let Some((_, reason)) =
        leftovers::unlistable(&Places::default()).into_iter().find(|(of, _)| *of == family)
    else {
        return;
    };
    let legacy = variants.iter().find(|programs| programs.variant == Variant::Legacy);
    let error = match legacy.map(Installed::save_all) {
        Some(Ok(_)) => return,
        Some(Err(error)) => error.to_string(),
        None => "its programs are not installed".to_owned(),
    };
    tracing::warn!(%family, reason, error, "cannot check whether iptables-legacy has chains of Keelson");
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
    programs: &mut dyn Programs,
    family: Family,
    removed: &mut dyn FnMut(String),
) -> Result<(), ProgramError> {
    let sets = match programs.count_sets() {
        Ok(sets) => sets,
        Err(ProgramError::Missing { .. } | ProgramError::Failed { .. }) => return Ok(()),
        Err(error) => return Err(error),
    };
    let ours: Vec<&str> =
        sets.iter().map(|(set, _)| set.as_str()).filter(|set| set.starts_with(set_prefix(family))).collect();
    let count = destroy_all(programs, &ours);
    if count > 0 {
        removed(format!("{count} IP sets of {family}"));
    }
    Ok(())
}

/// Number of sets that were destroyed. One call, unless a set is still in use.
fn destroy_all(programs: &mut dyn Programs, sets: &[&str]) -> usize {
    let all: String = sets.iter().map(|set| format!("destroy {set}\n")).collect();
    if sets.is_empty() || programs.restore_sets(&all).is_ok() {
        return sets.len();
    }
    // The call ended at the first set that it could not destroy, so some of them are gone.
    let left: Option<Vec<String>> =
        programs.count_sets().ok().map(|left| left.into_iter().map(|(set, _)| set).collect());
    let is_gone = |set: &str| left.as_ref().is_some_and(|left| !left.iter().any(|have| have == set));
    sets.iter().filter(|set| is_gone(set) || destroy(programs, set)).count()
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

    /// The sets of the kernel. A call of `ipset restore` ends at the first line that fails.
    struct Sets {
        sets: Vec<String>,
        /// In use for this number of calls.
        busy: Option<(String, usize)>,
        calls: Vec<String>,
    }

    impl Programs for Sets {
        fn save(&mut self, _: Table) -> Result<String, ProgramError> {
            Ok(String::new())
        }
        fn restore(&mut self, _: &str) -> Result<(), ProgramError> {
            Ok(())
        }
        fn save_sets(&mut self) -> Result<String, ProgramError> {
            Ok(String::new())
        }
        fn restore_sets(&mut self, input: &str) -> Result<(), ProgramError> {
            self.calls.push(input.to_owned());
            for set in input.lines().filter_map(|line| line.strip_prefix("destroy ")) {
                if let Some((_, left)) = self.busy.as_mut().filter(|(busy, left)| busy == set && *left > 0) {
                    *left -= 1;
                    let message = "Set cannot be destroyed: it is in use by a kernel component".into();
                    return Err(ProgramError::Failed {
                        program: "ipset".into(),
                        status: "exit status: 1".into(),
                        message,
                    });
                }
                self.sets.retain(|have| have != set);
            }
            Ok(())
        }
        fn count_sets(&mut self) -> Result<Vec<(String, usize)>, ProgramError> {
            Ok(self.sets.iter().map(|set| (set.clone(), 0)).collect())
        }
        fn prefers_small_sections(&self) -> bool {
            false
        }
        fn generation(&self) -> Option<u32> {
            None
        }
        fn remove_other_variant(&mut self, _: &mut dyn FnMut(String)) -> Result<(), ProgramError> {
            Ok(())
        }
        fn duplicate(&self) -> Box<dyn Programs> {
            Box::new(Sets { sets: Vec::new(), busy: None, calls: Vec::new() })
        }
    }

    #[test]
    fn sets_are_destroyed_by_one_call_and_one_by_one_only_if_that_fails() {
        let prefix = set_prefix(Family::V4);
        let names: Vec<String> = (0..22).map(|number| format!("{prefix}{number}")).collect();
        for (busy, calls) in [
            (None, 1),
            // The sets before it are gone with the first call, and it is free by the second.
            (Some((names[20].clone(), 1)), 1 + 2),
            (Some((names[0].clone(), 2)), 1 + 1 + 22),
        ] {
            let sets = names.iter().cloned().chain(["FOREIGN".to_owned()]).collect();
            let mut kernel = Sets { sets, busy: busy.clone(), calls: Vec::new() };
            let mut removed = Vec::new();
            remove_sets(&mut kernel, Family::V4, &mut |what| removed.push(what)).expect("removes");
            assert_eq!(kernel.sets, ["FOREIGN"], "{busy:?}");
            assert_eq!(removed, ["22 IP sets of IPv4"]);
            assert_eq!(kernel.calls.len(), calls, "{busy:?}");
        }
        let mut none = Sets { sets: Vec::new(), busy: None, calls: Vec::new() };
        remove_sets(&mut none, Family::V4, &mut |what| panic!("{what}")).expect("nothing to remove");
        assert!(none.calls.is_empty());
    }

    #[test]
    fn chains_are_those_of_the_backend_that_has_one_of_its_own() {
        let saved = "*nat\n:POSTROUTING ACCEPT [0:0]\n:KEELSON-SERVICES - [0:0]\n:KEELSON-NODE-PORTS - [0:0]\n\
                     -A POSTROUTING -j KEELSON-SERVICES\nCOMMIT\n";
        for (own, chains) in [("KEELSON-NODE-PORTS", 2), ("KEELSON-ADDRESSES", 0), ("KEELSON-NODE", 0)] {
            assert_eq!(count_chains(saved, own), chains, "{own}");
        }
    }
}
