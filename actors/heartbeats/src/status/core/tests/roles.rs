//! Roles: registration, the companion's restrictions, conditions of others.

use proptest::prelude::*;

use super::*;
use crate::status::{ExternalCondition, Labels, Register};

fn policy(register: Register) -> StatusPolicy {
    StatusPolicy { register, zone: "z1".into(), ..StatusPolicy::new(Role::Node, "n1") }
}

#[test]
fn a_missing_node_is_created_with_its_full_status_as_first_report() {
    let mut world = World::with(policy(Register::Once));
    assert_eq!(world.verbs(), ["get", "create"], "once the runtime is ready");
    assert_eq!(world.health, JobHealth::Healthy);
    assert_eq!(world.counted, [Counted::Registered, Counted::Sent]);
    let body = &world.requests[1].body;
    assert_eq!(body["metadata"]["labels"]["topology.kubernetes.io/zone"], "z1");
    assert_eq!(
        body["status"]["addresses"],
        json!([{"type": "InternalIP", "address": "10.0.0.7"}, {"type": "Hostname", "address": "n1"}])
    );
    let kinds: Vec<_> = body["status"]["conditions"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|of| (of["type"].as_str().expect("a type").to_owned(), of["status"].clone()))
        .collect();
    let expected = [
        ("MemoryPressure", "False"),
        ("DiskPressure", "False"),
        ("PIDPressure", "False"),
        ("ImagePullsStalled", "False"),
        ("KeelsonStateNotDurable", "False"),
        ("Ready", "True"),
    ];
    assert_eq!(kinds, expected.map(|(kind, status)| (kind.to_owned(), json!(status))), "Ready last");
    assert_eq!(body["status"]["nodeInfo"]["containerRuntimeVersion"], "containerd://v2.4.2");
    world.pass(2 * MINUTE);
    assert_eq!(world.requests.len(), 2, "nothing new: {:?}", world.verbs());
}

#[test]
fn a_new_node_waits_a_limited_time_for_the_first_runtime_status() {
    let mut world = World::without_node(StatusPolicy::new(Role::Node, "n1"));
    world.collected.runtime = Err("no answer within 5s".into());
    world.restart();
    world.pass(2 * SECOND);
    assert_eq!(world.verbs(), Vec::<&str>::new());
    world.collected = healthy();
    world.step(Event::RuntimeReady);
    assert_eq!(world.condition("Ready")["status"], "True");
    world.write(None);
    world.reported = None;
    world.collected.runtime = Err("no answer within 5s".into());
    world.restart();
    world.pass(4 * SECOND);
    assert_eq!(world.condition("Ready")["message"], "the container runtime has not answered yet");
    world.collected = healthy();
    world.step(Event::RuntimeReady);
    assert_eq!(world.condition("Ready")["status"], "True");
}

#[test]
fn a_restart_with_a_slow_runtime_keeps_the_node_ready() {
    let mut world = World::after(Role::Node, MINUTE);
    world.collected.runtime = Err("no answer within 5s".into());
    world.restart();
    world.pass(25 * SECOND);
    assert_eq!((world.verbs(), &world.condition("Ready")["status"]), (vec![], &json!("True")));
}

#[test]
fn registration_backs_off_from_100_ms_to_7_s_and_starts_over() {
    let mut world = World::without_node(StatusPolicy::new(Role::Node, "n1"));
    world.always = Some(Fault::Says(ApiErrorKind::Unreachable));
    world.restart();
    world.pass(60 * SECOND);
    let at: Vec<_> = world.requests.iter().map(|request| request.at).collect();
    let pauses: Vec<_> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pauses[..9], [100, 200, 400, 800, 1600, 3200, 6400, 7000, 7000]);
    assert!(world.closed > 0);
    world.always = None;
    world.pass(7 * SECOND);
    assert_eq!(world.health, JobHealth::Healthy);
}

