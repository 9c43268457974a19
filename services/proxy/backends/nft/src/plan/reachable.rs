//! Elements of a plan that a packet can meet.
//!
//! Owns: [`Plan::reachable_elements`]. In: an address and port. Out: elements, without computing all the others.

use std::{collections::HashSet, net::IpAddr};

use keelson_proxy::model::{Endpoint, Frontend, Protocol};

use super::{Plan, cluster_ip, count_element, fact_elements, hairpin};
use crate::element::Element;

impl Plan {
    /// Every element that a packet to this address and port can meet on its way to an endpoint, and some more, without
    /// duplicates: those of the possible frontends, of their service ports, of the possible endpoints, and the few that
    /// exist for all.
    pub(crate) fn reachable_elements(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Vec<Element> {
        let mut frontends =
            vec![Frontend::Address { ip, protocol, port }, Frontend::NodePort { protocol, port }];
        let mut addresses = vec![ip];
        let mut elements = fact_elements(self.family, &self.facts);
        let mut numbers = HashSet::new();
        for claim in
            frontends.clone().iter().filter_map(|frontend| self.frontends.get(frontend)?.all().first())
        {
            let Some(served) =
                self.port(claim).filter(|port| port.number.is_none_or(|number| numbers.insert(number)))
            else {
                continue;
            };
            elements.extend(served.elements());
            elements.extend(served.all_counted().map(count_element));
            let endpoints: HashSet<Endpoint> =
                served.cluster.endpoints.iter().chain(&served.local.endpoints).copied().collect();
            for endpoint in endpoints {
                let Endpoint { ip, port } = endpoint;
                addresses.push(ip);
                frontends.extend([
                    Frontend::Address { ip, protocol, port },
                    Frontend::NodePort { protocol, port },
                ]);
                elements.extend(
                    self.hairpin.contains_key(&(protocol, endpoint)).then(|| hairpin(protocol, endpoint)),
                );
            }
        }
        frontends.sort_unstable();
        frontends.dedup();
        addresses.sort_unstable();
        addresses.dedup();
        let meanings = frontends.iter().filter_map(|frontend| self.frontend_state(frontend));
        elements.extend(meanings.flat_map(|state| state.elements(&self.facts)));
        elements.extend(addresses.into_iter().filter(|ip| self.is_cluster_ip(*ip)).map(cluster_ip));
        let mut seen = HashSet::new();
        elements.retain(|element| seen.insert((element.set, element.key)));
        elements
    }
}
