//! Contents of slices: cases 6 to 13 and 18 to 22.

use crate::common::{Case, Setup};
use crate::expect::{Want, kept};
use crate::objects::{PORT, elsewhere, on_node, port};
use anyhow::Result;
use keelson_cluster::endpoints::Kind;
use keelson_cluster::net::{Family, Transport};
use serde_json::json;

#[test]
fn case_06_endpoints_of_all_slices_are_merged() -> Result<()> {
    Case::run(6, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({})).await?;
        let all = [on_node(&case, 1), elsewhere(1), elsewhere(2)];
        case.slices_of("svc", "a", &crate::objects::at_8080(), &all[..1]).await?;
        case.slices_of("svc", "b", &crate::objects::at_8080(), &all[1..]).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), kept(&all))]).await?;
        case.delete_slices("svc", "b").await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), kept(&all[..1]))]).await
    })
}

#[test]
fn case_07_an_endpoint_in_two_slices_counts_once_until_both_lose_it() -> Result<()> {
    Case::run(7, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({})).await?;
        let l1 = [on_node(&case, 1)];
        case.slices_of("svc", "a", &crate::objects::at_8080(), &l1).await?;
        case.slices_of("svc", "b", &crate::objects::at_8080(), &l1).await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), kept(&l1))]).await?;
        case.delete_slices("svc", "a").await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), kept(&l1))]).await?;
        case.delete_slices("svc", "b").await?;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), Want::Reject)]).await
    })
}

#[test]
fn case_08_an_endpoint_that_one_slice_has_ready_is_ready() -> Result<()> {
    Case::run(8, Setup::Plain, async |case| {
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        for (n, name, [first, second]) in [
            (1, "one", [l1.clone().terminating(), l1.clone()]),
            (2, "two", [l1.clone(), l1.clone().terminating()]),
        ] {
            case.make(name, n, &json!({})).await?;
            case.slices_of(name, "a", &crate::objects::at_8080(), &[first]).await?;
            case.slices_of(name, "b", &crate::objects::at_8080(), &[second, r1.clone()]).await?;
        }
        case.synced().await?;
        let (pod, both) = (case.pod(), [l1, r1]);
        // If it counted as terminating, only R1 would be used.
        case.all([(pod.clone(), case.v(1), kept(&both)), (pod, case.v(2), kept(&both))]).await
    })
}

#[test]
fn case_09_each_slice_has_its_own_port_numbers() -> Result<()> {
    Case::run(9, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({})).await?;
        let (l1, r1) = (on_node(&case, 1), elsewhere(1));
        let numbered = |number| [port("http", number, Transport::Tcp)];
        case.slices_of("svc", "a", &numbered(8080), std::slice::from_ref(&l1)).await?;
        case.slices_of("svc", "b", &numbered(8081), std::slice::from_ref(&r1)).await?;
        case.synced().await?;
        let want = Want::Answers {
            by: [(l1.at, 8080), (r1.at, 8081)].into(),
            masqueraded: false,
            by_packets: false,
        };
        case.all([(case.pod(), case.v(1), want)]).await
    })
}

#[test]
fn case_10_ports_without_number_or_name_are_skipped() -> Result<()> {
    Case::run(10, Setup::Plain, async |case| {
        let ports = ["a", "b", "c", "d"];
        let ports: Vec<_> =
            ports.iter().zip(PORT..).map(|(name, number)| port(name, number, Transport::Tcp)).collect();
        case.make("svc", 1, &json!({"type": "ClusterIP", "ports": ports})).await?;
        let odd = [
            json!({"protocol": "TCP", "port": 8080}),
            json!({"name": "b", "protocol": "TCP"}),
            json!({"name": "c", "protocol": "TCP", "port": 0}),
            port("d", 8082, Transport::Tcp),
        ];
        let r1 = [elsewhere(1)];
        for family in Family::ALL {
            case.put_unchecked(Kind::Slice, &case.slice("svc", "a", family, &odd, &r1)).await?;
        }
        case.synced().await?;
        let (pod, v) = (case.pod(), case.v(1));
        case.all([
            (pod.clone(), v, Want::Reject),
            (pod.clone(), v.port(PORT + 1), Want::Reject),
            (pod.clone(), v.port(PORT + 2), Want::Reject),
            (pod, v.port(PORT + 3), kept(&r1).at(8082)),
        ])
        .await
    })
}

#[test]
fn case_11_a_port_of_another_protocol_is_another_port() -> Result<()> {
    Case::run(11, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({})).await?;
        let udp = [port("http", 8080, Transport::Udp)];
        case.slices_of("svc", "a", &udp, &[elsewhere(1)]).await?;
        case.synced().await?;
        case.all(case.all_clients(case.v(1), &Want::Reject)).await
    })
}

