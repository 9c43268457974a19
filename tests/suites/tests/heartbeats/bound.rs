//! E4: credentials that belong to one node. A real API server with exactly the shipped manifests tells what each kind
//! may do to its own node and to another; docs/heartbeats.md has the same tables.

use crate::common::{Role, TestEnv, eventually_slow, manifest_of, on_cluster, quick, run, shared};
use crate::runtime::start_ready_runtime;
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use keelson_cluster::kube::{Bound, Cluster, Identity, NODE_LEASES};
use keelson_cluster::manifests::DAEMON_SET;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::scratch::Scratch;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams,
    ValidationDirective,
};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

const ACCOUNT: &str = "keelson-agent";

/// The status of a response; 200 for every success.
fn code<T>(outcome: kube::Result<T>) -> Result<u16> {
    match outcome {
        Ok(_) => Ok(200),
        Err(kube::Error::Api(status)) => Ok(status.code),
        Err(other) => Err(other).context("no answer"),
    }
}

/// A node with everything that a client could try to write: both Leases, a pod, and an Event of its agent.
pub(crate) async fn furnished(cluster: &Cluster, node: &str) -> Result<()> {
    if cluster.admin.node(node).await?.is_none() {
        cluster.admin.create_node(node, &[]).await?;
    }
    let leases = [node.to_owned(), format!("keelson-{node}")].map(|name| {
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": name, "namespace": NODE_LEASES}, "spec": {"holderIdentity": node}})
    });
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("pod-{node}")}, "spec": {
        "nodeName": node, "automountServiceAccountToken": false, "containers": [{"name": "a", "image": "a"}],
    }});
    let mut event = event(&format!("event-{node}"), node);
    event["apiVersion"] = "v1".into();
    event["kind"] = "Event".into();
    for object in leases.iter().chain([&pod, &event]) {
        cluster.admin.apply(&object.to_string()).await?;
    }
    Ok(())
}

fn event(name: &str, node: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": format!("pod-{node}")},
        "type": "Normal", "reason": "ImagePullQueued", "message": "waits", "count": 1,
        "source": {"component": "keelson", "host": node},
    })
}

/// Requests for a node, and their status. All are dry runs.
pub(crate) async fn tried(client: &Client, node: &str) -> Result<Vec<(&'static str, u16)>> {
    let nodes: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client.clone(), NODE_LEASES);
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let (patch, post, delete) = (
        PatchParams { dry_run: true, ..PatchParams::default() },
        PostParams { dry_run: true, ..PostParams::default() },
        DeleteParams { dry_run: true, ..DeleteParams::default() },
    );
    let condition = json!({"type": "KeelsonStateNotDurable", "status": "False"});
    let status = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    let renewal = Patch::Merge(json!({"spec": {"renewTime": "2026-01-02T03:04:05.000006Z"}}));
    let again = Patch::Merge(json!({"count": 2}));
    let ready = Patch::Strategic(json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}));
    let (own, beside, pod) = (node.to_owned(), format!("keelson-{node}"), format!("pod-{node}"));
    let old_event = format!("event-{node}");
    let new_event: Event = serde_json::from_value(event(&format!("new-event-{node}"), node))?;
    Ok(vec![
        ("status of the Node", code(nodes.patch_status(node, &patch, &status).await)?),
        ("the Node", code(nodes.delete(node, &delete).await)?),
        ("Lease NODE", code(leases.patch(&own, &patch, &renewal).await)?),
        ("Lease keelson-NODE", code(leases.patch(&beside, &patch, &renewal).await)?),
        ("delete Lease keelson-NODE", code(leases.delete(&beside, &delete).await)?),
        ("create an Event", code(events.create(&post, &new_event).await)?),
        ("patch an Event", code(events.patch(&old_event, &patch, &again).await)?),
        ("delete an Event", code(events.delete(&old_event, &delete).await)?),
        ("status of a pod", code(pods.patch_status(&pod, &patch, &ready).await)?),
        ("delete a pod", code(pods.delete(&pod, &delete).await)?),
    ])
}

