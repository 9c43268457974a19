//! Session affinity: which endpoint a client had last.
//!
//! Owns: [`Affinity`]. In: choices of endpoints, and the time. Out: remembered endpoints. Pure.
//!
//! The key is the client and the service port, so that all frontends of a service port share it. The timeout begins anew
//! with each connection. An endpoint that left the set in use is ignored.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_proxy::model::{Endpoint, PortName};

/// Maximum number of clients of a family, over all service ports. Further clients have no affinity.
pub(crate) const CAPACITY: usize = 131_072;

#[derive(Debug, Clone, Copy)]
struct Remembered {
    endpoint: Endpoint,
    until: Instant,
}

/// A client, its endpoint, and how long it is remembered.
pub(crate) type Entry = (IpAddr, Endpoint, Duration);

#[derive(Debug)]
pub(crate) struct Affinity {
    capacity: usize,
    clients: usize,
    ports: HashMap<PortName, HashMap<IpAddr, Remembered>>,
}

impl Default for Affinity {
    fn default() -> Self {
        Self { capacity: CAPACITY, clients: 0, ports: HashMap::new() }
    }
}

impl Affinity {
    /// The endpoint that the client had, if it is in the set in use.
    pub(crate) fn find(
        &self,
        port: &PortName,
        client: IpAddr,
        set: &[Endpoint],
        now: Instant,
    ) -> Option<Endpoint> {
        let remembered = self.ports.get(port)?.get(&client)?;
        (remembered.until > now && set.contains(&remembered.endpoint)).then_some(remembered.endpoint)
    }

    /// Remembers a connection that was made.
    pub(crate) fn remember(
        &mut self,
        port: &PortName,
        client: IpAddr,
        endpoint: Endpoint,
        timeout: Duration,
        now: Instant,
    ) {
        let remembered = Remembered { endpoint, until: now + timeout };
        let clients = match self.ports.get_mut(port) {
            Some(clients) => clients,
            None => self.ports.entry(port.clone()).or_default(),
        };
        match clients.get_mut(&client) {
            Some(known) => *known = remembered,
            None if self.clients < self.capacity => {
                clients.insert(client, remembered);
                self.clients += 1;
            }
            None => {}
        }
    }

    /// Forgets clients whose timeout has passed, and those of endpoints and service ports that `is_known` does not have.
    pub(crate) fn clean(&mut self, now: Instant, mut is_known: impl FnMut(&PortName, Endpoint) -> bool) {
        self.ports.retain(|port, clients| {
            clients.retain(|_, remembered| remembered.until > now && is_known(port, remembered.endpoint));
            !clients.is_empty()
        });
        self.clients = self.ports.values().map(HashMap::len).sum();
    }

    /// All that is remembered, by service port: client, endpoint and the rest of the timeout.
    pub(crate) fn entries(&self, now: Instant) -> Vec<(PortName, Vec<Entry>)> {
        let of_port = |clients: &HashMap<IpAddr, Remembered>| -> Vec<Entry> {
            let entry = |(client, remembered): (&IpAddr, &Remembered)| {
                let rest = remembered.until.checked_duration_since(now).filter(|rest| !rest.is_zero())?;
                Some((*client, remembered.endpoint, rest))
            };
            clients.iter().filter_map(entry).collect()
        };
        self.ports.iter().map(|(port, clients)| (port.clone(), of_port(clients))).collect()
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients
    }
}

#[cfg(test)]
mod tests {
    use keelson_client::ServiceName;
    use keelson_proxy::model::Protocol;

    use super::*;

    fn port(name: &str) -> PortName {
        PortName { service: ServiceName::new("default", "web"), port: name.into(), protocol: Protocol::Tcp }
    }

    fn endpoint(last: u8) -> Endpoint {
        Endpoint { ip: [10, 244, 0, last].into(), port: 8080 }
    }

    #[test]
    fn case_47_affinity() {
        let (first, second) = (endpoint(1), endpoint(2));
        let both = [first, second];
        let client: IpAddr = [198, 51, 100, 7].into();
        let start = Instant::now();
        let timeout = Duration::from_secs(10);
        let mut affinity = Affinity::default();
        let (http, https) = (port("http"), port("https"));
        affinity.remember(&http, client, first, timeout, start);
        let later = start + timeout / 2;
        assert_eq!(affinity.find(&http, client, &both, later), Some(first));
        assert_eq!(affinity.find(&https, client, &both, later), None, "ports are independent");
        assert_eq!(affinity.find(&http, [198, 51, 100, 8].into(), &both, later), None);
        assert_eq!(affinity.find(&http, client, &both, start + timeout), None, "the timeout has passed");
        affinity.remember(&http, client, first, timeout, later);
        assert_eq!(affinity.find(&http, client, &both, start + timeout), Some(first), "it began anew");
        assert_eq!(affinity.find(&http, client, &[second], later), None, "the endpoint left the set");
        assert_eq!(affinity.find(&http, client, &both, later), Some(first), "another set does not change it");
        affinity.clean(later, |_, endpoint| endpoint != first);
        assert_eq!(affinity.find(&http, client, &both, later), None, "the endpoint is gone");
        assert_eq!(affinity.clients(), 0);
    }

    #[test]
    fn clients_are_bounded() {
        let now = Instant::now();
        let mut affinity = Affinity { capacity: 2, ..Affinity::default() };
        let timeout = Duration::from_secs(1);
        for last in 0..5 {
            affinity.remember(&port("http"), [198, 51, 100, last].into(), endpoint(1), timeout, now);
        }
        assert_eq!(affinity.clients(), 2);
        affinity.remember(&port("http"), [198, 51, 100, 0].into(), endpoint(2), timeout, now);
        let found = affinity.find(&port("http"), [198, 51, 100, 0].into(), &[endpoint(2)], now);
        assert_eq!(found, Some(endpoint(2)), "known clients are updated");
        affinity.clean(now + timeout, |_, _| true);
        assert_eq!(affinity.clients(), 0);
    }
}
