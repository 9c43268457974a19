//! Every kind of mistake is reported at its exact place with a correction, together with all others.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests, which clippy.toml does not see

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use keelson_config::{Fault, Origin, Sources, load};

struct Case {
    dir: tempfile::TempDir,
    sources: Sources,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let sources = Sources { default_file: dir.path().join("keelson.toml"), ..Sources::new("node-1") };
        Self { dir, sources }
    }

    fn file(self, text: impl AsRef<[u8]>) -> Self {
        std::fs::write(&self.sources.default_file, text).unwrap();
        self
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.sources.env.insert(name.into(), value.into());
        self
    }

    fn set(mut self, text: &str) -> Self {
        self.sources.sets.push(text.into());
        self
    }

    fn gates(mut self, text: &str) -> Self {
        self.sources.feature_gates.push(text.into());
        self
    }

    /// All problems, one per line, without the path of the folder.
    fn errors(&self) -> String {
        let errors = load(&self.sources).expect_err("accepted");
        errors.to_string().replace(&format!("{}/", self.dir.path().display()), "")
    }
}

#[track_caller]
fn file_fault(text: &str, expected: &str) {
    assert_eq!(Case::new().file(text).errors(), expected);
}

/// Asserts the fault of `section.key=value` as a flag.
#[track_caller]
fn set_fault(text: &str, expected: &str) {
    let key = text.split('=').next().unwrap();
    assert_eq!(Case::new().set(text).errors(), format!("flag --set {key}: {expected}"), "{text}");
}

/// Asserts the fault of the value of `key = value` in a section of the file, at this column.
#[track_caller]
fn value_fault(section: &str, line: &str, column: u32, expected: &str) {
    let key = line.split(" =").next().unwrap();
    let expected = format!("keelson.toml:2:{column}: {section}.{key}: {expected}");
    file_fault(&format!("[{section}]\n{line}\n"), &expected);
}

#[test]
fn wrong_types_in_the_file() {
    for (section, line, column, expected) in [
        (
            "pulls",
            "serialize_image_pulls = \"true\"",
            25,
            "expected true or false, without quotes, found the string \"true\"",
        ),
        (
            "pulls",
            "max_parallel_image_pulls = \"3\"",
            28,
            "expected a whole number, without quotes, found the string \"3\"",
        ),
        (
            "pulls",
            "max_parallel_image_pulls = 1.5",
            28,
            "expected a whole number, found a number with a fraction",
        ),
        ("agent", "log_format = true", 14, "expected \"text\" or \"json\", found true"),
        (
            "cri",
            "socket_mode = 0o660",
            15,
            "expected an octal mode as text, such as \"0660\", found the number 432",
        ),
        (
            "proxy",
            "nodeport_addresses = true",
            22,
            "expected a list, [\"primary\"] or networks such as [\"10.0.0.0/8\"], found true",
        ),
        ("feature_gates", "PullOption = \"no\"", 14, "expected true or false, found the string \"no\""),
    ] {
        value_fault(section, line, column, expected);
    }
    file_fault(
        "cri = {listen = [\"unix:///x\"]}\n",
        "keelson.toml:1:17: cri.listen: expected a unix socket address as text, such as \
         \"unix:///run/keelson/name.sock\", found a list",
    );
    file_fault("pulls = 3\n", "keelson.toml:1:9: expected a table [pulls], found a number");
    file_fault("[[pulls]]\n", "keelson.toml:1:1: expected a table [pulls], found a list of tables");
}

#[test]
fn bounds() {
    value_fault(
        "pulls",
        "max_parallel_image_pulls = -1",
        28,
        "-1 is out of range; allowed: 1 to 10000, or 0 for no limit",
    );
    for (text, allowed) in [
        ("pulls.max_queued_callers=99999999999999999999", "1 to 1000000"),
        ("cri.hold_timeout=2m", "0s to 1m59s"),
        ("pulls.stall_timeout=1ms", "1s to 24h, or 0s for off"),
        ("pulls.progress_retention=59s", "1m to 24h"),
    ] {
        let value = text.split_once('=').unwrap().1;
        set_fault(text, &format!("\"{value}\" is out of range; allowed: {allowed}"));
    }
    set_fault("proxy.masquerade_bit=32", "32 is out of range; allowed: 0 to 31");
}

