//! The places of a family as text.
//!
//! Owns: [`RulesetText`], one line per place. In: a table. Out: lines such as `10.96.0.10:80/TCP default/web:http
//! (cluster IP) -> 10.244.1.1:8080`.

use std::{collections::BTreeSet, fmt, net::IpAddr, sync::Arc};

use keelson_proxy::model::{Family, PortName};

use crate::{
    plan::{Rule, SocketKey, is_served},
    table::{PlaceStatus, Table},
};

/// A copy that can be printed without the table.
#[derive(Debug)]
pub(crate) struct RulesetText {
    family: Family,
    places: Vec<(SocketKey, Arc<Rule>, Option<String>)>,
    /// Service ports of a protocol that is not relayed.
    unserved: Vec<PortName>,
}

impl RulesetText {
    pub(crate) fn of(family: Family, table: &Table, local: &BTreeSet<IpAddr>) -> Self {
        let node_ports = table.node_port_addresses(local);
        let wanted = table.plan().rules().flat_map(|rule| table.wanted(rule.frontend, &node_ports));
        let mut places: Vec<_> = wanted
            .map(|(key, rule)| {
                let status = table.place(&key).and_then(|place| status(&place.status));
                (key, Arc::new(rule), status)
            })
            .collect();
        places.sort_unstable_by_key(|(key, ..)| *key);
        let ports = table.plan().service_ports().map(|port| &port.name);
        let mut unserved: Vec<PortName> = ports.filter(|name| !is_served(name.protocol)).cloned().collect();
        unserved.sort_unstable();
        Self { family, places, unserved }
    }

    pub(crate) fn print(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        writeln!(out, "# {}", self.family)?;
        if !self.unserved.is_empty() {
            let names: Vec<String> = self.unserved.iter().map(ToString::to_string).collect();
            writeln!(out, "# SCTP is not served in user space: {}", names.join(", "))?;
        }
        for (key, rule, status) in &self.places {
            write!(out, "{key} {rule}")?;
            match status {
                Some(status) => writeln!(out, "; {status}")?,
                None => writeln!(out)?,
            }
        }
        Ok(())
    }
}

/// What is unusual about a place; `None`: it listens where it should, or nothing is known.
pub(crate) fn status(status: &PlaceStatus) -> Option<String> {
    match status {
        PlaceStatus::Rejecting | PlaceStatus::Listening(_) => None,
        PlaceStatus::Mapped { listener, reason } => {
            Some(format!("served at {} instead: {reason}", listener.address()))
        }
        PlaceStatus::Failing(reason) => Some(format!("failing: {reason}")),
    }
}
