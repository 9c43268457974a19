//! What the real kubeadm does to the kubelet's configuration and to kube-proxy, and what Keelson makes of it.

use crate::node::Node;
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use keelson_harness::documents::{Block, command_blocks};
use keelson_harness::peers;
use kube::Api;
use tokio::process::Command;

pub(crate) const INSTALL: &str = "install -m 0755 target/dist/keelson /usr/bin/keelson\n\
                       install -D -m 0644 packaging/keelson.toml /etc/keelson/keelson.toml\n\
                       systemctl enable --now keelson-cri.socket keelson-debug.socket keelson.service\n";
const UPGRADE: &str = "kubeadm upgrade node phase kubelet-config";

/// O6: an upgrade drops the agent out of the path, doctor says so, and attach and bypass go on from what kubeadm has written.
#[tokio::test(flavor = "multi_thread")]
async fn o6_an_upgrade_rewrites_the_configuration_file() -> Result<()> {
    let node = Node::start().await?;
    let blocks = [
        Block::own(INSTALL, ""),
        Block::own(
            "cp /var/lib/kubelet/config.yaml /run/kubeadms.yaml\nkeelson attach\nkeelson doctor pulls\n",
            "  ok       kubelet: image pulls go through the agent (/var/lib/kubelet/config.yaml)\n  \
             warning  kubeadm: `kubeadm upgrade node` writes /var/lib/kubelet/config.yaml anew, and the agent drops out\n",
        ),
        Block::own("keelson attach\n", "the agent is in the image path; nothing to change\n"),
        Block::own(
            &format!(
                "{UPGRADE}\nif grep keelson /var/lib/kubelet/config.yaml; then exit 1; fi\nif keelson doctor pulls; then exit 1; fi\n"
            ),
            "  FAILED   kubelet: the agent was put into the image path, and /var/lib/kubelet/config.yaml was rewritten ...\n",
        ),
        Block::own(
            "keelson attach\nkeelson doctor pulls\nkeelson bypass\ncmp /var/lib/kubelet/config.yaml /run/kubeadms.yaml\n",
            "  ok       kubelet: image pulls go through the agent (/var/lib/kubelet/config.yaml)\n",
        ),
        Block::own("keelson bypass\n", "the agent is not in the image path; nothing to change\n"),
        // O6: a drop-in directory.
        Block::own(
            &format!(
                "echo 'KUBELET_EXTRA_ARGS=--config-dir=/etc/kubernetes/kubelet.conf.d' >> /etc/default/kubelet\nkeelson attach\n\
                 cmp /var/lib/kubelet/config.yaml /run/kubeadms.yaml\n{UPGRADE}\nkeelson doctor pulls\n"
            ),
            "created /etc/kubernetes/kubelet.conf.d/20-keelson.conf\n  \
             ok       kubelet: image pulls go through the agent (/etc/kubernetes/kubelet.conf.d/20-keelson.conf)\n",
        ),
        // O5: the agent is dead, and its settings are broken.
        Block::own(
            "systemctl disable --now keelson.service keelson-cri.socket keelson-debug.socket\necho '[' >> /etc/keelson/keelson.toml\n\
             if keelson attach; then exit 1; fi\nkeelson bypass\n[ ! -e /etc/kubernetes/kubelet.conf.d/20-keelson.conf ]\n",
            "keelson: the settings cannot be read (keelson config check says why); continuing without them\n\
             removed /etc/kubernetes/kubelet.conf.d/20-keelson.conf\n",
        ),
    ];
    node.run(&blocks).await?.check(&blocks)
}

/// O1, O21: refused without a limit; a cleanup is refused while the kubelet uses the agent.
#[tokio::test(flavor = "multi_thread")]
async fn o1_attach_is_refused_without_a_limit() -> Result<()> {
    let node = Node::alone()?;
    let blocks = [
        Block::own(INSTALL, ""),
        Block::own(
            "keelson limit 0\nif keelson attach; then exit 1; fi\nif grep keelson /var/lib/kubelet/config.yaml; then exit 1; fi\nkeelson limit 2\n",
            "  FAILED   limit: the agent has no limit on parallel image pulls, and the kubelet would lose its own\n\
             keelson: the kubelet is not changed because a check failed\n",
        ),
        Block::own(
            "keelson attach\nsystemctl disable --now keelson.service keelson-cri.socket keelson-debug.socket\n\
             if keelson attach; then exit 1; fi\nif keelson cleanup; then exit 1; fi\n",
            "  FAILED   cri socket: ...\n\
             keelson: the kubelet uses the agent (imageServiceEndpoint in /var/lib/kubelet/config.yaml), and could not pull ...\n",
        ),
        Block::own("keelson bypass\nkeelson cleanup\n", ""),
    ];
    node.run(&blocks).await?.check(&blocks)
}

