//! E4: the shipped DaemonSet as a real pod. The DaemonSet controller makes the pod from
//! packaging/kustomize/daemonset, a stock kubelet runs it, mounts its token, and probes it. The only changes to
//! the manifest are the two places it marks, the image, and the paths and the port of the node, which this machine may
//! use itself.

use crate::common::{ACCOUNT, on_cluster};
use crate::kubectl::asks_by_exec;
use crate::test_env::pod_node;
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Binding, Pod};
use keelson_cluster::kube::{Cluster, ControllerOptions, KubeletOptions};
use keelson_cluster::manifests::DAEMON_SET;
use keelson_harness::containerd::Kind;
use keelson_harness::images::ImageSpec;
use keelson_harness::peers;
use keelson_harness::registry::Access;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, free_port, http_get};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};
use std::path::Path;

/// The parts of the manifest that are specific to the node.
struct Place<'a> {
    node: &'a str,
    image: &'a str,
    port: u16,
    folder: &'a Path,
    runtime: &'a Path,
    server: &'a str,
}

impl Place<'_> {
    fn manifest(&self) -> Result<String> {
        let mut documents: Vec<Value> = serde_saphyr::from_multiple(DAEMON_SET).context("no YAML")?;
        let [settings, set] = &mut documents[..] else { anyhow::bail!("the manifest has two documents") };
        let socket = self.runtime.file_name().context("a socket has a name")?.display();
        let toml = settings["data"]["keelson.toml"].as_str().context("the settings")?;
        let toml = toml
            .replace("127.0.0.1:9440", &format!("127.0.0.1:{}", self.port))
            .replace("containerd.sock", &socket.to_string());
        settings["data"]["keelson.toml"] = json!(format!("{toml}[endpoints]\nwatch = \"always\"\n"));
        let pod = &mut set["spec"]["template"]["spec"];
        pod["nodeSelector"] = json!({"kubernetes.io/hostname": self.node});
        for volume in pod["volumes"].as_array_mut().context("volumes")? {
            let name = volume["name"].as_str().unwrap_or_default().to_owned();
            let path = match name.as_str() {
                "runtime" => self.runtime.parent().context("a socket is in a folder")?.to_owned(),
                "state" | "sockets" | "endpoints" => self.folder.join(name),
                _ => continue,
            };
            volume["hostPath"]["path"] = json!(path);
        }
        let container = &mut pod["containers"][0];
        container["image"] = json!(self.image);
        for probe in ["livenessProbe", "readinessProbe"] {
            container[probe]["httpGet"]["port"] = json!(self.port);
            container[probe]["periodSeconds"] = json!(1);
        }
        let (host, port) = self.server.rsplit_once(':').context("an address has a port")?;
        let env = container["env"].as_array_mut().context("the environment")?;
        for (name, value) in [("KUBERNETES_SERVICE_HOST", host), ("KUBERNETES_SERVICE_PORT", port)] {
            let variable = env.iter_mut().find(|variable| variable["name"] == name);
            variable.with_context(|| format!("no variable {name}"))?["value"] = json!(value);
        }
        Ok(documents.iter().map(|document| format!("{document}\n---\n")).collect())
    }
}

fn pods(cluster: &Cluster) -> Api<Pod> {
    cluster.admin.pods("kube-system")
}

/// Waits for a pod of the DaemonSet that is not terminating.
async fn made(cluster: &Cluster) -> Result<(String, String)> {
    eventually(PATIENCE, "the DaemonSet controller makes a pod", || async {
        let of_set = ListParams::default().labels("app.kubernetes.io/name=keelson-agent");
        let found = pods(cluster).list(&of_set).await?.items;
        let pod = found.into_iter().find(|pod| pod.metadata.deletion_timestamp.is_none());
        let meta = pod.context("there is none")?.metadata;
        Ok((meta.name.context("a name")?, meta.uid.context("a uid")?))
    })
    .await
}

