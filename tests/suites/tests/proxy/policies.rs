//! Traffic policies and masquerading: cases 31 to 39.

use crate::common::{Case, Setup, run};
use crate::expect::{Want, kept, masked};
use crate::objects::{PORT, elsewhere, on_node, port};
use crate::subject::transports;
use anyhow::Result;
use keelson_cluster::endpoints::Kind;
use keelson_cluster::net::plan::NODE;
use serde_json::json;

#[test]
fn case_31_internal_policy_local_is_for_cluster_ips_alone() -> Result<()> {
    Case::run(31, Setup::Plain, async |case| {
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        let both = [l1.clone(), r1];
        case.make_with("svc", 1, &json!({"internalTrafficPolicy": "Local"}), &both).await?;
        let inside =
            case.service("inside", 2, &json!({"type": "ClusterIP", "externalTrafficPolicy": "Local"}));
        case.refused(Kind::Service, &inside).await?;
        case.put_unchecked(Kind::Service, &inside).await?;
        case.slices("inside", &both).await?;
        case.synced().await?;
        case.all([
            (case.pod(), case.v(1), kept([&l1])),
            (case.host(), case.v(1), masked([&l1])),
            (case.client(), case.v(1), masked([&l1])),
            (case.client(), case.np(1), masked(&both)),
            (case.pod(), case.np(1), masked(&both)),
            (case.pod(), case.v(2), kept(&both)),
            (case.client(), case.v(2), masked(&both)),
        ])
        .await
    })
}

#[test]
fn case_32_internal_policy_local_without_local_endpoints_drops_and_without_any_rejects() -> Result<()> {
    Case::run(32, Setup::Plain, async |case| {
        let r1 = [elsewhere(1)];
        case.serve("svc", 1, &json!({"internalTrafficPolicy": "Local"}), &r1).await?;
        let mut table = case.all_clients(case.v(1), &Want::Drop);
        table.extend(case.all_clients(case.w(1), &masked(&r1)));
        case.all(table).await?;
        case.slices("svc", &[]).await?;
        case.synced().await?;
        let mut table = case.all_rejected(case.v(1));
        table.extend(case.all_rejected(case.w(1)));
        case.all(table).await
    })
}

#[test]
fn case_33_external_policy_local_keeps_the_source_and_short_circuits_pods_and_host() -> Result<()> {
    Case::run(33, Setup::Plain, async |case| {
        let x = case.x_address(1);
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        let both = [l1.clone(), r1];
        case.serve("svc", 1, &json!({"externalTrafficPolicy": "Local", "externalIPs": [x.v4, x.v6]}), &both)
            .await?;
        let (w, v, x, np) = (case.w(1), case.v(1), case.x(1), case.np(1));
        case.all([
            (case.client(), w, kept([&l1])),
            (case.client(), np, kept([&l1])),
            (case.client(), x, kept([&l1])),
            (case.pod(), w, kept(&both)),
            (case.pod(), np, kept(&both)),
            (case.pod(), x, kept(&both)),
            (case.host(), w, masked(&both)),
            (case.host(), np, masked(&both)),
            (case.pod(), v, kept(&both)),
        ])
        .await
    })
}

#[test]
fn case_34_external_policy_local_without_local_endpoints_drops_external_traffic() -> Result<()> {
    Case::run(34, Setup::Plain, async |case| {
        let r1 = [elsewhere(1)];
        case.serve("svc", 1, &json!({"externalTrafficPolicy": "Local"}), &r1).await?;
        case.all([
            (case.client(), case.w(1), Want::Drop),
            (case.client(), case.np(1), Want::Drop),
            (case.pod(), case.w(1), kept(&r1)),
            (case.host(), case.np(1), masked(&r1)),
            (case.host(), case.w(1), masked(&r1)),
        ])
        .await
    })
}

#[test]
fn case_35_without_a_detector_pods_count_as_outside_and_the_host_does_not() -> Result<()> {
    Case::run(35, Setup::NoDetector, async |case| {
        let both = [on_node(&case, 1), elsewhere(1)];
        case.serve("svc", 1, &json!({"externalTrafficPolicy": "Local"}), &both).await?;
        case.all([
            (case.pod(), case.w(1), kept(&both[..1])),
            (case.client(), case.w(1), kept(&both[..1])),
            (case.host(), case.w(1), masked(&both).by_packets()),
        ])
        .await
    })
}

/// Sends requests to V from pod, host and C, with endpoints on this node and elsewhere, and expects them masqueraded or
/// not.
async fn masquerade_of_v(number: u8, setup: Setup, [pod, host, c]: [bool; 3]) -> Result<()> {
    let case = Case::new(number, setup).await?;
    let both = [on_node(&case, 1), elsewhere(1)];
    case.serve("svc", 1, &json!({}), &both).await?;
    let want = |masqueraded| if masqueraded { masked(&both) } else { kept(&both) };
    case.all([
        (case.pod(), case.v(1), want(pod)),
        (case.host(), case.v(1), want(host)),
        (case.client(), case.v(1), want(c)),
    ])
    .await
}