#[test]
fn durations() {
    let units = "(units: ms, s, m, h)";
    let ten = format!("10 has no unit; for seconds write \"10s\" {units}");
    value_fault("pulls", "stall_timeout = 10", 17, &ten);
    set_fault("pulls.stall_timeout=0", &format!("0 has no unit; for seconds write \"0s\" {units}"));
    let error = Case::new().env("KEELSON_PULLS__STALL_TIMEOUT", "ten minutes").errors();
    let lead =
        "environment KEELSON_PULLS__STALL_TIMEOUT: pulls.stall_timeout: \"ten minutes\" is not a duration: ";
    assert!(error.starts_with(lead), "{error}");
    assert!(error.ends_with("such as \"500ms\", \"10s\" or \"1m30s\""), "{error}");
}

#[test]
fn addresses_paths_and_names() {
    for (text, expected) in [
        (
            "cri.runtime_endpoint=/run/crio/crio.sock",
            "not a unix socket address: the scheme is missing; write \"unix:///run/crio/crio.sock\"",
        ),
        (
            "debug.http=localhost:9440",
            "not an address: an IP address and a port are required; write \"127.0.0.1:9440\" or \
             \"[::1]:9440\", or \"\" for off",
        ),
        (
            "agent.state_dir=keelson",
            "not an absolute path: the path is not absolute; write a path that begins with \"/\" and has no \
             \"..\"",
        ),
        ("agent.node_name=Node-1", "not a node name: node names are lower case; write \"node-1\""),
        (
            "cri.socket_mode=0666",
            "not a socket mode: every user of the node could connect; write \"0600\" (owner) or \"0660\" \
             (owner and group)",
        ),
        ("proxy.cluster_cidr=10.244.0.1/16", "not a network: it has host bits set; write \"10.244.0.0/16\""),
        (
            "proxy.nodeport_addresses=primary,10.0.0.0/8",
            "not a list of addresses for node ports: primary cannot be combined with networks; write \
             [\"primary\"] or only networks",
        ),
        (
            "proxy.bind_address=node-7",
            "not an IP address: it is neither an IPv4 nor an IPv6 address; write such as \"10.0.0.7\" or \
             \"fd00::7\"",
        ),
        (
            "proxy.bridge_interface=a/b",
            "not a name of a network interface: it has a character that is not allowed in interface names; \
             write at most 15 characters, such as \"cbr0\"",
        ),
    ] {
        let value = text.split_once('=').unwrap().1;
        set_fault(text, &format!("\"{value}\" is {expected}"));
    }
    let error = Case::new().set("agent.log=keelson=loud").errors();
    assert!(error.starts_with("flag --set agent.log: \"keelson=loud\" is not a log filter: "));
}

#[test]
fn a_password_in_an_address_is_refused_and_not_repeated() {
    for text in ["cri.listen=unix://joe:hunter2@/run/x", "debug.http=joe:hunter2@127.0.0.1:9440"] {
        let errors = load(&Case::new().set(text).sources).unwrap_err();
        assert!(matches!(errors.problems()[0].fault, Fault::UserInfo { .. }), "{errors}");
        assert!(!format!("{errors} {errors:?}").contains("hunter2"), "{errors}");
    }
    for text in ["cri.listen unix://joe:hunter2@/x", "pulls.when_full=https://joe:hunter2@host"] {
        let errors = load(&Case::new().set(text).sources).unwrap_err();
        assert!(!format!("{errors} {errors:?}").contains("hunter2"), "{errors}");
        assert!(errors.to_string().contains("...@"), "{errors}");
    }
}

#[test]
fn a_host_name_that_is_no_node_name() {
    let mut case = Case::new();
    case.sources.hostname = "my_host".into();
    assert_eq!(
        case.errors(),
        "default: agent.node_name: \"my_host\" is not a node name (from the host name): it is not a DNS \
         subdomain (RFC 1123); set agent.node_name to the node's name"
    );
    let loaded = load(&case.set("agent.node_name=worker-7").sources).unwrap();
    assert_eq!(loaded.settings.agent.node_name, "worker-7");
}

