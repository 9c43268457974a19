//! Opens the backend, and removes its tables.
//!
//! Owns: [`Nft`]. In: options. Out: an [`NftBackend`]; removed tables.

use keelson_proxy::{
    backend::{Access, Backend, BackendError, BackendInfo, Driver, RuleOwner},
    model::Family,
    options::Options,
};

use crate::{
    backend::{INFO, NftBackend},
    kernel::{KernelError, Netlink, NfTables, TABLE},
    kube_proxy,
};

#[derive(Debug, Clone, Copy)]
pub struct Nft;

impl Driver for Nft {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError> {
        let connect = || Netlink::open().map(|netlink| Box::new(netlink) as Box<dyn NfTables>);
        Ok(Box::new(NftBackend::open(connect, options, access)?))
    }

    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        Ok(remove_tables(&mut Netlink::open()?, owner, removed)?)
    }
}

pub(crate) fn remove_tables(
    netlink: &mut Netlink,
    owner: RuleOwner,
    removed: &mut dyn FnMut(String),
) -> Result<(), KernelError> {
    let wanted = match owner {
        RuleOwner::Keelson => TABLE,
        RuleOwner::KubeProxy => kube_proxy::TABLE,
    };
    for (family, name) in netlink.tables()? {
        if name == wanted {
            netlink.delete_table(family, &name)?;
            let keyword = match family {
                Family::V4 => "ip",
                Family::V6 => "ip6",
            };
            removed(format!("table {keyword} {name}"));
        }
    }
    Ok(())
}
