//! The Helm chart, and the Kustomize bases that are made of it. In: the real helm, kubectl and kube-apiserver. That a node
//! works with what the chart installs is shown by `make cluster-check`.

use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::Cluster;
use keelson_harness::peers;
use keelson_harness::scratch::Scratch;
use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Needed by every installation with the proxy.
const NETWORK: &[&str] = &["--set", "proxy.clusterCIDR={10.244.0.0/16}"];

/// Bases of packaging/kustomize: each has one manifest of its name, made from the chart's template of its name.
const BASES: [&str; 6] = ["bootstrap", "companion", "companion-lease", "daemonset", "node", "proxy"];

/// Value sets that an API server must accept.
const ACCEPTED: [(&str, &[&str]); 8] = [
    ("defaults", NETWORK),
    ("both families", &["--set", "proxy.clusterCIDR={10.244.0.0/16,fd00:10:244::/56}"]),
    ("local pods by the Node", &["--set", "proxy.detectLocalMode=NodeCIDR"]),
    ("rights only", &["--set", "proxy.enabled=false"]),
    ("ebpf", &["--set", "proxy.clusterCIDR={10.244.0.0/16},proxy.backend=ebpf"]),
    (
        "auto with ebpf",
        &[
            "--set",
            "proxy.clusterCIDR={10.244.0.0/16},proxy.backend=auto",
            "--set",
            "proxy.ebpf.allowed=true,proxy.ebpf.cgroupFolder=/sys/fs/cgroup/unified",
        ],
    ),
    (
        "SELinux, conntrack, node ports, a digest",
        &[
            "--set-json",
            r#"proxy={"clusterCIDR":["10.1.0.0/16"],"manageConntrack":true,"seLinuxOptions":{"type":"spc_t"},"nodePortAddresses":["primary"],"refuseBeside":{"k8s-app":null}}"#,
            "--set",
            "image.digest=sha256:0000000000000000000000000000000000000000000000000000000000000000",
            "--set",
            "image.pullSecrets={one}",
        ],
    ),
    (
        "everything",
        &[
            "--set",
            "proxy.clusterCIDR={10.244.0.0/16},proxy.metricsBindAddress=0.0.0.0:10249",
            "--set",
            "agent.enabled=true,agent.http=0.0.0.0:9440,apiServer.host=10.0.0.1",
            "--set",
            "rbac.companionLease=true,rbac.bootstrap=true",
            "--set",
            "podMonitor.enabled=true,prometheusRule.enabled=true,networkPolicy.enabled=true",
            "--set-json",
            r#"networkPolicy.from=[{"namespaceSelector":{"matchLabels":{"monitoring":"yes"}}}]"#,
            "--set-json",
            r#"agent.affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"x","operator":"Exists"}]}]}}}"#,
        ],
    ),
];