/// O8: the addon's phase is what drops the patch, and it can be skipped.
#[tokio::test(flavor = "multi_thread")]
async fn o8_the_kube_proxy_addon_drops_the_patch() -> Result<()> {
    let node = Node::start().await?;
    let kube_proxies: Api<DaemonSet> = Api::namespaced(node.cluster()?.admin.client(), "kube-system");
    let patch = command_blocks("docs/install.md")?
        .into_iter()
        .find(|block| block.code.contains("patch daemonset kube-proxy"))
        .context("install.md patches kube-proxy")?;
    let has_affinity = async || -> Result<bool> {
        let spec = kube_proxies.get("kube-proxy").await?.spec.context("a spec")?;
        Ok(spec.template.spec.is_some_and(|pod| pod.affinity.is_some()))
    };
    node.run(std::slice::from_ref(&patch)).await?.check(&[patch])?;
    ensure!(has_affinity().await?, "the patch keeps kube-proxy off");
    let upgrades = documented_upgrades()?;
    for command in &upgrades {
        skipped_phase_exists(command).await.with_context(|| command.clone())?;
    }
    // On a node without a control plane, which leaves out all addons. What kubeadm says of the kernel is about this machine.
    let on_a_node = |command: &String| {
        Block::own(
            &format!("{command} --ignore-preflight-errors=SystemVerification\n"),
            "[upgrade/kubelet-config] ... successfully upgraded!\n",
        )
    };
    let on_a_node: Vec<Block> = upgrades
        .iter()
        .filter(|command| command.starts_with("kubeadm upgrade node "))
        .map(on_a_node)
        .collect();
    ensure!(!on_a_node.is_empty(), "no document upgrades a node: {upgrades:?}");
    // Each stand-in of a node begins with kubeadm's phase addon/kube-proxy, as `kubeadm upgrade apply` runs it.
    node.run(&on_a_node).await?.check(&on_a_node)?;
    ensure!(!has_affinity().await?, "the addon has no affinity");
    Ok(())
}

/// Commands of the documents that upgrade without a phase.
fn documented_upgrades() -> Result<Vec<String>> {
    let mut upgrades = Vec::new();
    for document in ["docs/kubeadm.md", "docs/rollout.md"] {
        let blocks = command_blocks(document)?;
        let commands = blocks.iter().flat_map(Block::commands);
        let before = upgrades.len();
        upgrades.extend(
            commands.filter(|text| text.starts_with("kubeadm upgrade ") && text.contains("--skip-phases")),
        );
        ensure!(upgrades.len() > before, "{document} skips no phase of an upgrade");
    }
    Ok(upgrades)
}

/// kubeadm ignores names of phases that it does not have.
async fn skipped_phase_exists(command: &str) -> Result<()> {
    let words: Vec<&str> = command.split([' ', '=']).collect();
    let at = words.iter().position(|word| *word == "--skip-phases").context("no phase is skipped")?;
    let phase = words.get(at + 1).context("no phase is named")?;
    let (parent, child) = phase.split_once('/').context("a phase of addon is skipped")?;
    let mut kubeadm = Command::new(peers::kubeadm()?.join("kubeadm"));
    let help = kubeadm.args(words.iter().skip(1).take(2)).arg("--help").output().await?;
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    // Phases inside of one follow it, and are indented.
    let mut phases = help.lines().skip_while(|line| line.split_whitespace().next() != Some(parent)).skip(1);
    let inner = phases.by_ref().take_while(|line| line.starts_with("  /"));
    let names: Vec<_> =
        inner.filter_map(|line| line.trim().trim_start_matches('/').split(' ').next()).collect();
    ensure!(names.contains(&child), "{parent} has the phases {names:?}:\n{help}");
    Ok(())
}

