//! Why a Service does not answer on a node.
//!
//! Owns: the verdict, a function of [`ServiceFacts`]. In: Service, EndpointSlices and Node of the API server; what the
//! agent of the node computed for the Service; the proxy's status and its explanation of each frontend. Out: a
//! [`Report`].

use serde_json::Value;

use super::{
    access::{Access, AccessError, Peer},
    report::{Evidence, Finding, Report, State},
    value::{condition, is_true, list, number, suffix, text},
};

/// The most frontends that the proxy is asked about.
const FRONTENDS: usize = 8;

type Answer = Result<Value, String>;

/// What is known; documents are as their sources give them, and an error is why there is none.
#[derive(Debug)]
pub(super) struct ServiceFacts {
    pub(super) node_name: String,
    pub(super) service: Value,
    pub(super) slices: Answer,
    pub(super) node: Answer,
    /// `keelson endpoints --max 0`.
    pub(super) endpoints: Answer,
    /// `keelson endpoints explain`.
    pub(super) computed: Answer,
    /// `keelson proxy state`.
    pub(super) proxy: Answer,
    /// `keelson proxy explain`, by frontend.
    pub(super) explained: Vec<(String, Answer)>,
}

pub(super) async fn gather(
    access: &Access,
    namespace: Option<&str>,
    name: &str,
    node: &str,
) -> Result<ServiceFacts, AccessError> {
    let said = |answer: Result<Value, AccessError>| answer.map_err(|error| error.to_string());
    let service = access.get(namespace, &["service", name]).await?;
    let namespace = text(&service, "/metadata/namespace").to_owned();
    let selector = format!("kubernetes.io/service-name={name}");
    let (of_service, of_node) = (["endpointslices", "-l", &selector], ["node", node]);
    let qualified = format!("{namespace}/{name}");
    let explain = ["endpoints", "explain", &qualified];
    let (slices, object, endpoints, computed, proxy) = tokio::join!(
        access.get(Some(&namespace), &of_service),
        access.get(None, &of_node),
        access.on_node(Peer::Agent, node, &["endpoints", "--max", "0"]),
        access.on_node(Peer::Agent, node, &explain),
        access.on_node(Peer::Proxy, node, &["proxy", "state"]),
    );
    let mut explained = Vec::new();
    if proxy.is_ok() {
        for frontend in frontends(&service) {
            let answer = access.on_node(Peer::Proxy, node, &["proxy", "explain", &frontend]).await;
            explained.push((frontend, said(answer)));
        }
    }
    Ok(ServiceFacts {
        node_name: node.into(),
        service,
        slices: said(slices),
        node: said(object),
        endpoints: said(endpoints),
        computed: said(computed),
        proxy: said(proxy),
        explained,
    })
}

/// `ADDRESS:PORT/PROTOCOL` of each cluster IP and port.
fn frontends(service: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for address in cluster_ips(service) {
        let address = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
        for port in list(service, "/spec/ports") {
            let protocol = match text(port, "/protocol") {
                "" => "TCP",
                protocol => protocol,
            };
            found.push(format!("{address}:{}/{protocol}", number(port, "/port")));
        }
    }
    found.truncate(FRONTENDS);
    found
}

fn cluster_ips(service: &Value) -> Vec<&str> {
    let ips = list(service, "/spec/clusterIPs").iter().filter_map(Value::as_str);
    ips.filter(|ip| !ip.is_empty() && *ip != "None").collect()
}

pub(super) fn verdict(facts: &ServiceFacts) -> Report {
    let finding = of_service(facts)
        .or_else(|| of_slices(facts))
        .or_else(|| of_agent(facts))
        .or_else(|| of_computed(facts))
        .or_else(|| of_proxy(facts))
        .or_else(|| of_explained(facts))
        .unwrap_or_else(|| of_all(facts));
    Report::new(finding, evidence(facts))
}

