//! Rights of an agent: every shipped right is needed, none is missing, and another node cannot be accessed.
//!
//! Service endpoints come from the API server here, because some of the rights are for them.

use crate::common::{
    ACCOUNT, MANIFEST, NODE_MANIFEST, NODE_ROLE, agent_requests, companion, describe_event, heartbeats,
    knows_rights, node_settings, on_cluster, run, set_condition, settings, shared, wait_until_healthy,
};
use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use keelson_cluster::kube::{Cluster, Identity, NODE_LEASES, refused};
use keelson_cluster::manifests::PROXY;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, until};
use kube::Api;
use kube::api::{
    ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, ValidationDirective,
};
use serde_json::{Value, json};

/// The resources of Services, which heartbeats do not need.
const ENDPOINTS: [&str; 3] = ["services", "endpointslices", "servicecidrs"];

/// Short intervals, and endpoints from the API server.
fn quick(settings: Settings) -> Settings {
    settings
        .set("node.lease_duration", "4s")
        .set("node.node_status_update_frequency", "1s")
        .set("endpoints.source", "kube")
        // No client follows them here.
        .set("endpoints.watch", "always")
}

/// One verb of a rule of the manifest.
#[derive(Clone, Debug)]
struct Right {
    document: usize,
    rule: usize,
    resource: String,
    verb: String,
}

impl Right {
    fn is_of_endpoints(&self) -> bool {
        ENDPOINTS.contains(&self.resource.as_str())
    }
}

fn documents(manifest: &str) -> Result<Vec<Value>> {
    serde_saphyr::from_multiple(manifest).context("the manifest is no YAML")
}

fn rights(documents: &[Value]) -> Vec<Right> {
    let mut rights = Vec::new();
    for (document, value) in documents.iter().enumerate() {
        for (rule, value) in value["rules"].as_array().into_iter().flatten().enumerate() {
            let texts = |field: &str| value[field].as_array().cloned().unwrap_or_default();
            for resource in texts("resources") {
                for verb in texts("verbs") {
                    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                    rights.push(Right { document, rule, resource: text(&resource), verb: text(&verb) });
                }
            }
        }
    }
    rights
}

fn without(right: &Right, mut documents: Vec<Value>) -> Result<Vec<Value>> {
    let rule = &mut documents[right.document]["rules"][right.rule];
    ensure!(rule["resources"].as_array().is_some_and(|all| all.len() == 1), "one resource a rule: {rule}");
    let verbs = rule["verbs"].as_array_mut().context("a rule has verbs")?;
    verbs.retain(|verb| *verb != right.verb);
    if verbs.is_empty() {
        let rules = documents[right.document]["rules"].as_array_mut().context("there are rules")?;
        rules.remove(right.rule);
    }
    Ok(documents)
}

/// Checks that a companion without this right reports it.
async fn a_companion_needs(cluster: &Cluster, number: usize, right: Right) -> Result<()> {
    let name = format!("least-{number}");
    let scratch = Scratch::new()?;
    for document in without(&right, documents(MANIFEST)?)? {
        cluster.admin.apply(&document.to_string().replace(ACCOUNT, &name)).await?;
    }
    let identity = cluster.companion(&scratch, &name, &name).await?;
    let others = remaining_right(&right);
    eventually(PATIENCE, "the API server knows the rights that are left", || others(&identity)).await?;
    cluster.admin.create_node(&name, &[]).await?;
    let settings = quick(settings(&name, &identity.kubeconfig()));
    is_missed(cluster, &scratch, &identity, &settings, &right).await
}

/// Checks that an agent of role `node` needs this right in addition to those of every node.
async fn a_node_needs(cluster: &Cluster, number: usize, right: Right) -> Result<()> {
    let name = format!("least-node-{number}");
    let scratch = Scratch::new()?;
    let identity = cluster.node(&scratch, &name).await?;
    for mut document in without(&right, documents(NODE_MANIFEST)?)? {
        // For this node alone, so that several can lack different rights.
        if document["kind"] == "ClusterRoleBinding" {
            let user =
                json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": identity.user()});
            document["subjects"] = json!([user]);
        }
        cluster.admin.apply(&document.to_string().replace(NODE_ROLE, &name)).await?;
    }
    let left = if right.resource == "endpointslices" { CIDRS } else { SLICES };
    knows_list(&identity, left).await?;
    let settings = quick(node_settings(&name, &identity.kubeconfig(), scratch.path()));
    is_missed(cluster, &scratch, &identity, &settings, &right).await
}

