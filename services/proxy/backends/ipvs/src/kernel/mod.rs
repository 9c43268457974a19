//! The kernel: virtual servers, and the interface with the addresses of Services.
//!
//! Owns: [`Kernel`], and [`Netlink`], which is the real one. In: changes. Out: what there is, or a [`KernelError`].

pub(crate) mod interface;
pub(crate) mod ipvs;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::Path,
};

use keelson_proxy::{
    backend::BackendError,
    model::Family,
    netlink::{Connection, NETLINK_GENERIC, NETLINK_ROUTE, Refused, Request},
};

pub(crate) use self::ipvs::Timeouts;
use crate::servers::{FoundDestination, FoundServer, ServerChange, ServerKey};

/// It exists if the kernel has IPVS.
const PROC_FILE: &str = "/proc/thread-self/net/ip_vs";

// linux/errno.h.
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const ESRCH: i32 = 3;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ENODEV: i32 = 19;
const EAFNOSUPPORT: i32 = 97;
const EADDRNOTAVAIL: i32 = 99;
const EOPNOTSUPP: i32 = 95;
const ENOBUFS: i32 = 105;

/// Errors of the moment.
const PASSING: [i32; 5] = [EINTR, EAGAIN, ENOMEM, EBUSY, ENOBUFS];

#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    #[error("the kernel has no IPVS; load the module ip_vs (CONFIG_IP_VS)")]
    NoIpvs,
    #[error("the kernel has no IPVS for {0} (CONFIG_IP_VS_IPV6)")]
    NoFamily(Family),
    #[error("the kernel has no dummy interfaces; load the module dummy (CONFIG_DUMMY)")]
    NoDummy,
    #[error("not permitted to change {0}: the proxy needs CAP_NET_ADMIN")]
    NotPermitted(&'static str),
    #[error(
        "the kernel has no IPVS scheduler {0:?}; load the module ip_vs_{0} or change proxy.ipvs_scheduler"
    )]
    NoScheduler(String),
    #[error("the kernel refused to {what}: {error}")]
    Refused { what: String, error: io::Error },
    #[error("cannot exchange netlink messages about {about}: {error}")]
    Netlink { about: &'static str, error: io::Error },
}

impl KernelError {
    fn is_fatal(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Netlink { .. })
    }

    /// Whether a later attempt may succeed on the same node: says nothing about what the node supports.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Refused { error, .. } | Self::Netlink { error, .. } => {
                error.raw_os_error().is_some_and(|errno| PASSING.contains(&errno))
            }
            _ => false,
        }
    }
}

impl From<KernelError> for BackendError {
    fn from(error: KernelError) -> Self {
        Self::new(&error, error.is_fatal())
    }
}

const SERVERS: &str = "virtual servers";
const ADDRESSES: &str = "addresses of keelson-ipvs0";

/// What the backend does with the kernel, or what a test has in its place.
pub(crate) trait Kernel: Send {
    /// Every virtual server of a family, of any program, with its real servers.
    fn servers(&mut self, family: Family) -> Result<BTreeMap<ServerKey, FoundServer>, KernelError>;

    /// The real servers of one; `None`: it does not exist.
    fn destinations(
        &mut self,
        family: Family,
        key: ServerKey,
    ) -> Result<Option<Vec<FoundDestination>>, KernelError>;

    /// Applies all changes in order. After an error, any of them may have been made.
    fn change_servers(&mut self, family: Family, changes: &[ServerChange]) -> Result<(), KernelError>;

    /// The addresses of the interface; `None`: it does not exist.
    fn addresses(&mut self, family: Family) -> Result<Option<BTreeSet<IpAddr>>, KernelError>;

    /// Succeeds if it exists.
    fn create_interface(&mut self) -> Result<(), KernelError>;

    /// Succeeds if addresses exist already, or are gone already.
    fn change_addresses(&mut self, added: &[IpAddr], deleted: &[IpAddr]) -> Result<(), KernelError>;

    /// Returns whether there was one.
    fn delete_interface(&mut self) -> Result<bool, KernelError>;

    fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), KernelError>;

    fn timeouts(&mut self) -> Result<Timeouts, KernelError>;

    /// A second connection, in the network namespace of the calling thread.
    fn duplicate(&self) -> Result<Box<dyn Kernel>, KernelError>;
}

