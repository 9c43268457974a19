//! Precedence of layers; all valid settings load, and no input makes the loader panic.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests, which clippy.toml does not see

use std::collections::BTreeMap;

use keelson_config::{Entry, Gate, Key, Loaded, Origin, Sources, load, schema};
use proptest::prelude::*;
use serde_json::Value as Json;

/// Settings of each layer, as `section.key` and text.
#[derive(Clone, Debug, Default)]
struct Layers {
    file: BTreeMap<String, Json>,
    env: BTreeMap<String, Json>,
    flag: BTreeMap<String, Json>,
}

fn text(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Array(all) => all.iter().map(text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

fn env_name(key: &str) -> String {
    let (section, name) = key.split_once('.').unwrap();
    schema()
        .iter()
        .find(|k| k.path == key)
        .map_or_else(|| format!("KEELSON_{}__{name}", section.to_uppercase()), Key::env)
}

impl Layers {
    fn load(&self) -> Loaded {
        // Texts, numbers and bools of JSON are also valid TOML.
        let lines: String = self.file.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        let (_dir, sources) = sources(lines);
        let sources = Sources {
            hostname: "Host-1".into(),
            env: self.env.iter().map(|(key, value)| (env_name(key), text(value))).collect(),
            sets: self.flag.iter().map(|(key, value)| format!("{key}={}", text(value))).collect(),
            ..sources
        };
        load(&sources).unwrap_or_else(|errors| panic!("{errors}\n{self:?}"))
    }
}

fn entry<'a>(loaded: &'a Loaded, key: &str) -> &'a Entry {
    loaded.entries.iter().find(|entry| entry.key == key).unwrap()
}

/// With a file of this text, which exists as long as the folder.
fn sources(text: impl AsRef<[u8]>) -> (tempfile::TempDir, Sources) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("k.toml");
    std::fs::write(&file, text).unwrap();
    (dir, Sources { file: Some(file), ..Sources::new("h") })
}

#[test]
fn each_layer_wins_over_those_below() {
    let values = [("file", "1m"), ("environment", "2m"), ("flag", "3m")];
    for mask in 0..8usize {
        let mut layers = Layers::default();
        let maps = [&mut layers.file, &mut layers.env, &mut layers.flag];
        for (i, map) in maps.into_iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1) {
            map.insert("pulls.cancel_grace".into(), values[i].1.into());
        }
        let expected = match mask.checked_ilog2() {
            None => ("default", "10s"),
            Some(top) => values[top as usize],
        };
        let loaded = layers.load();
        let entry = entry(&loaded, "pulls.cancel_grace");
        assert_eq!((entry.origin.source(), &entry.value), (expected.0, &expected.1.into()), "{layers:?}");
        let seconds = humantime::parse_duration(expected.1).unwrap();
        assert_eq!(loaded.settings.pulls.cancel_grace, seconds);
    }
}

#[test]
fn the_place_of_a_value_is_named() {
    let (_dir, mut sources) = sources("[pulls]\n# one\nwhen_full = \"reject\"\n");
    let file = sources.file.clone().unwrap();
    sources.env.insert("KEELSON_PULLS__ENFORCE".into(), "runtime".into());
    sources.sets.push("agent.log=debug".into());
    sources.sets.push("agent.log=warn".into());
    let loaded = load(&sources).unwrap();
    let from = |key: &str| entry(&loaded, key).origin.to_string();
    assert_eq!(from("pulls.when_full"), format!("{}:3", file.display()));
    assert_eq!(from("pulls.enforce"), "environment KEELSON_PULLS__ENFORCE");
    assert_eq!(from("agent.log"), "flag --set agent.log");
    assert_eq!(from("cri.listen"), "default");
    assert_eq!(loaded.settings.agent.log, "warn", "the last flag wins");
    assert_eq!(loaded.file.as_deref(), Some(file.as_path()));
}

#[test]
fn which_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, max: u32| {
        let path = dir.path().join(name);
        std::fs::write(&path, format!("pulls.max_parallel_image_pulls = {max}\n")).unwrap();
        path
    };
    let (default_file, named, flag) = (write("default", 1), write("named", 2), write("flag", 3));
    let mut sources = Sources { default_file, ..Sources::new("h") };
    let max = |sources: &Sources| load(sources).unwrap().settings.pulls.max_parallel_image_pulls;
    assert_eq!(max(&sources), 1);
    sources.env.insert("KEELSON_CONFIG".into(), named.to_str().unwrap().into());
    assert_eq!(max(&sources), 2);
    sources.file = Some(flag);
    assert_eq!(max(&sources), 3);
    let none = Sources { default_file: dir.path().join("absent"), ..Sources::new("h") };
    assert_eq!(load(&none).unwrap().file, None);
}

