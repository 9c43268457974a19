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
    names::{ADDRESSES, NODE_PORTS},
    programs::{ProgramError, Programs, find},
    removal::{find_chains, remove_all},
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
        Ok(find_chains(NODE_PORTS)?)
    }

    fn retire_rules(
        &self,
        next: &dyn Driver,
        owner: RuleOwner,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy {
            return Ok(());
        }
        // Replaced by `next`, or of the backend ipvs, which removes them after the last connection by its virtual servers.
        if next.info().has_chains || !find_chains(ADDRESSES)?.is_empty() {
            return Ok(());
        }
        self.remove_rules(owner, removed)
    }

    /// Those of kube-proxy are removed by [`keelson_proxy::leftovers`].
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy {
            return Ok(());
        }
        Ok(remove_all(removed)?)
    }
}