/// The kernel by netlink.
#[derive(Debug)]
pub(crate) struct Netlink {
    generic: Connection,
    route: Connection,
    /// Of the generic netlink family; `None`: the kernel has no IPVS.
    id: Option<u16>,
}

/// Whether the kernel has IPVS, without loading its module.
pub(crate) fn has_ipvs() -> bool {
    Path::new(PROC_FILE).exists()
}

impl Netlink {
    /// # Errors
    /// The kernel has no IPVS, and cannot load it.
    pub(crate) fn open() -> Result<Self, KernelError> {
        let mut opened = Self::open_without_ipvs()?;
        let id = ipvs::family_id(&mut opened.generic).map_err(|error| match error.raw_os_error() {
            Some(ENOENT) => KernelError::NoIpvs,
            _ => KernelError::Netlink { about: SERVERS, error },
        })?;
        opened.id = Some(id);
        Ok(opened)
    }

    /// For the interface alone.
    pub(crate) fn open_without_ipvs() -> Result<Self, KernelError> {
        let open = |protocol| {
            Connection::open(protocol).map_err(|error| KernelError::Netlink { about: SERVERS, error })
        };
        Ok(Self { generic: open(NETLINK_GENERIC)?, route: open(NETLINK_ROUTE)?, id: None })
    }

    fn id(&self) -> Result<u16, KernelError> {
        self.id.ok_or(KernelError::NoIpvs)
    }

    fn index(&mut self) -> Result<Option<u32>, KernelError> {
        match self.route.get(&interface::get()) {
            Ok(answer) => Ok(interface::parse_index(&answer)),
            Err(error) if error.raw_os_error() == Some(ENODEV) => Ok(None),
            Err(error) => Err(KernelError::Netlink { about: ADDRESSES, error }),
        }
    }

    fn change_routes(&mut self, requests: &[Request]) -> Result<Vec<Refused>, KernelError> {
        let sent = self.route.send_all(requests);
        sent.map_err(|error| KernelError::Netlink { about: ADDRESSES, error })
    }
}

fn refused(what: String, about: &'static str, errno: i32) -> KernelError {
    match errno {
        EPERM => KernelError::NotPermitted(about),
        _ => KernelError::Refused { what, error: io::Error::from_raw_os_error(errno) },
    }
}

fn server_error(family: Family, change: &ServerChange, errno: i32) -> KernelError {
    match (change, errno) {
        (ServerChange::AddServer(_, spec) | ServerChange::SetServer(_, spec), ENOENT) => {
            KernelError::NoScheduler(spec.scheduler.clone())
        }
        (ServerChange::AddServer(..), EAFNOSUPPORT) => KernelError::NoFamily(family),
        _ => refused(change.to_string(), SERVERS, errno),
    }
}

/// What a change is for is there already.
fn is_done(change: &ServerChange, errno: i32) -> bool {
    match change {
        ServerChange::DeleteServer(_) => errno == ESRCH,
        ServerChange::DeleteDestination(..) => errno == ENOENT || errno == ESRCH,
        _ => false,
    }
}

impl Kernel for Netlink {
    fn servers(&mut self, family: Family) -> Result<BTreeMap<ServerKey, FoundServer>, KernelError> {
        let id = self.id()?;
        let mut found = BTreeMap::new();
        let dumped = self.generic.dump(&ipvs::get_servers(id), |body| {
            if let Some((of, key, spec)) = ipvs::parse_server(body)
                && of == family
            {
                found.insert(key, FoundServer { spec, destinations: Vec::new() });
            }
        });
        dumped.map_err(|error| KernelError::Netlink { about: SERVERS, error })?;
        for (key, server) in &mut found {
            server.destinations = self.destinations(family, *key)?.unwrap_or_default();
        }
        Ok(found)
    }

    fn destinations(
        &mut self,
        family: Family,
        key: ServerKey,
    ) -> Result<Option<Vec<FoundDestination>>, KernelError> {
        let id = self.id()?;
        let mut found = Vec::new();
        let dumped = self.generic.dump(&ipvs::get_destinations(id, family, key), |body| {
            found.extend(ipvs::parse_destination(family, body));
        });
        match dumped {
            Ok(()) => Ok(Some(found)),
            Err(error) if error.raw_os_error() == Some(ESRCH) => Ok(None),
            Err(error) => Err(KernelError::Netlink { about: SERVERS, error }),
        }
    }