#[test]
fn environment_names() {
    let sections = "agent, cri, pulls, kube, node, endpoints, proxy, debug, feature_gates";
    let means = "did you mean KEELSON_PULLS__WHEN_FULL?";
    for (name, value, expected) in [
        ("FOO__BAR", "1", format!("unknown section \"foo\"; the sections are {sections}")),
        ("PULL__WHEN_FUL", "wait", format!("unknown section \"pull\"; {means}")),
        ("PULLS__WHEN_FUL", "wait", format!("unknown key \"when_ful\"; {means}")),
        ("AGENT__WHEN_FULL", "wait", format!("unknown key \"when_full\"; {means}")),
        (
            "PULLS_WHEN_FULL",
            "wait",
            "two underscores are required between section and key; write KEELSON_PULLS__WHEN_FULL".into(),
        ),
        ("PULLS__WHEN_FULL", "", "pulls.when_full: \"\" is not one of \"wait\", \"reject\"".into()),
        (
            "FEATURE_GATES",
            "PullOption",
            "\"PullOption\" is not a feature gate setting; write Name=true or Name=false, separated by commas"
                .into(),
        ),
        (
            "FEATURE_GATES__PULL_OPTION",
            "yes",
            "feature_gates.PullOption: expected true or false, found \"yes\"".into(),
        ),
    ] {
        let name = format!("KEELSON_{name}");
        assert_eq!(Case::new().env(&name, value).errors(), format!("environment {name}: {expected}"));
    }
}

#[test]
fn environment_names_that_are_no_settings_are_left_alone() {
    let case = Case::new()
        .env("KEELSON_CONFIG", "")
        .env("KEELSON_DEBUG_SOCKET", "unix:///elsewhere")
        .env("KEELSON_PORT", "tcp://10.0.0.1:80")
        .env("KEELSON_SERVICE_HOST", "10.0.0.1")
        .env("OTHER_PULLS__WHEN_FUL", "wait");
    assert!(load(&case.sources).is_ok());
}

#[test]
fn two_variables_for_one_setting() {
    let case = Case::new().env("KEELSON_PULLS__WHEN_FULL", "wait").env("KEELSON_pulls__when_full", "reject");
    assert_eq!(
        case.errors(),
        "environment KEELSON_pulls__when_full: pulls.when_full: set twice with different values, also as \
         environment KEELSON_PULLS__WHEN_FULL; remove one"
    );
    let case = Case::new()
        .env("KEELSON_FEATURE_GATES", "PullOption=true")
        .env("KEELSON_FEATURE_GATES__PullOption", "false");
    assert!(
        case.errors().starts_with("environment KEELSON_FEATURE_GATES__PullOption: "),
        "{}",
        case.errors()
    );
    let same = Case::new().env("KEELSON_PULLS__WHEN_FULL", "wait").env("KEELSON_pulls__when_full", "wait");
    assert!(load(&same.sources).is_ok());
}

#[test]
fn flags() {
    let lead = "is not a setting; write --set section.key=value, such as --set pulls.when_full=reject";
    for text in ["pulls.when_full", "=3"] {
        assert_eq!(Case::new().set(text).errors(), format!("flag --set: \"{text}\" {lead}"));
    }
    set_fault("when_full=wait", "unknown key \"when_full\"; did you mean pulls.when_full?");
    set_fault("puls.when_full=wait", "unknown section \"puls\"; did you mean pulls.when_full?");
    let error = Case::new().gates("Xyzzy=true,PullOption=maybe").errors();
    assert_eq!(
        error,
        "flag --feature-gates Xyzzy: unknown feature gate \"Xyzzy\"; known gates: PullDeduplication, \
         PresentImageFastLane, KeepPullProgress, ResumePulls, PullOption, NodeHeartbeats, PodAwarePulls, LeanLeases, \
         ExternalNodeConditions, ServiceEndpoints, EndpointDeltas, NodeEvents, PerRegistryPullLimit, AllAlpha, \
         AllBeta\n\
         flag --feature-gates PullOption: feature_gates.PullOption: expected true or false, found \"maybe\""
    );
}

