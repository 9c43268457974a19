//! Why a pod does not start.
//!
//! Owns: the verdict, a function of [`PodFacts`]. In: pod, Node and Events of the API server, and the pulls of the agent
//! on the pod's node. Out: a [`Report`].

use keelson_actor_system::clock::unix_ms;
use serde_json::Value;

use super::{
    access::{Access, AccessError, Peer},
    report::{Evidence, Finding, Report, State},
    value::{condition, is_true, list, number, suffix, text},
};
use crate::cli::format::{bytes, duration_ms, percent, since_ms};

/// A pull that has received nothing for this long is said to be slow, long before it is cancelled as stalled.
const QUIET_MS: u64 = 15_000;
/// Queued pulls that are asked for: the most that the agent lists.
const MAX_QUEUED: &str = "10000";
/// The newest Events that are shown.
const EVENTS: usize = 5;

/// What is known; documents are as their sources give them.
#[derive(Debug)]
pub(super) struct PodFacts {
    pub(super) now_unix_ms: i64,
    pub(super) pod: Value,
    /// `None`: the pod has no node. An error: why it is not known.
    pub(super) node: Option<Result<Value, String>>,
    pub(super) events: Result<Value, String>,
    /// `keelson pulls`.
    pub(super) pulls: Option<Result<Value, String>>,
}

pub(super) async fn gather(
    access: &Access,
    namespace: Option<&str>,
    name: &str,
) -> Result<PodFacts, AccessError> {
    let pod = access.get(namespace, &["pod", name]).await?;
    let now_unix_ms = unix_ms();
    let said = |answer: Result<Value, AccessError>| answer.map_err(|error| error.to_string());
    let (namespace, node) =
        (text(&pod, "/metadata/namespace").to_owned(), text(&pod, "/spec/nodeName").to_owned());
    let of_pod = format!("involvedObject.uid={}", text(&pod, "/metadata/uid"));
    let of_pod = ["events", "--field-selector", &of_pod];
    let events = access.get(Some(&namespace), &of_pod);
    if node.is_empty() {
        return Ok(PodFacts { events: said(events.await), node: None, pulls: None, pod, now_unix_ms });
    }
    let of_node = ["node", &node];
    let object = access.get(None, &of_node);
    let pulls = access.on_node(Peer::Agent, &node, &["pulls", "--max-queued", MAX_QUEUED]);
    let (events, object, pulls) = tokio::join!(events, object, pulls);
    Ok(PodFacts {
        now_unix_ms,
        pod,
        node: Some(said(object)),
        events: said(events),
        pulls: Some(said(pulls)),
    })
}

pub(super) fn verdict(facts: &PodFacts) -> Report {
    let finding = of_phase(facts)
        .or_else(|| of_node(facts))
        .or_else(|| of_containers(facts))
        .unwrap_or_else(|| of_events(facts));
    Report::new(finding, evidence(facts))
}

fn of_phase(facts: &PodFacts) -> Option<Finding> {
    let pod = &facts.pod;
    let node = text(pod, "/spec/nodeName");
    if pod.pointer("/metadata/deletionTimestamp").is_some() {
        return Some(Finding::pending(
            "the pod is being deleted",
            "kubectl describe pod shows what it waits for",
        ));
    }
    let phase = text(pod, "/status/phase");
    if phase == "Succeeded" || phase == "Failed" {
        let message = suffix(first_of([text(pod, "/status/message"), text(pod, "/status/reason")]));
        let verdict = format!("the pod has ended with phase {phase}{message}");
        return Some(match phase {
            "Succeeded" => Finding::new(State::Healthy, verdict, ""),
            _ => Finding::failing(verdict, "kubectl logs shows what its containers wrote"),
        });
    }
    if is_condition(pod, "Ready", "True") {
        return Some(Finding::new(State::Healthy, format!("the pod runs on {node} and is ready"), ""));
    }
    if node.is_empty() {
        let scheduled = condition(pod, "PodScheduled");
        let why = suffix(scheduled.map_or("", |condition| text(condition, "/message")));
        let hint = "the scheduler decides this; Keelson is not involved yet";
        return Some(Finding::failing(format!("no node is chosen for the pod{why}"), hint));
    }
    None
}

fn of_node(facts: &PodFacts) -> Option<Finding> {
    let name = text(&facts.pod, "/spec/nodeName");
    let Some(Ok(node)) = &facts.node else { return None };
    let ready = condition(node, "Ready")?;
    if text(ready, "/status") == "True" {
        return None;
    }
    let why = suffix(text(ready, "/message"));
    let hint = "look at the kubelet of the node; a kubelet whose image endpoint does not answer exits when it starts";
    Some(Finding::failing(format!("the node {name} is not Ready{why}"), hint))
}