fn of_service(facts: &ServiceFacts) -> Option<Finding> {
    let service = &facts.service;
    if text(service, "/spec/type") == "ExternalName" {
        let target = text(service, "/spec/externalName");
        let verdict = format!("the Service is a DNS name for {target}; no proxy serves it");
        return Some(Finding::new(State::Healthy, verdict, "check that the name resolves in a pod"));
    }
    if cluster_ips(service).is_empty() {
        let verdict = "the Service is headless: DNS gives the addresses of its pods, and no proxy serves it";
        return Some(Finding::new(
            State::Healthy,
            verdict,
            "check the name in a pod, and the pods themselves",
        ));
    }
    let other = text(service, "/metadata/labels/service.kubernetes.io~1service-proxy-name");
    (!other.is_empty()).then(|| {
        let verdict = format!("the Service is left to the service proxy {other:?} by its label");
        Finding::failing(
            verdict,
            "look at that proxy, or remove the label service.kubernetes.io/service-proxy-name",
        )
    })
}

/// Endpoints of the slices: all, and those that are ready.
fn endpoints_of(slices: &Value) -> (usize, usize) {
    let all = list(slices, "/items").iter().flat_map(|slice| list(slice, "/endpoints"));
    // Ready unless it is said not to be.
    let is_ready =
        |endpoint: &Value| endpoint.pointer("/conditions/ready").and_then(Value::as_bool) != Some(false);
    all.fold((0, 0), |(all, ready), endpoint| (all + 1, ready + usize::from(is_ready(endpoint))))
}

fn of_slices(facts: &ServiceFacts) -> Option<Finding> {
    let (all, ready) = endpoints_of(facts.slices.as_ref().ok()?);
    if all == 0 {
        let selects = facts.service.pointer("/spec/selector").is_some_and(|selector| !selector.is_null());
        let hint = match selects {
            true => "compare the Service's spec.selector with the labels of the pods",
            false => "the Service has no selector, so another controller has to make its EndpointSlices",
        };
        return Some(Finding::failing("the Service has no endpoints", hint));
    }
    // Endpoints that terminate are served when there are no others: the agent knows.
    (ready == 0 && facts.computed.is_err()).then(|| {
        Finding::failing(
            format!("none of the {all} endpoints of the Service is ready"),
            "look at the readiness of its pods",
        )
    })
}

fn of_agent(facts: &ServiceFacts) -> Option<Finding> {
    let node = &facts.node_name;
    if let Ok(object) = &facts.node
        && let Some(ready) = condition(object, "Ready").filter(|ready| text(ready, "/status") != "True")
    {
        let why = suffix(text(ready, "/message"));
        return Some(Finding::failing(
            format!("the node {node} is not Ready{why}"),
            "look at the kubelet of the node",
        ));
    }
    let state = facts.endpoints.as_ref().ok()?;
    let why = suffix(text(state, "/reason"));
    match text(state, "/state") {
        "synced" => None,
        "stale" => Some(Finding::failing(
            format!("the agent of {node} has stale endpoints{why}"),
            "changes do not reach the node until its agent reaches the API server",
        )),
        "not-watched" => Some(Finding::failing(
            format!("no proxy follows the agent of {node}{why}"),
            "start keelson-proxy on the node",
        )),
        other => Some(Finding::failing(
            format!("the agent of {node} serves no endpoints (state {other}){why}"),
            "`keelson endpoints` on the node has the details",
        )),
    }
}

fn of_computed(facts: &ServiceFacts) -> Option<Finding> {
    let computed = facts.computed.as_ref().ok()?;
    let node = &facts.node_name;
    if !is_true(computed, "/served") {
        let why = suffix(text(computed, "/reason"));
        return Some(Finding::failing(
            format!("the agent of {node} does not serve the Service{why}"),
            "follow the reason",
        ));
    }
    let refused = traffic(computed).find(|(_, traffic)| text(traffic, "/verdict") != "forwarded")?.1;
    let (to, from) = (text(refused, "/to"), text(refused, "/from"));
    let (word, why) = (text(refused, "/verdict"), suffix(text(refused, "/reason")));
    let hint = "keelson endpoints explain on the node says of every endpoint why it is chosen or not";
    Some(Finding::failing(format!("traffic from {from} to {to} is {word} on {node}{why}"), hint))
}