#[test]
fn the_host_names_the_node_unless_a_setting_does() {
    let mut sources = Sources::new(" Worker-3.Example ");
    sources.default_file = "/nonexistent/keelson.toml".into();
    assert_eq!(load(&sources).unwrap().settings.agent.node_name, "worker-3.example");
    sources.env.insert("KEELSON_AGENT__NODE_NAME".into(), "other".into());
    assert_eq!(load(&sources).unwrap().settings.agent.node_name, "other");
}

#[test]
fn gates_by_layer_and_by_name() {
    let (_dir, mut sources) =
        sources("[feature_gates]\nPullOption = false\nResumePulls = false\nKeepPullProgress = false\n");
    sources.env.insert("KEELSON_FEATURE_GATES".into(), "ResumePulls=true, AllAlpha=true,".into());
    sources.env.insert("KEELSON_FEATURE_GATES__KEEP_PULL_PROGRESS".into(), "true".into());
    sources.sets.push("feature_gates.KeepPullProgress=true".into());
    sources.feature_gates.push("KeepPullProgress=false,AllBeta=false".into());
    let loaded = load(&sources).unwrap();
    let gate = |gate: Gate| {
        let key = format!("feature_gates.{}", gate.name());
        let entry = entry(&loaded, &key);
        assert_eq!(entry.value, Json::Bool(loaded.settings.feature_gates.enabled(gate)));
        (loaded.settings.feature_gates.enabled(gate), entry.origin.clone())
    };
    assert!(matches!(gate(Gate::PullOption), (false, Origin::File { line: 2, .. })));
    assert_eq!(gate(Gate::ResumePulls), (true, Origin::Env("KEELSON_FEATURE_GATES".into())));
    assert_eq!(
        gate(Gate::KeepPullProgress),
        (false, Origin::Flag("--feature-gates KeepPullProgress".into()))
    );
    assert_eq!(gate(Gate::PullDeduplication), (false, Origin::Flag("--feature-gates AllBeta".into())));
    assert_eq!(gate(Gate::PerRegistryPullLimit), (true, Origin::Env("KEELSON_FEATURE_GATES".into())));
}