/// The first container that does not run decides; init containers come first.
fn of_containers(facts: &PodFacts) -> Option<Finding> {
    let waiting = containers(&facts.pod).into_iter().find(|container| !container.runs)?;
    let name = &waiting.name;
    // A pull of the same image for another pod does not explain other states.
    let reasons = ["", "ContainerCreating", "PodInitializing", "ErrImagePull", "ImagePullBackOff"];
    if reasons.contains(&waiting.reason.as_str())
        && let Some(Ok(pulls)) = &facts.pulls
        && let Some(finding) = of_pull(pulls, &waiting, facts)
    {
        return Some(finding);
    }
    match waiting.reason.as_str() {
        "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" => {
            let verdict = format!(
                "the image {} of container {name} cannot be pulled{}",
                waiting.image,
                suffix(&waiting.message)
            );
            Some(Finding::failing(verdict, image_hint(&waiting.message)))
        }
        "CrashLoopBackOff" | "Error" | "OOMKilled" => {
            let verdict = format!(
                "container {name} starts and ends again ({}){}",
                waiting.reason,
                suffix(&waiting.message)
            );
            Some(Finding::failing(verdict, format!("kubectl logs -c {name} --previous shows what it wrote")))
        }
        "" | "ContainerCreating" | "PodInitializing" => None,
        "Running" => Some(Finding::pending(
            format!("container {name} runs and is not ready"),
            "its readiness probe decides this; kubectl describe pod shows it",
        )),
        reason => {
            let verdict = format!("container {name} waits with reason {reason}{}", suffix(&waiting.message));
            Some(Finding::failing(verdict, "kubectl describe pod shows the fields that the message names"))
        }
    }
}

fn image_hint(message: &str) -> &'static str {
    let message = message.to_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if has(&["unauthorized", "authorization", "denied", "403", "401"]) {
        "check spec.imagePullSecrets, and that the secret is in the pod's namespace"
    } else if has(&["not found", "manifest unknown", "404"]) {
        "check the name and the tag of the image"
    } else if has(&["no such host", "timeout", "refused", "unreachable", "i/o"]) {
        "check that the node reaches the registry (DNS, proxy, firewall)"
    } else {
        "the message is the registry's or the runtime's; the kubelet tries again by itself"
    }
}

/// The verdict of the agent's queue on the image of a container; `None` if it has no pull of it.
fn of_pull(pulls: &Value, waiting: &Waiting, facts: &PodFacts) -> Option<Finding> {
    let wanted = normalized(&waiting.image);
    let pull = list(pulls, "/pulls").iter().find(|pull| normalized(text(pull, "/image")) == wanted)?;
    let image = &waiting.image;
    let runtime = text(pulls, "/runtime_health");
    if text(pull, "/state") == "waiting_for_runtime" || runtime == "down" {
        let (why, node) = (suffix(text(pulls, "/runtime_error")), text(&facts.pod, "/spec/nodeName"));
        let verdict = format!("the pull of {image} waits for the container runtime of {node}{why}");
        return Some(Finding::failing(
            verdict,
            "look at the runtime: systemctl status containerd (or crio) on the node",
        ));
    }
    let requested = pull.pointer("/requested_unix_ms").and_then(Value::as_i64);
    let waited = since_ms(requested.unwrap_or_default(), facts.now_unix_ms);
    Some(match text(pull, "/state") {
        "queued" | "checking" => queued(pulls, pull, image, &waited),
        "held" => Finding::pending(
            format!("the pull of {image} keeps its place in the queue until the kubelet asks again"),
            "the agent was restarted; the kubelet asks again by itself",
        ),
        "retrying" => Finding::pending(
            format!("the pull of {image} is tried again{}", suffix(text(pull, "/error"))),
            "wait, or look at the error",
        ),
        _ => running(pull, image),
    })
}

