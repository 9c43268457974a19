//! Traffic policies and masquerading: cases 31 to 39.

use crate::expect::{Want, kept, masked};
use crate::objects::{PORT, elsewhere, on_node, port};
use crate::rig::{Case, Setup, run};
use anyhow::Result;
use keelson_cluster::endpoints::Kind;
use keelson_cluster::net::Transport;
use keelson_cluster::net::plan::NODE;
use serde_json::json;

#[test]
fn case_31_internal_policy_local_is_for_cluster_ips_alone() -> Result<()> {
    run(async {
        let case = Case::new(31, Setup::Plain).await?;
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        let both = [l1.clone(), r1];
        case.make("svc", 1, &json!({"internalTrafficPolicy": "Local"})).await?;
        case.slices("svc", &both).await?;
        let inside =
            case.service("inside", 2, &json!({"type": "ClusterIP", "externalTrafficPolicy": "Local"}));
        case.refused(Kind::Service, &inside).await?;
        case.put_unchecked(Kind::Service, &inside).await?;
        case.slices("inside", &both).await?;
        case.synced().await?;
        let (pod, host, c) = (case.world().pod(), case.world().host(), case.world().client());
        case.all([
            (pod.clone(), case.v(1), kept([&l1])),
            (host, case.v(1), masked([&l1])),
            (c.clone(), case.v(1), masked([&l1])),
            (c.clone(), case.np(1), masked(&both)),
            (pod.clone(), case.np(1), masked(&both)),
            (pod, case.v(2), kept(&both)),
            (c, case.v(2), masked(&both)),
        ])
        .await
    })
}

#[test]
fn case_32_internal_policy_local_without_local_endpoints_drops_and_without_any_rejects() -> Result<()> {
    run(async {
        let case = Case::new(32, Setup::Plain).await?;
        let r1 = [elsewhere(1)];
        case.make("svc", 1, &json!({"internalTrafficPolicy": "Local"})).await?;
        case.slices("svc", &r1).await?;
        case.synced().await?;
        let mut table = case.all_clients(case.v(1), &Want::Drop);
        table.extend(case.all_clients(case.w(1), &masked(&r1)));
        case.all(table).await?;
        case.slices("svc", &[]).await?;
        case.synced().await?;
        let mut table = case.all_clients(case.v(1), &Want::Reject);
        table.extend(case.all_clients(case.w(1), &Want::Reject));
        case.all(table).await
    })
}

#[test]
fn case_33_external_policy_local_keeps_the_source_and_short_circuits_pods_and_host() -> Result<()> {
    run(async {
        let case = Case::new(33, Setup::Plain).await?;
        let x = case.x_address(1);
        case.make("svc", 1, &json!({"externalTrafficPolicy": "Local", "externalIPs": [x.v4, x.v6]})).await?;
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        let both = [l1.clone(), r1];
        case.slices("svc", &both).await?;
        case.synced().await?;
        let (w, v, x, np) = (case.w(1), case.v(1), case.x(1), case.np(1));
        let (pod, host, c) = (case.world().pod(), case.world().host(), case.world().client());
        case.all([
            (c.clone(), w, kept([&l1])),
            (c.clone(), np, kept([&l1])),
            (c, x, kept([&l1])),
            (pod.clone(), w, kept(&both)),
            (pod.clone(), np, kept(&both)),
            (pod.clone(), x, kept(&both)),
            (host.clone(), w, masked(&both)),
            (host, np, masked(&both)),
            (pod, v, kept(&both)),
        ])
        .await
    })
}

#[test]
fn case_34_external_policy_local_without_local_endpoints_drops_external_traffic() -> Result<()> {
    run(async {
        let case = Case::new(34, Setup::Plain).await?;
        case.make("svc", 1, &json!({"externalTrafficPolicy": "Local"})).await?;
        let r1 = [elsewhere(1)];
        case.slices("svc", &r1).await?;
        case.synced().await?;
        let (pod, host, c) = (case.world().pod(), case.world().host(), case.world().client());
        case.all([
            (c.clone(), case.w(1), Want::Drop),
            (c, case.np(1), Want::Drop),
            (pod, case.w(1), kept(&r1)),
            (host.clone(), case.np(1), masked(&r1)),
            (host, case.w(1), masked(&r1)),
        ])
        .await
    })
}