#[test]
fn an_existing_node_gets_labels_and_keeps_the_rest() {
    let mut policy = policy(Register::Once);
    policy.labels = Labels::parse_list("pool=a").expect("labels");
    let mut world = World::without_node(policy);
    world.make_node();
    world.restart();
    assert_eq!(world.verbs(), ["repair", "get", "patch"]);
    assert_eq!(
        world.requests[0].body,
        json!({"metadata": {"labels": {
            "kubernetes.io/hostname": "n1", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
            "topology.kubernetes.io/zone": "z1", "pool": "a",
        }}})
    );
    let node = world.node.clone().expect("there");
    assert_eq!(node["metadata"]["labels"]["foreign"], "yes");
    assert_eq!(node["spec"], json!({"podCIDR": "10.244.1.0/24"}));
    assert_eq!(node["status"]["volumesInUse"], json!(["v"]));
    assert_eq!(node["status"]["allocatable"]["example.com/gpu"], "2");
    assert_eq!(world.condition("Foreign"), json!({"type": "Foreign", "status": "True"}));
    // System labels are repaired as long as the agent runs.
    world.send_node();
    world.forget();
    world.other(&json!({"metadata": {"labels": {"kubernetes.io/os": "plan9", "pool": "b"}}}));
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    assert_eq!(world.requests[0].body["metadata"], json!({"labels": {"kubernetes.io/os": "linux"}}));
}

#[test]
fn a_status_does_not_wait_for_labels_that_are_refused() {
    let mut world = World::without_node(policy(Register::Once));
    world.make_node();
    world.faults.push_back(Fault::Says(ApiErrorKind::Forbidden));
    world.restart();
    assert_eq!(world.verbs(), ["repair", "patch"]);
    assert!(world.fails().0.contains("labels"), "{:?}", world.health);
    assert_eq!(world.condition("Ready")["status"], "True");
    world.pass(11 * SECOND);
    assert_eq!(world.health, JobHealth::Healthy);
}

#[test]
fn a_node_created_concurrently_is_adopted() {
    for kind in [ApiErrorKind::AlreadyExists, ApiErrorKind::Forbidden] {
        let mut world = World::without_node(policy(Register::Once));
        world.faults.extend([Fault::Says(ApiErrorKind::NotFound), Fault::Says(kind)]);
        world.make_node();
        world.watches = false;
        world.restart();
        assert_eq!(world.verbs()[..3], ["get", "create", "get"]);
        assert_eq!(world.condition("Ready")["status"], "True");
    }
    let mut world = World::without_node(policy(Register::Once));
    world.faults.extend([Fault::Says(ApiErrorKind::NotFound), Fault::Says(ApiErrorKind::Forbidden)]);
    world.restart();
    assert_eq!(world.verbs(), ["get", "create", "get"]);
    assert!(world.fails().0.contains("cannot create"), "{:?}", world.health);
}

#[test]
fn case_26_a_deleted_node_is_not_recreated_and_the_deletion_time_is_reported() {
    let mut world = World::with(policy(Register::Once));
    world.pass(MINUTE);
    world.forget();
    world.delete();
    world.pass(MINUTE);
    let verbs = world.verbs();
    assert!((5..=6).contains(&verbs.len()) && verbs.iter().all(|verb| *verb == "get"), "{verbs:?}");
    let (reason, since) = world.fails();
    assert!(reason.contains("Node n1 was deleted") && reason.contains("register_node"), "{reason}");
    assert!((NEW_YEAR + MINUTE..=NEW_YEAR + MINUTE + 11 * SECOND).contains(&since), "{since}");
    world.make_node();
    world.send_node();
    assert_eq!(world.condition("Ready")["status"], "True", "at once");
    assert_eq!(world.health, JobHealth::Healthy);
    // Again, with a restart, which registers as the kubelet's does.
    world.delete();
    world.pass(MINUTE);
    world.forget();
    world.restart();
    assert_eq!(world.verbs(), ["get", "create"]);
}

#[test]
fn case_26_a_deletion_missed_by_the_watch_is_detected_by_the_next_report() {
    let mut world = World::with(policy(Register::Once));
    world.pass(MINUTE);
    world.write(None);
    world.forget();
    world.pass(8 * MINUTE);
    assert_eq!(world.verbs()[..3], ["patch", "get", "get"]);
    assert!(!world.verbs().contains(&"create") && world.fails().0.contains("deleted"));
}

#[test]
fn case_26_a_deleted_node_is_recreated_with_always_and_awaited_with_never() {
    let mut world = World::with(policy(Register::Always));
    world.pass(MINUTE);
    world.forget();
    world.delete();
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["get", "create"]);
    assert_eq!((&world.health, &world.condition("Ready")["status"]), (&JobHealth::Healthy, &json!("True")));
    let mut world = World::with(policy(Register::Never));
    world.pass(MINUTE);
    assert!(!world.verbs().contains(&"create") && world.fails().0.contains("never"), "{:?}", world.health);
    world.make_node();
    world.send_node();
    assert_eq!(world.condition("Ready")["status"], "True");
}