/// Values of a key that are valid regardless of the others.
fn valid_value(key: &'static Key) -> BoxedStrategy<Json> {
    let words = |words: &'static [&'static str]| prop::sample::select(words).prop_map(Json::from).boxed();
    let lists = |lists: &'static [&'static str]| {
        let list = |text: &str| text.split(',').map(Json::from).collect::<Vec<_>>().into();
        prop::sample::select(lists).prop_map(list).boxed()
    };
    let word = "[a-z][a-z0-9]{0,9}";
    match (key.path, &key.default) {
        // Relations: those of the gates, of the limit with serialize, and of the loopback address.
        (
            "pulls.serialize_image_pulls" | "pulls.per_registry_max_parallel_image_pulls" | "pulls.enforce",
            v,
        ) => Just(v.clone()).boxed(),
        // One way to the API server, with the settings that it requires.
        ("kube.kubeconfig", _) => word.prop_map(|w| format!("/etc/{w}").into()).boxed(),
        ("kube.request_timeout", _) => (1u32..=119).prop_map(|s| format!("{s}s").into()).boxed(),
        (path, v) if path.starts_with("kube.") => Just(v.clone()).boxed(),
        ("node.role", _) => words(&["node", "companion"]),
        ("node.when_contested", _) => words(&["stand-back", "continue"]),
        ("node.register_node", _) => words(&["once", "always", "never"]),
        ("node.root_dir" | "agent.state_dir" | "proxy.conntrack_sysctl_dir", _) => {
            word.prop_map(|w| format!("/var/{w}").into()).boxed()
        }
        ("node.lease_duration" | "node.pulls_stalled_after", _) => {
            (10u32..=119).prop_map(|s| format!("{s}s").into()).boxed()
        }
        ("node.node_status_report_frequency", _) => (2u32..=60).prop_map(|m| format!("{m}m").into()).boxed(),
        ("node.node_ip", _) => words(&["", "10.0.0.7", "10.0.0.7,fd00::7"]),
        ("node.eviction_hard", _) => words(&["", "memory.available<1Gi"]),
        ("node.kube_reserved" | "node.system_reserved", _) => words(&["", "cpu=100m,memory=200Mi"]),
        ("node.register_with_taints", _) => words(&["", "a=b:NoSchedule"]),
        ("node.node_labels", _) => words(&["", "a=b,example.com/c=d"]),
        ("node.zone" | "node.region" | "node.provider_id" | "node.kubelet_version", _) => {
            word.prop_map(Json::from).boxed()
        }
        ("agent.node_name", _) => word.prop_map(Json::from).boxed(),
        ("agent.log", _) => words(&["info", "WARN", "debug,keelson_cri=trace", "off,keelson_kube=info"]),
        ("agent.log_format", _) => words(&["text", "json"]),
        ("pulls.when_full", _) => words(&["wait", "reject"]),
        ("debug.http", _) => any::<(u8, u16)>().prop_map(|(a, p)| format!("127.0.0.{a}:{p}").into()).boxed(),
        ("endpoints.source", _) => words(&["auto", "off"]),
        ("endpoints.watch", _) => words(&["on-demand", "always"]),
        ("debug.http_hosts" | "proxy.http_hosts", _) => lists(&["node-7", "node-7.example.com,10.0.0.7"]),
        // Others require ebpf_untracked_pods.
        ("proxy.ebpf_pod_devices", _) => Just(Vec::<String>::new().into()).boxed(),
        ("proxy.ebpf_direct_return_devices", _) => lists(&["eth0", "eth0,bond*"]),
        ("proxy.ebpf_direct_return_hook", _) => words(&["tc", "xdp"]),
        ("proxy.ebpf_direct_return_nodes", _) => lists(&["10.0.0.0/8", "10.0.0.0/24,fd00::/64"]),
        ("proxy.ebpf_cgroup", _) => words(&["", "/sys/fs/cgroup", "/sys/fs/cgroup/kubepods.slice"]),
        ("proxy.userspace_affinity_file", _) => {
            prop_oneof![Just("".into()), word.prop_map(|w| format!("/var/lib/{w}").into())].boxed()
        }
        ("endpoints.manifests", _) => word.prop_map(|w| format!("/etc/{w}").into()).boxed(),
        ("endpoints.listen", _) => any::<(u8, u16)>()
            .prop_map(|(a, p)| {
                vec![format!("unix:///run/endpoints.{p}"), format!("tcp://127.0.0.{a}:{p}")].into()
            })
            .boxed(),
        // Other modes require a name. IPv6 addresses do not conflict with the listeners.
        ("proxy.backend", _) => words(&["auto", "nft", "iptables", "ipvs", "userspace", "ebpf"]),
        ("proxy.service_proxy_name", _) => words(&["", "edge", "mesh.v2_a-b"]),
        ("endpoints.service_proxy_names", _) => lists(&["edge", "edge,mesh"]),
        ("proxy.ipvs_scheduler", _) => words(&["rr", "lc", "sh", "mh", "nq"]),
        ("proxy.iptables_variant", _) => words(&["auto", "legacy", "nft"]),
        ("proxy.userspace_proxy_protocol", _) => words(&["off", "v1", "v2"]),
        ("proxy.userspace_mapped_port_base", _) => (1024u32..=65_535).prop_map(Json::from).boxed(),
        ("proxy.detect_local_mode", _) => words(&["ClusterCIDR", "NodeCIDR"]),
        ("proxy.masquerade_bit", _) => (0u32..=31).prop_map(Json::from).boxed(),
        ("proxy.target", _) => words(&["", "unix:///run/e.sock"]),
        ("proxy.bind_address", _) => lists(&["10.0.0.7", "10.0.0.7,fd00::7", "::"]),
        ("proxy.cluster_cidr", _) => lists(&["10.244.0.0/16", "fd00:10:244::/56,10.0.0.0/8"]),
        ("proxy.nodeport_addresses", _) => lists(&["primary", "10.0.0.0/8,127.0.0.0/8", "::/0"]),
        ("proxy.bridge_interface" | "proxy.interface_name_prefix", _) => words(&["", "cbr0", "veth"]),
        ("proxy.flowtable_interfaces", _) => lists(&["eth0", "eth0,veth*", "*"]),
        ("proxy.http", _) => words(&["", "[::1]:9441", "[::1]:0"]),
        ("proxy.healthz_bind_address", _) => words(&["", "[::1]:10256", "[fd00::7]:10256"]),
        ("proxy.metrics_bind_address", _) => words(&["", "[::1]:10249", "[::1]:0"]),
        ("cri.socket_mode" | "debug.socket_mode" | "endpoints.socket_mode" | "proxy.socket_mode", _) => {
            words(&["0600", "0660", "0770"])
        }
        (path, Json::String(s)) if s.starts_with("unix:") => {
            word.prop_map(move |w| format!("unix:///run/{path}/{w}").into()).boxed()
        }
        ("pulls.retained_bytes_max", _) => words(&["0", "1Mi", "1500Mi", "1Ti"]),
        ("pulls.retain_min_free_percent", _) => (0u32..=99).prop_map(Json::from).boxed(),
        ("pulls.progress_retention" | "pulls.record_max_age", _) => {
            (1u32..=1440).prop_map(|m| format!("{m}m").into()).boxed()
        }
        ("endpoints.min_interval" | "proxy.min_sync_period", _) => {
            (0u32..=10_000).prop_map(|ms| format!("{ms}ms").into()).boxed()
        }
        ("pulls.progress_interval", _) => (50u32..=60_000).prop_map(|ms| format!("{ms}ms").into()).boxed(),
        (_, Json::String(_)) => (1u32..=119).prop_map(|s| format!("{s}s").into()).boxed(),
        (_, Json::Number(_)) => (1u32..=100).prop_map(Json::from).boxed(),
        (_, Json::Bool(_)) => any::<bool>().prop_map(Json::from).boxed(),
        (path, other) => panic!("no values for {path} ({other})"),
    }
}

