use serde_json::json;

use super::*;

fn pod(reason: &str, message: &str) -> Value {
    json!({
        "metadata": {"namespace": "shop", "name": "web", "uid": "u"},
        "spec": {"nodeName": "n1", "containers": [{"name": "app", "image": "r.example/app:1"}]},
        "status": {"phase": "Pending", "containerStatuses": [
            {"name": "app", "ready": false, "state": {"waiting": {"reason": reason, "message": message}}},
        ]},
    })
}

fn node(status: &str) -> Option<Result<Value, String>> {
    Some(Ok(
        json!({"status": {"conditions": [{"type": "Ready", "status": status, "message": "kubelet said so"}]}}),
    ))
}

fn events(list: Value) -> Result<Value, String> {
    Ok(json!({"items": list}))
}

/// Two slots are in use, and `pull` is among the pulls.
fn pulls(pull: Value) -> Option<Result<Value, String>> {
    let other = json!({"image": "r.example/other:1", "state": "running", "pod": "shop/b",
        "progress": {"bytes_done": 1, "bytes_total": 4, "idle_ms": 20}});
    Some(Ok(
        json!({"limit": {"max_parallel_image_pulls": 2}, "running": 2, "queued": 3, "runtime_health": "up",
        "pulls": [other, pull], "finished": []}),
    ))
}

fn mine(state: &str, more: Value) -> Value {
    let mut pull =
        json!({"image": "r.example/app:1", "state": state, "position": 0, "requested_unix_ms": 1_000});
    pull.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    pull
}

fn facts(pod: Value) -> PodFacts {
    PodFacts {
        now_unix_ms: 66_000,
        pod,
        node: node("True"),
        events: events(json!([])),
        pulls: pulls(json!({})),
    }
}

#[track_caller]
fn says(facts: &PodFacts, state: State, part: &str) -> Report {
    let report = verdict(facts);
    assert!(report.state == state && report.verdict.contains(part), "{part:?} in {report:#?}");
    report
}