/// Checks that an agent without this right tries to use it, is refused, and reports that.
async fn is_missed(
    cluster: &Cluster,
    scratch: &Scratch,
    identity: &Identity,
    settings: &Settings,
    right: &Right,
) -> Result<()> {
    let runtime = format!("unix://{}/none.sock", scratch.path().display());
    let mut agent = Agent::new(scratch, &runtime, settings)?;
    agent.start_live().await?;
    eventually(PATIENCE, &format!("{right:?} is missed"), || async {
        let asked = agent_requests(cluster, identity.user())?;
        let refused: Vec<_> = asked.iter().filter(|event| event.code == Some(403)).collect();
        ensure!(
            refused.iter().any(|event| event.is_for(&right.verb, &right.resource)),
            "it asked {:#?}",
            asked.iter().map(describe_event).collect::<Vec<_>>()
        );
        Ok(())
    })
    .await?;
    eventually(PATIENCE, &format!("the agent reports that it lacks {right:?}"), || async {
        match right.is_of_endpoints() {
            true => wait_for_endpoints_failure(&agent, &right.resource).await,
            false => wait_for_failing_heartbeats(&agent).await,
        }
    })
    .await?;
    let foreign: Vec<_> = agent_requests(cluster, identity.user())?
        .into_iter()
        .filter(|event| event.code == Some(403) && !event.is_for(&right.verb, &right.resource))
        .collect();
    ensure!(foreign.is_empty(), "without {right:?} it was refused something else: {foreign:#?}");
    Ok(())
}

async fn wait_for_failing_heartbeats(agent: &Agent) -> Result<()> {
    let shown = heartbeats(agent).await?;
    let reason = shown["reason"].as_str().unwrap_or_default();
    ensure!(shown["state"] == "failing" && reason.contains("403"), "it reports {shown}");
    let ready = agent.http_get("/readyz?verbose").await?;
    ensure!(ready.text().contains("403"), "/readyz returns {}", ready.text());
    Ok(())
}

/// Checks that it reports a refusal of this source, and of no other.
async fn wait_for_endpoints_failure(agent: &Agent, resource: &str) -> Result<()> {
    let shown = agent.json("/debug/endpoints").await?;
    let sources = shown["sources"].as_array().context("there are sources")?;
    for source in sources {
        let reason = source["reason"].as_str().unwrap_or_default();
        let (refused, is_it) = (reason.contains("403"), source["resource"] == resource);
        ensure!(
            refused == is_it && (source["health"] == "failing") == is_it,
            "{resource}: it reports {shown}"
        );
    }
    // P19: no endpoint depends on them.
    if resource == "servicecidrs" {
        ensure!(shown["state"] == "synced", "it reports {shown}");
        return Ok(());
    }
    // No list was complete yet, so there is nothing to serve.
    ensure!(shown["state"] == "pending", "it reports {shown}");
    let ready = agent.http_get("/readyz?verbose").await?;
    let text = ready.text();
    let line = text.lines().find(|line| line.starts_with("[-]endpoints")).unwrap_or_default();
    ensure!(line.contains(resource) && line.contains("403"), "/readyz returns {text}");
    Ok(())
}

async fn knows_list(identity: &Identity, path: &str) -> Result<()> {
    let client = identity.client().await?;
    eventually(PATIENCE, &format!("{} may list {path}", identity.user()), || async {
        let request = http::Request::get(format!("{path}?limit=1")).body(Vec::new())?;
        client.request::<Value>(request).await.map(drop).context("it may not yet")
    })
    .await
}

const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";

/// A check that a right other than the missing one has reached the authorizer, for each of the two roles.
fn remaining_right<'a>(
    right: &Right,
) -> impl Fn(&'a Identity) -> futures_util::future::BoxFuture<'a, Result<()>> + use<'a> {
    let (no_leases, no_get) = (right.resource == "leases" && right.verb == "get", right.resource == "nodes");
    move |identity: &'a Identity| {
        Box::pin(async move {
            let client = identity.client().await?;
            let pods: Api<Pod> = Api::all(client.clone());
            let nodes: Api<Node> = Api::all(client.clone());
            // Pods or nodes: whichever has all verbs.
            match no_get {
                true => pods.list(&ListParams::default().limit(1)).await.map(drop)?,
                false => nodes.list(&ListParams::default().limit(1)).await.map(drop)?,
            }
            let leases: Api<Lease> = Api::namespaced(client, NODE_LEASES);
            if no_leases {
                let empty = Patch::Merge(json!({}));
                return refused(leases.patch("nobody", &PatchParams::default(), &empty).await, 404);
            }
            leases.get_opt("nobody").await.map(drop).context("it may not read a Lease yet")
        })
    }
}

