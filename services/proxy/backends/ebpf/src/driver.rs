//! Opens the backend, and removes what it left.
//!
//! Owns: [`Ebpf`]. In: options. Out: an [`EbpfBackend`]; programs and maps that are removed.
//!
//! The packet level is the backend nft: its tables are found and retired by its own driver. Only a clean-up of this backend
//! removes them as well.

use keelson_proxy::{
    backend::{Access, Backend, BackendError, BackendInfo, Driver, RuleOwner},
    options::Options,
};
use keelson_proxy_nft::Nft;

use crate::{
    backend::{EbpfBackend, INFO},
    kernel::{Loader, Pinned, SocketKernel, find_pins, remove_pins, unsuitable_cgroup, usual_sizes},
    stale,
};

#[derive(Debug, Clone, Copy)]
pub struct Ebpf;

impl Driver for Ebpf {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn includes(&self) -> Option<&'static str> {
        Some(Nft.info().name)
    }

    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError> {
        let find = || Pinned::find(options.ebpf.cgroup.as_deref(), usual_sizes());
        let mut loader = Loader::default();
        let kernel: Option<Box<dyn SocketKernel>> = match access {
            Access::Program | Access::Compare => {
                let mut pinned = find()?;
                pinned.has_direct_return = options.ebpf.direct_return.is_some();
                pinned.has_pod_devices = !options.ebpf.pod_devices.is_empty();
                if !pinned.is_running() {
                    pinned.probe(&mut loader, access == Access::Program)?;
                }
                tracing::info!(places = pinned.describe(), "eBPF programs can be loaded");
                Some(Box::new(pinned))
            }
            Access::Print => None,
        };
        let packets = Nft.open(options, access)?;
        Ok(Box::new(EbpfBackend::new(packets, kernel, options, &mut loader)?))
    }

    fn reason_against(&self, options: &Options) -> Option<String> {
        if options.masquerade_all {
            return Some(
                "with proxy.masquerade_all no connection is translated at the socket level".to_owned(),
            );
        }
        let of_cgroup = match options.ebpf.cgroup {
            Some(_) => None,
            None => unsuitable_cgroup(),
        };
        of_cgroup.or_else(stale::reason_against)
    }

    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        Ok(find_pins()?.into_iter().map(|folder| folder.display().to_string()).collect())
    }

    fn retire_rules(
        &self,
        _: &dyn Driver,
        owner: RuleOwner,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        match owner {
            RuleOwner::Keelson => Ok(remove_pins(removed)?),
            RuleOwner::KubeProxy => Ok(()),
        }
    }

    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::Keelson {
            remove_pins(removed)?;
            Nft.remove_rules(owner, removed)?;
        }
        Ok(())
    }
}