/// Binds a pod to a node as the scheduler does.
async fn bind(cluster: &Cluster, pod: &str, node: &str) -> Result<()> {
    let binding: Binding = serde_json::from_value(json!({
        "metadata": {"name": pod}, "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }))?;
    let binding = serde_json::to_vec(&binding)?;
    let url = format!("/api/v1/namespaces/kube-system/pods/{pod}/binding");
    let request = http::Request::post(url).header("content-type", "application/json").body(binding)?;
    cluster.admin.client().request::<Value>(request).await.map(drop).context("cannot bind the pod")
}

async fn is_ready(cluster: &Cluster, pod: &str) -> Result<()> {
    eventually(2 * PATIENCE, "the kubelet calls the pod ready", || async {
        let status = pods(cluster).get(pod).await?.status.context("no status")?;
        let conditions = status.conditions.clone().unwrap_or_default();
        let ready = conditions.iter().any(|it| it.type_ == "Ready" && it.status == "True");
        ensure!(ready, "it is {status:?}");
        Ok(())
    })
    .await
}

#[test]
fn e4_the_shipped_daemon_set_runs_as_a_pod_and_writes_to_its_own_node() -> Result<()> {
    on_cluster(async |cluster| {
        // The API server connects to the kubelet by this name, for exec.
        let (name, scratch) = ("localhost", Scratch::new()?);
        let folder = scratch.dir("d0")?;
        let node = pod_node(scratch, &folder, Kind::V2, Access::Anonymous).await?;
        let image = ImageSpec::with_libraries("keelson", &[(&peers::keelson()?, "usr/bin/keelson")])?;
        let image = image.push(&node.registry).await?;
        let ca = cluster.pki().ca_file().display().to_string();
        let controllers = ControllerOptions {
            controllers: ["daemonset-controller", "root-ca-certificate-publisher-controller"]
                .map(str::to_owned)
                .into(),
            args: vec![format!("--root-ca-file={ca}")],
            ..ControllerOptions::default()
        };
        let _controllers = cluster.controllers(&node.scratch, &controllers).await?;
        let kubelet = cluster.kubelet(&node.scratch, name, &node.runtime, &KubeletOptions::default()).await?;
        cluster.admin.await_condition(name, "Ready", "True").await?;

        let runtime = node.runtime.endpoint();
        let place = Place {
            node: name,
            image: &node.name(&image),
            port: free_port()?,
            folder: &node.scratch.dir("host")?,
            runtime: Path::new(runtime.trim_start_matches("unix://")),
            server: cluster.api.address(),
        };
        cluster.admin.apply(&place.manifest()?).await?;
        let (first, uid) = made(cluster).await?;
        bind(cluster, &first, name).await?;
        let says = || format!("the kubelet reports {}", kubelet.log().unwrap_or_default());
        is_ready(cluster, &first).await.with_context(says)?;

        // Its own conditions on its own Node, with a token that is bound to the pod.
        for kind in ["ImagePullsStalled", "ServiceEndpointsStale", "KeelsonStateNotDurable"] {
            cluster.admin.await_condition(name, kind, "False").await?;
        }
        let url = format!("http://127.0.0.1:{}/debug/node", place.port);
        let shown: Value = serde_json::from_str(&http_get(&url).await?.success()?.text())?;
        let token = &shown["credentials"][0];
        ensure!(token["user"] == format!("system:serviceaccount:kube-system:{ACCOUNT}"), "{shown}");
        ensure!(token["bound_node"] == name && token["state"] == "healthy", "{shown}");
        ensure!(shown["credential_warnings"] == json!([]), "{shown}");

        asks_by_exec(cluster, &node.scratch, &peers::keelson()?, name, &first).await?;

        // Another pod takes over the state of the first one on the node, with its own token.
        cluster.admin.delete_pod("kube-system", &first).await?;
        let (second, other) = made(cluster).await?;
        ensure!(other != uid, "the controller made no other pod");
        bind(cluster, &second, name).await?;
        is_ready(cluster, &second).await.with_context(says)?;
        // The first one may have answered its probes, at the same port of the node, and end now.
        eventually(PATIENCE, "the second agent shows its credentials", || async {
            let shown: Value = serde_json::from_str(&http_get(&url).await?.success()?.text())?;
            let bound = &shown["credentials"][0]["bound_node"];
            ensure!(*bound == name && shown["lease"]["state"] == "disabled", "{shown}");
            Ok(())
        })
        .await?;

        cluster.admin.delete_pod("kube-system", &second).await
    })
}