#[test]
fn every_right_of_a_companion_is_needed() -> Result<()> {
    run(async {
        let shared = shared().await?;
        let mut rights = rights(&documents(MANIFEST)?);
        // Used when a pull waits: `events.rs` tests that they are needed.
        rights.retain(|right| right.resource != "events");
        ensure!(rights.len() >= 5, "the manifest gives {rights:?}");
        for resource in ENDPOINTS {
            ensure!(rights.iter().any(|right| right.resource == resource), "none for {resource}: {rights:?}");
        }
        eprintln!("{} rights: {rights:?}", rights.len());
        let each = rights.into_iter().enumerate();
        try_join_all(each.map(|(number, right)| a_companion_needs(&shared.cluster, number, right))).await?;
        Ok(())
    })
}

/// Waits until the endpoints are those of the API server, and the agent is ready with them.
async fn current(agent: &mut Agent) -> Result<()> {
    eventually(PATIENCE, "the endpoints are current", || async {
        let shown = agent.json("/debug/endpoints").await?;
        ensure!(shown["state"] == "synced" && shown["source"] == "kube", "they are {shown}");
        Ok(())
    })
    .await?;
    agent.ready().await
}

/// All requests of an agent to the API server: start, condition, a deleted pod, a deleted Lease, restarts of both
/// kinds.
async fn run_full_lifecycle(cluster: &Cluster, name: &str, lease: &str, agent: &mut Agent) -> Result<()> {
    agent.start_again().await?;
    wait_until_healthy(agent).await?;
    current(agent).await?;
    set_condition(agent, "KernelDeadlock", "False", "NoDeadlock").await?;
    cluster.admin.await_condition(name, "KernelDeadlock", "False").await?;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "nodeName": name, "automountServiceAccountToken": false, "containers": [{"name": "a", "image": "a"}],
    }});
    cluster.admin.apply(&pod.to_string()).await?;
    cluster.admin.delete_pod("default", name).await?;

    let first = cluster.admin.lease(lease).await?.context("there is a Lease")?.metadata.uid;
    cluster.admin.delete_lease(lease).await?;
    eventually(PATIENCE, "the Lease is made again", || async {
        let made = cluster.admin.lease(lease).await?.context("there is none")?;
        ensure!(made.metadata.uid != first, "it is the old one");
        Ok(())
    })
    .await?;
    agent.kill9()?;
    agent.start_again().await?;
    set_condition(agent, "KernelDeadlock", "True", "Deadlock").await?;
    cluster.admin.await_condition(name, "KernelDeadlock", "True").await?;
    agent.terminate().await?;
    agent.start_again().await?;
    current(agent).await?;
    wait_until_healthy(agent).await
}

/// Checks that no request was refused, and that all requests of a life were made.
fn check_no_refusals(cluster: &Cluster, user: &str, expected: &[(&str, &str)]) -> Result<()> {
    let asked = agent_requests(cluster, user)?;
    for event in &asked {
        ensure!(!matches!(event.code, Some(401 | 403)), "refused: {}", describe_event(event));
    }
    for (verb, resource) in expected {
        ensure!(
            asked.iter().any(|event| event.is_for(verb, resource)),
            "{user} never asked to {verb} {resource}"
        );
    }
    eprintln!("{user}: {} requests, none refused", asked.len());
    Ok(())
}

fn pairs(rights: &[Right]) -> Vec<(&str, &str)> {
    rights.iter().map(|right| (right.verb.as_str(), right.resource.as_str())).collect()
}

#[test]
fn the_rights_of_a_companion_are_sufficient() -> Result<()> {
    on_cluster(async |cluster| {
        let scratch = Scratch::new()?;
        let containerd = Containerd::start(&scratch, Kind::V2, &Options::default()).await?;
        let identity = companion(cluster, &scratch, ACCOUNT, "enough").await?;
        cluster.admin.create_node("enough", &[]).await?;
        let settings = quick(settings("enough", &identity.kubeconfig()));
        let mut agent = Agent::new(&scratch, &containerd.endpoint(), &settings)?;
        // Every node's agent uses this account, so the log includes requests of others too.
        run_full_lifecycle(cluster, "enough", "keelson-enough", &mut agent).await?;
        let mut rights = rights(&documents(MANIFEST)?);
        rights.retain(|right| right.resource != "events");
        check_no_refusals(cluster, identity.user(), &pairs(&rights))
    })
}

