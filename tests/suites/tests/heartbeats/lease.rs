//! The Lease: created once, renewed without a read, taken back from others.

use crate::common::{
    Role, TestEnv, eventually_slow, on_cluster, pauses, quick, sleep_seconds, verbs_and_codes, within,
};
use anyhow::{Context as _, Result, ensure};
use http::Method;
use keelson_cluster::kube::{ApiFault, ApiMatch, ApiSeen, AuditEvent, Cluster};
use keelson_harness::agent::Settings;
use kube::api::{Patch, PatchParams};
use serde_json::json;

/// Requests for the Lease before its first renewal.
const START: [&str; 2] = ["get 404", "create 201"];

#[test]
fn case_22_an_absent_lease_costs_three_requests_once_and_one_every_ten_seconds() -> Result<()> {
    on_cluster(async |cluster| {
        // The real interval: 40 s / 4.
        let env = TestEnv::started(cluster, "case-22", Role::Companion, Settings::new()).await?;
        env.wait_for_renewals(cluster, 2).await?;

        let asked = env.lease_requests(cluster)?;
        let mut expected: Vec<String> = START.map(str::to_owned).into();
        expected.extend((0..asked.len() - START.len()).map(|_| "patch 200".to_owned()));
        assert_eq!(verbs_and_codes(&asked), expected, "{asked:#?}");
        // One GET of the Node between the two for the owner's uid, and one for the first status, which may precede the
        // watch's first event. None afterwards.
        let mut nodes = env.requests(cluster)?;
        nodes.retain(|event| event.is_for("get", "nodes"));
        let (read, made) = (asked[0].ended, asked[1].received);
        ensure!(nodes.iter().any(|get| get.received >= read && get.ended <= made), "{nodes:#?}");
        within("reads of the Node", nodes.len() as f64, 1.0, 2.0)?;
        ensure!(nodes.iter().all(|get| get.received < asked[2].received), "{nodes:#?}");
        let between = pauses(&asked[1..]);
        for pause in &between {
            // Minus the difference between the clocks of two processes.
            within("the pause before a renewal", *pause, 9.95, 60.0)?;
        }
        eprintln!("pauses: {between:?}");

        let node = cluster.admin.node("case-22").await?.context("no Node")?;
        let created = asked[1].body.clone().context("the audit log has bodies")?;
        let owner = &created["metadata"]["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Node"), &json!(node.metadata.uid)));
        let lease = cluster.admin.lease("keelson-case-22").await?.context("no Lease")?;
        let spec = lease.spec.context("no spec")?;
        assert_eq!(spec.holder_identity.as_deref(), Some("case-22"));
        assert_eq!(spec.lease_duration_seconds, Some(40));
        assert_eq!(spec.lease_transitions.unwrap_or(0), 0);
        let shown = env.agent.output(&["node"]).await?;
        ensure!(shown.contains("keelson-case-22, renewed "), "{shown}");
        Ok(())
    })
}

#[test]
fn case_22_a_node_that_registers_itself_gets_its_lease_at_once() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "case-22-node", Role::Node, Settings::new()).await?;
        let node = cluster.admin.node("case-22-node").await?.context("no Node")?;
        let lease = cluster.admin.lease("case-22-node").await?.context("no Lease")?;
        let owner = lease.metadata.owner_references.context("no owner")?.remove(0);
        assert_eq!((owner.kind.as_str(), Some(owner.uid)), ("Node", node.metadata.uid));

        let asked = env.requests(cluster)?;
        let made = |resource| {
            let mut found = asked.iter().filter(move |event| event.is_for("create", resource));
            let first = found.next().cloned();
            (first, found.count())
        };
        let (node, more_nodes) = made("nodes");
        let (lease, more_leases) = made("leases");
        assert_eq!((more_nodes, more_leases), (0, 0), "{asked:#?}");
        let (node, lease) = (node.context("no POST of the Node")?, lease.context("no POST of the Lease")?);
        assert_eq!((node.code, lease.code), (Some(201), Some(201)));
        // The interval is 10 s: the watch delivered the Node at once.
        let after = lease.received.duration_since(node.ended).as_secs_f64();
        eprintln!("the Lease was made {after:.3} s after the Node");
        let refused: Vec<_> = asked.iter().filter(|event| event.code == Some(403)).collect();
        assert!(refused.is_empty(), "{refused:#?}");
        Ok(())
    })
}

