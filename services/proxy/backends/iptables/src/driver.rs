//! Opens the backend, and removes its rules.
//!
//! Owns: [`Iptables`]. In: options. Out: a backend; removed chains and sets.

use keelson_proxy::{
    backend::{Access, Backend, BackendError, BackendInfo, Driver, RuleOwner},
    model::Family,
    options::Options,
};

use crate::{
    backend::{INFO, IptablesBackend},
    programs::{ProgramError, Programs, Variant, find, installed},
    removal::{count_chains, remove_all},
};

#[derive(Debug, Clone, Copy)]
pub struct Iptables;

impl Driver for Iptables {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError> {
        let found = Family::ALL.map(|family| match access {
            Access::Print => None,
            Access::Program | Access::Compare => Some(find(family, options.iptables.variant)),
        });
        let features = Family::ALL.into_iter().zip(&found).filter_map(|(family, found)| {
            let variant = found.as_ref()?.as_ref().ok()?.variant;
            Some(format!("iptables {family}: {variant}"))
        });
        let features = features.collect();
        let find = move |family: Family| match &found[family as usize] {
            Some(Ok(programs)) => Ok(programs.duplicate()),
            Some(Err(error)) => Err(error.clone()),
            None => {
                Err(ProgramError::NotRun { program: "iptables".into(), reason: "opened to print".into() })
            }
        };
        Ok(Box::new(IptablesBackend::open(&find, options, access, features)?))
    }

    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        let mut found = Vec::new();
        for family in Family::ALL {
            for variant in Variant::ALL {
                let Ok(programs) = installed(family, variant) else { continue };
                let chains = count_chains(&programs, family)?;
                if chains > 0 {
                    found.push(format!("{chains} chains of {family} iptables ({variant})"));
                }
            }
        }
        Ok(found)
    }

    fn retire_rules(
        &self,
        next: &dyn Driver,
        owner: RuleOwner,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        if next.info().has_chains { Ok(()) } else { self.remove_rules(owner, removed) }
    }

    /// Those of kube-proxy are removed by [`keelson_proxy::leftovers`].
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy {
            return Ok(());
        }
        Ok(remove_all(removed)?)
    }
}