fn queued(pulls: &Value, pull: &Value, image: &str, waited: &str) -> Finding {
    let (place, length) = (number(pull, "/position"), number(pulls, "/queued"));
    let limit = number(pulls, "/limit/max_parallel_image_pulls");
    let slots = match limit {
        0 => String::new(),
        limit => format!("; {} of {limit} slots are in use", number(pulls, "/running")),
    };
    let quiet = list(pulls, "/pulls").iter().filter(|pull| idle_ms(pull) >= QUIET_MS).count() as u64;
    let verdict = format!(
        "the pull of {image} waits in the queue of the node: place {place} of {length} for {waited}{slots}"
    );
    if limit > 0 && quiet >= limit {
        return Finding::failing(
            verdict,
            "no running pull receives data: check the registry; `keelson pulls` on the node has the details",
        );
    }
    Finding::pending(
        verdict,
        "it starts when a slot is free; `keelson limit N` on the node raises the limit until `keelson limit --reset`",
    )
}

fn running(pull: &Value, image: &str) -> Finding {
    let (done, total) = (number(pull, "/progress/bytes_done"), number(pull, "/progress/bytes_total"));
    let share = match total {
        0 => "progress not known".to_owned(),
        total => format!("{} % of {}", percent(done, total), bytes(total)),
    };
    let idle = idle_ms(pull);
    if idle >= QUIET_MS && (total == 0 || done < total) {
        let idle = duration_ms(i64::try_from(idle).unwrap_or(i64::MAX));
        let verdict = format!("the pull of {image} runs but has received no data for {idle} ({share})");
        return Finding::failing(
            verdict,
            "check the registry and the way to it; pulls.stall_timeout cancels it",
        );
    }
    let speed = bytes(number(pull, "/progress/bytes_per_second"));
    Finding::pending(format!("the image {image} is being pulled: {share}, {speed}/s"), "wait")
}

fn idle_ms(pull: &Value) -> u64 {
    number(pull, "/progress/idle_ms")
}

/// Nothing in the states says why: the last warning does, if there is one.
fn of_events(facts: &PodFacts) -> Finding {
    let node = text(&facts.pod, "/spec/nodeName");
    let warning =
        facts.events.as_ref().ok().and_then(|events| {
            sorted(events).into_iter().rev().find(|event| text(event, "/type") == "Warning")
        });
    if let Some(event) = warning {
        let verdict = format!("{}{}", text(event, "/reason"), suffix(text(event, "/message")));
        return Finding::failing(verdict, "the kubelet reports this; Keelson has no pull for this pod");
    }
    match &facts.pulls {
        Some(Err(_)) => Finding::unknown(
            format!("the containers are being created on {node}, and the agent there could not be asked"),
            "make the agent reachable (see the line of the agent), or run `keelson pulls` on the node",
        ),
        _ => Finding::pending(
            format!("the containers are being created on {node}; no image of the pod is being pulled"),
            "volumes and the pod network come before the images: kubectl describe pod shows them",
        ),
    }
}

fn is_condition(object: &Value, kind: &str, status: &str) -> bool {
    condition(object, kind).is_some_and(|condition| text(condition, "/status") == status)
}

fn first_of(texts: [&str; 2]) -> &str {
    texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default()
}

#[derive(Debug)]
struct Waiting {
    name: String,
    image: String,
    /// Started, or ended as an init container should.
    runs: bool,
    reason: String,
    message: String,
}

/// Init containers, then containers, each with its state; without a status it is being created.
fn containers(pod: &Value) -> Vec<Waiting> {
    let mut all = Vec::new();
    for (specs, statuses, is_init) in [
        ("/spec/initContainers", "/status/initContainerStatuses", true),
        ("/spec/containers", "/status/containerStatuses", false),
    ] {
        for spec in list(pod, specs) {
            let name = text(spec, "/name");
            let status = list(pod, statuses).iter().find(|status| text(status, "/name") == name);
            let status = status.unwrap_or(&Value::Null);
            let is_ready = is_true(status, "/ready");
            let is_running = status.pointer("/state/running").is_some();
            let has_ended = status.pointer("/state/terminated/exitCode").and_then(Value::as_u64) == Some(0);
            let of = |field: &str| {
                let states = ["waiting", "terminated"].map(|state| format!("/state/{state}/{field}"));
                first_of([text(status, &states[0]), text(status, &states[1])]).to_owned()
            };
            let reason = if is_running { "Running".to_owned() } else { of("reason") };
            all.push(Waiting {
                name: name.into(),
                image: text(spec, "/image").into(),
                runs: is_ready || (is_init && (has_ended || is_running)),
                reason,
                message: of("message"),
            });
        }
    }
    all
}