/// Names of the allowed requests; all others must be refused with 403.
pub(crate) fn allowed(tried: &[(&'static str, u16)]) -> Result<Vec<&'static str>> {
    for (what, code) in tried {
        ensure!(matches!(code, 200 | 403), "{what}: {code}");
    }
    Ok(tried.iter().filter(|(_, code)| *code == 200).map(|(what, _)| *what).collect())
}

/// Checks what a node's own certificate may do to its node; to another node only what every node may do to all.
pub(crate) async fn is_held_to_its_node_by_the_authorizer(
    client: &Client,
    own: &str,
    other: &str,
) -> Result<()> {
    let to_own = allowed(&tried(client, own).await?)?;
    let expected = [
        "status of the Node",
        "Lease NODE",
        "create an Event",
        "patch an Event",
        "status of a pod",
        "delete a pod",
    ];
    ensure!(to_own == expected, "its own node: {to_own:?}");
    let to_other = allowed(&tried(client, other).await?)?;
    // No API server restricts a node's Events to the node.
    ensure!(to_other == ["create an Event", "patch an Event"], "another node: {to_other:?}");
    Ok(())
}

/// The credentials of node A, of each kind except the certificate that the agent requests itself (`bootstrap.rs`).
#[test]
fn e4_credentials_of_one_node_reach_no_other() -> Result<()> {
    on_cluster(async |cluster| {
        let scratch = Scratch::new()?;
        let (a, b, account) = ("bound-a", "bound-b", "bound");
        furnished(cluster, a).await?;
        furnished(cluster, b).await?;
        cluster.admin.apply(&manifest_of(account)).await?;

        let kubelet = cluster.node(&scratch, a).await?;
        eventually_slow("the Node authorizer knows the pod", || async {
            is_held_to_its_node_by_the_authorizer(&kubelet.client().await?, a, b).await
        })
        .await?;

        let unbound = cluster.service_account(&scratch, "kube-system", account).await?;
        // Without the policy it would be allowed.
        eventually_slow(
            "the policy is in force: a token that is bound to no node writes nothing",
            || async {
                for node in [a, b] {
                    let allowed = allowed(&tried(&unbound.client().await?, node).await?)?;
                    ensure!(allowed.is_empty(), "{allowed:?}");
                }
                Ok(())
            },
        )
        .await?;
        for identity in [
            cluster.companion(&scratch, account, a).await?,
            cluster.companion_of_node(&scratch, account, a).await?,
        ] {
            let client = identity.client().await?;
            let expected = ["status of the Node", "Lease keelson-NODE", "create an Event", "patch an Event"];
            eventually_slow("the account has its rights", || async {
                let to_own = allowed(&tried(&client, a).await?)?;
                ensure!(to_own == expected, "its own node: {to_own:?}");
                Ok(())
            })
            .await?;
            let to_other = allowed(&tried(&client, b).await?)?;
            ensure!(to_other.is_empty(), "another node: {to_other:?}");
            check_token_node(&client, a, b).await?;
        }
        check_foreign_lease_is_refused(cluster, &scratch, account, a).await
    })
}

/// A refusal names the node that the token is bound to.
async fn check_token_node(client: &Client, own: &str, other: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let status = Patch::Strategic(json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}));
    let refused = nodes.patch_status(other, &PatchParams::default(), &status).await;
    let Err(kube::Error::Api(status)) = refused else { anyhow::bail!("it was not refused: {refused:?}") };
    let expected = format!("Node {other} is not the node that the token is bound to, {own}");
    ensure!(status.message.contains(&expected), "{}", status.message);
    Ok(())
}

/// Nor a Lease in any other namespace.
async fn check_foreign_lease_is_refused(
    cluster: &Cluster,
    scratch: &Scratch,
    account: &str,
    node: &str,
) -> Result<()> {
    let by_token = cluster.companion(scratch, account, node).await?.client().await?;
    let by_certificate = cluster.node(scratch, node).await?.client().await?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    for (client, name, namespace, expected) in [
        (&by_token, "keelson-nowhere", NODE_LEASES, 403),
        (&by_token, "nowhere", NODE_LEASES, 403),
        (&by_token, "keelson-bound-a", "default", 403),
        // It exists: only that prevents the request.
        (&by_token, "keelson-bound-a", NODE_LEASES, 409),
        (&by_certificate, "keelson-nowhere", NODE_LEASES, 403),
        (&by_certificate, "keelson-bound-a", NODE_LEASES, 403),
        (&by_certificate, "bound-a", NODE_LEASES, 409),
    ] {
        let lease: Lease = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
        let code = code(leases.create(&dry, &lease).await)?;
        ensure!(code == expected, "creating the Lease {namespace}/{name}: {code}");
    }
    Ok(())
}

/// What the kubelet's certificate may read: the table of docs/heartbeats.md.
#[test]
fn e4_what_a_kubelets_certificate_may_read() -> Result<()> {
    on_cluster(async |cluster| {
        let scratch = Scratch::new()?;
        let name = "reader";
        cluster.admin.create_node(name, &[]).await?;
        let client = cluster.node(&scratch, name).await?.client().await?;
        let own = ListParams::default().fields(&format!("metadata.name={name}"));
        let of_node = ListParams::default().fields(&format!("spec.nodeName={name}"));
        let all = ListParams::default();
        let cidrs = ApiResource::from_gvk(&GroupVersionKind::gvk("networking.k8s.io", "v1", "ServiceCIDR"));
        let found = [
            ("own Node", code(Api::<Node>::all(client.clone()).list(&own).await)?),
            ("own pods", code(Api::<Pod>::all(client.clone()).list(&of_node).await)?),
            ("Services", code(Api::<Service>::all(client.clone()).list(&all).await)?),
            ("EndpointSlices", code(Api::<EndpointSlice>::all(client.clone()).list(&all).await)?),
            ("ServiceCIDRs", code(Api::<DynamicObject>::all_with(client.clone(), &cidrs).list(&all).await)?),
            (
                "Lease keelson-NODE",
                code(Api::<Lease>::namespaced(client, NODE_LEASES).get("keelson-reader").await)?,
            ),
        ];
        // Another test gives nodes the last two of these with node.yaml, perhaps on this cluster; so the assertion
        // covers what needs no manifest, and the Lease, which no manifest gives.
        let may: Vec<_> = found.iter().filter(|(_, code)| *code == 200).map(|(what, _)| *what).collect();
        for what in ["own Node", "own pods", "Services"] {
            ensure!(may.contains(&what), "{what}: {found:?}");
        }
        ensure!(!may.contains(&"Lease keelson-NODE"), "{found:?}");
        Ok(())
    })
}

/// A companion with the kubelet's certificate, by files and by a kubeconfig, while the kubelet rotates it.
#[test]
fn e4_a_companion_uses_the_kubelets_certificate() -> Result<()> {
    on_cluster(async |cluster| {
        for (name, by_file) in [("kubelets-file", true), ("kubelets-conf", false)] {
            let scratch = Scratch::new()?;
            cluster.admin.create_node(name, &[]).await?;
            let mut identity = cluster.node(&scratch, name).await?;
            let runtime = start_ready_runtime(&scratch)?;
            let mut agent =
                Agent::new(&scratch, &runtime.endpoint(), &with_kubelet(cluster, &identity, name, by_file))?;
            agent.start_live().await?;
            for status in ["True", "False", "True"] {
                set_condition(&agent, status).await?;
                cluster.admin.await_condition(name, "KernelDeadlock", status).await?;
                identity.rotate().await?;
            }
            let node = agent.json("/debug/node").await?;
            let shown = &node["credentials"][0];
            ensure!(shown["user"] == format!("system:node:{name}"), "{node}");
            ensure!(shown["state"] == "healthy" && node["credential_warnings"] == json!([]), "{node}");
            let ready = agent.http_get("/readyz?verbose").await?.text();
            ensure!(ready.contains("[+]credentials ok\n"), "{ready}");
            let log = agent.log()?;
            ensure!(log.contains("credentials reloaded"), "it was not read again");
            ensure!(!log.contains("cannot read the credentials"), "a rotation was seen half");
            let unauthorized =
                cluster.api.audit(|event| event.user == identity.user() && event.code == Some(401))?;
            ensure!(unauthorized.is_empty(), "{unauthorized:?}");
        }
        Ok(())
    })
}

fn with_kubelet(cluster: &Cluster, identity: &Identity, name: &str, by_file: bool) -> Settings {
    let settings = quick().set("agent.node_name", name).set("endpoints.source", "off");
    if !by_file {
        return settings.set("kube.kubeconfig", identity.kubeconfig().display().to_string());
    }
    let file = identity.credential_file().display().to_string();
    settings
        .set("kube.server", cluster.api.endpoint())
        .set("kube.certificate_authority", cluster.pki().ca_file().display().to_string())
        .set("kube.client_certificate", file.as_str())
        .set("kube.client_key", file.as_str())
}

async fn set_condition(agent: &Agent, status: &str) -> Result<()> {
    let set = ["node", "set-condition", "KernelDeadlock", status, "--reason", "Test"];
    agent.keelson(&set).await?.success().map(drop)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).with_context(|| path.display().to_string())
}

