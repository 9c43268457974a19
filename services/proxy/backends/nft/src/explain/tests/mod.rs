//! Explanations for every row of the tables in service-semantics.

mod cases;
mod frontends;
mod properties;
mod wording;

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{Question, Source, Target},
    model::{Endpoint, Family, PortName, Protocol, ServicePort},
    options::Detector,
};

use super::{ReachableElements, RuleContext, explain};
use crate::{
    chain::Chain,
    plan::{Existing, NodeFacts, Plan},
    ruleset::{Base, NodePortMatch},
    testing,
};

/// A node: N is 192.168.0.1, N2 192.168.0.2; P is 10.244.0.0/16; L* are 10.244.0.*, R* are 10.244.1.*.
struct World {
    base: Base,
    plan: Plan,
    local: Vec<IpAddr>,
    facts: NodeFacts,
    offload: Option<Chain>,
}

const N: &str = "192.168.0.1";

impl World {
    fn new(ports: Vec<ServicePort>) -> Self {
        let mut plan = Plan::new(Family::V4, Existing::default());
        plan.record(true);
        let mut by_service = std::collections::BTreeMap::<ServiceName, Vec<ServicePort>>::new();
        for port in ports {
            by_service.entry(port.name.service.clone()).or_default().push(port);
        }
        for (service, ports) in by_service {
            plan.set(&service, ports);
        }
        let facts = NodeFacts {
            service_cidrs: vec![net("10.96.0.0/16")],
            node_ips: vec![ip(N)],
            node_port_addresses: vec![ip(N)],
        };
        let base = Base {
            family: Family::V4,
            masquerade_all: false,
            mark: 0x4000,
            detector: Some(Detector::Cidr(net("10.244.0.0/16"))),
            node_ports: NodePortMatch::Addresses,
            untracked_pods: false,
        };
        let local = [N, "192.168.0.2", "10.244.0.254", "127.0.0.1"].map(ip).to_vec();
        plan.facts(facts.clone());
        Self { base, plan, local, facts, offload: None }
    }

    fn with(mut self, change: impl FnOnce(&mut Base)) -> Self {
        change(&mut self.base);
        self
    }

    fn facts(mut self, change: impl FnOnce(&mut NodeFacts)) -> Self {
        change(&mut self.facts);
        self.plan.facts(self.facts.clone());
        self
    }

    fn context(&self) -> RuleContext<'_> {
        RuleContext { base: &self.base, plan: &self.plan, local: &self.local, offload: self.offload }
    }

    fn explain(&self, target: &str, from: &str) -> pb::Explanation {
        explain(&self.context(), &question(target, from))
    }

    /// The only way, in short form: `forwarded 10.244.0.2:8080 10.244.1.2:8080 +M`.
    fn way(&self, target: &str, from: &str) -> String {
        let ways = self.explain(target, from).ways;
        assert_eq!(ways.len(), 1, "{ways:?}");
        short(&ways[0])
    }

    /// Rows: target, source, expected result.
    fn check(&self, rows: &[(&str, &str, &str)]) {
        for (target, from, expected) in rows {
            assert_eq!(self.way(target, from), *expected, "{from} -> {target}");
        }
    }
}

fn question(target: &str, from: &str) -> Question {
    Question::new(target.parse::<Target>().unwrap(), from.parse::<Source>().unwrap()).unwrap()
}

/// Verdict, endpoints in order, and whether it is masqueraded.
fn short(way: &pb::Way) -> String {
    let mut endpoints = way.endpoints.clone();
    endpoints.sort();
    let mut format = vec![way.verdict.clone()];
    format.extend(endpoints.iter().map(|endpoint| {
        endpoint.trim_end_matches(":8080").replace("10.244.0.", "L").replace("10.244.1.", "R")
    }));
    if way.verdict == "forwarded" {
        format.push(if way.masqueraded { "+M" } else { "-M" }.into());
    }
    format.join(" ")
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// `L1` or `R2`, on port 8080.
fn endpoint(name: &str) -> Endpoint {
    let (side, last) = name.split_at(1);
    let net = if side == "L" { "10.244.0" } else { "10.244.1" };
    Endpoint { ip: ip(&format!("{net}.{last}")), port: 8080 }
}

fn endpoints(names: &[&str]) -> Vec<Endpoint> {
    let mut endpoints: Vec<Endpoint> = names.iter().map(|name| endpoint(name)).collect();
    endpoints.sort_unstable();
    endpoints
}

const V: &str = "10.96.0.10:80";
const X: &str = "198.51.100.10:80";
const W: &str = "203.0.113.10:80";
const NP: &str = "192.168.0.1:30080";
/// An outside client, and one in no range.
const C: &str = "192.0.2.1";
const B: &str = "192.0.2.200";

/// default/web:http with V, X, W, NP and these endpoints; those whose names begin with L are on the node.
fn web(names: &[&str]) -> ServicePort {
    let on_node: Vec<&str> = names.iter().copied().filter(|name| name.starts_with('L')).collect();
    ServicePort {
        external_ips: vec![ip("198.51.100.10")],
        load_balancer_ips: vec![ip("203.0.113.10")],
        node_port: 30_080,
        has_any: !names.is_empty(),
        cluster: endpoints(names),
        on_node: endpoints(&on_node),
        ..testing::service_port(&ServiceName::new("default", "web"), "http", ip("10.96.0.10"), 80)
    }
}

/// The same with a policy Local, and LocalSet.
fn local(mut port: ServicePort, internal: bool, external: bool) -> ServicePort {
    port.internal_local = internal;
    port.external_local = external;
    port.local = port.on_node.clone();
    port
}
