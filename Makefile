# Keelson's commands. `make` alone lists them.
#
# All of them work with any CARGO_TARGET_DIR. run, test and bench need root, because containerd mounts file systems;
# they start a containerd and a registry of their own and leave those of the machine alone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
CARGO ?= cargo
TARGET = $(shell scripts/target-dir.sh)

# What make soak runs: for how long, and programs of which profile.
MINUTES ?= 60
PROFILE ?= release

.PHONY: help run cluster check test soak systemd-check boot-check upgrade-check kubernetes-check containerd-check vm-check conformance-kube-proxy bench bench-proxy fmt lint spelling docs deny fuzz clean packages packages-check monitoring-check cluster-check chart-check

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 32

run: ## pull images through the agent into a containerd of its own, until Ctrl-C
	@scripts/install-packages.sh run
	@$(CARGO) build --workspace --bin keelson --bin keelson-demo
	@exec $(TARGET)/debug/keelson-demo

# A whole cluster of one node. IMAGE is an OCI archive with the image of Keelson; without it one is made of the program.
CLUSTER_PEERS = chart-tools cni containerd coredns cri-driver etcd kubernetes
CLUSTER = $(TARGET)/debug/keelson-cluster $(if $(IMAGE),--image $(IMAGE))

cluster: ## a cluster of one node with Keelson in kube-proxy's place and in the path of image pulls, until Ctrl-C (IMAGE=FILE)
	@scripts/install-packages.sh cluster
	@tests/peers/build.sh $(CLUSTER_PEERS)
	@$(CARGO) build --workspace --bin keelson --bin keelson-cluster
	@KEELSON_PEERS="$$(tests/peers/build.sh $(CLUSTER_PEERS))" exec $(CLUSTER)

cluster-check: ## on such a cluster the way of docs/rollout.md, with kube-proxy before and after
	@scripts/install-packages.sh cluster
	@tests/peers/build.sh $(CLUSTER_PEERS)
	@$(CARGO) build --workspace --bin keelson --bin keelson-cluster
	@KEELSON_PEERS="$$(tests/peers/build.sh $(CLUSTER_PEERS))" exec $(CLUSTER) --check

chart-check: ## lint the Helm chart, compare the manifests with it, and have an API server check every object (a part of make test)
	@scripts/install-packages.sh cluster
	@tests/peers/build.sh chart-tools etcd kubernetes
	@$(CARGO) build --workspace --bin keelson
	@$(CARGO) test --workspace --test chart

packages: ## .deb, .rpm, tarball, image and SBOM in <target folder>/packages (ARCH=arm64 for another architecture)
	@scripts/install-packages.sh packages
	@CARGO="$(CARGO)" packaging/packages.sh

packages-check: ## install, upgrade and remove what make packages made, in roots of their own; import the image; make all again (root)
	@scripts/install-packages.sh packages
	@CARGO="$(CARGO)" tests/packages/run.sh

check: ## format, clippy, spelling and unit tests: no root, no peers
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@$(MAKE) --no-print-directory spelling
	@CARGO="$(CARGO)" scripts/check.sh

test: ## every test on the kernel of this machine, those on real components included
	@scripts/install-packages.sh test
	@CARGO="$(CARGO)" scripts/test.sh

monitoring-check: ## the rules of Prometheus: syntax, and a case for each alert (the suite monitoring has the rest)
	@scripts/install-packages.sh monitoring
	promtool check rules packaging/chart/keelson/rules.yaml
	promtool test rules packaging/monitoring/rules_test.yaml

# ARGS=--whole-node: on the cluster of make cluster. The program of the former version is built for it; KEELSON_TEST_FORMER= leaves it out.
SOAK_PEERS = containerd cri-driver crio etcd kubernetes
WHOLE_NODE = $(findstring --whole-node,$(ARGS))

soak: ## random work under random faults, with invariants checked (MINUTES=60 ARGS="--seed 7 --runtime crio", ARGS=--whole-node)
	@scripts/install-packages.sh soak
	@tests/peers/build.sh $(if $(WHOLE_NODE),$(CLUSTER_PEERS),$(SOAK_PEERS))
	@$(CARGO) build --profile $(PROFILE) $(if $(filter dev,$(PROFILE)),--workspace,-p keelson -p keelson-soak) --bin keelson --bin keelson-soak
	@$(if $(WHOLE_NODE),peers=$$(tests/peers/build.sh $(CLUSTER_PEERS)); former=$${KEELSON_TEST_FORMER-$$(scripts/former.sh)}; \
		export KEELSON_PEERS="$$peers" KEELSON_TEST_FORMER="$$former";) \
		exec $(TARGET)/$(PROFILE:dev=debug)/keelson-soak --minutes $(MINUTES) --out $(TARGET)/soak $(ARGS)

systemd-check: ## restart the shipped units under a real systemd in namespaces of its own (root, systemd 252, overlayfs)
	@$(CARGO) build --workspace --bin keelson
	@KEELSON_PROGRAM=$(TARGET)/debug/keelson tests/systemd/run.sh tests/systemd/restarts.sh \
		"$$(tests/peers/build.sh containerd | cut -d= -f2)/containerd" "$$(tests/peers/build.sh cri-driver | cut -d= -f2)/cri-driver"
	@KEELSON_PROGRAM=$(TARGET)/debug/keelson tests/systemd/run.sh tests/systemd/proxy.sh

