//! Addresses of node ports: cases 45 and 46.

use crate::expect::{Target, Want, masked};
use crate::objects::elsewhere;
use crate::rig::{Case, Setup, run};
use anyhow::Result;
use keelson_cluster::net::Dual;
use keelson_cluster::net::plan::{BRIDGE, NODE_2};
use serde_json::json;
use std::net::{Ipv4Addr, Ipv6Addr};

const LOOPBACK: Dual = Dual { v4: Ipv4Addr::LOCALHOST, v6: Ipv6Addr::LOCALHOST };

async fn with_node_port(number: u8, setup: Setup) -> Result<(Case, Want)> {
    let case = Case::new(number, setup).await?;
    case.make("svc", 1, &json!({"type": "NodePort"})).await?;
    let r1 = [elsewhere(1)];
    case.slices("svc", &r1).await?;
    case.synced().await?;
    Ok((case, masked(&r1)))
}

#[test]
fn case_45_46_node_ports_are_on_the_address_of_the_node_by_default() -> Result<()> {
    run(async {
        let (case, there) = with_node_port(45, Setup::Plain).await?;
        let (c, host) = (case.world().client(), case.world().host());
        let loopback = Target::new(LOOPBACK, case.node_port(1));
        case.all([
            (c.clone(), case.np(1), there.clone()),
            (case.world().pod(), case.np(1), there.clone()),
            (host.clone(), case.np(1), there),
            (c, case.np2(1), Want::Reset),
            (host.from(NODE_2), case.np2(1), Want::Reset),
            (host.from(LOOPBACK), loopback, Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_45_46_node_ports_are_on_the_networks_that_are_listed() -> Result<()> {
    run(async {
        let (case, there) = with_node_port(145, Setup::NodePortsListed).await?;
        let (c, host, pod) = (case.world().client(), case.world().host(), case.world().pod());
        let loopback = Target::new(LOOPBACK, case.node_port(1));
        let bridge = Target::new(BRIDGE, case.node_port(1));
        case.all([
            (c.clone(), case.np(1), there.clone()),
            (c, case.np2(1), there),
            (pod, bridge, Want::Reset),
            (host.from(LOOPBACK), loopback, Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_45_46_a_list_without_a_family_is_every_address_of_it_but_loopback() -> Result<()> {
    run(async {
        let (case, there) = with_node_port(146, Setup::NodePortsV4).await?;
        let (c, host, pod) = (case.world().client(), case.world().host(), case.world().pod());
        let loopback = Target::new(LOOPBACK, case.node_port(1));
        let bridge = Target::new(BRIDGE, case.node_port(1));
        case.all([
            (c.clone(), case.np(1), there.clone()),
            (c, case.np2(1), there.clone()),
            (pod.clone(), bridge.v6(), there),
            (pod, bridge.v4(), Want::Reset),
            (host.from(LOOPBACK), loopback, Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_46_every_address_of_ipv4_excludes_loopback() -> Result<()> {
    run(async {
        let (case, there) = with_node_port(147, Setup::NodePortsAll).await?;
        let (c, host, pod) = (case.world().client(), case.world().host(), case.world().pod());
        let loopback = Target::new(LOOPBACK, case.node_port(1));
        let bridge = Target::new(BRIDGE, case.node_port(1));
        case.all([
            (c, case.np2(1), there.clone()),
            (pod, bridge, there),
            (host.from(LOOPBACK), loopback, Want::Reset),
        ])
        .await
    })
}