/// The manifest for an account of one node: every rule names its objects, except where RBAC cannot: a Lease has no name
/// before it is created, pods are not selected by name, and endpoints are made from the slices of all nodes. Nodes are
/// selected by name, with the field selector.
fn narrowed(account: &str, node: &str) -> Result<Vec<String>> {
    let mut documents = documents(MANIFEST)?;
    for document in &mut documents {
        let rules = document["rules"].as_array().cloned().unwrap_or_default();
        let mut narrow = Vec::new();
        for mut rule in rules {
            let of = |resource: &str| rule["resources"] == json!([resource]);
            let nameless = of("pods") || of("events") || ENDPOINTS.iter().any(|resource| of(resource));
            if of("leases") {
                let verbs = rule["verbs"].as_array_mut().context("a rule has verbs")?;
                verbs.retain(|verb| verb != "create");
                narrow.push(
                    json!({"apiGroups": rule["apiGroups"], "resources": ["leases"], "verbs": ["create"]}),
                );
                rule["resourceNames"] = json!([format!("keelson-{node}")]);
            } else if !nameless {
                rule["resourceNames"] = json!([node]);
            }
            narrow.push(rule);
        }
        if !narrow.is_empty() {
            document["rules"] = narrow.into();
        }
    }
    Ok(documents.iter().map(|document| document.to_string().replace(ACCOUNT, account)).collect())
}

#[test]
fn an_account_can_be_restricted_to_one_node() -> Result<()> {
    on_cluster(async |cluster| {
        let scratch = Scratch::new()?;
        for document in narrowed("agent-of-one", "one-of-many")? {
            cluster.admin.apply(&document).await?;
        }
        let identity = cluster.companion(&scratch, "agent-of-one", "one-of-many").await?;
        cluster.admin.create_node("one-of-many", &[]).await?;
        knows_rights(&identity, "one-of-many").await?;
        let containerd = Containerd::start(&scratch, Kind::Debian16, &Options::default()).await?;
        let settings = quick(settings("one-of-many", &identity.kubeconfig()));
        let mut agent = Agent::new(&scratch, &containerd.endpoint(), &settings)?;
        run_full_lifecycle(cluster, "one-of-many", "keelson-one-of-many", &mut agent).await?;
        check_no_refusals(cluster, identity.user(), &[("watch", "nodes"), ("patch", "leases")])?;
        check_no_access_to_other_nodes(cluster, &identity, "one-of-many-others").await
    })
}

/// Neither status nor Lease of another node may be read or written.
async fn check_no_access_to_other_nodes(cluster: &Cluster, identity: &Identity, other: &str) -> Result<()> {
    cluster.admin.create_node(other, &[]).await?;
    let client = identity.client().await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client, NODE_LEASES);
    let params = PatchParams::default();
    let change = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let status = Patch::Strategic(json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}));
    refused(nodes.patch(other, &params, &change).await, 403)?;
    refused(nodes.patch_status(other, &params, &status).await, 403)?;
    refused(leases.get(other).await, 403)?;
    refused(leases.patch(other, &params, &change).await, 403)
}

#[test]
fn role_node_needs_only_rights_for_endpoints_and_reaches_no_other_node() -> Result<()> {
    on_cluster(async |cluster| {
        let granted = rights(&documents(NODE_MANIFEST)?);
        ensure!(granted.iter().all(Right::is_of_endpoints), "the manifest gives {granted:?}");
        // Before all nodes have them: rights add up.
        let each = granted.clone().into_iter().enumerate();
        try_join_all(each.map(|(number, right)| a_node_needs(cluster, number, right))).await?;

        cluster.admin.apply(NODE_MANIFEST).await?;
        let scratch = Scratch::new()?;
        let options = Options { network: true, ..Options::default() };
        let containerd = Containerd::start(&scratch, Kind::V2, &options).await?;
        let identity = cluster.node(&scratch, "itself").await?;
        knows_list(&identity, SLICES).await?;
        let settings = quick(node_settings("itself", &identity.kubeconfig(), scratch.path()));
        let mut agent = Agent::new(&scratch, &containerd.endpoint(), &settings)?;
        run_full_lifecycle(cluster, "itself", "itself", &mut agent).await?;
        let mut expected = vec![
            ("create", "nodes"),
            ("patch", "nodes/status"),
            ("watch", "nodes"),
            ("watch", "pods"),
            ("create", "leases"),
        ];
        // Every node may read Services.
        expected.extend([("list", "services"), ("watch", "services")]);
        expected.extend(pairs(&granted));
        check_no_refusals(cluster, identity.user(), &expected)?;
        let renewals = || {
            agent_requests(cluster, identity.user()).is_ok_and(|all| {
                all.iter()
                    .any(|event| event.is_write() && event.name == "itself" && event.resource == "leases")
            })
        };
        until("the Lease is renewed", renewals).await?;

        check_no_access_to_other_nodes(cluster, &identity, "other").await?;
        let pods: Api<Pod> = Api::all(identity.client().await?);
        let theirs = ListParams::default().fields("spec.nodeName=other");
        refused(pods.list(&theirs).await, 403)
    })
}