#[test]
fn a_companion_never_registers_and_waits_for_the_kubelet() {
    let mut world = World::new(Role::Companion);
    world.pass(MINUTE);
    assert!(world.requests.iter().all(|request| request.verb == "get") && world.requests.len() <= 7);
    assert_eq!(world.fails().0, "Node n1 does not exist; its kubelet must register it");
    world.make_node();
    world.send_node();
    assert_eq!(world.health, JobHealth::Healthy);
    assert_eq!(
        world.requests.last().expect("a patch").body,
        json!({"status": {"conditions": [
            {"type": "ImagePullsStalled", "status": "False", "reason": "PullsNotStalled",
             "message": "no image pull is stalled",
             "lastHeartbeatTime": "2026-01-01T00:01:00Z", "lastTransitionTime": "2026-01-01T00:01:00Z"},
            {"type": "KeelsonStateNotDurable", "status": "False", "reason": "StateDurable",
             "message": "the state store is open and its last write succeeded",
             "lastHeartbeatTime": "2026-01-01T00:01:00Z", "lastTransitionTime": "2026-01-01T00:01:00Z"},
        ]}})
    );
}

#[test]
fn external_conditions_go_with_the_next_status_and_repeats_are_free() {
    let mut world = World::with_node(Role::Companion);
    world.pass_watched(MINUTE);
    world.forget();
    let report = |status| ExternalCondition {
        ttl: Some(Duration::from_secs(60)),
        ..condition("KernelDeadlock", status)
    };
    world.set(report(ConditionStatus::False));
    assert_eq!(world.verbs(), Vec::<&str>::new(), "not by itself");
    world.pass(11 * SECOND);
    assert_eq!(world.verbs(), ["patch"]);
    assert_eq!(world.condition("KernelDeadlock")["reason"], "AllIsWell");
    for _ in 0..12 {
        world.set(report(ConditionStatus::False));
        world.pass(10 * SECOND);
    }
    assert_eq!(world.verbs(), ["patch"]);
    let since = world.condition("KernelDeadlock")["lastTransitionTime"].clone();
    world.restart();
    world.pass(11 * SECOND);
    assert_eq!(
        (world.verbs(), world.condition("KernelDeadlock")["lastTransitionTime"].clone()),
        (vec!["patch"], since)
    );
    // Its reporter dies.
    world.pass(MINUTE);
    assert_eq!(world.condition("KernelDeadlock")["reason"], "ReporterSilent");
    assert_eq!(world.verbs(), ["patch", "patch"]);
    world.set(report(ConditionStatus::True));
    world.pass(11 * SECOND);
    assert_eq!(world.condition("KernelDeadlock")["status"], "True");
    // It is cleared, across a restart.
    world.clear("KernelDeadlock");
    world.restart();
    world.forget();
    world.pass(11 * SECOND);
    assert_eq!(
        world.requests[0].body["status"]["conditions"][2],
        json!({"$patch": "delete", "type": "KernelDeadlock"})
    );
    assert_eq!(world.condition("KernelDeadlock"), Value::Null);
    assert_eq!(world.condition("Foreign")["status"], "True");
    world.pass_watched(2 * MINUTE);
    world.pass(MINUTE);
    assert!(world.conditions.is_empty() && world.requests.len() <= 2, "{:?}", world.verbs());
}

/// Conditions of kubelets and others, as a list may contain them.
fn any_conditions() -> impl Strategy<Value = Vec<Value>> {
    let kinds =
        ["Ready", "MemoryPressure", "Foreign", "ImagePullsStalled", "KernelDeadlock", "example.com/X"];
    proptest::sample::subsequence(kinds.to_vec(), 0..=kinds.len()).prop_shuffle().prop_flat_map(|kinds| {
        let one = |kind: &'static str| {
            (prop_oneof![Just("True"), Just("False"), Just("Unknown")], any::<bool>(), "[a-z]{0,5}").prop_map(
                move |(status, timed, text)| {
                    let mut condition =
                        json!({"type": kind, "status": status, "message": text, "reason": "R"});
                    if timed {
                        condition["lastHeartbeatTime"] = "2025-12-31T00:00:00Z".into();
                        condition["lastTransitionTime"] = "2025-12-31T00:00:00Z".into();
                    }
                    condition
                },
            )
        };
        kinds.into_iter().map(one).collect::<Vec<_>>()
    })
}