#[test]
fn case_12_the_first_address_counts_and_endpoints_without_node_are_not_local() -> Result<()> {
    Case::run(12, Setup::Plain, async |case| {
        case.make("svc", 1, &json!({"externalTrafficPolicy": "Local"})).await?;
        let (l1, l2, r1) = (on_node(&case, 1), on_node(&case, 2), elsewhere(1));
        for family in Family::ALL {
            let endpoints = [l1.clone().without_node(), l2.clone(), elsewhere(3)];
            let mut slice = case.slice("svc", "a", family, &crate::objects::at_8080(), &endpoints);
            slice["endpoints"][1]["addresses"] = json!([l2.at.of(family), r1.at.of(family)]);
            slice["endpoints"][2]["addresses"] = json!([]);
            case.put_unchecked(Kind::Slice, &slice).await?;
        }
        case.serve("lost", 2, &json!({"externalTrafficPolicy": "Local"}), &[l1.clone().without_node()])
            .await?;
        case.all([
            (case.pod(), case.v(1), kept([&l1, &l2])),
            (case.client(), case.w(1), kept([&l2])),
            (case.pod(), case.v(2), kept([&l1])),
            (case.client(), case.w(2), Want::Drop),
        ])
        .await
    })
}

#[test]
fn case_13_missing_and_contradictory_conditions() -> Result<()> {
    Case::run(13, Setup::Plain, async |case| {
        let serving = json!({"conditions": {"ready": false, "serving": true, "terminating": false}});
        let both = json!({"conditions": {"ready": true, "serving": true, "terminating": true}});
        let (l1, l2) = (on_node(&case, 1).with(json!({"conditions": {}})), on_node(&case, 2).with(both));
        let l3 = on_node(&case, 3).with(serving);
        case.make_with("svc", 1, &json!({}), &[l1.clone(), l2.clone(), l3.clone()]).await?;
        case.serve("only", 2, &json!({}), &[l3]).await?;
        case.all([(case.pod(), case.v(1), kept([&l1, &l2])), (case.pod(), case.v(2), Want::Reject)]).await
    })
}

#[test]
fn case_18_unready_endpoints_get_no_traffic() -> Result<()> {
    Case::run(18, Setup::Plain, async |case| {
        let l1 = on_node(&case, 1);
        case.serve("svc", 1, &json!({}), &[l1.clone(), elsewhere(1).unready()]).await?;
        case.all([(case.pod(), case.v(1), kept([&l1]))]).await
    })
}

#[test]
fn case_19_terminating_endpoints_serve_if_no_others_are_ready() -> Result<()> {
    Case::run(19, Setup::Plain, async |case| {
        let (l1, r1) = (on_node(&case, 1).terminating(), elsewhere(1).terminating());
        case.serve("svc", 1, &json!({}), &[l1.clone(), r1.clone(), elsewhere(2).not_serving()]).await?;
        case.all([(case.pod(), case.v(1), kept([&l1, &r1]))]).await
    })
}

#[test]
fn case_20_the_local_fallback_is_independent_of_that_of_the_cluster() -> Result<()> {
    Case::run(20, Setup::Plain, async |case| {
        let (l1, r1) = (on_node(&case, 1).terminating(), elsewhere(1));
        case.serve("svc", 1, &json!({"externalTrafficPolicy": "Local"}), &[l1.clone(), r1.clone()]).await?;
        case.all([
            (case.pod(), case.v(1), kept([&r1])),
            (case.client(), case.w(1), kept([&l1])),
            (case.pod(), case.w(1), kept([&r1])),
        ])
        .await
    })
}

#[test]
fn case_21_a_remote_terminating_endpoint_serves_the_cluster_set_only() -> Result<()> {
    Case::run(21, Setup::Plain, async |case| {
        let r1 = elsewhere(1).terminating();
        case.serve("svc", 1, &json!({"externalTrafficPolicy": "Local"}), std::slice::from_ref(&r1)).await?;
        case.all([(case.pod(), case.v(1), kept([&r1])), (case.client(), case.w(1), Want::Drop)]).await
    })
}

#[test]
fn case_22_without_serving_endpoints_everything_is_rejected() -> Result<()> {
    Case::run(22, Setup::Plain, async |case| {
        case.serve(
            "svc",
            1,
            &json!({"externalTrafficPolicy": "Local"}),
            &[on_node(&case, 1).unready(), elsewhere(1).not_serving()],
        )
        .await?;
        let targets = [case.v(1), case.w(1), case.np(1)];
        case.all(targets.into_iter().flat_map(|target| case.all_rejected(target))).await
    })
}
