//! Addresses of node ports: cases 45 and 46.

use crate::common::{Case, Setup, run};
use crate::expect::{Target, Want, masked};
use crate::objects::elsewhere;
use crate::subject::{differs_by_design, is_as_mode_nftables};
use anyhow::Result;
use keelson_cluster::net::Dual;
use keelson_cluster::net::plan::{BRIDGE, NODE_2};
use serde_json::json;
use std::net::{Ipv4Addr, Ipv6Addr};

const LOOPBACK: Dual = Dual { v4: Ipv4Addr::LOCALHOST, v6: Ipv6Addr::LOCALHOST };

/// The node port at another address.
fn at(address: Dual, case: &Case) -> Target {
    Target::new(address, case.node_port(1))
}

async fn with_node_port(number: u8, setup: Setup) -> Result<(Case, Want)> {
    let case = Case::new(number, setup).await?;
    let r1 = [elsewhere(1)];
    case.serve("svc", 1, &json!({"type": "NodePort"}), &r1).await?;
    Ok((case, masked(&r1)))
}

#[test]
fn case_45_46_node_ports_are_on_the_address_of_the_node_by_default() -> Result<()> {
    if differs_by_design(45) {
        return Ok(());
    }
    run(async {
        let (case, there) = with_node_port(45, Setup::Plain).await?;
        let second = if is_as_mode_nftables() { Want::Reset } else { there.clone() };
        case.all([
            (case.client(), case.np(1), there.clone()),
            (case.pod(), case.np(1), there.clone()),
            (case.host(), case.np(1), there),
            (case.client(), case.np2(1), second.clone()),
            (case.host().from(NODE_2), case.np2(1), second),
            (case.host().from(LOOPBACK), at(LOOPBACK, &case), Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_45_46_node_ports_are_on_the_networks_that_are_listed() -> Result<()> {
    run(async {
        let (case, there) = with_node_port(145, Setup::NodePortsListed).await?;
        case.all([
            (case.client(), case.np(1), there.clone()),
            (case.client(), case.np2(1), there),
            (case.pod(), at(BRIDGE, &case), Want::Reset),
            (case.host().from(LOOPBACK), at(LOOPBACK, &case), Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_45_46_a_list_without_a_family_is_every_address_of_it_but_loopback() -> Result<()> {
    run(async {
        let (case, there) = with_node_port(146, Setup::NodePortsV4).await?;
        case.all([
            (case.client(), case.np(1), there.clone()),
            (case.client(), case.np2(1), there.clone()),
            (case.pod(), at(BRIDGE, &case).v6(), there),
            (case.pod(), at(BRIDGE, &case).v4(), Want::Reset),
            (case.host().from(LOOPBACK), at(LOOPBACK, &case), Want::Reset),
        ])
        .await
    })
}

#[test]
fn case_46_every_address_of_ipv4_excludes_loopback() -> Result<()> {
    if differs_by_design(147) {
        return Ok(());
    }
    run(async {
        let (case, there) = with_node_port(147, Setup::NodePortsAll).await?;
        case.all([
            (case.client(), case.np2(1), there.clone()),
            (case.pod(), at(BRIDGE, &case), there),
            (case.host().from(LOOPBACK), at(LOOPBACK, &case), Want::Reset),
        ])
        .await
    })
}