/// Doctor with the credentials of a node at a real API server: permissions that are missing, another node's name, an address
/// of Services, networks.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_what_is_missing() -> Result<()> {
    let node = Node::start().await?;
    let blocks = [
        Block::own(INSTALL, ""),
        Block::own(
            "printf '\\n[kube]\\nkubeconfig = \"/etc/kubernetes/kubelet.conf\"\\n' >> /etc/keelson/keelson.toml\n\
             if keelson doctor heartbeats endpoints; then exit 1; fi\n",
            "  ok       credentials: client certificate ... of system:node:n1, valid for ...\n  \
             ok       node name: Node n1 exists\n  \
             ok       permissions: may get nodes, watch nodes, patch nodes/status, list pods, watch pods, create events, patch events\n\
             endpoints\n  \
             ok       permissions: may list services, watch services\n  \
             FAILED   permissions: may not list endpointslices...\n",
        ),
        Block::own(
            "if keelson doctor heartbeats --set agent.node_name=n2; then exit 1; fi\n",
            "  FAILED   credentials: ... is that of the node n1, and this agent is n2\n  \
             FAILED   node name: the kubelet is the node n1 (the host name), and this agent n2\n",
        ),
        Block::own(
            "if keelson doctor proxy --set proxy.cluster_cidr=10.9.0.0/16; then exit 1; fi\n",
            "  FAILED   pod networks: proxy.cluster_cidr 10.9.0.0/16 does not contain the Node's 10.244.1.0/24...\n  \
             FAILED   pod networks: proxy.cluster_cidr is 10.9.0.0/16, and kubeadm's podSubnet 10.244.0.0/16\n",
        ),
        Block::own(
            "if keelson doctor --set kube.kubeconfig=/etc/none; then exit 1; fi\n",
            "  FAILED   credentials: ...none...\n",
        ),
    ];
    node.run(&blocks).await?.check(&blocks)
}

/// O5, O6: the real kubelet takes the endpoint from the file and from the drop-in, and does not start without the agent.
#[tokio::test(flavor = "multi_thread")]
async fn o5_the_real_kubelet_reads_what_attach_has_written() -> Result<()> {
    let node = Node::alone()?;
    // It ends when the image endpoint does not answer, before it has done anything.
    let starts = "nsenter --net=/run/proxy.net timeout 100 kubelet --config /run/base.yaml $FLAGS --root-dir /run/kubelet --hostname-override n1";
    let fails = "... validate CRI v1 image API for endpoint ...unix:///run/keelson/cri.sock...\n";
    let (stop, start) = (
        "systemctl disable --now keelson.service keelson-cri.socket keelson-debug.socket",
        "systemctl enable --now keelson-cri.socket keelson-debug.socket keelson.service",
    );
    let blocks = [
        Block::own(INSTALL, ""),
        Block::own(
            &format!(
                "cat > /run/base.yaml <<'EOF'\n{KUBELET}EOF\nkeelson attach --kubelet-config /run/base.yaml\n{stop}\n\
                 FLAGS=''\nif {starts}; then exit 1; fi\n"
            ),
            fails,
        ),
        Block::own(
            &format!(
                "keelson bypass --kubelet-config /run/base.yaml\nif grep keelson /run/base.yaml; then exit 1; fi\n{start}\n\
                 keelson attach --kubelet-config /run/base.yaml --kubelet-config-dir /run/conf.d\n{stop}\n\
                 if grep keelson /run/base.yaml; then exit 1; fi\n\
                 FLAGS='--config-dir /run/conf.d'\nif {starts}; then exit 1; fi\n"
            ),
            fails,
        ),
    ];
    node.run(&blocks).await?.check(&blocks)
}

/// A kubelet without an API server.
const KUBELET: &str = "# of this cluster\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                       containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n\
                       imageServiceEndpoint: unix:///run/containerd/containerd.sock # as always\n\
                       cgroupsPerQOS: false\nenforceNodeAllocatable: []\nfailSwapOn: false\nfailCgroupV1: false\ncgroupDriver: cgroupfs\nauthentication:\n  anonymous:\n    enabled: true\n  \
                       webhook:\n    enabled: false\nauthorization:\n  mode: AlwaysAllow\n";
