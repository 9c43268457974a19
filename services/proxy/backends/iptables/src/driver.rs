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
    programs::{Installed, Programs, Variant, find, installed},
    removal::{remove_chains, remove_sets},
};

#[derive(Debug, Clone, Copy)]
pub struct Iptables;

impl Driver for Iptables {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError> {
        let wanted = options.iptables.variant;
        let features = Family::ALL.into_iter().filter_map(|family| {
            let programs = find(family, wanted).ok().filter(|_| access != Access::Print)?;
            Some(format!("iptables {family}: {}", programs.variant))
        });
        let features = features.collect();
        let find = move |family| Ok(Box::new(find(family, wanted)?) as Box<dyn Programs>);
        Ok(Box::new(IptablesBackend::open(&find, options, access, features)?))
    }

    /// Those of kube-proxy are removed by [`keelson_proxy::leftovers`].
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy {
            return Ok(());
        }
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
}
