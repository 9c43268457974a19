use serde_json::json;

use super::*;

/// Everything is as it should be.
fn facts() -> ServiceFacts {
    let way = |from: &str| json!({"from": from, "verdict": "forwarded", "endpoints": ["10.244.0.2:80", "10.244.1.2:80"]});
    ServiceFacts {
        node_name: "n1".into(),
        service: json!({
            "metadata": {"namespace": "shop", "name": "web"},
            "spec": {"type": "ClusterIP", "clusterIPs": ["10.96.0.10"], "selector": {"app": "web"},
                "ports": [{"port": 80, "protocol": "TCP"}]},
        }),
        slices: Ok(json!({"items": [{"endpoints": [{"conditions": {"ready": true}}, {"conditions": {}}]}]})),
        node: Ok(json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})),
        endpoints: Ok(json!({"state": "synced", "rev": 9, "instance_id": "7"})),
        computed: Ok(computed("forwarded", "policy Cluster")),
        proxy: Ok(proxy("synced", 9)),
        explained: vec![("10.96.0.10:80/TCP".into(), Ok(json!({"ways": [way("a pod"), way("the node")]})))],
    }
}

fn computed(verdict: &str, reason: &str) -> Value {
    let traffic = json!({"from": "anyone", "to": "10.96.0.10:80", "verdict": verdict, "reason": reason, "endpoints": []});
    json!({"served": true, "ports": [{"name": "http", "families": [{"family": "IPv4", "traffic": [traffic]}]}]})
}

fn proxy(state: &str, rev: u64) -> Value {
    json!({"backend": "nft", "link": "following", "rev": rev, "instance_id": "7", "families": [
        {"family": "IPv4", "state": state, "reason": "no room"}, {"family": "IPv6", "state": "disabled"}]})
}

#[track_caller]
fn says(facts: &ServiceFacts, state: State, part: &str) {
    let report = verdict(facts);
    assert!(report.state == state && report.verdict.contains(part), "{part:?} in {report:#?}");
}

fn with(change: impl FnOnce(&mut ServiceFacts)) -> ServiceFacts {
    let mut facts = facts();
    change(&mut facts);
    facts
}

#[test]
fn a_service_that_is_forwarded() {
    says(&facts(), State::Healthy, "the rules of n1 forward the Service to 2 endpoints");
    // A cluster IP is no frontend for packets from outside.
    let outside = with(|facts| {
        let ways = json!([{"from": "outside", "verdict": "untouched"}, {"from": "a pod", "verdict": "forwarded", "endpoints": ["e"]}]);
        facts.explained = vec![("10.96.0.10:80/TCP".into(), Ok(json!({"ways": ways})))];
    });
    says(&outside, State::Healthy, "to 1 endpoints");
}

#[test]
fn services_that_no_proxy_serves() {
    for (change, state, part) in [
        (
            json!({"spec": {"type": "ExternalName", "externalName": "db.example"}}),
            State::Healthy,
            "a DNS name for db.example",
        ),
        (json!({"spec": {"type": "ClusterIP", "clusterIPs": ["None"]}}), State::Healthy, "headless"),
        (
            json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "edge"}},
                "spec": {"clusterIPs": ["10.96.0.10"]}}),
            State::Failing,
            "left to the service proxy \"edge\"",
        ),
    ] {
        says(&with(|facts| facts.service = change), state, part);
    }
}

#[test]
fn endpoints_come_before_the_node() {
    says(&with(|facts| facts.slices = Ok(json!({"items": []}))), State::Failing, "no endpoints");
    let not_ready = json!({"items": [{"endpoints": [{"conditions": {"ready": false}}]}]});
    let away = with(|facts| {
        facts.slices = Ok(not_ready.clone());
        facts.computed = Err("no agent".into());
    });
    says(&away, State::Failing, "none of the 1 endpoints of the Service is ready");
    // The agent says what becomes of traffic then: an endpoint that terminates may be served.
    says(&with(|facts| facts.slices = Ok(not_ready)), State::Healthy, "forward the Service");
    let dead = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown", "message": "gone"}]}});
    says(&with(|facts| facts.node = Ok(dead)), State::Failing, "the node n1 is not Ready: gone");
}

#[test]
fn the_agent_comes_before_the_proxy() {
    for (state, part) in [
        ("stale", "has stale endpoints: away"),
        ("not-watched", "no proxy follows the agent"),
        ("pending", "serves no endpoints (state pending): away"),
    ] {
        let facts = with(|facts| facts.endpoints = Ok(json!({"state": state, "reason": "away"})));
        says(&facts, State::Failing, part);
    }
    let local =
        with(|facts| facts.computed = Ok(computed("dropped", "policy Local: no endpoint on this node")));
    says(&local, State::Failing, "traffic from anyone to 10.96.0.10:80 is dropped on n1: policy Local");
    let hidden = with(|facts| facts.computed = Ok(json!({"served": false, "reason": "no cluster IP"})));
    says(&hidden, State::Failing, "does not serve the Service: no cluster IP");
}

#[test]
fn the_proxy_and_its_rules() {
    says(
        &with(|facts| facts.proxy = Ok(proxy("failing", 9))),
        State::Failing,
        "is failing for IPv4: no room",
    );
    says(
        &with(|facts| facts.proxy = Ok(proxy("synced", 8))),
        State::Pending,
        "has revision 8 in the kernel, and the agent revision 9",
    );
    // Revisions of two instances cannot be compared.
    let other = with(|facts| {
        let mut state = proxy("synced", 8);
        state["instance_id"] = json!("6");
        facts.proxy = Ok(state);
    });
    says(&other, State::Healthy, "forward");
    let lost = with(|facts| facts.proxy = Ok(json!({"link": "failing", "link_reason": "refused"})));
    says(&lost, State::Failing, "is not connected to its agent: refused");
    let rejected = with(|facts| {
        let ways = json!([{"from": "a pod", "verdict": "rejected"}]);
        facts.explained = vec![("10.96.0.10:80/TCP".into(), Ok(json!({"ways": ways})))];
    });
    says(&rejected, State::Failing, "packets from a pod to 10.96.0.10:80/TCP are rejected on n1");
}

#[test]
fn who_cannot_be_asked_is_said() {
    let alone = with(|facts| {
        facts.proxy = Err("no pod of the proxy".into());
        facts.explained = Vec::new();
    });
    says(&alone, State::Unknown, "the agent of n1 serves the Service, and the proxy could not be asked");
    let nobody = with(|facts| {
        for answer in [&mut facts.endpoints, &mut facts.computed, &mut facts.proxy] {
            *answer = Err("no way".into());
        }
        facts.explained = Vec::new();
    });
    says(&nobody, State::Unknown, "neither agent nor proxy of n1 could be asked");
    let lines = verdict(&nobody).evidence;
    assert!(lines.contains(&Evidence { source: "proxy", text: "no way".into() }), "{lines:#?}");
}

#[test]
fn every_cluster_ip_and_port_is_a_frontend() {
    let service = json!({"spec": {"clusterIPs": ["10.96.0.10", "fd00::a"], "ports": [{"port": 53, "protocol": "UDP"}, {"port": 80}]}});
    let expected = ["10.96.0.10:53/UDP", "10.96.0.10:80/TCP", "[fd00::a]:53/UDP", "[fd00::a]:80/TCP"];
    assert_eq!(frontends(&service), expected);
}
