//! Opens the backend, and removes its routes.
//!
//! Owns: [`Userspace`]. In: options. Out: a [`UserspaceBackend`]; removed routes.

use keelson_proxy::{
    backend::{Access, Backend, BackendError, BackendInfo, Driver, RuleOwner},
    model::Family,
    options::Options,
};

use crate::{
    backend::{INFO, UserspaceBackend},
    routes::{self, RouteError},
};

#[derive(Debug, Clone, Copy)]
pub struct Userspace;

impl Driver for Userspace {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError> {
        Ok(Box::new(UserspaceBackend::open(options, access)?))
    }

    /// Sockets end with the process that has them; only routes can remain.
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy || cfg!(not(target_os = "linux")) {
            return Ok(());
        }
        let error = |error: RouteError| BackendError::new(&error, matches!(error, RouteError::NotPermitted));
        for family in Family::ALL {
            for ip in routes::list(family).map_err(error)? {
                routes::remove(ip).map_err(error)?;
                removed(format!("local route to {ip}"));
            }
        }
        Ok(())
    }
}