/// Each kind of traffic with the name of its port.
fn traffic(computed: &Value) -> impl Iterator<Item = (&str, &Value)> {
    list(computed, "/ports").iter().flat_map(|port| {
        let families = list(port, "/families").iter();
        families.flat_map(move |family| {
            list(family, "/traffic").iter().map(move |one| (text(port, "/name"), one))
        })
    })
}

fn of_proxy(facts: &ServiceFacts) -> Option<Finding> {
    let proxy = facts.proxy.as_ref().ok()?;
    let node = &facts.node_name;
    if text(proxy, "/link") != "following" {
        let why = suffix(text(proxy, "/link_reason"));
        let verdict = format!("the proxy of {node} is not connected to its agent{why}");
        return Some(Finding::failing(verdict, "the rules stay as they are until it is; look at the agent"));
    }
    for family in list(proxy, "/families") {
        let (name, why) = (text(family, "/family"), suffix(text(family, "/reason")));
        match text(family, "/state") {
            "synced" | "disabled" => {}
            state => {
                let verdict = format!("the proxy of {node} is {state} for {name}{why}");
                return Some(Finding::failing(verdict, "`keelson proxy state` on the node has the details"));
            }
        }
    }
    let (has, wants) = (number(proxy, "/rev"), facts.endpoints.as_ref().map(|state| number(state, "/rev")));
    match wants {
        Ok(wants) if same_instance(facts) && has < wants => Some(Finding::pending(
            format!("the proxy of {node} has revision {has} in the kernel, and the agent revision {wants}"),
            "ask again; if it stays behind, look at `keelson proxy state` on the node",
        )),
        _ => None,
    }
}

fn same_instance(facts: &ServiceFacts) -> bool {
    let of = |answer: &Answer| {
        answer.as_ref().map(|state| text(state, "/instance_id").to_owned()).unwrap_or_default()
    };
    of(&facts.proxy) == of(&facts.endpoints)
}

fn of_explained(facts: &ServiceFacts) -> Option<Finding> {
    let node = &facts.node_name;
    for (frontend, answer) in &facts.explained {
        let explanation = match answer {
            Ok(explanation) => explanation,
            Err(error) => {
                let verdict = format!("the proxy of {node} cannot explain {frontend}: {error}");
                return Some(Finding::unknown(verdict, "run the command on the node"));
            }
        };
        let refused = list(explanation, "/ways").iter().find(|way| text(way, "/verdict") != "forwarded");
        if let Some(way) = refused {
            let (from, word) = (text(way, "/from"), text(way, "/verdict"));
            // What no rule matches is no frontend for this sender, such as a cluster IP from outside.
            if word == "untouched"
                && list(explanation, "/ways").iter().any(|way| text(way, "/verdict") == "forwarded")
            {
                continue;
            }
            let hint = format!("keelson proxy explain {frontend} on the node shows the rules");
            return Some(Finding::failing(
                format!("packets from {from} to {frontend} are {word} on {node}"),
                hint,
            ));
        }
    }
    None
}

/// Nothing that was seen is wrong; what could not be asked decides how much that says.
fn of_all(facts: &ServiceFacts) -> Finding {
    let node = &facts.node_name;
    match (&facts.computed, &facts.proxy) {
        (_, Ok(_)) if !facts.explained.is_empty() => {
            let endpoints: usize =
                facts.explained.iter().map(|(_, answer)| forwarded_to(answer).len()).max().unwrap_or(0);
            let hint = "if it does not answer: the pods themselves, NetworkPolicies, and rules of other programs on the node";
            Finding::new(
                State::Healthy,
                format!("the rules of {node} forward the Service to {endpoints} endpoints"),
                hint,
            )
        }
        (Ok(_), _) => Finding::unknown(
            format!("the agent of {node} serves the Service, and the proxy could not be asked"),
            "make the proxy reachable (see its line); a kube-proxy is not asked",
        ),
        _ => Finding::unknown(
            format!("the Service has ready endpoints, and neither agent nor proxy of {node} could be asked"),
            "make agent and proxy reachable (see their lines)",
        ),
    }
}