#[test]
fn case_35_without_a_detector_pods_count_as_outside_and_the_host_does_not() -> Result<()> {
    run(async {
        let case = Case::new(35, Setup::NoDetector).await?;
        case.make("svc", 1, &json!({"externalTrafficPolicy": "Local"})).await?;
        let both = [on_node(&case, 1), elsewhere(1)];
        case.slices("svc", &both).await?;
        case.synced().await?;
        case.all([
            (case.world().pod(), case.w(1), kept(&both[..1])),
            (case.world().client(), case.w(1), kept(&both[..1])),
            (case.world().host(), case.w(1), masked(&both)),
        ])
        .await
    })
}

/// Sends requests to V from pod, host and C, with endpoints on this node and elsewhere, and expects them masqueraded or
/// not.
async fn masquerade_of_v(number: u8, setup: Setup, [pod, host, c]: [bool; 3]) -> Result<()> {
    let case = Case::new(number, setup).await?;
    case.make("svc", 1, &json!({})).await?;
    let both = [on_node(&case, 1), elsewhere(1)];
    case.slices("svc", &both).await?;
    case.synced().await?;
    let want = |masqueraded| if masqueraded { masked(&both) } else { kept(&both) };
    case.all([
        (case.world().pod(), case.v(1), want(pod)),
        (case.world().host(), case.v(1), want(host)),
        (case.world().client(), case.v(1), want(c)),
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
    run(async {
        let case = Case::new(141, Setup::MasqueradeAll).await?;
        case.make("svc", 1, &json!({"externalTrafficPolicy": "Local"})).await?;
        let both = [on_node(&case, 1), elsewhere(1)];
        case.slices("svc", &both).await?;
        case.synced().await?;
        case.all([
            (case.world().pod(), case.v(1), masked(&both)),
            (case.world().pod(), case.w(1), kept(&both)),
            (case.world().client(), case.w(1), kept(&both[..1])),
            (case.world().host(), case.w(1), masked(&both)),
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
    run(async {
        let case = Case::new(37, Setup::Plain).await?;
        let x = case.x_address(1);
        case.make("svc", 1, &json!({"externalIPs": [x.v4, x.v6]})).await?;
        let both = [on_node(&case, 1), elsewhere(1)];
        case.slices("svc", &both).await?;
        case.synced().await?;
        let targets = [case.w(1), case.np(1), case.x(1)];
        case.all(targets.into_iter().flat_map(|target| case.all_clients(target, &masked(&both)))).await
    })
}

#[test]
fn case_38_hairpin_connections_have_the_source_of_the_node() -> Result<()> {
    run(async {
        let case = Case::new(38, Setup::Plain).await?;
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        for (n, name, endpoint) in [(1, "itself", &l1), (2, "other", &r1)] {
            case.make(name, n, &json!({})).await?;
            case.slices(name, std::slice::from_ref(endpoint)).await?;
        }
        case.make("local", 3, &json!({"externalTrafficPolicy": "Local"})).await?;
        case.slices("local", std::slice::from_ref(&l1)).await?;
        case.synced().await?;
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
    run(async {
        let case = Case::new(39, Setup::Plain).await?;
        let x = case.x_address(1);
        let ports = Transport::ALL.map(|transport| {
            let mut port = port(&transport.name().to_lowercase(), PORT, transport);
            port["nodePort"] = json!(case.node_port(1));
            port
        });
        case.make("svc", 1, &json!({"externalIPs": [x.v4, x.v6], "ports": ports})).await?;
        case.synced().await?;
        let mut table = Vec::new();
        for frontend in [case.v(1), case.w(1), case.x(1), case.np(1)] {
            for transport in Transport::ALL {
                table.extend(case.all_clients(frontend.over(transport), &Want::Reject));
            }
        }
        case.all(table).await
    })
}

#[test]
fn case_37_an_endpoint_on_the_network_of_the_node_needs_no_masquerading() -> Result<()> {
    run(async {
        let case = Case::new(142, Setup::Plain).await?;
        case.make("svc", 1, &json!({})).await?;
        let node = on_node(&case, 1).moved_to(NODE);
        case.slices("svc", std::slice::from_ref(&node)).await?;
        case.synced().await?;
        // Packets for the node itself never reach source translation.
        let (pod, c) = (case.world().pod(), case.world().client());
        case.all([
            (pod.clone(), case.v(1), kept([&node])),
            (pod, case.w(1), kept([&node])),
            (c.clone(), case.w(1), kept([&node])),
            (c, case.np(1), kept([&node])),
        ])
        .await
    })
}