/// A Node without a companion's conditions.
fn foreign(node: &Value, own: &[&str]) -> Value {
    let mut node = node.clone();
    drop(node["metadata"].as_object_mut().expect("an object").remove("resourceVersion"));
    let list = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let list: Vec<_> =
        list.into_iter().filter(|of| !own.contains(&of["type"].as_str().expect("a type"))).collect();
    node["status"]["conditions"] = list.into();
    node
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_companion_changes_only_its_own_fields_with_concurrent_writers(
        seen in any_conditions(),
        written in any_conditions(),
        cleared: bool,
        cpu in "[1-9][0-9]{0,2}m?",
        labels in proptest::collection::btree_map("[a-z]{1,4}", "[a-z]{0,4}", 0..4),
    ) {
        let mut world = World::with_node(Role::Companion);
        let mut node = world.node.clone().expect("a Node");
        node["metadata"]["labels"] = json!(labels);
        node["status"]["conditions"] = json!(seen);
        node["status"]["capacity"] = json!({"cpu": cpu});
        world.write(Some(node.clone()));
        world.send_node();
        world.set(condition("KernelDeadlock", ConditionStatus::True));
        if cleared {
            world.clear("KernelDeadlock");
        }
        // The kubelet writes, and the watch has not reported it yet.
        node["status"]["conditions"] = json!(written);
        node["status"]["addresses"] = json!([{"type": "InternalIP", "address": "10.9.9.9"}]);
        world.write(Some(node.clone()));
        world.step(Event::ReportNow);
        world.pass(11 * SECOND);
        prop_assert!(world.requests.iter().all(|request| request.verb == "patch"), "{:?}", world.verbs());
        for request in &world.requests {
            let top: Vec<_> = request.body.as_object().expect("an object").keys().collect();
            let status: Vec<_> = request.body["status"].as_object().expect("an object").keys().collect();
            prop_assert!(top == ["status"] && status == ["conditions"], "{}", request.body);
        }
        let own = ["ImagePullsStalled", "ServiceEndpointsStale", "KeelsonStateNotDurable", "KernelDeadlock"];
        prop_assert_eq!(foreign(world.node.as_ref().expect("there"), &own), foreign(&node, &own));
        // Once the watch reports it, the companion's own conditions are right.
        world.send_node();
        world.pass(6 * MINUTE);
        prop_assert_eq!(&world.condition("ImagePullsStalled")["status"], "False");
        prop_assert_eq!(world.condition("KernelDeadlock").is_null(), cleared);
    }

    #[test]
    fn a_patch_of_role_node_yields_the_computed_status(
        seen in any_conditions(),
        cpu in proptest::option::of("[1-9][0-9]{0,2}m?"),
        cpus in 1u32..500,
        images in proptest::collection::vec(("[a-z]{1,8}", 0u64..5), 0..6),
    ) {
        let mut world = World::with_node(Role::Node);
        let mut node = world.node.clone().expect("a Node");
        node["status"]["conditions"] = json!(seen);
        if let Some(cpu) = cpu {
            node["status"]["capacity"]["cpu"] = cpu.into();
        }
        world.write(Some(node.clone()));
        world.collected.readings.cpus = Some(cpus);
        let images = images.into_iter().map(|(name, size_bytes)| RuntimeImage { names: vec![name], size_bytes });
        world.collected.runtime.as_mut().expect("well").images = Arc::new(images.collect());
        world.restart();
        let kept = world.reported.clone().expect("reported").status;
        let there = typed(world.node.as_ref().expect("there")).status.expect("a status");
        let by_type = |status: &k8s_openapi::api::core::v1::NodeStatus| {
            let mut list = status.conditions.clone().unwrap_or_default();
            list.sort_by(|one, other| one.type_.cmp(&other.type_));
            list
        };
        prop_assert_eq!(by_type(&kept), by_type(&there), "heartbeats included");
        prop_assert!(!crate::status::compare::differ(&kept, &there), "{:?} {:?}", kept, there);
        for kind in ["Foreign", "KernelDeadlock", "example.com/X"] {
            let find = |node: &Value| {
                let list = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
                list.into_iter().find(|of| of["type"] == kind)
            };
            prop_assert_eq!(find(world.node.as_ref().expect("there")), find(&node));
        }
    }
}