fn forwarded_to(answer: &Answer) -> Vec<&str> {
    let Ok(explanation) = answer else { return Vec::new() };
    let mut found: Vec<&str> = list(explanation, "/ways")
        .iter()
        .flat_map(|way| list(way, "/endpoints"))
        .filter_map(Value::as_str)
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn evidence(facts: &ServiceFacts) -> Vec<Evidence> {
    let mut lines = Vec::new();
    let mut say = |source, text: String| lines.push(Evidence { source, text });
    let service = &facts.service;
    let (namespace, name) = (text(service, "/metadata/namespace"), text(service, "/metadata/name"));
    let policy = |name: &str| match text(service, name) {
        "" => "Cluster".to_owned(),
        policy => policy.to_owned(),
    };
    say(
        "service",
        format!(
            "{namespace}/{name}: {} at {}, internal traffic {}, external traffic {}",
            text(service, "/spec/type"),
            cluster_ips(service).join(", "),
            policy("/spec/internalTrafficPolicy"),
            policy("/spec/externalTrafficPolicy")
        ),
    );
    match &facts.slices {
        Err(error) => say("endpoints", error.clone()),
        Ok(slices) => {
            let (all, ready) = endpoints_of(slices);
            say(
                "endpoints",
                format!("{all} in {} EndpointSlices, {ready} ready", list(slices, "/items").len()),
            );
        }
    }
    match &facts.node {
        Err(error) => say("node", error.clone()),
        Ok(node) => {
            for condition in list(node, "/status/conditions") {
                let (kind, status) = (text(condition, "/type"), text(condition, "/status"));
                if kind == "Ready" || status == "True" {
                    say("node", format!("{kind} is {status}{}", suffix(text(condition, "/message"))));
                }
            }
        }
    }
    agent_lines(facts, &mut say);
    proxy_lines(facts, &mut say);
    lines
}

fn agent_lines(facts: &ServiceFacts, say: &mut impl FnMut(&'static str, String)) {
    match &facts.endpoints {
        Err(error) => say("agent", error.clone()),
        Ok(state) => {
            let why = suffix(text(state, "/reason"));
            say(
                "agent",
                format!("endpoints {}, revision {}{why}", text(state, "/state"), number(state, "/rev")),
            );
        }
    }
    match &facts.computed {
        // The same way failed for both.
        Err(error) if facts.endpoints.is_ok() => say("agent", error.clone()),
        Err(_) => {}
        Ok(computed) => {
            for (port, one) in traffic(computed) {
                let endpoints = list(one, "/endpoints").len();
                let (from, to, word) = (text(one, "/from"), text(one, "/to"), text(one, "/verdict"));
                let why = suffix(text(one, "/reason"));
                say(
                    "agent",
                    format!("port {port:?}: {from} to {to} is {word} to {endpoints} endpoints{why}"),
                );
            }
        }
    }
}

fn proxy_lines(facts: &ServiceFacts, say: &mut impl FnMut(&'static str, String)) {
    let proxy = match &facts.proxy {
        Err(error) => return say("proxy", error.clone()),
        Ok(proxy) => proxy,
    };
    say(
        "proxy",
        format!(
            "backend {}, link {}, revision {}",
            text(proxy, "/backend"),
            text(proxy, "/link"),
            number(proxy, "/rev")
        ),
    );
    for family in list(proxy, "/families") {
        let (name, state) = (text(family, "/family"), text(family, "/state"));
        let why = suffix(text(family, "/reason"));
        let failures = number(family, "/failures");
        say("proxy", format!("{name} {state}, {} syncs, {failures} failures{why}", number(family, "/syncs")));
    }
    for (frontend, answer) in &facts.explained {
        match answer {
            Err(error) => say("proxy", format!("{frontend}: {error}")),
            Ok(explanation) => {
                for way in list(explanation, "/ways") {
                    let to: Vec<&str> = list(way, "/endpoints").iter().filter_map(Value::as_str).collect();
                    let to = if to.is_empty() { String::new() } else { format!(" to {}", to.join(", ")) };
                    say(
                        "proxy",
                        format!("{frontend} from {}: {}{to}", text(way, "/from"), text(way, "/verdict")),
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