boot-check: ## install, upgrade, break and remove the packages on a Debian with systemd that boots in a virtual machine (ARGS="--until CASE")
	@scripts/install-packages.sh packages
	@scripts/install-packages.sh boot
	@CARGO="$(CARGO)" tests/boot/run.sh $(ARGS)

upgrade-check: ## agents, proxies and clients of this version beside those of the former one (the last tag)
	@scripts/install-packages.sh test
	@CARGO="$(CARGO)" KEELSON_TEST_FORMER=$$(scripts/former.sh) scripts/test.sh --retries 0 --ignore-default-filter -E 'binary_id(keelson-suites::skew)'

# All control planes that are supported but the newest one, which `make test` has.
VERSIONS ?= 1.31 1.32 1.33 1.34 1.35

kubernetes-check: ## what depends on the version of the control plane, with each of VERSIONS="1.31 1.32 1.33 1.34 1.35"
	@scripts/install-packages.sh test
	@tests/peers/build.sh $(addprefix kubernetes-,$(VERSIONS))
	@for version in $(VERSIONS); do \
		printf 'Kubernetes %s\n' "$$version"; \
		KEELSON_TEST_KUBERNETES=$$version CARGO="$(CARGO)" scripts/test.sh --retries 0 --ignore-default-filter -E 'test(in_one_process_on_another_version)'; \
	done

containerd-check: ## the suites of image pulls with containerd 1.7 in place of 1.6
	@scripts/install-packages.sh test
	@tests/peers/build.sh containerd-1.7
	@KEELSON_TEST_CONTAINERD=1.7 CARGO="$(CARGO)" scripts/test.sh --retries 0 -E 'test(/debian16::/)'

# System calls are slow there: minutes of processor time. ARGS="-E 'test(ipvs)'": a part, for cargo nextest run.
vm-check: ## every test in a virtual machine: backend ipvs, and backend ebpf on its oldest kernel (Linux 6.1, without JIT)
	@scripts/install-packages.sh test
	@tests/peers/build.sh etcd kubernetes
	@tests/vm/kernel.sh >/dev/null
	@CARGO="$(CARGO)" scripts/test.sh --profile vm $(ARGS)

# Mode ipvs makes very many system calls: with Linux 6.1 the suite does not end in half an hour (tests/vm/kernel.sh).
conformance-kube-proxy: ## the suite of service proxies against the real kube-proxy instead of keelson, in modes nftables, iptables and ipvs
	@scripts/install-packages.sh test
	@tests/peers/build.sh kubernetes
	KEELSON_PROXY_SUBJECT=kube-proxy $(CARGO) test --workspace --test proxy
	KEELSON_PROXY_SUBJECT=kube-proxy KEELSON_TEST_PROXY_BACKEND=iptables $(CARGO) test --workspace --test proxy
	KEELSON_VM_LINUX=7.3 KEELSON_PROXY_SUBJECT=kube-proxy CARGO="$(CARGO)" scripts/test.sh --profile vm --retries 0 -E 'binary(proxy) and test(ipvs)'

bench: ## measure the figures of docs/performance.md beside direct containerd, a stock kubelet and kube-proxy; write its chart and first table
	@scripts/install-packages.sh bench
	@tests/peers/build.sh
	@$(CARGO) build --profile dist -p keelson -p keelson-bench --bin keelson --bin keelson-bench
	@exec $(TARGET)/dist/keelson-bench

bench-proxy: ## of these what is about a proxy's rules, beside kube-proxy (ARGS="--backend iptables --sizes 1000x10 --parts cold,change")
	@scripts/install-packages.sh bench
	@tests/peers/build.sh
	@$(CARGO) build --profile dist -p keelson -p keelson-bench --bin keelson --bin keelson-bench
	@KEELSON_PEERS=$$(tests/peers/build.sh) exec $(TARGET)/dist/keelson-bench proxy $(ARGS)

fmt: ## format Rust and Go
	$(CARGO) fmt --all
	gofmt -w tests/peers

lint: ## clippy, spelling, shellcheck, module cycles, gofmt, go vet
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@$(MAKE) --no-print-directory spelling
	scripts/lint.sh

spelling: ## words that are misspelled (.typos.toml), or that the style avoids (scripts/words.sh)
	"$$(scripts/tool.sh typos)"
	scripts/words.sh

docs: ## the documentation of the crates
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --no-deps --workspace

deny: ## licences, sources and duplicates of dependencies, and those that nothing uses
	"$$(scripts/tool.sh cargo-deny)" --log-level error check licenses bans sources
	"$$(scripts/tool.sh cargo-machete)" --with-metadata

fuzz: ## each fuzz target for a minute (KEELSON_FUZZ_SECONDS)
	scripts/fuzz.sh

clean: ## remove what was built here, and the folder of make run
	$(CARGO) clean
	rm -rf run
