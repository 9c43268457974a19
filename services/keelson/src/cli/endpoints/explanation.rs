//! The explanation of one Service as text.
//!
//! In: an explanation from the agent. Out: frontends and policies, then for each port and family where traffic goes
//! and why each endpoint is selected or not, then the slices.

use keelson_proto::endpoints as pb;

use crate::cli::{
    format::{clean, count, first_names, one_line},
    table::Table,
};

/// Maximum number of endpoints in a line on traffic; the table below has all.
const NAMED: usize = 4;

pub(super) fn describe(explanation: &pb::Explanation) -> String {
    let mut text = facts(explanation);
    for port in &explanation.ports {
        text.push_str(&format!("\nPort {}\n", port_name(port)));
        for family in &port.families {
            text.push_str(&describe_family(family));
        }
    }
    if explanation.ports.iter().flat_map(|port| &port.families).any(|family| !family.endpoints.is_empty()) {
        text.push_str(
            "\nSETS: C is the cluster set, for traffic that can go to any node; L is the local set, for \
             traffic\n\
             that stays on this node.\n",
        );
    }
    if !explanation.slices.is_empty() {
        text.push_str("\nEndpointSlices\n");
        text.push_str(&indented(&slices(&explanation.slices), 2));
    }
    text
}

fn facts(explanation: &pb::Explanation) -> String {
    let served = match (explanation.served, explanation.reason.as_str()) {
        (true, "") => "yes".into(),
        (true, reason) => format!("yes: {}", one_line(reason)),
        (false, "") => "NO".into(),
        (false, reason) => format!("NO: {}", one_line(reason)),
    };
    let health_check = match explanation.health_check_node_port {
        0 => String::new(),
        port => format!("node port {port}"),
    };
    let revision = if explanation.rev == 0 { String::new() } else { explanation.rev.to_string() };
    let lines = [
        ("Service:           ", format!("{}/{}", clean(&explanation.namespace), clean(&explanation.name))),
        ("Served:            ", served),
        ("Type:              ", clean(&explanation.r#type)),
        ("Cluster IPs:       ", list(&explanation.cluster_ips)),
        ("External IPs:      ", list(&explanation.external_ips)),
        ("Load balancer IPs: ", list(&explanation.load_balancer_ips)),
        ("Source ranges:     ", list(&explanation.source_ranges)),
        ("Internal traffic:  ", one_line(&explanation.internal_traffic_policy)),
        ("External traffic:  ", one_line(&explanation.external_traffic_policy)),
        ("Affinity:          ", one_line(&explanation.affinity)),
        ("Health check:      ", health_check),
        ("Revision:          ", revision),
    ];
    let mut text = String::new();
    for (name, value) in lines.iter().filter(|(_, value)| !value.is_empty()) {
        text.push_str(&format!("{name}{value}\n"));
    }
    for ignored in &explanation.ignored {
        text.push_str(&format!("Ignored:           {}\n", one_line(ignored)));
    }
    text
}

/// `http 80/TCP, node port 30080`.
fn port_name(port: &pb::PortExplanation) -> String {
    let mut text = format!("{}/{}", port.port, clean(&port.protocol));
    if !port.name.is_empty() {
        text = format!("{} {text}", clean(&port.name));
    }
    if port.node_port != 0 {
        text.push_str(&format!(", node port {}", port.node_port));
    }
    text
}

fn describe_family(family: &pb::FamilyExplanation) -> String {
    let mut text = format!("  {}, topology: {}", clean(&family.family), clean(&family.topology));
    if !family.topology_reason.is_empty() {
        text.push_str(&format!(": {}", one_line(&family.topology_reason)));
    }
    text.push('\n');
    if !family.traffic.is_empty() {
        text.push_str(&indented(&traffic(&family.traffic), 4));
    }
    if family.endpoints.is_empty() {
        text.push_str("    no endpoints\n");
    } else {
        text.push('\n');
        text.push_str(&indented(&endpoints(&family.endpoints), 4));
    }
    text
}

fn traffic(traffic: &[pb::TrafficExplanation]) -> String {
    let mut table = Table::new(&["FROM", "TO", "VERDICT", "ENDPOINTS", "WHY"]);
    for kind in traffic {
        table.row([
            clean(&kind.from),
            clean(&kind.to),
            clean(&kind.verdict),
            first_names(&kind.endpoints, NAMED),
            one_line(&kind.reason),
        ]);
    }
    table.text()
}

fn endpoints(endpoints: &[pb::EndpointExplanation]) -> String {
    let mut table = Table::new(&["SETS", "ENDPOINT", "CONDITIONS", "POD", "NODE", "ZONE", "SLICE", "WHY"]);
    for endpoint in endpoints {
        let sets = format!(
            "{}{}",
            if endpoint.cluster_set { "C" } else { "" },
            if endpoint.local_set { "L" } else { "" }
        );
        let here = if endpoint.local { " (this node)" } else { "" };
        table.row([
            sets,
            address(endpoint),
            conditions(endpoint),
            clean(&endpoint.pod),
            format!("{}{here}", clean(&endpoint.node)),
            clean(&endpoint.zone),
            clean(&endpoint.slice),
            one_line(&endpoint.reason),
        ]);
    }
    table.text()
}

fn address(endpoint: &pb::EndpointExplanation) -> String {
    let address = clean(&endpoint.address);
    if address.contains(':') {
        format!("[{address}]:{}", endpoint.port)
    } else {
        format!("{address}:{}", endpoint.port)
    }
}

/// `ready`, `serving, terminating`, `not ready`.
fn conditions(endpoint: &pb::EndpointExplanation) -> String {
    let state = match (endpoint.ready, endpoint.serving) {
        (true, _) => "ready",
        (false, true) => "serving",
        (false, false) => "not ready",
    };
    if endpoint.terminating { format!("{state}, terminating") } else { state.into() }
}

fn slices(slices: &[pb::SliceExplanation]) -> String {
    let mut table = Table::new(&["SLICE", "ADDRESSES", "ENDPOINTS", "USED", "WHY"]);
    for slice in slices {
        table.row([
            clean(&slice.name),
            clean(&slice.address_type),
            count(slice.endpoints.into(), "endpoint"),
            if slice.used { "yes" } else { "NO" }.into(),
            one_line(&slice.reason),
        ]);
    }
    table.text()
}

fn list<'a>(values: impl IntoIterator<Item = &'a String>) -> String {
    values.into_iter().map(|value| clean(value)).collect::<Vec<_>>().join(", ")
}

fn indented(text: &str, by: usize) -> String {
    text.lines().map(|line| format!("{:by$}{line}\n", "")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(number: u8, local: bool, reason: &str) -> pb::EndpointExplanation {
        pb::EndpointExplanation {
            address: format!("10.1.0.{number}"),
            port: 8080,
            pod: format!("web-{number}"),
            node: if local { "worker-7" } else { "worker-8" }.into(),
            zone: "a".into(),
            slice: "web-x7k2p".into(),
            ready: true,
            serving: true,
            local,
            cluster_set: true,
            local_set: local,
            reason: reason.into(),
            ..Default::default()
        }
    }

    fn traffic(from: &str, to: &str, verdict: &str, endpoints: u8, reason: &str) -> pb::TrafficExplanation {
        pb::TrafficExplanation {
            from: from.into(),
            to: to.into(),
            verdict: verdict.into(),
            endpoints: (1..=endpoints).map(|number| format!("10.1.0.{number}:8080")).collect(),
            reason: reason.into(),
        }
    }

    fn explanation() -> pb::Explanation {
        let ending = pb::EndpointExplanation {
            address: "fd00::2".into(),
            ready: false,
            terminating: true,
            cluster_set: false,
            pod: String::new(),
            ..endpoint(2, false, "it ends\nand others are ready")
        };
        let four = pb::FamilyExplanation {
            family: "IPv4".into(),
            topology: "zone".into(),
            topology_reason: "every ready endpoint is hinted, one for a".into(),
            traffic: vec![
                traffic("anyone", "10.96.0.10:80", "forwarded", 6, "policy Cluster"),
                traffic("outside", "node port 30080", "forwarded", 1, "policy Local"),
            ],
            endpoints: vec![endpoint(1, true, "ready and hinted"), ending],
        };
        let six = pb::FamilyExplanation {
            family: "IPv6".into(),
            topology: "none".into(),
            traffic: vec![traffic("anyone", "[fd00:96::a]:80", "rejected", 0, "no endpoint of this family")],
            ..Default::default()
        };
        let slice = |name: &str, used, reason: &str| pb::SliceExplanation {
            name: name.into(),
            address_type: if used { "IPv4" } else { "FQDN" }.into(),
            endpoints: 2,
            used,
            reason: reason.into(),
        };
        pb::Explanation {
            namespace: "shop".into(),
            name: "web".into(),
            served: true,
            r#type: "NodePort".into(),
            cluster_ips: vec!["10.96.0.10".into(), "fd00:96::a".into()],
            source_ranges: vec!["192.0.2.0/25".into()],
            internal_traffic_policy: "Cluster".into(),
            external_traffic_policy: "Local: only endpoints on this node".into(),
            affinity: "ClientIP, 10800 s".into(),
            health_check_node_port: 32_000,
            ports: vec![pb::PortExplanation {
                name: "http".into(),
                protocol: "TCP".into(),
                port: 80,
                node_port: 30_080,
                families: vec![four, six],
            }],
            slices: vec![slice("web-x7k2p", true, ""), slice("web-fqdn", false, "names are not resolved")],
            rev: 12,
            ignored: vec!["external IP \x1b[31m2001:db8::9: another family".into()],
            ..Default::default()
        }
    }

    #[test]
    fn a_service_whole() {
        let expected = "\
Service:           shop/web
Served:            yes
Type:              NodePort
Cluster IPs:       10.96.0.10, fd00:96::a
Source ranges:     192.0.2.0/25
Internal traffic:  Cluster
External traffic:  Local: only endpoints on this node
Affinity:          ClientIP, 10800 s
Health check:      node port 32000
Revision:          12
Ignored:           external IP \u{fffd}[31m2001:db8::9: another family

Port http 80/TCP, node port 30080
  IPv4, topology: zone: every ready endpoint is hinted, one for a
    FROM     TO               VERDICT    ENDPOINTS                                                              WHY
    anyone   10.96.0.10:80    forwarded  10.1.0.1:8080, 10.1.0.2:8080, 10.1.0.3:8080, 10.1.0.4:8080 and 2 more  policy Cluster
    outside  node port 30080  forwarded  10.1.0.1:8080                                                          policy Local

    SETS  ENDPOINT        CONDITIONS            POD    NODE                  ZONE  SLICE      WHY
    CL    10.1.0.1:8080   ready                 web-1  worker-7 (this node)  a     web-x7k2p  ready and hinted
    -     [fd00::2]:8080  serving, terminating  -      worker-8              a     web-x7k2p  it ends and others are ready
  IPv6, topology: none
    FROM    TO               VERDICT   ENDPOINTS  WHY
    anyone  [fd00:96::a]:80  rejected  -          no endpoint of this family
    no endpoints

SETS: C is the cluster set, for traffic that can go to any node; L is the local set, for traffic
that stays on this node.

EndpointSlices
  SLICE      ADDRESSES  ENDPOINTS    USED  WHY
  web-x7k2p  IPv4       2 endpoints  yes   -
  web-fqdn   FQDN       2 endpoints  NO    names are not resolved
";
        assert_eq!(describe(&explanation()), expected);
    }

    #[test]
    fn a_service_without_frontends() {
        let headless = pb::Explanation {
            namespace: "shop".into(),
            name: "db".into(),
            reason: "it is headless".into(),
            ..Default::default()
        };
        assert_eq!(
            describe(&headless),
            "Service:           shop/db\nServed:            NO: it is headless\n"
        );
    }

    #[test]
    fn conditions_and_ports() {
        let with = |ready, serving, terminating| {
            conditions(&pb::EndpointExplanation { ready, serving, terminating, ..Default::default() })
        };
        assert_eq!(with(true, true, true), "ready, terminating");
        assert_eq!(with(false, true, false), "serving");
        assert_eq!(with(false, false, true), "not ready, terminating");
        let plain = pb::PortExplanation { protocol: "UDP".into(), port: 53, ..Default::default() };
        assert_eq!(port_name(&plain), "53/UDP");
    }
}