async fn write_lease(cluster: &Cluster, lease: &str, patch: serde_json::Value) -> Result<()> {
    let merge = Patch::Merge(&patch);
    cluster.admin.leases().patch(lease, &PatchParams::default(), &merge).await.context("cannot patch")?;
    Ok(())
}

#[test]
fn case_23_one_conflict_is_read_and_renewed_in_the_same_sync() -> Result<()> {
    on_cluster(async |cluster| {
        let proxy = cluster.proxy().await?;
        // An interval of 4 s, so that a pause of a busy machine does not look like one.
        let settings = quick().set("node.lease_duration", "16s");
        let mut env = TestEnv::new(cluster, "case-23", Role::Companion, settings).await?;
        env.via(&proxy.endpoint())?;
        env.agent.start_again().await?;
        env.wait_for_renewals(cluster, 1).await?;
        let connections = proxy.connections();

        // Another writer, which also takes the Lease for itself.
        let foreign =
            json!({"metadata": {"labels": {"foreign": "yes"}}, "spec": {"holderIdentity": "thief"}});
        write_lease(cluster, "keelson-case-23", foreign).await?;
        env.wait_for_renewals(cluster, 2).await?;
        let asked = env.lease_requests(cluster)?;
        let conflict = asked.iter().position(|event| event.code == Some(409)).context("no conflict")?;
        let sync = &asked[conflict..conflict + 3];
        assert_eq!(verbs_and_codes(sync), ["patch 409", "get 200", "patch 200"], "{asked:#?}");
        // A sync would end with a pause of 4 s at least.
        for pause in pauses(sync) {
            within("the pause within a sync", pause, -0.1, 3.5)?;
        }
        let all = asked.iter().filter(|event| event.code == Some(409)).count();
        assert_eq!(all, 1, "{:?}", verbs_and_codes(&asked));
        assert_eq!(proxy.connections(), connections, "a conflict is no reason to close connections");

        let lease = cluster.admin.lease("keelson-case-23").await?.context("no Lease")?;
        assert_eq!(
            lease.metadata.labels.context("no labels")?.get("foreign").map(String::as_str),
            Some("yes")
        );
        let spec = lease.spec.context("no spec")?;
        assert_eq!(spec.holder_identity.as_deref(), Some("case-23"));
        assert_eq!(spec.lease_transitions, Some(1));
        assert_eq!(env.metric("keelson_lease_takeovers_total").await?, 1.0);
        env.wait_until_healthy().await
    })
}

/// Splits requests at pauses longer than this.
fn syncs(seen: &[ApiSeen], seconds: f64) -> Vec<Vec<ApiSeen>> {
    let mut syncs: Vec<Vec<ApiSeen>> = Vec::new();
    for one in seen {
        let last = syncs.last_mut().filter(|sync| {
            let before = sync.last().and_then(|before| before.finished);
            before.is_none_or(|before| one.started.duration_since(before).as_secs_f64() < seconds)
        });
        match last {
            Some(sync) => sync.push(one.clone()),
            None => syncs.push(vec![one.clone()]),
        }
    }
    syncs
}

#[test]
fn case_23_endless_conflicts_cause_ten_attempts_per_interval_on_one_connection() -> Result<()> {
    on_cluster(async |cluster| {
        let proxy = cluster.proxy().await?;
        // An interval of 4 s, so that a pause of a busy machine does not look like the end of a sync.
        let settings = quick().set("node.lease_duration", "16s");
        let mut env = TestEnv::new(cluster, "case-23-forever", Role::Companion, settings).await?;
        env.via(&proxy.endpoint())?;
        env.agent.start_again().await?;
        env.settled(cluster).await?;
        let connections = proxy.connections();
        let about_leases = |seen: &ApiSeen| seen.path.contains("/leases/keelson-case-23-forever");
        let before = proxy.seen(about_leases).len();

        let rule = proxy.rule(ApiMatch::path("/leases/").method(Method::PATCH), ApiFault::status(409));
        let is_over = || {
            let seen = proxy.seen(about_leases);
            let sync = syncs(&seen[before.min(seen.len())..], 3.0);
            // The second has begun, so the first is complete; and there was a complete one after that.
            sync.len() >= 3
        };
        eventually_slow("two syncs full of conflicts", || async {
            is_over().then_some(()).context("not yet")
        })
        .await?;
        env.wait_until_failing("another client writes it concurrently").await?;
        let seen = proxy.seen(about_leases);
        let syncs = syncs(&seen[before..], 3.0);
        let count = |sync: &[ApiSeen], method| sync.iter().filter(|one| one.method == method).count();
        let tries: Vec<_> =
            syncs.iter().map(|sync| (count(sync, Method::PATCH), count(sync, Method::GET))).collect();
        // Five attempts, a read, five more. Once only versions that led to conflicts are known, a sync begins with the
        // read. Each attempt but the last of a half is followed by a read.
        assert_eq!(&tries[..2], [(10, 9), (5, 5)], "{syncs:#?}");
        proxy.remove(rule);
        env.wait_for_renewals(cluster, 1).await?;
        env.wait_until_healthy().await?;
        assert_eq!(proxy.connections(), connections, "a conflict is no reason to close connections");
        Ok(())
    })
}

