use std::path::PathBuf;

use crate::load::{Loaded, Sources, load};

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// What kubeadm 1.36 writes, with two networks.
const KUBEADM: &str = r#"apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16,fd00:10:244::/56
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"#;

struct Read {
    loaded: Result<Loaded, String>,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Read {
    fn of(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.conf");
        std::fs::write(&file, text).unwrap();
        let loaded = load(&Sources { file: Some(file.clone()), ..Sources::new("h") });
        Self { loaded: loaded.map_err(|errors| errors.to_string()), file, _folder: folder }
    }

    /// Settings that differ from the default, and the notes without the file name.
    fn set(&self) -> (Vec<String>, Vec<String>) {
        let loaded = self.loaded.as_ref().unwrap();
        let set = loaded.entries.iter().filter(|entry| entry.origin.source() == "file");
        let set = set.map(|entry| format!("{}={}", entry.key, entry.value)).collect();
        let file = self.file.display().to_string();
        let notes = loaded.kube_proxy.as_ref().unwrap().iter();
        (set, notes.map(|note| note.replacen(&file, "", 1)).collect())
    }

    fn error(&self) -> String {
        let error = self.loaded.as_ref().map(|_| "no error").unwrap_err();
        error.replace(&self.file.display().to_string(), "")
    }
}

#[test]
fn p20_the_file_of_kubeadm_has_the_same_effect_as_in_kube_proxy() {
    let (set, notes) = Read::of(KUBEADM).set();
    assert_eq!(
        set,
        [
            r#"proxy.bind_address=["0.0.0.0"]"#,
            r#"proxy.cluster_cidr=["10.244.0.0/16","fd00:10:244::/56"]"#,
            r#"proxy.nodeport_addresses=["0.0.0.0/0","::/0"]"#,
        ]
    );
    assert_eq!(notes.len(), 3, "{notes:#?}");
    assert!(notes[0].starts_with(":4: clientConnection has no effect: only the agent"), "{notes:#?}");
    assert!(notes[1].contains(": mode iptables: Services are programmed with nftables"), "{notes:#?}");
    assert!(notes[2].contains("node ports are served at all addresses"), "{notes:#?}");
}

#[test]
fn p20_every_field_that_is_understood_becomes_a_setting() {
    let text = format!(
        "{HEAD}mode: nftables
bindAddress: 192.0.2.7
bindAddressHardFail: true
healthzBindAddress: 0.0.0.0
metricsBindAddress: 127.0.0.1:9999
detectLocalMode: BridgeInterface
detectLocal:
  bridgeInterface: cbr0
clusterCIDR: 10.0.0.0/8
nodePortAddresses: [192.0.2.0/24]
nftables:
  masqueradeBit: 0
  masqueradeAll: true
  syncPeriod: 1m0s
  minSyncPeriod: 2.5s
conntrack:
  maxPerCore: 0
  min: 4096
  tcpEstablishedTimeout: 0s
  tcpCloseWaitTimeout: 2h
  tcpBeLiberal: true
  udpTimeout: 30s
  udpStreamTimeout: 5m
featureGates:
  AllowServiceExternalIPs: false
logging:
  format: json
  verbosity: 4
"
    );
    let (mut set, notes) = Read::of(&text).set();
    set.sort();
    let mut expected = vec![
        r#"agent.log="debug""#,
        r#"agent.log_format="json""#,
        r#"proxy.bind_address=["192.0.2.7"]"#,
        "proxy.bind_address_hard_fail=true",
        r#"proxy.healthz_bind_address="0.0.0.0:10256""#,
        r#"proxy.metrics_bind_address="127.0.0.1:9999""#,
        r#"proxy.detect_local_mode="BridgeInterface""#,
        r#"proxy.bridge_interface="cbr0""#,
        r#"proxy.cluster_cidr=["10.0.0.0/8"]"#,
        r#"proxy.nodeport_addresses=["192.0.2.0/24"]"#,
        "proxy.masquerade_bit=0",
        "proxy.masquerade_all=true",
        r#"proxy.sync_period="1m""#,
        r#"proxy.min_sync_period="2s500ms""#,
        "proxy.conntrack_max_per_core=0",
        "proxy.conntrack_min=4096",
        r#"proxy.conntrack_tcp_timeout_established="0s""#,
        r#"proxy.conntrack_tcp_timeout_close_wait="2h""#,
        "proxy.conntrack_tcp_be_liberal=true",
        r#"proxy.conntrack_udp_timeout="30s""#,
        r#"proxy.conntrack_udp_timeout_stream="5m""#,
        "proxy.allow_external_ips=false",
    ];
    expected.sort_unstable();
    assert_eq!(set, expected);
    assert_eq!(notes, [""; 0]);
}

#[test]
fn p20_a_section_counts_in_the_mode_in_which_kube_proxy_reads_it() {
    let sections = "nodePortAddresses: [primary]
iptables: {masqueradeBit: 3, masqueradeAll: true, syncPeriod: 10s}
ipvs: {syncPeriod: 20s, scheduler: lc, strictARP: true}
nftables: {masqueradeBit: 5, syncPeriod: 40s}
";
    let of_iptables = ["proxy.masquerade_all=true", "proxy.masquerade_bit=3", "proxy.sync_period=\"10s\""];
    let of_ipvs = [
        "proxy.ipvs_scheduler=\"lc\"",
        "proxy.ipvs_strict_arp=true",
        "proxy.masquerade_all=true",
        "proxy.masquerade_bit=3",
        "proxy.sync_period=\"20s\"",
    ];
    for (mode, expected, without_effect) in [
        ("\"\"", &of_iptables[..], 5),
        ("iptables", &of_iptables, 5),
        ("ipvs", &of_ipvs, 3),
        ("nftables", &["proxy.masquerade_bit=5", "proxy.sync_period=\"40s\""], 6),
    ] {
        let (mut set, notes) = Read::of(&format!("{HEAD}mode: {mode}\n{sections}")).set();
        set.retain(|line| {
            !line.starts_with("proxy.nodeport_addresses") && !line.starts_with("proxy.backend")
        });
        set.sort();
        assert_eq!(set, expected, "{mode}");
        let notes: Vec<_> = notes.iter().filter(|note| note.contains("has no effect")).collect();
        assert_eq!(notes.len(), without_effect, "{mode}: {notes:#?}");
    }
}

#[test]
fn mode_iptables_is_the_backend_iptables() {
    for (text, expected, notes) in [
        ("mode: iptables\n", &[r#"proxy.backend="iptables""#][..], 0),
        (
            "mode: iptables\niptables:\n  localhostNodePorts: false\n",
            &[r#"proxy.backend="iptables""#, "proxy.iptables_localhost_node_ports=false"],
            0,
        ),
        ("mode: nftables\niptables:\n  localhostNodePorts: true\n", &[], 1),
        // Without a mode, nothing says that the node needs iptables.
        (
            "iptables:\n  localhostNodePorts: false\n",
            &[r#"proxy.nodeport_addresses=["0.0.0.0/0","::/0"]"#],
            3,
        ),
    ] {
        let (mut set, found) = Read::of(&format!("{HEAD}{text}")).set();
        set.sort();
        assert_eq!(set, expected, "{text}");
        assert_eq!(found.len(), notes, "{text}: {found:#?}");
    }
}

#[test]
fn mode_ipvs_is_the_backend_ipvs() {
    let section = "ipvs: {scheduler: sh, strictARP: true, tcpTimeout: 10m, tcpFinTimeout: 0s, udpTimeout: 30s, \
                   excludeCIDRs: [10.0.0.0/8]}\n";
    let (mut set, notes) = Read::of(&format!("{HEAD}mode: ipvs\n{section}")).set();
    set.sort();
    assert_eq!(
        set,
        [
            r#"proxy.backend="ipvs""#,
            r#"proxy.ipvs_scheduler="sh""#,
            "proxy.ipvs_strict_arp=true",
            r#"proxy.ipvs_tcp_timeout="10m""#,
            r#"proxy.ipvs_udp_timeout="30s""#,
        ]
    );
    assert_eq!(notes.len(), 1, "{notes:#?}");
    assert!(notes[0].contains("ipvs.excludeCIDRs has no effect"), "{notes:#?}");
    let error = Read::of(&format!("{HEAD}mode: ipvs\nipvs:\n  scheduler: fastest\n")).error();
    assert!(error.contains(":5") && error.contains("\"fastest\" is not one of"), "{error}");
}

#[test]
fn p20_addresses_follow_the_family_of_bind_address() {
    for (more, line) in [
        ("", r#"proxy.healthz_bind_address="[::]:10256""#),
        ("", r#"proxy.metrics_bind_address="[::1]:10249""#),
        ("healthzBindAddress: 'fd00::1'\n", r#"proxy.healthz_bind_address="[fd00::1]:10256""#),
    ] {
        let (set, _) = Read::of(&format!("{HEAD}mode: nftables\nbindAddress: '::'\n{more}")).set();
        assert!(set.iter().any(|have| have == line), "{line} in {set:#?}");
    }
}

/// kube-proxy decodes leniently where strict decoding fails, and warns.
#[test]
fn p20_unknown_fields_are_ignored_with_a_note() {
    let text = format!(
        "{HEAD}mode: nftables\nclusterCidr: 10.0.0.0/8\nnftables:\n  masqueradeMark: 3\nfeatureGates: {{X: true}}\n"
    );
    let (set, notes) = Read::of(&text).set();
    assert_eq!(set, [""; 0]);
    assert_eq!(notes.len(), 3, "{notes:#?}");
    assert!(notes.iter().any(|note| note.starts_with(":4: unknown field \"clusterCidr\"")), "{notes:#?}");
    assert!(
        notes.iter().any(|note| note.starts_with(":6: unknown field \"nftables.masqueradeMark\"")),
        "{notes:#?}"
    );
    assert!(notes.iter().any(|note| note.contains("featureGates.X has no effect")), "{notes:#?}");
}

#[test]
fn p20_wrong_values_are_errors_with_their_places() {
    for (text, parts) in [
        ("mode: kernelspace\n", &[":3", "\"kernelspace\" is not one of"][..]),
        ("nftables:\n  masqueradeBit: 32\nmode: nftables\n", &[":4", "proxy.masquerade_bit", "out of range"]),
        ("mode: nftables\nnftables:\n  syncPeriod: soon\n", &[":5", "expected a duration in Go syntax"]),
        ("mode: nftables\nnodePortAddresses: 10.0.0.0/8\n", &[":4", "expected a list of strings"]),
        ("mode: nftables\nconntrack: 3\n", &[":4", "expected an object in conntrack"]),
        ("mode: nftables\nclusterCIDR: 10.0.0.0/8,10.1.0.0/16\n", &["two networks of one IP family"]),
        ("mode: nftables\nfeatureGates: {AllowServiceExternalIPs: 3}\n", &["expected true or false"]),
    ] {
        let error = Read::of(&format!("{HEAD}{text}")).error();
        assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
    let old = "apiVersion: kubeproxy.config.k8s.io/v1beta9\nkind: KubeProxyConfiguration\n";
    let error = Read::of(old).error();
    assert!(error.contains(":1: ") && error.contains("v1beta9"), "{error}");
}

#[test]
fn p20_mistakes_of_yaml_are_reported() {
    let json = "{\n  \"apiVersion\": \"kubeproxy.config.k8s.io/v1alpha1\",\n  \"kind\": \"KubeProxyConfiguration\",\n  \"mode\": ]\n}\n";
    for (text, line) in [
        (format!("{HEAD}mode: nftables\n\tclusterCIDR: 10.0.0.0/8\n"), ":3:7: "),
        (format!("{HEAD}mode: nftables\nmode: ipvs\n"), ":4:"),
        (format!("{HEAD}nodePortAddresses: [10.0.0.0/8\nmode: nftables\n"), ":4:5: "),
        (json.to_owned(), ":1:1: "),
    ] {
        let error = Read::of(&text).error();
        assert!(error.contains("not valid YAML: ") && error.contains(line), "{text}: {error}");
        assert!(!error.contains("TOML") && error.lines().count() == 1, "{text}: {error}");
    }
}

#[test]
fn p20_a_settings_file_stays_a_settings_file() {
    let read = Read::of("# was: kind = KubeProxyConfiguration\n[proxy]\nmasquerade_bit = 3\n");
    let loaded = read.loaded.unwrap();
    assert_eq!((loaded.kube_proxy, loaded.settings.proxy.masquerade_bit), (None, 3));
}
