//! Hints: cases 23 to 30. The node is in zone a.

use crate::common::{Case, Setup};
use crate::expect::kept;
use crate::objects::{Ep, elsewhere, on_node};
use anyhow::Result;
use keelson_cluster::endpoints::Kind;
use serde_json::json;

/// Creates Services 1 and following with these endpoints each, and checks which of them answer a pod, by index.
async fn hinted(case: &Case, table: &[(&[Ep], &[usize])]) -> Result<()> {
    for (n, (endpoints, _)) in (1..).zip(table) {
        let name = format!("svc-{n}");
        case.make(&name, n, &json!({"type": "ClusterIP"})).await?;
        case.slices(&name, endpoints).await?;
    }
    case.synced().await?;
    let rows = (1..).zip(table).map(|(n, (endpoints, chosen))| {
        (case.pod(), case.v(n), kept(chosen.iter().map(|index| &endpoints[*index])))
    });
    case.all(rows).await
}

#[test]
fn case_23_endpoints_for_the_zone_of_the_node() -> Result<()> {
    Case::run(23, Setup::Plain, async |case| {
        let l1 = on_node(&case, 1);
        let each = [l1.clone().zones(&["b"]), elsewhere(1).zones(&["a"]), elsewhere(2).zones(&["c"])];
        let lists = [l1.zones(&["b", "a"]), elsewhere(1).zones(&["a"]), elsewhere(2).zones(&["c"])];
        hinted(&case, &[(&each, &[1]), (&lists, &[0, 1])]).await
    })
}

#[test]
fn case_24_a_ready_endpoint_without_a_hint_disables_hints() -> Result<()> {
    Case::run(24, Setup::Plain, async |case| {
        let ready = [on_node(&case, 1).zones(&["a"]), elsewhere(1).zones(&["b"]), elsewhere(2)];
        let unready = [on_node(&case, 1).zones(&["a"]), elsewhere(1).zones(&["b"]), elsewhere(2).unready()];
        hinted(&case, &[(&ready, &[0, 1, 2]), (&unready, &[0])]).await
    })
}

#[test]
fn case_25_no_endpoint_for_the_zone_means_all_endpoints() -> Result<()> {
    Case::run(25, Setup::Plain, async |case| {
        let nobody = [on_node(&case, 1).zones(&["b"]), elsewhere(1).zones(&["c"])];
        let only_unready = [
            on_node(&case, 1).zones(&["b"]),
            elsewhere(1).zones(&["c"]),
            elsewhere(2).zones(&["a"]).unready(),
        ];
        hinted(&case, &[(&nobody, &[0, 1]), (&only_unready, &[0, 1])]).await
    })
}

#[test]
fn case_25_30_the_zone_of_the_node_changes_and_is_removed() -> Result<()> {
    Case::run_alone(125, Setup::OwnNode, async |case| {
        let each = [on_node(&case, 1).zones(&["a"]), elsewhere(1).zones(&["b"]), elsewhere(2).zones(&["b"])];
        hinted(&case, &[(&each, &[0])]).await?;
        let zone = |zone| json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}});
        // No Service and no slice changes meanwhile.
        case.writer.patch(Kind::Node, case.node(), &zone(json!("b"))).await?;
        case.eventually_all(vec![(case.pod(), case.v(1), kept(&each[1..]))]).await?;
        case.writer.patch(Kind::Node, case.node(), &zone(json!(null))).await?;
        case.eventually_all(vec![(case.pod(), case.v(1), kept(&each))]).await?;
        case.writer.patch(Kind::Node, case.node(), &zone(json!("a"))).await?;
        case.eventually_all(vec![(case.pod(), case.v(1), kept(&each[..1]))]).await
    })
}

#[test]
fn case_26_node_hints_take_precedence_over_zone_hints() -> Result<()> {
    Case::run(26, Setup::Plain, async |case| {
        let all = [
            on_node(&case, 1).zones(&["a"]).nodes(&[case.node()]),
            elsewhere(1).zones(&["a"]).nodes(&["other"]),
            elsewhere(2).zones(&["b"]).nodes(&["third"]),
        ];
        hinted(&case, &[(&all, &[0])]).await
    })
}

#[test]
fn case_27_other_or_incomplete_node_hints_fall_back_to_zones() -> Result<()> {
    Case::run(27, Setup::Plain, async |case| {
        let others =
            [on_node(&case, 1).zones(&["b"]).nodes(&["third"]), elsewhere(1).zones(&["a"]).nodes(&["other"])];
        let incomplete = [
            on_node(&case, 1).zones(&["b"]).nodes(&[case.node()]),
            elsewhere(1).zones(&["a"]),
            elsewhere(2).zones(&["a"]).nodes(&["third"]),
        ];
        hinted(&case, &[(&others, &[1]), (&incomplete, &[1, 2])]).await
    })
}

#[test]
fn case_28_hints_decide_regardless_of_the_traffic_distribution() -> Result<()> {
    Case::run(28, Setup::Plain, async |case| {
        let plain = [on_node(&case, 1), elsewhere(1)];
        case.make_with(
            "close",
            1,
            &json!({"type": "ClusterIP", "trafficDistribution": "PreferClose"}),
            &plain,
        )
        .await?;
        let hinted = [on_node(&case, 1).zones(&["a"]), elsewhere(1).zones(&["b"])];
        case.serve("none", 2, &json!({"type": "ClusterIP"}), &hinted).await?;
        case.all([(case.pod(), case.v(1), kept(&plain)), (case.pod(), case.v(2), kept(&hinted[..1]))]).await
    })
}

#[test]
fn case_29_hints_do_not_affect_local_policy() -> Result<()> {
    Case::run(29, Setup::Plain, async |case| {
        let (l1, r1) = (on_node(&case, 1).zones(&["b"]), elsewhere(1).zones(&["a"]));
        case.serve(
            "svc",
            1,
            &json!({"externalTrafficPolicy": "Local"}),
            &[l1.clone(), r1.clone(), elsewhere(2).zones(&["b"])],
        )
        .await?;
        case.all([(case.client(), case.np(1), kept([&l1])), (case.pod(), case.v(1), kept([&r1]))]).await
    })
}

#[test]
fn case_30_terminating_endpoints_are_not_filtered_by_hints() -> Result<()> {
    Case::run(30, Setup::Plain, async |case| {
        let leaving =
            [on_node(&case, 1).zones(&["a"]).terminating(), elsewhere(1).zones(&["b"]).terminating()];
        hinted(&case, &[(&leaving, &[0, 1])]).await
    })
}
