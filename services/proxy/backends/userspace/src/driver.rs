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

    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        let mut found = Vec::new();
        for family in Family::ALL.into_iter().filter(|_| cfg!(target_os = "linux")) {
            let routes = routes::list(family).map_err(route_error)?.len();
            if routes > 0 {
                found.push(format!("{routes} local routes of {family}"));
            }
        }
        Ok(found)
    }

    fn keeps_translation(&self) -> bool {
        false
    }

    /// Sockets end with the process that has them; only routes can remain.
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
        if owner == RuleOwner::KubeProxy || cfg!(not(target_os = "linux")) {
            return Ok(());
        }
        for family in Family::ALL {
            for ip in routes::list(family).map_err(route_error)? {
                routes::remove(ip).map_err(route_error)?;
                removed(format!("local route to {ip}"));
            }
        }
        Ok(())
    }
}

fn route_error(error: RouteError) -> BackendError {
    BackendError::new(&error, matches!(error, RouteError::NotPermitted))
}
