//! The documents about a node that runs: heartbeats, endpoints, the proxy, eBPF, questions by kubectl, and the packages, whose
//! document ends with the removal.
//!
//! Owns: what their commands need that the documents take for granted, and what they have to have done. In: the blocks of
//! [`Story::Operation`]. Out: these blocks, with blocks of the test between.

use crate::stories::{Story, blocks_of};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::documents::{Block, all_blocks};
use std::fs;
use std::path::PathBuf;

/// What the package installs, by the table of packaging/README.md.
const PACKAGE: &str = "\
install -m 0755 target/dist/keelson /usr/bin/keelson
install -D -m 0644 packaging/keelson.toml /etc/keelson/keelson.toml
install -m 0644 packaging/keelson*.service packaging/keelson*.socket /usr/lib/systemd/system/
install -D -m 0644 packaging/keelson-proxy-ebpf.conf /usr/share/keelson/keelson-proxy-ebpf.conf
";

/// The agent, with an API server and Services.
const START: &str = "\
mkdir -p /etc/kubernetes/pki
kubectl config view --raw --flatten -o jsonpath='{.clusters[0].cluster.certificate-authority-data}' | base64 -d > /etc/kubernetes/pki/ca.crt
kubectl apply -f packaging/kustomize/node/node.yaml
kubectl apply -f - <<'EOF'
apiVersion: v1
kind: Service
metadata: {name: shop}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: shop-1, labels: {kubernetes.io/service-name: shop}}
addressType: IPv4
ports: [{name: '', port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.244.1.7], nodeName: NODE}]
---
apiVersion: v1
kind: Service
metadata: {name: other, labels: {service.kubernetes.io/service-proxy-name: edge}}
spec: {clusterIP: 10.96.0.11, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: other-1, labels: {kubernetes.io/service-name: other}}
addressType: IPv4
ports: [{name: '', port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.244.1.7], nodeName: NODE}]
EOF
cat >> /etc/keelson/keelson.toml <<'EOF'
[kube]
kubeconfig = \"/etc/kubernetes/kubelet.conf\"
[proxy]
cluster_cidr = [\"10.244.0.0/16\"]
ebpf_cgroup = \"/sys/fs/cgroup\"
[endpoints]
service_proxy_names = [\"edge\"]
EOF
systemctl enable --now keelson-cri.socket keelson-debug.socket keelson.service
";

/// As docs/heartbeats.md goes on after the token was made: its file, and where the settings name it.
const USE_TOKEN: &str = "\
[ $(stat -c %a token.NODE) = 600 ]
install -m 0600 token.NODE /etc/keelson/token
cp /etc/keelson/keelson.toml /run/keelson.toml
sed -i '/^kubeconfig = /d' /etc/keelson/keelson.toml
sed -i '/^\\[kube\\]/a server = \"https://10.0.0.1:6443\"' /etc/keelson/keelson.toml
sed -i '/^\\[kube\\]/a certificate_authority = \"/etc/kubernetes/pki/ca.crt\"' /etc/keelson/keelson.toml
sed -i '/^\\[kube\\]/a token_file = \"/etc/keelson/token\"' /etc/keelson/keelson.toml
systemctl restart keelson
keelson node
cp /run/keelson.toml /etc/keelson/keelson.toml
systemctl restart keelson
";

/// What packaging/README.md writes into the settings, with the certificate of the kubelet.
const SETTINGS_OF_PACKAGES: &str = "\
mkdir -p /var/lib/kubelet/pki
for part in certificate key; do
    kubectl --kubeconfig /etc/kubernetes/kubelet.conf config view --raw --flatten -o jsonpath=\"{.users[0].user.client-$part-data}\" |
        base64 -d
done > /var/lib/kubelet/pki/kubelet-client-current.pem
chmod 0600 /var/lib/kubelet/pki/kubelet-client-current.pem
cat >> /etc/keelson/keelson.toml <<'EOF'
SETTINGS
EOF
systemctl restart keelson
keelson doctor heartbeats endpoints
";

/// Back to a node without Keelson.
const REMOVE: &str = "\
systemctl disable --now keelson-proxy
keelson proxy cleanup
systemctl disable --now keelson.service keelson-cri.socket keelson-debug.socket
keelson cleanup --state
rm -r /etc/keelson /etc/systemd/system/keelson-proxy.service.d
";

/// Commands, and what they print.
type Own = (&'static str, &'static str);

/// A block, known by its document and a part of it, and what the test runs before and after it.
struct Around {
    document: &'static str,
    part: &'static str,
    before: &'static [Own],
    after: &'static [Own],
}

const AROUND: [Around; 9] = [
    Around {
        document: "docs/heartbeats.md",
        part: "create token keelson-agent",
        before: &[(PACKAGE, ""), (START, "")],
        after: &[(USE_TOKEN, "Identity: system:serviceaccount:kube-system:keelson-agent...\n")],
    },
    Around {
        document: "docs/heartbeats.md",
        part: "bootstrap-kubelet.conf",
        before: &[(
            "kubeadm token create abcdef.0123456789abcdef --ttl 1h --kubeconfig \"$KUBECONFIG\"\n",
            "",
        )],
        after: &[(
            "[ $(stat -c %a /etc/kubernetes/bootstrap-kubelet.conf) = 600 ]\n\
             kubectl --kubeconfig /etc/kubernetes/bootstrap-kubelet.conf auth whoami\n",
            "Username ...system:bootstrap:abcdef\n",
        )],
    },
    Around {
        document: "docs/proxy.md",
        part: "--config edge.toml",
        before: &[("cat > edge.toml <<'EOF'\nEDGE\nEOF\n", "")],
        after: &[],
    },
    Around {
        document: "docs/ebpf.md",
        part: "/usr/share/keelson/keelson-proxy-ebpf.conf",
        before: &[(
            "mount -t bpf bpf /sys/fs/bpf\nmount --bind CGROUP /sys/fs/cgroup\nsystemctl enable --now keelson-proxy\n",
            "",
        )],
        after: &[],
    },
    Around {
        document: "docs/support.md",
        part: "kubectl-keelson",
        before: &[],
        after: &[("kubectl keelson why-service shop --node NODE --via env\n", "")],
    },
    Around {
        document: "packaging/README.md",
        part: "keelson config check      #",
        before: &[(REMOVE, ""), (PACKAGE, "")],
        after: &[],
    },
    Around {
        document: "packaging/README.md",
        part: "keelson proxy --backend nft --dry-run",
        before: &[(SETTINGS_OF_PACKAGES, "")],
        after: &[],
    },
    Around {
        document: "packaging/README.md",
        part: "systemctl reload keelson",
        before: &[(
            "sed -i 's/^max_parallel_image_pulls = 3/max_parallel_image_pulls = 2/' /etc/keelson/keelson.toml\n",
            "",
        )],
        after: &[("keelson limit\n", "Limit:         2\n")],
    },
    Around {
        document: "packaging/README.md",
        part: "keelson cleanup --state",
        before: &[],
        after: &[("[ ! -e /var/lib/keelson/state ]\n", "")],
    },
];

impl Around {
    fn is(&self, block: &Block) -> bool {
        block.document == self.document && block.code.contains(self.part)
    }
}

/// Of version 2, with no process in it: what the stand-in has as the cgroups of the machine, so that programs can be attached.
/// Removed on drop.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    pub(crate) fn new() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
        let root = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (path, kind) = (fields.next()?, fields.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(path))
        });
        let name = format!("keelson-docs-{}", std::process::id());
        let path = root.context("cgroup v2 is not mounted")?.join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make the cgroup {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// What a document shows of a file of settings.
fn file(document: &str, path: &str) -> Result<String> {
    let first = format!("# {path}\n");
    let parts = all_blocks(document)?.into_iter().map(|block| block.code);
    let parts: String = parts.filter(|code| code.starts_with(&first)).collect();
    ensure!(!parts.is_empty(), "{document} does not show {path}");
    Ok(parts)
}

pub(crate) fn blocks(cgroup: &Cgroup) -> Result<Vec<Block>> {
    let edge = file("docs/proxy.md", "edge.toml")?;
    let settings = file("packaging/README.md", "/etc/keelson/keelson.toml")?;
    let own = |(code, prints): &Own| {
        let code = code.replace("EDGE\n", &edge).replace("SETTINGS\n", &settings);
        Block::own(&code.replace("CGROUP", &cgroup.0.display().to_string()), prints)
    };
    let mut all = Vec::new();
    let mut used = [false; AROUND.len()];
    for mut block in blocks_of(Story::Operation)? {
        let around = AROUND.iter().zip(&mut used).find(|(around, _)| around.is(&block));
        // That of a machine, and not of the stand-in.
        block.code = block.code.replace("netns-4026531840", "netns-$(stat -L -c %i /run/proxy.net)");
        let Some((around, used)) = around else {
            all.push(block);
            continue;
        };
        *used = true;
        all.extend(around.before.iter().map(own));
        all.push(block);
        all.extend(around.after.iter().map(own));
    }
    ensure!(used.iter().all(|used| *used), "a block in AROUND is in no document: {used:?}");
    Ok(all)
}