fn valid_layer() -> impl Strategy<Value = BTreeMap<String, Json>> {
    let settings: Vec<_> = schema()
        .iter()
        .map(|key| {
            let path = key.path.to_owned();
            prop::option::of(valid_value(key)).prop_map(move |value| value.map(|value| (path.clone(), value)))
        })
        .collect();
    let gates: Vec<_> = ["PullDeduplication", "ResumePulls", "PerRegistryPullLimit"]
        .into_iter()
        .map(|name| {
            let path = format!("feature_gates.{name}");
            prop::option::of(any::<bool>()).prop_map(move |on| on.map(|on| (path.clone(), Json::Bool(on))))
        })
        .collect();
    (settings, gates).prop_map(|(settings, gates)| settings.into_iter().chain(gates).flatten().collect())
}

/// Compares durations by length, everything else literally.
fn same(key: &str, got: &Json, wanted: &Json) -> bool {
    let length = |value: &Json| value.as_str().and_then(|s| humantime::parse_duration(s).ok());
    let kind = schema().iter().find(|k| k.path == key).map(|k| k.kind.as_str()).unwrap_or_default();
    match kind.starts_with("duration") {
        true => length(got).is_some() && length(got) == length(wanted),
        false => got == wanted,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn valid_settings_load_and_the_highest_layer_wins(
        file in valid_layer(), env in valid_layer(), flag in valid_layer(),
    ) {
        let layers = Layers { file, env, flag };
        let loaded = layers.load();
        for entry in &loaded.entries {
            let top = [("flag", &layers.flag), ("environment", &layers.env), ("file", &layers.file)]
                .into_iter()
                .find_map(|(name, layer)| layer.get(&entry.key).map(|value| (name, value)));
            match top {
                Some((name, value)) => {
                    prop_assert_eq!(entry.origin.source(), name, "{}", entry.key);
                    prop_assert!(same(&entry.key, &entry.value, value), "{:?} for {}", entry, value);
                }
                None => prop_assert_eq!(&entry.origin, &Origin::Default, "{}", entry.key),
            }
        }
    }

    #[test]
    fn nothing_makes_it_panic(
        file in prop::collection::vec(any::<u8>(), 0..200),
        names in prop::collection::vec("KEELSON_[A-Z_.é]{0,20}", 0..4),
        texts in prop::collection::vec(any::<String>(), 8),
        key in 0..schema().len(),
    ) {
        let (_dir, mut sources) = sources(file);
        let key = &schema()[key];
        sources.hostname = texts[0].clone();
        sources.env = names.into_iter().zip(texts.iter().cloned()).collect();
        sources.env.remove("KEELSON_CONFIG");
        sources.env.insert(key.env(), texts[4].clone());
        sources.sets = vec![texts[5].clone(), format!("{}={}", key.path, texts[6]), format!("{}=1", texts[7])];
        sources.feature_gates = vec![texts[6].clone(), format!("{}=true", texts[7])];
        check_lines(&sources);
    }

    #[test]
    fn toml_like_garbage_does_not_make_it_panic(
        lines in prop::collection::vec("(\\[)?(pulls|cri|feature_gates|é)(\\.[a-z_]{1,9})?(\\])?( = )?(\"[a-zé0-9]{0,5}\"|-?[0-9]{1,25}|\\[\\]|\\{\\}|true|1\\.5)?", 0..6),
    ) {
        let (_dir, sources) = sources(lines.join("\n"));
        check_lines(&sources);
    }
}

/// The result is either settings, or errors of one line each.
fn check_lines(sources: &Sources) {
    if let Err(errors) = load(sources) {
        assert_eq!(errors.to_string().lines().count(), errors.problems().len(), "{errors}");
        assert!(!errors.problems().is_empty());
    }
}
