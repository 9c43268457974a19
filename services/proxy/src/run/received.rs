//! What the proxy needs of a Service.
//!
//! Owns: [`Received`]. In: messages of the Endpoints API. Out: ports by family, the health check node port. Those of a large first state are
//! made on a thread of the client, so that the sync loop gets them ready.

use keelson_client::{ServiceEndpoints, ServiceName};
use keelson_proto::localnetv1::Protocol;

use crate::{
    health::ServiceHealthCheck,
    model::{Family, ServicePort, service_ports},
};

#[derive(Debug)]
pub(super) struct Received {
    pub(super) service_proxy_name: String,
    /// In the order of [`Family::ALL`].
    ports: [Vec<ServicePort>; 2],
    check: Option<ServiceHealthCheck>,
    pub(super) has_udp: bool,
}

impl From<ServiceEndpoints> for Received {
    fn from(service: ServiceEndpoints) -> Self {
        Self {
            ports: Family::ALL.map(|family| service_ports(&service, family)),
            check: health_check(&service),
            has_udp: service.ports.iter().any(|port| port.protocol() == Protocol::Udp),
            service_proxy_name: service.service_proxy_name,
        }
    }
}

impl Received {
    /// The ports in each family, and the health check node port, of a node that supports these families.
    pub(super) fn within(
        mut self,
        families: &[Family],
    ) -> ([Vec<ServicePort>; 2], Option<ServiceHealthCheck>) {
        for (family, ports) in Family::ALL.into_iter().zip(&mut self.ports) {
            if families.contains(&family) {
                continue;
            }
            ports.clear();
            if let Some(check) = &mut self.check {
                *check.local_mut(family) = None;
            }
        }
        let has_family = |check: &ServiceHealthCheck| check.local_v4.or(check.local_v6).is_some();
        (self.ports, self.check.filter(has_family))
    }
}

/// The agent sends the port only if it has an effect.
fn health_check(service: &ServiceEndpoints) -> Option<ServiceHealthCheck> {
    let port = u16::try_from(service.health_check_node_port).ok().filter(|port| *port != 0)?;
    let cluster_ips = service.i_ps.as_ref().and_then(|ips| ips.cluster_i_ps.as_ref())?;
    Some(ServiceHealthCheck {
        name: ServiceName::new(&service.namespace, &service.name),
        port,
        local_v4: (!cluster_ips.v4.is_empty()).then_some(service.local_ready_v4),
        local_v6: (!cluster_ips.v6.is_empty()).then_some(service.local_ready_v6),
    })
}

#[cfg(test)]
mod tests {
    use keelson_proto::localnetv1::{IpSet, PortMapping, ServiceIPs};

    use super::*;

    fn service(v4: &[&str], v6: &[&str], protocol: Protocol) -> ServiceEndpoints {
        let texts = |ips: &[&str]| ips.iter().map(|&ip| ip.to_owned()).collect();
        ServiceEndpoints {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            i_ps: Some(ServiceIPs {
                cluster_i_ps: Some(IpSet { v4: texts(v4), v6: texts(v6) }),
                ..ServiceIPs::default()
            }),
            ports: vec![PortMapping { protocol: protocol.into(), port: 80, ..PortMapping::default() }],
            health_check_node_port: 32_000,
            local_ready_v4: 2,
            local_ready_v6: 3,
            ..ServiceEndpoints::default()
        }
    }

    #[test]
    fn families_that_the_node_does_not_support_are_left_out() {
        use Family::{V4, V6};
        let both: (&[&str], &[&str]) = (&["10.96.0.10"], &["fd00::a"]);
        let v6: (&[&str], &[&str]) = (&[], &["fd00::a"]);
        for ((v4_ips, v6_ips), families, ports, local) in [
            (both, &[V4, V6][..], [1, 1], Some([Some(2), Some(3)])),
            (both, &[V4], [1, 0], Some([Some(2), None])),
            (both, &[V6], [0, 1], Some([None, Some(3)])),
            (v6, &[V4, V6], [0, 1], Some([None, Some(3)])),
            (v6, &[V4], [0, 0], None),
            ((&[], &[]), &[V4, V6], [0, 0], None),
        ] {
            let received = Received::from(service(v4_ips, v6_ips, Protocol::Tcp));
            let (found, check) = received.within(families);
            assert_eq!(found.map(|ports| ports.len()), ports, "{v4_ips:?} {v6_ips:?} {families:?}");
            let check = check.map(|check| {
                assert_eq!((check.name.name(), check.port), ("web", 32_000));
                [check.local_v4, check.local_v6]
            });
            assert_eq!(check, local, "{v4_ips:?} {v6_ips:?} {families:?}");
        }
    }

    #[test]
    fn udp_and_the_proxy_that_is_meant_are_seen() {
        let udp = ServiceEndpoints {
            service_proxy_name: "other".to_owned(),
            health_check_node_port: 0,
            ..service(&["10.96.0.10"], &[], Protocol::Udp)
        };
        let received = Received::from(udp);
        assert_eq!((received.has_udp, received.service_proxy_name.as_str()), (true, "other"));
        assert_eq!(received.within(&Family::ALL).1, None, "no health check node port");
        assert!(!Received::from(service(&["10.96.0.10"], &[], Protocol::Tcp)).has_udp);
    }
}