#[test]
fn case_36_pods_are_not_masqueraded_and_others_are() -> Result<()> {
    run(masquerade_of_v(36, Setup::Plain, [false, true, true]))
}

#[test]
fn case_36_without_a_detector_nothing_is_masqueraded() -> Result<()> {
    run(masquerade_of_v(136, Setup::NoDetector, [false, false, false]))
}

#[test]
fn case_36_masquerade_all_includes_pods() -> Result<()> {
    run(masquerade_of_v(137, Setup::MasqueradeAll, [true, true, true]))
}

#[test]
fn case_36_masquerade_all_applies_to_cluster_ips_only() -> Result<()> {
    Case::run(141, Setup::MasqueradeAll, async |case| {
        let both = [on_node(&case, 1), elsewhere(1)];
        case.serve("svc", 1, &json!({"externalTrafficPolicy": "Local"}), &both).await?;
        case.all([
            (case.pod(), case.v(1), masked(&both)),
            (case.pod(), case.w(1), kept(&both)),
            (case.client(), case.w(1), kept(&both[..1])),
            (case.host(), case.w(1), masked(&both)),
        ])
        .await
    })
}

#[test]
fn case_36_pods_by_the_cidrs_of_the_node() -> Result<()> {
    run(masquerade_of_v(138, Setup::NodeCidr, [false, true, true]))
}

#[test]
fn case_36_pods_by_the_bridge() -> Result<()> {
    run(masquerade_of_v(139, Setup::Bridge, [false, true, true]))
}

#[test]
fn case_36_pods_by_the_interface_prefix() -> Result<()> {
    run(masquerade_of_v(140, Setup::Prefix, [false, true, true]))
}

#[test]
fn case_37_external_policy_cluster_is_masqueraded_for_all() -> Result<()> {
    Case::run(37, Setup::Plain, async |case| {
        let x = case.x_address(1);
        let both = [on_node(&case, 1), elsewhere(1)];
        case.serve("svc", 1, &json!({"externalIPs": [x.v4, x.v6]}), &both).await?;
        let targets = [case.w(1), case.np(1), case.x(1)];
        case.all(targets.into_iter().flat_map(|target| case.all_clients(target, &masked(&both)))).await
    })
}

#[test]
fn case_38_hairpin_connections_have_the_source_of_the_node() -> Result<()> {
    Case::run(38, Setup::Plain, async |case| {
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        for (n, name, endpoint) in [(1, "itself", &l1), (2, "other", &r1)] {
            case.make(name, n, &json!({})).await?;
            case.slices(name, std::slice::from_ref(endpoint)).await?;
        }
        case.serve("local", 3, &json!({"externalTrafficPolicy": "Local"}), std::slice::from_ref(&l1)).await?;
        let pod = case.world().local(1)?;
        case.all([
            (pod.clone(), case.v(1), masked([&l1])),
            (pod.clone(), case.v(2), kept([&r1])),
            (pod.clone(), case.w(1), masked([&l1])),
            (pod, case.w(3), masked([&l1])),
        ])
        .await
    })
}

#[test]
fn case_39_no_endpoints_are_rejected_at_every_frontend() -> Result<()> {
    Case::run(39, Setup::Plain, async |case| {
        let x = case.x_address(1);
        let ports = transports().iter().map(|transport| {
            let mut port = port(&transport.name().to_lowercase(), PORT, *transport);
            port["nodePort"] = json!(case.node_port(1));
            port
        });
        let ports: Vec<_> = ports.collect();
        case.make("svc", 1, &json!({"externalIPs": [x.v4, x.v6], "ports": ports})).await?;
        case.synced().await?;
        let mut table = Vec::new();
        for frontend in [case.v(1), case.w(1), case.x(1), case.np(1)] {
            for transport in transports() {
                table.extend(case.all_rejected(frontend.over(*transport)));
            }
        }
        case.all(table).await
    })
}

#[test]
fn case_37_an_endpoint_on_the_network_of_the_node_needs_no_masquerading() -> Result<()> {
    Case::run(142, Setup::Plain, async |case| {
        let node = on_node(&case, 1).moved_to(NODE);
        case.serve("svc", 1, &json!({}), std::slice::from_ref(&node)).await?;
        // Packets for the node itself never reach source translation.
        case.all([
            (case.pod(), case.v(1), kept([&node])),
            (case.pod(), case.w(1), kept([&node])),
            (case.client(), case.w(1), kept([&node])),
            (case.client(), case.np(1), kept([&node])),
        ])
        .await
    })
}
