//! Source ranges: cases 40 to 42.

use crate::common::{Case, Setup};
use crate::expect::{Want, kept, masked};
use crate::objects::elsewhere;
use anyhow::Result;
use keelson_cluster::net::Family;
use keelson_cluster::net::plan::{CLIENT_NETWORKS, NODE_NETWORKS};
use serde_json::json;

#[test]
fn case_40_source_ranges_are_for_the_load_balancer_alone_and_for_every_source() -> Result<()> {
    Case::run(40, Setup::Plain, async |case| {
        // With a space, as the API allows.
        let ranges: Vec<String> = CLIENT_NETWORKS
            .iter()
            .map(|range| format!(" {range}"))
            .chain(NODE_NETWORKS.map(str::to_owned))
            .collect();
        let x = case.x_address(1);
        let spec = json!({"loadBalancerSourceRanges": ranges, "externalIPs": [x.v4, x.v6]});
        let r1 = [elsewhere(1)];
        case.serve("svc", 1, &spec, &r1).await?;
        let w = case.w_address(1);
        for family in Family::ALL {
            case.world().bind_to_node(w.of(family))?;
        }
        let (pod, host, c, b) = (case.pod(), case.host(), case.client(), case.world().outside_client());
        let vip = host.from(w);
        case.all([
            (c, case.w(1), masked(&r1)),
            (b.clone(), case.w(1), Want::Drop),
            (pod.clone(), case.w(1), Want::Drop),
            (b.clone(), case.np(1), masked(&r1)),
            (b.clone(), case.x(1), masked(&r1)),
            (b, case.v(1), masked(&r1)),
            (pod, case.v(1), kept(&r1)),
            (host, case.w(1), masked(&r1).by_packets()),
            (vip, case.w(1), masked(&r1).by_packets()),
        ])
        .await
    })
}

#[test]
fn case_41_ranges_of_the_other_family_or_of_everything_do_not_filter() -> Result<()> {
    Case::run(41, Setup::Plain, async |case| {
        let r1 = [elsewhere(1)];
        for (n, name, ranges) in [
            (1, "six", vec![CLIENT_NETWORKS[1]]),
            (2, "all", vec![CLIENT_NETWORKS[0], "0.0.0.0/0", CLIENT_NETWORKS[1], "::/0"]),
        ] {
            case.make(name, n, &json!({"loadBalancerSourceRanges": ranges})).await?;
            case.slices(name, &r1).await?;
        }
        case.synced().await?;
        let (b, c) = (case.world().outside_client(), case.client());
        case.all([
            (b.clone(), case.w(1).v4(), masked(&r1)),
            (b.clone(), case.w(1).v6(), Want::Drop),
            (c, case.w(1), masked(&r1)),
            (b, case.w(2), masked(&r1)),
        ])
        .await
    })
}

#[test]
fn case_42_ranges_apply_before_rejections() -> Result<()> {
    Case::run(42, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({"loadBalancerSourceRanges": CLIENT_NETWORKS})).await?;
        case.synced().await?;
        let (b, c) = (case.world().outside_client(), case.client());
        case.all([(c, case.w(1), Want::Reject), (b, case.w(1), Want::Drop)]).await
    })
}