/// Values, and what the message names.
const REFUSED: [(&[&str], &str); 15] = [
    (&[], "/proxy/clusterCIDR"),
    (&["--set", "proxy.clusterCIDR={10.244.0.0}"], "/proxy/clusterCIDR"),
    (&["--set", "proxy.clusterCIDR={10.244.0.0/16,10.245.0.0/16,10.246.0.0/16}"], "/proxy/clusterCIDR"),
    (&["--set", "proxy.clusterCIDR=10.244.0.0/16"], "/proxy/clusterCIDR"),
    (&["--set", "proxy.clusterCidr={10.244.0.0/16}"], "clusterCidr"),
    (&["--set-json", r#"proxy={"nodeSelector":null}"#], "/proxy"),
    (&["--set", "proxy.backend=bpf"], "/proxy/backend"),
    (&["--set", "proxy.backend=ebpf,proxy.ebpf.cgroupFolder=sys/fs/cgroup"], "/proxy/ebpf/cgroupFolder"),
    (&["--set", "proxy.endpointsFolder=/run/keelson-endpoints/"], "/proxy/endpointsFolder"),
    (&["--set", "proxy.metricsBindAddress=10249"], "/proxy/metricsBindAddress"),
    // The probes ask 127.0.0.1.
    (&["--set", "agent.enabled=true,apiServer.host=10.0.0.1,agent.http=10.0.0.7:9440"], "/agent/http"),
    (&["--set", "image.digest=latest"], "/image/digest"),
    (&["--set", "agent.enabled=true"], "/apiServer"),
    (&["--set", "agent.enabled=true,apiServer.host=10.0.0.1,rbac.companion=false"], "rbac.companion"),
    (&["--set", "podMonitor.enabled=true"], "proxy.metricsBindAddress"),
];

/// The oldest supported Kubernetes. `helm template` asks no API server for it.
const OLDEST: &str = "1.31.0";

fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

fn finish(mut command: Command, stdin: &str) -> Result<Output> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    child.stdin.take().context("a piped stdin is there")?.write_all(stdin.as_bytes())?;
    Ok(child.wait_with_output()?)
}

fn success(command: Command, stdin: &str) -> Result<String> {
    let shown = format!("{command:?}");
    let output = finish(command, stdin)?;
    ensure!(output.status.success(), "{shown}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn helm(args: &[&str]) -> Result<Command> {
    let mut command = Command::new(peers::chart_tool("helm")?);
    // Its own folders, of which it needs none.
    command.args(args).env("HELM_CACHE_HOME", "/nonexistent").env("HELM_CONFIG_HOME", "/nonexistent");
    Ok(command)
}

fn template(values: &[&str]) -> Result<Command> {
    let chart = packaging("chart/keelson").display().to_string();
    let mut args =
        vec!["template", "keelson", &chart, "--namespace", "kube-system", "--kube-version", OLDEST];
    args.extend(values);
    helm(&args)
}

fn documents(yaml: &str) -> Result<Vec<Value>> {
    let all: Vec<Value> = serde_saphyr::from_multiple(yaml).with_context(|| format!("no YAML:\n{yaml}"))?;
    Ok(all.into_iter().filter(|document| !document.is_null()).collect())
}

#[test]
fn the_chart_has_no_lint() -> Result<()> {
    let chart = packaging("chart/keelson").display().to_string();
    let mut args = vec!["lint", "--strict", &chart];
    args.extend(NETWORK);
    success(helm(&args)?, "").map(drop)
}

#[test]
fn values_that_would_do_harm_are_refused() -> Result<()> {
    for (values, named) in REFUSED {
        // What a case is about is said last, and wins.
        let needs_network = !named.contains("clusterC");
        let all: Vec<&str> =
            if needs_network { NETWORK } else { &[] }.iter().chain(values).copied().collect();
        let output = finish(template(&all)?, "")?;
        let message = String::from_utf8_lossy(&output.stderr).replace('.', "/").replace("'", "");
        ensure!(!output.status.success(), "{values:?} is accepted");
        ensure!(message.contains(&named.replace('.', "/")), "{values:?}: {message}");
    }
    Ok(())
}

/// The manifests are the chart's, word for word. `KEELSON_BLESS=1` writes them again.
#[test]
fn manifests_are_made_from_the_chart() -> Result<()> {
    let values = packaging("kustomize/values.yaml").display().to_string();
    let mut changed = Vec::new();
    for base in BASES {
        let only = format!("templates/{base}.yaml");
        let args = ["-f", &values, "--skip-schema-validation", "--show-only", &only];
        let made = success(template(&args)?, "")?;
        let made: String = made
            .lines()
            .skip_while(|line| *line == "---" || line.starts_with("# Source: "))
            .filter(|line| !line.starts_with("# Source: "))
            .map(|line| format!("{line}\n"))
            .collect();
        let file = packaging(&format!("kustomize/{base}/{base}.yaml"));
        if fs::read_to_string(&file).ok().as_deref() != Some(&made) {
            if std::env::var_os("KEELSON_BLESS").is_some() {
                fs::write(&file, made).with_context(|| format!("cannot write {}", file.display()))?;
            }
            changed.push(file.display().to_string());
        }
    }
    ensure!(changed.is_empty(), "not as the chart makes them, run it with KEELSON_BLESS=1: {changed:?}");
    Ok(())
}

#[test]
fn kustomizations_can_be_built() -> Result<()> {
    for (base, kinds) in [
        ("bootstrap", &["ClusterRoleBinding"; 3][..]),
        ("companion-lease", &["Role", "RoleBinding"]),
        ("node", &["ClusterRole", "ClusterRoleBinding"]),
        ("proxy", &["ConfigMap", "DaemonSet"]),
        (
            "daemonset",
            &[
                "ServiceAccount",
                "ClusterRole",
                "ClusterRoleBinding",
                "ConfigMap",
                "ValidatingAdmissionPolicy",
                "ValidatingAdmissionPolicyBinding",
                "DaemonSet",
            ],
        ),
    ] {
        let mut command = Command::new(peers::kubernetes("kubectl")?);
        command.arg("kustomize").arg(packaging("kustomize").join(base));
        let built = documents(&success(command, "")?)?;
        let found: Vec<&str> = built.iter().filter_map(|object| object["kind"].as_str()).collect();
        ensure!(found == kinds, "{base} has {found:?}");
    }
    Ok(())
}

/// The settings in a ConfigMap of these objects, and what `keelson config check` says about them.
fn check_settings(objects: &[Value], env: &[(&str, &str)]) -> Result<Vec<Output>> {
    let scratch = Scratch::new()?;
    let maps = objects.iter().filter(|object| object["kind"] == "ConfigMap");
    maps.map(|map| {
        let file = scratch.path().join("keelson.toml");
        fs::write(&file, map["data"]["keelson.toml"].as_str().context("a ConfigMap without settings")?)?;
        let mut command = Command::new(peers::keelson()?);
        command.args(["config", "check", "--config"]).arg(&file).envs(env.iter().copied());
        finish(command, "")
    })
    .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_accepts_every_object() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = Cluster::start(&scratch).await?;
    for (name, values) in ACCEPTED {
        let yaml = success(template(values)?, "").context(name)?;
        let objects = documents(&yaml)?;
        for output in check_settings(&objects, &[])? {
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{name}: keelson refuses the settings: {said}");
        }
        let (monitoring, others): (Vec<_>, Vec<_>) =
            objects.into_iter().partition(|object| object["apiVersion"] == "monitoring.coreos.com/v1");
        for rules in monitoring.iter().filter(|object| object["kind"] == "PrometheusRule") {
            let groups = rules["spec"]["groups"].as_array().context("a PrometheusRule without groups")?;
            ensure!(groups.len() > 3, "the chart has only {} groups of rules", groups.len());
        }
        let stream =
            |objects: &[Value]| -> String { objects.iter().map(|it| format!("---\n{it}\n")).collect() };
        let mut command = Command::new(peers::kubernetes("kubectl")?);
        command.arg("--kubeconfig").arg(cluster.admin_kubeconfig());
        command.args(["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]);
        let accepted = success(command, &stream(&others)).context(name)?;
        ensure!(accepted.lines().count() == others.len(), "{name}: {accepted}");
        ensure!(others.len() >= if name == "rights only" { 7 } else { 9 }, "{name}: {accepted}");

        let strict =
            success(Command::new(peers::chart_tool("strict")?), &stream(&monitoring)).context(name)?;
        let expected = if name == "everything" { 3 } else { 0 };
        ensure!(strict.lines().count() == expected && monitoring.len() == expected, "{name}: {strict}");
    }
    Ok(())
}

/// Capabilities and folders of the backend ebpf are those that docs/ebpf.md names, and no other container has them.
#[test]
fn only_ebpf_has_the_rights_of_ebpf() -> Result<()> {
    const USUAL: &[&str] = &["NET_ADMIN"];
    const MORE: &[&str] = &["NET_ADMIN", "BPF", "SYS_ADMIN"];
    for (values, capabilities) in [
        ("proxy.backend=nft", USUAL),
        ("proxy.backend=nft,proxy.ebpf.allowed=true", MORE),
        ("proxy.backend=auto", USUAL),
        ("proxy.backend=auto,proxy.ebpf.allowed=true", MORE),
        ("proxy.backend=ebpf", MORE),
    ] {
        let all: Vec<&str> = NETWORK.iter().copied().chain(["--set", values]).collect();
        let objects = documents(&success(template(&all)?, "")?)?;
        let set = objects.iter().find(|object| object["kind"] == "DaemonSet").context("no DaemonSet")?;
        let pod = &set["spec"]["template"]["spec"];
        let proxy = &pod["containers"][0];
        ensure!(
            proxy["securityContext"]["capabilities"]["add"] == serde_json::json!(capabilities),
            "{values}: {proxy}"
        );
        let folders: Vec<&str> =
            pod["volumes"].as_array().into_iter().flatten().filter_map(|it| it["name"].as_str()).collect();
        let has = |name| folders.contains(&name);
        let is_more = capabilities == MORE;
        ensure!(["bpf", "cgroup", "netns"].into_iter().all(|name| has(name) == is_more), "{values}: {pod}");
    }
    Ok(())
}

/// A setting that each cluster has to make is refused while it is missing.
#[test]
fn the_proxys_base_does_not_guess_the_pod_networks() -> Result<()> {
    let objects = documents(&fs::read_to_string(packaging("kustomize/proxy/proxy.yaml"))?)?;
    let set = objects.iter().find(|object| object["kind"] == "DaemonSet").context("no DaemonSet")?;
    let cidr = &set["spec"]["template"]["spec"]["containers"][0]["env"][0];
    let (Some(name), Some(value)) = (cidr["name"].as_str(), cidr["value"].as_str()) else {
        bail!("the overlay in its kustomization replaces another variable than {cidr}")
    };
    ensure!(name == "KEELSON_PROXY__CLUSTER_CIDR", "{cidr}");
    for output in check_settings(&objects, &[(name, value)])? {
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && said.contains("cluster_cidr"), "{said}");
    }
    for output in check_settings(&objects, &[(name, "10.244.0.0/16")])? {
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