/// The image as the runtime names it: with registry and tag.
fn normalized(image: &str) -> String {
    let (name, digest) = image.split_once('@').map_or((image, ""), |(name, digest)| (name, digest));
    let (name, tag) = match name.rfind(':') {
        Some(at) if !name[at..].contains('/') => name.split_at(at),
        _ => (name, if digest.is_empty() { ":latest" } else { "" }),
    };
    let is_registry = |part: &str| part.contains(['.', ':']) || part == "localhost";
    let name = match name.split_once('/') {
        Some((first, _)) if is_registry(first) => name.to_owned(),
        Some(_) => format!("docker.io/{name}"),
        None => format!("docker.io/library/{name}"),
    };
    let at = if digest.is_empty() { "" } else { "@" };
    format!("{name}{tag}{at}{digest}")
}

/// Events by the time at which they were last seen.
fn sorted(events: &Value) -> Vec<&Value> {
    let seen =
        |event: &Value| first_of([text(event, "/lastTimestamp"), text(event, "/eventTime")]).to_owned();
    let mut all: Vec<&Value> = list(events, "/items").iter().collect();
    all.sort_by_key(|event| seen(event));
    all
}

fn evidence(facts: &PodFacts) -> Vec<Evidence> {
    let mut lines = Vec::new();
    let mut say = |source, text: String| lines.push(Evidence { source, text });
    let pod = &facts.pod;
    let (namespace, name) = (text(pod, "/metadata/namespace"), text(pod, "/metadata/name"));
    let node = first_of([text(pod, "/spec/nodeName"), "no node"]);
    say("pod", format!("{namespace}/{name}: {} on {node}", text(pod, "/status/phase")));
    for container in containers(pod) {
        let state = match container.reason.as_str() {
            "" if container.runs => "runs",
            "" => "not started",
            reason => reason,
        };
        say(
            "pod",
            format!(
                "container {} ({}): {state}{}",
                container.name,
                container.image,
                suffix(&container.message)
            ),
        );
    }
    match &facts.node {
        None => {}
        Some(Err(error)) => say("node", error.clone()),
        Some(Ok(node)) => node_lines(node, &mut say),
    }
    match &facts.events {
        Err(error) => say("events", error.clone()),
        Ok(events) => event_lines(events, &mut say),
    }
    match &facts.pulls {
        None => {}
        Some(Err(error)) => say("agent", error.clone()),
        Some(Ok(pulls)) => agent_lines(pulls, pod, &mut say),
    }
    lines
}

fn node_lines(node: &Value, say: &mut impl FnMut(&'static str, String)) {
    for condition in list(node, "/status/conditions") {
        let (kind, status) = (text(condition, "/type"), text(condition, "/status"));
        // Of problems, those that are there.
        if (kind == "Ready") != (status == "True") || kind == "Ready" {
            say("node", format!("{kind} is {status}{}", suffix(text(condition, "/message"))));
        }
    }
}

fn event_lines(events: &Value, say: &mut impl FnMut(&'static str, String)) {
    for event in sorted(events).iter().rev().take(EVENTS).rev() {
        let (kind, reason) = (text(event, "/type"), text(event, "/reason"));
        say("events", format!("{kind} {reason}{}", suffix(text(event, "/message"))));
    }
}

fn agent_lines(pulls: &Value, pod: &Value, say: &mut impl FnMut(&'static str, String)) {
    let limit = match number(pulls, "/limit/max_parallel_image_pulls") {
        0 => "no limit".to_owned(),
        limit => format!("limit {limit}"),
    };
    let health = suffix(text(pulls, "/runtime_error"));
    say(
        "agent",
        format!(
            "{} running, {} queued, {limit}; runtime {}{health}",
            number(pulls, "/running"),
            number(pulls, "/queued"),
            text(pulls, "/runtime_health")
        ),
    );
    let images: Vec<String> = containers(pod).iter().map(|container| normalized(&container.image)).collect();
    for list_name in ["/pulls", "/finished"] {
        for pull in list(pulls, list_name) {
            if !images.contains(&normalized(text(pull, "/image"))) {
                continue;
            }
            let error = suffix(text(pull, "/error"));
            let place = match number(pull, "/position") {
                0 => String::new(),
                place => format!(", place {place}"),
            };
            say("agent", format!("pull of {}: {}{place}{error}", text(pull, "/image"), text(pull, "/state")));
        }
    }
    // Who has the slots.
    for pull in list(pulls, "/pulls").iter().filter(|pull| text(pull, "/state") == "running") {
        let progress = percent(number(pull, "/progress/bytes_done"), number(pull, "/progress/bytes_total"));
        say("agent", format!("slot: {} for {}, {progress} %", text(pull, "/image"), text(pull, "/pod")));
    }
}

#[cfg(test)]
mod tests;