/// A token that others can read is reported with the remedy; one that everybody can write is no longer used.
#[test]
fn e4_file_modes_of_secrets_are_reported() -> Result<()> {
    on_cluster(async |cluster| {
        let mut env = TestEnv::new(cluster, "modes", Role::Companion, quick()).await?;
        let file = env.identity.credential_file();
        set_mode(&file, 0o644)?;
        env.agent.start_again().await?;
        let advice = format!("run: chmod 600 {}", file.display());
        eventually_slow("the file mode is reported", || async {
            let ready = env.readyz().await?;
            ensure!(ready.status.is_success(), "not ready: {}", ready.text());
            let ready = ready.text();
            let line =
                ready.lines().find(|line| line.starts_with("[+]credentials ok: ")).context("not reported")?;
            ensure!(line.contains("(mode 0644)") && line.contains(&advice), "{line}");
            let node = env.agent.output(&["node"]).await?;
            ensure!(node.contains("warning: the token file") && node.contains(&advice), "{node}");
            ensure!(env.agent.log()?.contains(&advice), "it is not in the log");
            Ok(())
        })
        .await?;
        set_mode(&file, 0o600)?;
        eventually_slow("nothing is reported any more", || async {
            let ready = env.readyz().await?.text();
            ensure!(ready.contains("[+]credentials ok\n"), "{ready}");
            Ok(())
        })
        .await?;
        set_mode(&file, 0o666)?;
        eventually_slow("the file is refused", || async {
            let ready = env.readyz().await?.text();
            let line = ready
                .lines()
                .find(|line| line.starts_with("[-]credentials failed"))
                .context("not reported")?;
            ensure!(line.contains("writable by every user (mode 0666)"), "{line}");
            Ok(())
        })
        .await?;
        set_mode(&file, 0o600)?;
        eventually_slow("it is used again", || async {
            let ready = env.readyz().await?.text();
            ensure!(ready.contains("[+]credentials ok\n"), "{ready}");
            Ok(())
        })
        .await
    })
}