#[test]
fn files_that_cannot_be_read() {
    let mut case = Case::new();
    case.sources.file = Some(case.dir.path().join("missing.toml"));
    let error = case.errors();
    assert!(error.starts_with("missing.toml: cannot read the settings file: "), "{error}");
    case.sources.file = None;
    assert!(load(&case.sources).is_ok(), "the default file may be missing");
    let named = case.dir.path().join("named.toml");
    let case = case.env("KEELSON_CONFIG", named.to_str().unwrap());
    assert!(case.errors().starts_with("named.toml: cannot read"), "{}", case.errors());
    std::fs::create_dir(&case.sources.default_file).unwrap();
    let mut case = case;
    case.sources.env.clear();
    assert!(case.errors().starts_with("keelson.toml: cannot read"), "{}", case.errors());

    let bad = Case::new().file(b"[pulls]\nx = \"\xff\"\n");
    assert!(bad.errors().starts_with("keelson.toml:2:6: cannot read"), "{}", bad.errors());
    let large = Case::new().file(vec![b'\n'; (1 << 20) + 1]);
    assert!(large.errors().contains("larger than 1048576 bytes"), "{}", large.errors());
}

#[test]
fn syntax_errors_have_line_and_column_and_do_not_hide_other_layers() {
    let case = Case::new().file("[pulls]\n\nwhen_full = wait\n").set("pulls.when_ful=wait");
    let error = case.errors();
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines.len(), 2, "{error}");
    assert!(lines[0].starts_with("keelson.toml:3:13: not valid TOML: "), "{error}");
    assert!(lines[1].starts_with("flag --set pulls.when_ful: unknown key"), "{error}");
    let twice = Case::new().file("[pulls]\nwhen_full = \"wait\"\nwhen_full = \"wait\"\n").errors();
    assert!(twice.starts_with("keelson.toml:3:1: not valid TOML: duplicate key"), "{twice}");
}

#[test]
fn addresses_of_api_servers() {
    for (set, word) in [
        ("kube.server=http://10.0.0.1", "must be https"),
        ("kube.server=10.0.0.1:6443", "the scheme is missing"),
        ("kube.server=https://", "the host is missing"),
        ("kube.server=https://h/?x", "the host is missing"),
        ("kube.server=https://joe:hunter2@h", "https://10.0.0.1:6443"),
    ] {
        let error = Case::new().set(set).errors();
        assert!(error.contains(word) && !error.contains("hunter2"), "{set}: {error}");
    }
    let two = Case::new().set("kube.in_cluster=true").set("kube.kubeconfig=/etc/kubeconfig").errors();
    assert!(two.contains("are mutually exclusive"), "{two}");
    // E4: the certificate is the node's own.
    let companion = Case::new().set("kube.bootstrap_kubeconfig=/etc/bootstrap").errors();
    assert!(companion.contains("bootstrap_kubeconfig requires role = \"node\""), "{companion}");
    let half = Case::new().set("kube.client_key=/etc/key").errors();
    assert!(half.contains("set both or none"), "{half}");
}

/// Asserts that the only problem is a flag that does not fit another setting.
#[track_caller]
fn is_relation(case: &Case, word: &str) {
    let errors = load(&case.sources).unwrap_err();
    let [problem] = errors.problems() else { panic!("{errors}") };
    assert!(matches!(problem.fault, Fault::Relation { .. }), "{errors}");
    assert!(matches!(problem.place, Origin::Flag(_)), "{errors}");
    assert!(problem.to_string().contains(word), "{errors}");
}

