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

/// Has NAT chains that translate nothing, so that the kernel translates the established connections of rules that were removed.
pub(crate) const TRANSLATION_TABLE: &str = "keelson-established";

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

    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        let tables = Netlink::open()?.tables().map_err(BackendError::from)?;
        let ours = tables.into_iter().filter(|(_, name)| name == TABLE);
        Ok(ours.map(|(family, name)| format!("table {} {name}", keyword(family))).collect())
    }

    fn preserve_translation(&self, family: Family) -> Result<(), BackendError> {
        Ok(Netlink::open()?.keep_translation(family, TRANSLATION_TABLE)?)
    }

    fn retire_rules(
        &self,
        next: &dyn Driver,
        owner: RuleOwner,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        if next.keeps_translation() {
            return self.remove_rules(owner, removed);
        }
        let mut netlink = Netlink::open()?;
        let wanted = table_of(owner);
        for (family, name) in netlink.tables().map_err(BackendError::from)? {
            if name == wanted {
                netlink.keep_translation(family, TRANSLATION_TABLE)?;
                netlink.delete_table(family, &name)?;
                removed(format!("table {} {name}", keyword(family)));
            }
        }
        Ok(())
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
    let wanted = table_of(owner);
    let is_kept = |name: &str| owner == RuleOwner::Keelson && name == TRANSLATION_TABLE;
    for (family, name) in netlink.tables()? {
        if name == wanted || is_kept(&name) {
            netlink.delete_table(family, &name)?;
            removed(format!("table {} {name}", keyword(family)));
        }
    }
    Ok(())
}

const fn table_of(owner: RuleOwner) -> &'static str {
    match owner {
        RuleOwner::Keelson => TABLE,
        RuleOwner::KubeProxy => kube_proxy::TABLE,
    }
}

const fn keyword(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{chain::Chain, kernel::Change, testing::in_namespace};

    fn tables(netlink: &mut Netlink) -> Vec<String> {
        netlink.tables().unwrap().into_iter().map(|(_, name)| name).collect()
    }

    /// What a run left, as far as it matters here.
    fn make(netlink: &mut Netlink) {
        for family in Family::ALL {
            let changes = [Change::MakeTable, Change::MakeChain(Chain::NatPrerouting)];
            netlink.commit(family, &changes).unwrap();
        }
    }

    /// A backend without NAT chains.
    struct WithoutTranslation;

    impl Driver for WithoutTranslation {
        fn info(&self) -> BackendInfo {
            INFO
        }

        fn open(&self, _: &Options, _: Access) -> Result<Box<dyn Backend>, BackendError> {
            unreachable!("only its properties are asked for")
        }

        fn keeps_translation(&self) -> bool {
            false
        }

        fn remove_rules(&self, _: RuleOwner, _: &mut dyn FnMut(String)) -> Result<(), BackendError> {
            Ok(())
        }
    }

    #[test]
    fn retired_rules_leave_chains_that_keep_translation() {
        in_namespace(|| {
            let mut netlink = Netlink::open().unwrap();
            assert_eq!(Nft.find_rules().unwrap(), [""; 0]);
            for _ in 0..2 {
                // The second time, the other table exists.
                make(&mut netlink);
                assert_eq!(Nft.find_rules().unwrap(), ["table ip keelson", "table ip6 keelson"]);
                let mut removed = Vec::new();
                Nft.retire_rules(&WithoutTranslation, RuleOwner::Keelson, &mut |what| removed.push(what))
                    .unwrap();
                assert_eq!(removed, ["table ip keelson", "table ip6 keelson"]);
                assert_eq!(tables(&mut netlink), [TRANSLATION_TABLE; 2]);
                for family in Family::ALL {
                    for chain in ["nat-prerouting", "nat-output", "nat-postrouting"] {
                        assert!(netlink.has_chain(family, TRANSLATION_TABLE, chain).unwrap(), "{chain}");
                    }
                }
            }
            // They are no rules of an earlier run, and cleanup removes them.
            assert_eq!(Nft.find_rules().unwrap(), [""; 0]);
            Nft.retire_rules(&WithoutTranslation, RuleOwner::KubeProxy, &mut |what| panic!("{what}"))
                .unwrap();
            let mut removed = Vec::new();
            Nft.remove_rules(RuleOwner::Keelson, &mut |what| removed.push(what)).unwrap();
            assert_eq!(removed, ["table ip keelson-established", "table ip6 keelson-established"]);
            assert_eq!(tables(&mut netlink), [""; 0]);
        });
    }
}