/// The expiry of credentials is shown, in metrics and, late in their life, as a warning.
#[test]
fn e4_the_end_of_credentials_is_shown_and_counted() -> Result<()> {
    on_cluster(async |cluster| {
        let metric = "keelson_kube_credentials_expiration_timestamp_seconds";
        // A token: healthy, bound to its node, and no part of it in any output.
        let env = TestEnv::started(cluster, "token-end", Role::Companion, quick()).await?;
        let now = unix_now();
        eventually_slow("the token is shown", || async {
            let node = env.node_json().await?;
            let shown = &node["credentials"][0];
            ensure!(shown["kind"] == "token" && shown["state"] == "healthy", "{node}");
            ensure!(shown["bound_node"] == "token-end" && shown["user"] == env.identity.user(), "{node}");
            let left = env.metric(&format!("{metric}{{kind=\"token\"}}")).await? - now;
            ensure!((3_000.0..=3_700.0).contains(&left), "{left} s");
            Ok(())
        })
        .await?;
        let token = fs::read_to_string(env.identity.credential_file())?;
        let reported = [
            env.agent.log()?,
            env.readyz().await?.text(),
            env.agent.output(&["node", "-o", "json"]).await?,
            env.agent.http_get("/metrics").await?.text(),
        ];
        for part in token.trim().split('.') {
            ensure!(!reported.iter().any(|text| text.contains(part)), "a part of the token was shown");
        }

        let mut env = TestEnv::new(cluster, "certificate-end", Role::Node, quick()).await?;
        env.identity.rotate_for(Duration::from_secs(3_600))?;
        env.agent.start_again().await?;
        eventually_slow("the certificate is warned of", || async {
            let node = env.agent.output(&["node"]).await?;
            ensure!(node.contains("Identity: system:node:certificate-end, client certificate "), "{node}");
            ensure!(node.contains("EXPIRES in "), "{node}");
            let ready = env.readyz().await?;
            ensure!(ready.status.is_success(), "not ready: {}", ready.text());
            ensure!(ready.text().contains("and has not been renewed"), "{}", ready.text());
            ensure!(env.agent.log()?.contains("and has not been renewed"), "it is not in the log");
            let left = env.metric(&format!("{metric}{{kind=\"client_certificate\"}}")).await? - unix_now();
            ensure!((3_000.0..=3_600.0).contains(&left), "{left} s");
            Ok(())
        })
        .await?;
        env.identity.rotate().await?;
        eventually_slow("the renewed one is healthy", || async {
            let node = env.node_json().await?;
            ensure!(node["credentials"][0]["state"] == "healthy", "{node}");
            let ready = env.readyz().await?.text();
            ensure!(ready.contains("[+]credentials ok\n"), "{ready}");
            Ok(())
        })
        .await
    })
}