#[test]
fn relations() {
    let case = Case::new()
        .file("[pulls]\nserialize_image_pulls = true\n")
        .env("KEELSON_PULLS__MAX_PARALLEL_IMAGE_PULLS", "3");
    assert_eq!(
        case.errors(),
        "environment KEELSON_PULLS__MAX_PARALLEL_IMAGE_PULLS: pulls.max_parallel_image_pulls: \
         serialize_image_pulls = true allows one pull at a time and max_parallel_image_pulls = 3 allows 3; set \
         serialize_image_pulls = false, or max_parallel_image_pulls to 0 or 1 (pulls.serialize_image_pulls: \
         keelson.toml:2)"
    );
    for (set, word) in [
        ("pulls.per_registry_max_parallel_image_pulls=2", "gate PerRegistryPullLimit"),
        ("debug.http=0.0.0.0:9440", "not a loopback address"),
        ("debug.http=[::ffff:10.0.0.1]:1", "not a loopback address"),
        ("debug.listen=unix:///run/keelson/cri.sock", "cri.listen and debug.listen are both"),
        ("cri.listen=unix:///run/containerd//containerd.sock", "cri.listen and cri.runtime_endpoint are"),
        ("kube.context=prod", "context requires kubeconfig"),
        ("kube.token_file=/etc/token", "require server"),
        ("kube.server=https://10.0.0.1:6443", "server requires credentials"),
        ("endpoints.source=files", "requires a directory"),
        ("endpoints.source=kube", "requires an API server"),
        ("endpoints.listen=tcp://10.0.0.7:12345", "not a loopback address"),
        ("endpoints.listen=unix:///run/a,unix:///run/a", "is duplicated"),
        (
            "endpoints.listen=unix:///run/a,unix:///run/keelson/debug.sock",
            "debug.listen and endpoints.listen are",
        ),
        ("proxy.detect_local_mode=BridgeInterface", "requires bridge_interface"),
        ("proxy.ebpf_pod_devices=veth*", "requires ebpf_untracked_pods = true"),
        ("proxy.detect_local_mode=InterfaceNamePrefix", "requires interface_name_prefix"),
        ("proxy.cluster_cidr=10.0.0.0/16,10.1.0.0/16", "two networks of one IP family"),
        ("proxy.bind_address=10.0.0.7,10.0.0.8", "two addresses of one IP family"),
        ("proxy.http=0.0.0.0:9441", "not a loopback address"),
        ("proxy.http=127.0.0.1:9440", "are the same address"),
        ("proxy.healthz_bind_address=[::]:10249", "a different port"),
        ("proxy.metrics_bind_address=127.0.0.1:10256", "a different port"),
        ("proxy.listen=unix:///run/keelson/debug.sock", "proxy.listen and debug.listen are both"),
        (
            "proxy.listen=unix:///run/keelson-endpoints/endpoints.sock",
            "proxy.listen and endpoints.listen are both",
        ),
        ("node.lease_duration=40500ms", "whole seconds"),
        ("node.node_status_report_frequency=5s", "must not be less than"),
    ] {
        is_relation(&Case::new().set(set), word);
    }
    for gates in ["PullOption=false", "AllBeta=false"] {
        is_relation(&Case::new().set("pulls.enforce=runtime").gates(gates), "gate PullOption");
    }
    for sound in [
        vec!["pulls.serialize_image_pulls=true", "pulls.max_parallel_image_pulls=1"],
        vec!["debug.http=0.0.0.0:9440", "debug.http_allow_remote=true"],
        vec!["debug.http=[::1]:0"],
        vec!["debug.http="],
        vec!["kube.kubeconfig=/etc/kubernetes/kubelet.conf", "kube.context=prod", "node.role=node"],
        vec!["kube.in_cluster=true"],
        vec!["kube.bootstrap_kubeconfig=/etc/bootstrap", "node.role=node", "endpoints.source=kube"],
        vec!["kube.in_cluster=true", "endpoints.source=kube"],
        vec!["endpoints.source=files", "endpoints.manifests=/etc/keelson/manifests"],
        vec!["endpoints.listen=unix:///run/a, tcp://127.0.0.1:12345, tcp://[::1]:0, tcp://[::1]:0"],
        vec!["endpoints.listen=tcp://0.0.0.0:12345", "endpoints.allow_remote=true"],
        vec!["endpoints.listen="],
        vec!["proxy.detect_local_mode=BridgeInterface", "proxy.bridge_interface=cbr0"],
        vec!["proxy.ebpf_pod_devices=veth*", "proxy.ebpf_untracked_pods=true"],
        vec!["proxy.detect_local_mode=InterfaceNamePrefix", "proxy.interface_name_prefix=veth"],
        vec!["proxy.detect_local_mode=NodeCIDR"],
        vec!["proxy.cluster_cidr=10.244.0.0/16,fd00:10:244::/56", "proxy.bind_address=10.0.0.7,fd00::7"],
        vec!["proxy.http=", "proxy.healthz_bind_address=", "proxy.metrics_bind_address="],
        vec!["proxy.http=127.0.0.1:0", "proxy.metrics_bind_address=127.0.0.1:0"],
        vec!["proxy.http=10.0.0.7:9441", "proxy.http_allow_remote=true"],
        vec!["proxy.http=127.0.0.2:9440"],
        vec!["proxy.metrics_bind_address=[::1]:10256"],
        vec!["proxy.nodeport_addresses=10.0.0.0/8,::/0", "proxy.target=unix:///run/e.sock"],
        vec!["kube.server=https://[fd00::1]:6443", "kube.token_file=/etc/token"],
        vec!["pulls.per_registry_max_parallel_image_pulls=2", "feature_gates.AllAlpha=true"],
    ] {
        let case = sound.iter().fold(Case::new(), |case, text| case.set(text));
        assert!(load(&case.sources).is_ok(), "{sound:?}");
    }
}

