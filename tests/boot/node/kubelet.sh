#!/bin/sh
# Makes a node of it: a kubelet that runs the pods in /etc/kubernetes/manifests, with its configuration as kubeadm places it. Sandboxes are
# of an image of the registry. Arguments are the kubelet's: without --kubeconfig it has no API server.
set -eu
cat >/etc/containerd/config.toml <<'EOF'
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "127.0.0.1:5999/image0:latest"
EOF
systemctl restart containerd
mkdir -p /var/lib/kubelet /etc/kubernetes/manifests
cat >/var/lib/kubelet/config.yaml <<'EOF'
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: /etc/kubernetes/manifests
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
failSwapOn: false
fileCheckFrequency: 1s
EOF
# Its program is there at a boot, too.
grep -q LABEL=tools /etc/fstab || echo 'LABEL=tools /mnt ext4 ro 0 0' >>/etc/fstab
cat >/etc/systemd/system/kubelet.service <<EOF
[Unit]
RequiresMountsFor=/mnt
[Service]
ExecStart=/mnt/kubelet --config /var/lib/kubelet/config.yaml --hostname-override node $*
Restart=always
[Install]
WantedBy=multi-user.target
EOF
systemctl daemon-reload
systemctl enable --quiet --now kubelet
