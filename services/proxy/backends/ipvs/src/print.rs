//! Prints the wanted state.
//!
//! Owns: [`Printed`]. In: the plan of a family. Out: text. Each part begins with a comment that names the program that
//! reads it.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
};

use keelson_proxy::model::{Endpoint, Family, Protocol};
use keelson_proxy_xtables::{
    changes::{Changes, Wanted},
    ruleset::Plan as _,
    save::Found,
};

use crate::{
    kernel::interface::INTERFACE,
    plan::Plan,
    servers::{ServerKey, Spec},
};

/// A copy of what a family should have.
#[derive(Debug)]
pub(crate) struct Printed {
    family: Family,
    wanted: Wanted,
    servers: Vec<(ServerKey, Spec, Vec<Endpoint>)>,
    addresses: BTreeSet<IpAddr>,
}

impl Printed {
    pub(crate) fn of(plan: &Plan) -> Self {
        let server = |key| {
            let server = plan.server(key)?;
            Some((key, server.spec, server.endpoints.to_vec()))
        };
        Self {
            family: plan.family(),
            wanted: plan.wanted(),
            servers: plan.servers().into_iter().filter_map(server).collect(),
            addresses: plan.bound(),
        }
    }

    pub(crate) fn print(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        let (program, ip) = match self.family {
            Family::V4 => ("iptables-restore", "ip"),
            Family::V6 => ("ip6tables-restore", "ip -6"),
        };
        let changes: Changes = self.wanted.changes(&Found::default(), true);
        write!(out, "# ipset restore -exist\n{}", changes.sets_before(self.family))?;
        write!(out, "# {program} --noflush\n{}", changes.rules(usize::MAX))?;
        if !self.servers.is_empty() {
            writeln!(out, "# ipvsadm -R")?;
        }
        for (key, spec, endpoints) in &self.servers {
            let name = self.name(*key);
            let persistent = match spec.timeout {
                0 => String::new(),
                seconds => format!(" -p {seconds}"),
            };
            writeln!(out, "-A {name} -s {}{persistent}", spec.scheduler)?;
            for endpoint in endpoints {
                writeln!(out, "-a {name} -r {endpoint} -m -w 1")?;
            }
        }
        if !self.addresses.is_empty() {
            writeln!(out, "# {ip} -batch -")?;
        }
        for address in &self.addresses {
            match self.family {
                Family::V4 => writeln!(out, "address add {address}/32 dev {INTERFACE} scope host")?,
                Family::V6 => {
                    writeln!(out, "address add {address}/128 dev {INTERFACE} nodad preferred_lft 0")?;
                }
            }
        }
        Ok(())
    }

    fn name(&self, key: ServerKey) -> String {
        match key {
            ServerKey::Socket(socket) => {
                let letter = match socket.protocol {
                    Protocol::Tcp => "-t",
                    Protocol::Udp => "-u",
                    Protocol::Sctp => "--sctp-service",
                };
                format!("{letter} {}", SocketAddr::new(socket.ip, socket.port))
            }
            ServerKey::Mark(mark) => match self.family {
                Family::V4 => format!("-f {mark}"),
                Family::V6 => format!("-f {mark} -6"),
            },
        }
    }
}