#[test]
fn relations_are_not_checked_for_unknown_values() {
    let case = Case::new().set("pulls.serialize_image_pulls=yes").set("pulls.max_parallel_image_pulls=3");
    assert_eq!(case.errors().lines().count(), 1, "{}", case.errors());
    let case =
        Case::new().set("pulls.per_registry_max_parallel_image_pulls=3").gates("PerRegistryPullLimit=yes");
    assert_eq!(case.errors().lines().count(), 1, "{}", case.errors());
}

#[test]
fn all_problems_at_once_sorted_by_place() {
    let case = Case::new()
        .file("[cri]\nlisten = \"tcp://x\"\n[pulls]\nwhen_ful = \"wait\"\nstall_timeout = 10\ncancel_grace = 5\n")
        .env("KEELSON_PULLS__STALL_TIMEOUT", "10")
        .env("KEELSON_BAR__X", "1")
        .set("debug.http=0.0.0.0:80")
        .set("pulls.when_full=never")
        .set("pulls.cancel_grace=1s");
    let error = case.errors();
    let places: Vec<&str> = error.lines().map(|line| line.split(": ").next().unwrap()).collect();
    assert_eq!(
        places,
        [
            "keelson.toml:2:10",
            "keelson.toml:4:1",
            "keelson.toml:5:17",
            "keelson.toml:6:16", // overridden by a flag, but still wrong
            "environment KEELSON_BAR__X",
            "environment KEELSON_PULLS__STALL_TIMEOUT",
            "flag --set pulls.when_full",
            "flag --set debug.http",
        ],
        "{error}"
    );
}

#[test]
fn columns_count_characters() {
    file_fault(
        "pulls = {\"when_full\" = \"wäit\", enforce = \"nobody\"}\n",
        "keelson.toml:1:24: pulls.when_full: \"wäit\" is not one of \"wait\", \"reject\"; did you mean \"wait\"?\n\
         keelson.toml:1:42: pulls.enforce: \"nobody\" is not one of \"agent\", \"runtime\"",
    );
}

/// The first lines of each fixture list, as `# expect PLACE: ...`, all that must be reported.
#[test]
fn misspelt_fixtures() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/misspelt");
    let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 15, "fixtures are missing: {files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let expected: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# expect ")).collect();
        assert!(!expected.is_empty(), "{}", file.display());
        let sources = Sources { file: Some(file.clone()), env: BTreeMap::new(), ..Sources::new("node-1") };
        let errors = load(&sources).unwrap_err().to_string();
        let got: Vec<String> =
            errors.lines().map(|l| l.replace(&format!("{}:", file.display()), "")).collect();
        assert_eq!(got, expected, "{}", file.display());
    }
}