#[test]
fn the_proxy_manifest_is_valid_and_requests_one_capability() -> Result<()> {
    let documents = documents(PROXY)?;
    run(async { check_manifest(&shared().await?.cluster, &documents).await })?;
    check_capabilities(&documents)
}

/// Checks that the API server knows every field, in a dry run.
async fn check_manifest(cluster: &Cluster, documents: &[Value]) -> Result<()> {
    for document in documents {
        let object: DynamicObject = serde_json::from_value(document.clone())?;
        let types = object.types.clone().context("it has a kind")?;
        let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types)?);
        let api: Api<DynamicObject> = Api::namespaced_with(cluster.admin.client(), "kube-system", &resource);
        let name = object.metadata.name.clone().context("it has a name")?;
        let mut params = PatchParams { dry_run: true, ..PatchParams::apply("keelson-tests") };
        params.field_validation = Some(ValidationDirective::Strict);
        let taken = api.patch(&name, &params, &Patch::Apply(&object)).await;
        taken.with_context(|| format!("{} {name}", types.kind))?;
    }
    Ok(())
}

/// Checks one capability, no account, and the sockets of the settings.
fn check_capabilities(documents: &[Value]) -> Result<()> {
    let set = documents.iter().find(|document| document["kind"] == "DaemonSet").context("no DaemonSet")?;
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let security = &container["securityContext"];
    ensure!(security["capabilities"] == json!({"drop": ["ALL"], "add": ["NET_ADMIN"]}), "{security}");
    ensure!(security["allowPrivilegeEscalation"] == false && security["readOnlyRootFilesystem"] == true);
    ensure!(pod["automountServiceAccountToken"] == false && pod["hostNetwork"] == true, "{pod}");
    let settings =
        documents.iter().find(|document| document["kind"] == "ConfigMap").context("no ConfigMap")?;
    let settings = settings["data"]["keelson.toml"].as_str().context("no settings")?;
    let settings: toml::Value = toml::from_str(settings)?;
    // O15: the pod networks have no default that would be wrong elsewhere.
    let env = container["env"].as_array().context("no environment")?;
    ensure!(
        env.contains(&json!({"name": "KEELSON_PROXY__CLUSTER_CIDR", "value": "CLUSTER-CIDR"})),
        "{env:?}"
    );
    let defaults = include_str!("../../../../config/keelson.toml");
    let mounts = container["volumeMounts"].as_array().context("no mounts")?;
    let path = |name: &str| {
        mounts.iter().find(|mount| mount["name"] == name).and_then(|mount| mount["mountPath"].as_str())
    };
    for (name, socket) in
        [("endpoints", "[\"unix://{}/endpoints.sock\"]"), ("own", "\"unix://{}/proxy.sock\"")]
    {
        let socket = socket.replace("{}", path(name).with_context(|| format!("no mount {name}"))?);
        ensure!(defaults.contains(&format!("#listen = {socket}")), "{socket} is not the default");
    }
    // O14: conntrack's settings stay as they are on the node, so nothing of its /proc is in the pod.
    for setting in ["conntrack_tcp_timeout_established", "conntrack_tcp_timeout_close_wait"] {
        ensure!(settings["proxy"][setting].as_str() == Some("0s"), "{settings}");
    }
    let volumes = pod["volumes"].as_array().context("no volumes")?;
    let proc = volumes.iter().filter_map(|volume| volume["hostPath"]["path"].as_str());
    ensure!(!proc.clone().any(|path| path.starts_with("/proc")), "{volumes:?}");
    Ok(())
}
