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

.PHONY: help run cluster check test soak systemd-check conformance-ipvs conformance-kube-proxy bench bench-proxy fmt lint spelling docs deny fuzz clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 32

run: ## pull images through the agent into a containerd of its own, until Ctrl-C
	@scripts/install-packages.sh run
	@$(CARGO) build --workspace --bin keelson --bin keelson-demo
	@exec $(TARGET)/debug/keelson-demo

cluster: ## a control plane whose one node the agent alone keeps Ready, until Ctrl-C
	@scripts/install-packages.sh cluster
	@tests/peers/build.sh etcd kubernetes
	@$(CARGO) build --workspace --bin keelson --bin keelson-cluster
	@exec $(TARGET)/debug/keelson-cluster

check: ## format, clippy, spelling and unit tests: no root, no peers
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@$(MAKE) --no-print-directory spelling
	@CARGO="$(CARGO)" scripts/check.sh

test: ## every test, those on real components included
	@scripts/install-packages.sh test
	@CARGO="$(CARGO)" scripts/test.sh

soak: ## pull random images under random faults and check invariants (MINUTES=60 ARGS="--seed 7 --runtime crio")
	@scripts/install-packages.sh soak
	@tests/peers/build.sh containerd cri-driver crio etcd kubernetes
	@$(CARGO) build --profile $(PROFILE) --workspace --bin keelson --bin keelson-soak
	@exec $(TARGET)/$(PROFILE:dev=debug)/keelson-soak --minutes $(MINUTES) --out $(TARGET)/soak $(ARGS)

systemd-check: ## restart the shipped units under a real systemd in namespaces of its own (root, systemd 252, overlayfs)
	@$(CARGO) build --workspace --bin keelson
	@KEELSON_PROGRAM=$(TARGET)/debug/keelson tests/systemd/run.sh tests/systemd/restarts.sh \
		"$$(tests/peers/build.sh containerd | cut -d= -f2)/containerd" "$$(tests/peers/build.sh cri-driver | cut -d= -f2)/cri-driver"
	@KEELSON_PROGRAM=$(TARGET)/debug/keelson tests/systemd/run.sh tests/systemd/proxy.sh

conformance-ipvs: ## the suite of service proxies, and the life of a proxy, with the backend ipvs in a virtual machine (make test has tests of its own for it)
	@scripts/install-packages.sh test
	@CARGO="$(CARGO)" scripts/test.sh --retries 0 --ignore-default-filter -E 'test(/in_one_process_with_ipvs$$/)'

conformance-kube-proxy: ## the suite of service proxies against the real kube-proxy instead of keelson, in modes nftables and iptables
	@scripts/install-packages.sh test
	@tests/peers/build.sh kubernetes
	KEELSON_PROXY_SUBJECT=kube-proxy $(CARGO) test --workspace --test proxy
	KEELSON_PROXY_SUBJECT=kube-proxy KEELSON_TEST_PROXY_BACKEND=iptables $(CARGO) test --workspace --test proxy

bench: ## the figures of docs/performance.md, beside direct containerd, a stock kubelet and kube-proxy in the same run
	@scripts/install-packages.sh bench
	@tests/peers/build.sh
	@$(CARGO) build --profile dist --workspace --bin keelson --bin keelson-bench
	@exec $(TARGET)/dist/keelson-bench

bench-proxy: ## of these what is about a proxy's rules, beside kube-proxy (ARGS="--backend iptables --sizes 1000x10 --parts cold,change")
	@scripts/install-packages.sh bench
	@tests/peers/build.sh
	@$(CARGO) build --profile dist --workspace --bin keelson --bin keelson-bench
	@KEELSON_PEERS=$$(tests/peers/build.sh) exec $(TARGET)/dist/keelson-bench proxy $(ARGS)

fmt: ## format Rust and Go
	$(CARGO) fmt --all
	gofmt -w tests/peers

lint: ## clippy, spelling, shellcheck, gofmt, go vet
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
