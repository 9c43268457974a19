//! Describes the frontend at an address and port, for an explanation.
//!
//! Owns: [`RuleContext`], and [`Services`], which a plan implements. In: the plan, the node's addresses, the target. Out: a
//! sentence, and the service port if there is one ([`RuleContext::describe`]).

use std::net::IpAddr;

use keelson_proxy::{
    explain::Target,
    model::{Conflict, Frontend, FrontendKind, ServicePort},
};

/// The Services of a family.
pub trait Services {
    /// The service port that gets a frontend.
    fn lookup(&self, frontend: Frontend) -> Option<(FrontendKind, &ServicePort)>;

    fn ports(&self) -> impl Iterator<Item = &ServicePort>;

    /// Frontends that more than one service port claims.
    fn conflicts(&self) -> Vec<Conflict>;
}

#[derive(Debug, Clone, Copy)]
pub struct RuleContext<'a, P> {
    pub plan: &'a P,
    /// The addresses of the node's interfaces, including loopback.
    pub local: &'a [IpAddr],
}

impl<P: Services> RuleContext<'_, P> {
    #[must_use]
    pub fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.local.contains(&address)
    }

    /// The sentence, and the name of the service port; empty if there is none. `serves_node_ports`: at the target's address.
    /// `is_refused`: whether no source reaches an endpoint by a frontend.
    pub fn describe(
        &self,
        target: Target,
        serves_node_ports: bool,
        is_refused: impl Fn(Frontend) -> bool,
    ) -> (String, String) {
        let [address, node_port] = target.frontends();
        let named = |frontend, kind, port: &ServicePort| {
            let text = self.describe_claimed(target, frontend, kind, port, is_refused(frontend));
            (text, port.name.to_string())
        };
        if let Some((kind, port)) = self.plan.lookup(address) {
            return named(address, kind, port);
        }
        if let Some((kind, port)) = self.plan.lookup(node_port) {
            if serves_node_ports {
                return named(node_port, kind, port);
            }
            if self.is_local(target.address) {
                let Target { address, port: number, protocol } = target;
                let name = &port.name;
                let text = format!(
                    "{name} has the node port {number}/{protocol}, but node ports are not served at {address}"
                );
                return (text, String::new());
            }
        }
        (self.describe_unclaimed(target), String::new())
    }

    fn describe_claimed(
        &self,
        target: Target,
        frontend: Frontend,
        kind: FrontendKind,
        port: &ServicePort,
        is_refused: bool,
    ) -> String {
        let (what, is_local, policy) = match kind {
            FrontendKind::ClusterIp => ("the cluster IP", port.internal_local, "internalTrafficPolicy"),
            FrontendKind::ExternalIp => ("an external IP", port.external_local, "externalTrafficPolicy"),
            FrontendKind::LoadBalancerIp => {
                ("a load-balancer IP", port.external_local, "externalTrafficPolicy")
            }
            FrontendKind::NodePort => ("the node port", port.external_local, "externalTrafficPolicy"),
        };
        let mut text = format!("{target} is {what} of {}", port.name);
        if is_local {
            text.push_str(&format!(", {policy} Local"));
        }
        match (is_refused, port.has_any) {
            (true, true) => text.push_str(": it has endpoints, but none that this traffic may use"),
            (true, false) => text.push_str(": no usable endpoint on any node"),
            (false, _) => {}
        }
        let conflicts = self.plan.conflicts();
        if let Some(conflict) = conflicts.iter().find(|conflict| conflict.frontend == frontend) {
            let others: Vec<String> = conflict.others.iter().map(ToString::to_string).collect();
            text.push_str(&format!("; also claimed by {}", others.join(", ")));
        }
        text
    }

    fn describe_unclaimed(&self, target: Target) -> String {
        let Target { address, port, protocol } = target;
        let owner = self.plan.ports().find(|port| {
            port.cluster_ip == address
                || port.external_ips.contains(&address)
                || port.load_balancer_ips.contains(&address)
        });
        if let Some(owner) = owner {
            let service = &owner.name.service;
            return format!("{address} is an address of {service}, which has no port {port}/{protocol}");
        }
        if self.is_local(address) {
            return format!(
                "{address} is an address of this node, but no Service has the node port {port}/{protocol}"
            );
        }
        format!("{target} is not a frontend: {address} belongs to no Service and not to this node")
    }
}