fn unix_now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Every field of the DaemonSet is known, its settings are valid, and it needs few rights.
#[test]
fn e4_the_agent_manifest_is_valid_and_its_token_is_short_lived() -> Result<()> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(DAEMON_SET).context("no YAML")?;
    let find =
        |kind: &str| documents.iter().find(|document| document["kind"] == kind).context(kind.to_owned());
    let pod = &find("DaemonSet")?["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let security = &container["securityContext"];
    ensure!(security["capabilities"] == json!({"drop": ["ALL"]}), "{security}");
    ensure!(security["allowPrivilegeEscalation"] == false && security["readOnlyRootFilesystem"] == true);
    ensure!(pod["serviceAccountName"] == ACCOUNT && pod["automountServiceAccountToken"] == false, "{pod}");
    let volumes = pod["volumes"].as_array().context("no volumes")?;
    let api = volumes.iter().find(|volume| volume["name"] == "api").context("no token")?;
    let token = &api["projected"]["sources"][0]["serviceAccountToken"];
    ensure!(*token == json!({"path": "token", "expirationSeconds": 3600}), "{token}");
    let settings = find("ConfigMap")?["data"]["keelson.toml"].as_str().context("no settings")?;
    let scratch = Scratch::new()?;
    let file = scratch.path().join("keelson.toml");
    fs::write(&file, settings)?;
    run(async {
        let program = keelson_harness::peers::keelson()?;
        let mut check = tokio::process::Command::new(program);
        let checked = check.args(["config", "check", "--config"]).arg(&file).output().await?;
        ensure!(checked.status.success(), "{checked:?}");
        let shared = shared().await?;
        for document in documents.iter().cloned() {
            let object: DynamicObject = serde_json::from_value(document)?;
            let types = object.types.clone().context("it has a kind")?;
            let resource = ApiResource::from_gvk(&GroupVersionKind::try_from(&types)?);
            let api: Api<DynamicObject> =
                Api::namespaced_with(shared.cluster.admin.client(), "kube-system", &resource);
            let mut params = PatchParams { dry_run: true, ..PatchParams::apply("keelson-tests") };
            params.field_validation = Some(ValidationDirective::Strict);
            let name = object.metadata.name.clone().context("it has a name")?;
            api.patch(&name, &params, &Patch::Apply(&object)).await.with_context(|| name.clone())?;
        }
        Ok(())
    })
}

/// A token that is bound to a Node becomes invalid with the Node.
#[test]
fn e4_a_token_of_a_node_ends_with_the_node() -> Result<()> {
    on_cluster(async |cluster| {
        let (name, namespace) = ("ends", "kube-system");
        cluster.admin.create_node(name, &[]).await?;
        cluster.admin.ensure_service_account(namespace, name).await?;
        let bound = Bound::Node(name.to_owned());
        let token = cluster.admin.token(namespace, name, Some(&bound)).await?;
        let mut config = kube::Config::new(cluster.api.endpoint().parse()?);
        let pem = fs::read(cluster.pki().ca_file())?;
        let authority: rustls::pki_types::CertificateDer<'static> =
            rustls::pki_types::pem::PemObject::from_pem_slice(&pem).context("no certificate")?;
        config.root_cert = Some(vec![authority.to_vec()]);
        config.auth_info.token = Some(token.into());
        config.default_retry = false;
        let nodes: Api<Node> = Api::all(Client::try_from(config)?);
        // Authenticated, and without rights.
        eventually_slow("the token is known", || async {
            let code = code(nodes.get(name).await)?;
            ensure!(code == 403, "{code}");
            Ok(())
        })
        .await?;
        cluster.admin.delete_node(name).await?;
        eventually_slow("the token is worth nothing", || async {
            let code = code(nodes.get(name).await)?;
            ensure!(code == 401, "{code}");
            Ok(())
        })
        .await
    })
}