    fn change_servers(&mut self, family: Family, changes: &[ServerChange]) -> Result<(), KernelError> {
        let id = self.id()?;
        let requests: Vec<Request> = changes.iter().map(|change| ipvs::change(id, family, change)).collect();
        let all = self.generic.send_all(&requests);
        let all = all.map_err(|error| KernelError::Netlink { about: SERVERS, error })?;
        let failed = all.iter().find_map(|refused| {
            let change = changes.get(refused.at)?;
            (!is_done(change, refused.errno)).then(|| server_error(family, change, refused.errno))
        });
        failed.map_or(Ok(()), Err)
    }

    fn addresses(&mut self, family: Family) -> Result<Option<BTreeSet<IpAddr>>, KernelError> {
        let Some(index) = self.index()? else { return Ok(None) };
        let mut found = BTreeSet::new();
        let dumped = self.route.dump(&interface::get_addresses(family), |body| {
            found.extend(interface::parse_address(index, body));
        });
        dumped.map_err(|error| KernelError::Netlink { about: ADDRESSES, error })?;
        Ok(Some(found))
    }

    fn create_interface(&mut self) -> Result<(), KernelError> {
        match self.change_routes(&[interface::create()])?.first() {
            None | Some(Refused { errno: EEXIST, .. }) => Ok(()),
            Some(Refused { errno: EOPNOTSUPP, .. }) => Err(KernelError::NoDummy),
            Some(&Refused { errno, .. }) => {
                Err(refused(format!("create interface {}", interface::INTERFACE), ADDRESSES, errno))
            }
        }
    }

    fn change_addresses(&mut self, added: &[IpAddr], deleted: &[IpAddr]) -> Result<(), KernelError> {
        if added.is_empty() && deleted.is_empty() {
            return Ok(());
        }
        let index = match self.index()? {
            Some(index) => index,
            None if added.is_empty() => return Ok(()),
            None => return Err(refused("find the interface keelson-ipvs0".into(), ADDRESSES, ENODEV)),
        };
        let add = added.iter().map(|ip| interface::add_address(index, *ip));
        let delete = deleted.iter().map(|ip| interface::delete_address(index, *ip));
        let requests: Vec<Request> = add.chain(delete).collect();
        for Refused { at, errno } in self.change_routes(&requests)? {
            match (added.get(at), errno) {
                (Some(_), EEXIST) | (None, EADDRNOTAVAIL) => {}
                (Some(ip), errno) => return Err(refused(format!("add address {ip}"), ADDRESSES, errno)),
                (None, errno) => return Err(refused("delete an address".into(), ADDRESSES, errno)),
            }
        }
        Ok(())
    }

    fn delete_interface(&mut self) -> Result<bool, KernelError> {
        match self.change_routes(&[interface::delete()])?.first() {
            None => Ok(true),
            Some(Refused { errno: ENODEV, .. }) => Ok(false),
            Some(&Refused { errno, .. }) => {
                Err(refused(format!("delete interface {}", interface::INTERFACE), ADDRESSES, errno))
            }
        }
    }

    fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), KernelError> {
        let request = ipvs::set_timeouts(self.id()?, timeouts);
        let all = self.generic.send_all(&[request]);
        match all.map_err(|error| KernelError::Netlink { about: SERVERS, error })?.first() {
            None => Ok(()),
            Some(&Refused { errno, .. }) => Err(refused("set timeouts".into(), SERVERS, errno)),
        }
    }

    fn timeouts(&mut self) -> Result<Timeouts, KernelError> {
        let request = ipvs::get_timeouts(self.id()?);
        let answer = self.generic.get(&request);
        let answer = answer.map_err(|error| KernelError::Netlink { about: SERVERS, error })?;
        Ok(ipvs::parse_timeouts(&answer))
    }

    fn duplicate(&self) -> Result<Box<dyn Kernel>, KernelError> {
        Ok(Box::new(Self::open()?))
    }
}
