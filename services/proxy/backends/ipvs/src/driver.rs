//! Opens the backend, and removes what it programmed.
//!
//! Owns: [`Ipvs`]. In: options. Out: a backend; removed objects.

use keelson_proxy::{
    backend::{Access, Backend, BackendError, BackendInfo, Driver, RuleOwner},
    leftovers::{self, Places, ServerOwner},
    model::Family,
    options::Options,
};
use keelson_proxy_xtables::{
    names::{ADDRESSES, Table},
    programs::{self, ProgramError, Programs as _},
    removal,
};

use crate::{
    backend::{INFO, IpvsBackend},
    kernel::{Kernel, Netlink, has_ipvs, interface::INTERFACE},
    servers::ServerChange,
};

#[derive(Debug, Clone, Copy)]
pub struct Ipvs;

impl Driver for Ipvs {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError> {
        let variant = options.iptables.variant;
        let find = move |family: Family| -> Result<_, ProgramError> {
            Ok(programs::find(family, variant)?.duplicate())
        };
        let connect = || Ok(Box::new(Netlink::open()?) as Box<dyn Kernel>);
        Ok(Box::new(IpvsBackend::open(&find, &connect, options, access)?))
    }

    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        let mut found = Vec::new();
        if has_ipvs() {
            let mut kernel = Netlink::open()?;
            for family in Family::ALL {
                let servers = kernel.servers(family)?;
                let ours = servers.values().filter(|server| server.spec.is_ours()).count();
                if ours > 0 {
                    found.push(format!("{ours} virtual servers of {family}"));
                }
            }
        }
        found.extend(removal::find_chains(ADDRESSES)?);
        Ok(found)
    }

    fn virtual_connections(&self) -> usize {
        leftovers::virtual_connections(&Places::default(), INTERFACE, ServerOwner::Keelson)
    }

    /// The table mangle comes before the rules of any other backend, and drops. It has rules of new connections alone. Virtual
    /// servers come before sockets, and what they masquerade would depend on them for as long as it is open.
    fn release_new_connections(
        &self,
        next: &dyn Driver,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        if next.keeps_translation() {
            return Ok(removal::remove_table(Table::Mangle, removed)?);
        }
        leftovers::serve_by_sockets(ServerOwner::Keelson)
            .map_err(|error| BackendError::new(&error, false))?;
        Ok(removal::remove_all(removed)?)
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
        if !next.info().has_chains && !removal::find_chains(ADDRESSES)?.is_empty() {
            return self.remove_rules(owner, removed);
        }
        remove_servers(removed)?;
        // The other chains are replaced by `next`, or those of the backend iptables.
        Ok(removal::remove_table(Table::Mangle, removed)?)
    }

    /// Those of kube-proxy are removed by [`keelson_proxy::leftovers`].
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy {
            return Ok(());
        }
        // First: nothing must reach them without rules.
        remove_servers(removed)?;
        Ok(removal::remove_all(removed)?)
    }
}

/// Removes our virtual servers and the interface.
fn remove_servers(removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
    if has_ipvs() {
        let mut kernel = Netlink::open()?;
        for family in Family::ALL {
            let found = kernel.servers(family)?;
            let ours = found.iter().filter(|(_, server)| server.spec.is_ours());
            let changes: Vec<ServerChange> = ours.map(|(key, _)| ServerChange::DeleteServer(*key)).collect();
            kernel.change_servers(family, &changes)?;
            if !changes.is_empty() {
                removed(format!("{} virtual servers of {family}", changes.len()));
            }
        }
    }
    if Netlink::open_without_ipvs()?.delete_interface()? {
        removed(format!("interface {INTERFACE}"));
    }
    Ok(())
}
