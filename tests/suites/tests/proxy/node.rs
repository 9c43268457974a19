//! A node whose Node object is deleted, or loses fields: P4.

use crate::common::{Case, Setup};
use crate::expect::{Want, masked};
use crate::objects::{elsewhere, on_node};
use crate::subject::{Subject, is_as_mode_nftables};
use anyhow::Result;
use keelson_cluster::endpoints::Kind;
use serde_json::json;

/// Checks that node ports answer at their addresses, by default the node's primary one, and that the zone is used.
async fn unchanged(case: &Case, there: &Want) -> Result<()> {
    let second = if is_as_mode_nftables() { Want::Reset } else { there.clone() };
    case.all([
        (case.client(), case.np(1), there.clone()),
        (case.pod(), case.np(1), there.clone()),
        (case.client(), case.np2(1), second),
    ])
    .await
}

#[test]
fn p4_frontends_stay_when_the_node_object_is_deleted_or_loses_its_addresses() -> Result<()> {
    Case::run_alone(158, Setup::OwnNode, async |case| {
        let l1 = on_node(&case, 1).zones(&["a"]);
        case.serve("svc", 1, &json!({"type": "NodePort"}), &[l1.clone(), elsewhere(1).zones(&["b"])]).await?;
        let there = masked([&l1]);
        unchanged(&case, &there).await?;

        let status = json!({"status": {"addresses": null}});
        case.writer.patch(Kind::Node, &format!("{}/status", case.node()), &status).await?;
        case.synced().await?;
        unchanged(&case, &there).await?;

        case.writer.delete(Kind::Node, case.node()).await?;
        case.wait_until_node_deleted().await?;
        unchanged(&case, &there).await?;
        // A kube-proxy that starts without a Node has no facts to keep.
        if case.subject() == Subject::Keelson {
            case.bench.running.restart_agent().await?;
            case.bench.running.kill9().await?;
            case.bench.running.start_again(case.world()).await?;
            case.synced().await?;
            unchanged(&case, &there).await?;
        }

        case.make_node().await?;
        case.synced().await?;
        unchanged(&case, &there).await
    })
}