#[test]
fn a_deleted_lease_is_created_again_once() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::started(cluster, "deleted-lease", Role::Companion, quick()).await?;
        env.wait_for_renewals(cluster, 1).await?;
        let before = cluster.admin.lease("keelson-deleted-lease").await?.context("no Lease")?;
        cluster.admin.delete_lease("keelson-deleted-lease").await?;
        env.wait_for_renewals(cluster, 2).await?;
        let after = cluster.admin.lease("keelson-deleted-lease").await?.context("no Lease")?;
        ensure!(before.metadata.uid != after.metadata.uid, "it is the same");
        assert_eq!(before.metadata.owner_references, after.metadata.owner_references);
        let asked = env.lease_requests(cluster)?;
        let made = asked.iter().filter(|event| event.verb == "create").count();
        let missed = asked.iter().filter(|event| event.verb == "patch" && event.code == Some(404)).count();
        assert_eq!((made, missed), (2, 1), "{:?}", verbs_and_codes(&asked));
        assert!(!verbs_and_codes(&asked).contains(&"create 409".to_owned()), "{:?}", verbs_and_codes(&asked));
        env.wait_until_healthy().await
    })
}

/// Creations by an agent of objects that it must not create without a Node.
fn creations(asked: &[AuditEvent]) -> usize {
    asked.iter().filter(|event| event.verb == "create").count()
}

#[test]
fn a_companion_creates_nothing_while_its_node_is_deleted() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "node-gone", Role::Companion, quick()).await?;
        cluster.admin.delete_node("node-gone").await?;
        // The work of the garbage collector, which does not run here.
        cluster.admin.delete_lease("keelson-node-gone").await?;
        env.wait_until_failing("Node node-gone").await?;
        let made = creations(&env.requests(cluster)?);
        let from = env.requests(cluster)?.len();
        sleep_seconds(6).await;
        let asked = env.requests(cluster)?;
        assert_eq!(creations(&asked), made, "{:#?}", &asked[from..]);
        // One read for the Lease's Node and one for the status per interval of a second.
        within("requests in 6 s", (asked.len() - from) as f64, 2.0, 40.0)?;

        let fresh = cluster.admin.create_node("node-gone", &[]).await?;
        env.settled(cluster).await?;
        env.wait_until_healthy().await?;
        let lease = cluster.admin.lease("keelson-node-gone").await?.context("no Lease")?;
        let owner = lease.metadata.owner_references.context("no owner")?.remove(0);
        assert_eq!(Some(owner.uid), fresh.metadata.uid);
        Ok(())
    })
}

#[test]
fn a_lease_has_no_managed_fields_unless_the_gate_is_off() -> Result<()> {
    on_cluster(async |cluster| {
        for (name, lean) in [("lean", true), ("not-lean", false)] {
            let settings = quick().set("feature_gates.LeanLeases", lean);
            let env = TestEnv::started(cluster, name, Role::Companion, settings).await?;
            env.wait_for_renewals(cluster, 2).await?;
            let lease = cluster.admin.lease(&env.lease()).await?.context("no Lease")?;
            let fields = lease.metadata.managed_fields.unwrap_or_default();
            assert_eq!(fields.is_empty(), lean, "{fields:#?}");
        }
        Ok(())
    })
}