#[test]
fn a_pod_that_runs_has_ended_or_has_no_node() {
    let mut running = pod("", "");
    running["status"] = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    says(&facts(running), State::Healthy, "runs on n1 and is ready");
    let mut failed = pod("", "");
    failed["status"] = json!({"phase": "Failed", "reason": "Evicted"});
    says(&facts(failed), State::Failing, "phase Failed: Evicted");
    let mut unscheduled = pod("", "");
    unscheduled["spec"]["nodeName"] = Value::Null;
    unscheduled["status"] = json!({"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]});
    says(
        &PodFacts { node: None, pulls: None, ..facts(unscheduled) },
        State::Failing,
        "no node is chosen for the pod: 0/3 nodes",
    );
    let mut deleted = pod("ContainerCreating", "");
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    says(&facts(deleted), State::Pending, "is being deleted");
}

#[test]
fn the_node_comes_before_the_images() {
    let facts = PodFacts {
        node: node("Unknown"),
        pulls: Some(Err("no answer".into())),
        ..facts(pod("ContainerCreating", ""))
    };
    let report = says(&facts, State::Failing, "the node n1 is not Ready: kubelet said so");
    assert!(report.evidence.contains(&Evidence { source: "agent", text: "no answer".into() }), "{report:#?}");
}

#[test]
fn a_queued_pull_has_its_place_the_limit_and_who_has_the_slots() {
    let creating = || pod("ContainerCreating", "");
    let queued = mine("queued", json!({"position": 2}));
    let report = says(
        &PodFacts { pulls: pulls(queued.clone()), ..facts(creating()) },
        State::Pending,
        "waits in the queue of the node: place 2 of 3 for 1m05s; 2 of 2 slots are in use",
    );
    let has = |part: &str| report.evidence.iter().any(|line| line.text.contains(part));
    assert!(
        has("slot: r.example/other:1 for shop/b, 25 %") && has("pull of r.example/app:1: queued, place 2"),
        "{report:#?}"
    );
    // Nothing moves in any slot.
    let mut stuck = pulls(queued).unwrap().unwrap();
    let quiet = json!({"image": "x", "state": "running", "progress": {"idle_ms": 90_000}});
    stuck["pulls"] = json!([quiet, quiet, stuck["pulls"][1]]);
    let report =
        says(&PodFacts { pulls: Some(Ok(stuck)), ..facts(creating()) }, State::Failing, "place 2 of 3");
    assert!(report.hint.contains("no running pull receives data"), "{report:#?}");
}

#[test]
fn a_running_pull_has_its_progress_and_one_without_data_is_failing() {
    let of = |state: &str, progress: Value| PodFacts {
        pulls: pulls(mine(state, json!({"progress": progress}))),
        ..facts(pod("ContainerCreating", ""))
    };
    let moving = json!({"bytes_done": 25, "bytes_total": 100, "bytes_per_second": 2048, "idle_ms": 10});
    says(&of("running", moving), State::Pending, "is being pulled: 25 % of 100 B, 2.0 KiB/s");
    let quiet = json!({"bytes_done": 25, "bytes_total": 100, "idle_ms": 90_000});
    says(&of("running", quiet), State::Failing, "has received no data for 1m30s (25 % of 100 B)");
    // All is there, and the runtime unpacks.
    let unpacking = json!({"bytes_done": 100, "bytes_total": 100, "idle_ms": 90_000});
    says(&of("running", unpacking), State::Pending, "100 %");
    says(&of("waiting_for_runtime", json!({})), State::Failing, "waits for the container runtime of n1");
    says(&of("held", json!({})), State::Pending, "keeps its place");
}

#[test]
fn without_a_pull_the_state_of_the_container_or_the_last_warning_decides() {
    for (reason, message, state, part) in [
        ("ImagePullBackOff", "401 Unauthorized", State::Failing, "cannot be pulled: 401 Unauthorized"),
        ("CrashLoopBackOff", "back-off", State::Failing, "starts and ends again"),
        ("CreateContainerConfigError", "secret \"s\" not found", State::Failing, "secret \"s\" not found"),
        ("ContainerCreating", "", State::Pending, "no image of the pod is being pulled"),
    ] {
        says(&facts(pod(reason, message)), state, part);
    }
    // Another pod pulls the same image.
    for (reason, part) in [("CrashLoopBackOff", "starts and ends again"), ("", "runs and is not ready")] {
        let mut pod = pod(reason, "");
        if reason.is_empty() {
            pod["status"]["containerStatuses"][0]["state"] = json!({"running": {}});
        }
        let pulls = pulls(mine("queued", json!({"position": 1})));
        let report = verdict(&PodFacts { pulls, ..facts(pod) });
        assert!(report.verdict.contains(part), "{report:#?}");
    }
    let warned = events(json!([
        {"type": "Warning", "reason": "FailedMount", "message": "no volume", "lastTimestamp": "2026-01-01T00:00:02Z"},
        {"type": "Normal", "reason": "Scheduled", "message": "assigned", "lastTimestamp": "2026-01-01T00:00:01Z"},
    ]));
    says(
        &PodFacts { events: warned, ..facts(pod("ContainerCreating", "")) },
        State::Failing,
        "FailedMount: no volume",
    );
    let unknown = PodFacts { pulls: Some(Err("no pod".into())), ..facts(pod("ContainerCreating", "")) };
    says(&unknown, State::Unknown, "the agent there could not be asked");
}

#[test]
fn hints_follow_the_message() {
    for (message, part) in [
        ("pull access denied, repository does not exist or may require authorization", "imagePullSecrets"),
        ("manifest unknown", "the tag"),
        ("dial tcp: lookup r.example: no such host", "DNS"),
        ("something else", "tries again"),
    ] {
        assert!(image_hint(message).contains(part), "{message}: {}", image_hint(message));
    }
}

#[test]
fn an_init_container_that_has_ended_does_not_hold_the_pod() {
    let mut with_init = pod("ContainerCreating", "");
    with_init["spec"]["initContainers"] = json!([{"name": "init", "image": "busybox"}]);
    with_init["status"]["initContainerStatuses"] = json!([{"name": "init", "ready": true, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]);
    let queued = pulls(mine("queued", json!({"position": 1})));
    says(
        &PodFacts { pulls: queued, ..facts(with_init.clone()) },
        State::Pending,
        "the pull of r.example/app:1",
    );
    with_init["status"]["initContainerStatuses"][0] = json!({"name": "init", "ready": false, "state": {"waiting": {"reason": "ErrImagePull", "message": "x"}}});
    says(&facts(with_init), State::Failing, "the image busybox of container init cannot be pulled");
}

#[test]
fn images_are_compared_as_the_runtime_names_them() {
    for (image, expected) in [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1", "docker.io/library/busybox:1"),
        ("grafana/grafana", "docker.io/grafana/grafana:latest"),
        ("r.example:5000/a/b", "r.example:5000/a/b:latest"),
        ("localhost/a@sha256:ab", "localhost/a@sha256:ab"),
        ("r.example/a:1@sha256:ab", "r.example/a:1@sha256:ab"),
    ] {
        assert_eq!(normalized(image), expected);
    }
}
