//! `keelson support-bundle` as a process, on a machine that has secrets in every source that can be given to it.

// What a test needs and cannot have fails it.
#![allow(clippy::expect_used)]

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};

/// Values that are recognised by what surrounds them.
const BY_FORM: [&str; 9] = [
    "plain-password-1",
    "url-password-2",
    "bearer-opaque-3xxxxxxxx",
    "basic-4xxxxxxxxxxxxxx1",
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW06bm9kZTp4In0.c2lnbmF0dXJl",
    "MHcCAQEEIBundledPrivateKeyLine",
    "json-identity-token-6",
    "reference-password-7",
    "unit-environment-password-8",
];
/// Values that are recognised because a file or the environment says that they are secret.
const BY_VALUE: [&str; 6] = [
    "opaque.token.of.token-file",
    "opaqueTokenOfKubeconfig",
    "b3BhcXVlS2V5T2ZLdWJlY29uZmln",
    "opaqueRegistryPassword",
    "opaquePasswordOfContainerd",
    "opaqueTokenOfEnvironment",
];

/// Text as it may be in a log, with every secret.
fn leaky() -> String {
    let [password, url, bearer, basic, jwt, key, identity, reference, unit] = BY_FORM;
    let mut text = format!(
        "keelson: failed to pull image password={password} from https://user:{url}@registry.example/v2/\n\
         header Authorization: Bearer {bearer}\nsent with Basic {basic}\ntoken {jwt}.\n\
         -----BEGIN EC PRIVATE KEY-----\n{key}\n-----END EC PRIVATE KEY-----\n\
         msg=\"{{\\\"identitytoken\\\":\\\"{identity}\\\"}}\"\n\
         image user:{reference}@registry.example/app:1\nEnvironment=REGISTRY_PASSWORD={unit}\n"
    );
    for value in BY_VALUE {
        text.push_str(&format!("somewhere [{value}] in a line\n"));
    }
    text
}

struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir().expect("a folder") };
        for program in ["journalctl", "systemctl", "nft", "iptables-save", "ip", "ss", "conntrack"] {
            let script = format!("#!/bin/sh\ncat <<'END'\n{}# KEELSON keelson {}END\n", leaky(), leaky());
            machine.write(&format!("bin/{program}"), &script, 0o755);
        }
        let [token, kube_token, kube_key, registry, containerd, _] = BY_VALUE;
        machine.write("token", token, 0o600);
        let kubeconfig = format!(
            "users:\n- name: node\n  user:\n    token: {kube_token}\n    client-key-data: {kube_key}\n    password: {containerd}\n"
        );
        machine.write("kubelet/kubeconfig", &kubeconfig, 0o600);
        let auth = BASE64_STANDARD.encode(format!("user:{registry}"));
        let docker = format!("{{\"auths\":{{\"registry.example\":{{\"auth\":\"{auth}\"}}}}}}");
        machine.write("kubelet/config.json", &docker, 0o600);
        let kubelet =
            format!("serializeImagePulls: false\nstaticPodURLHeader: {{Authorization: [{}]}}\n", BY_FORM[2]);
        machine.write("kubelet/config.yaml", &kubelet, 0o600);
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: &str, mode: u32) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
    }

    /// `http`: where agent and proxy are expected, or nowhere.
    fn settings(&self, http: [&str; 2], server: &str) {
        let [agent, proxy] = http;
        let at = |name: &str| self.path(name).display().to_string();
        let text = format!(
            "[agent]\nnode_name = \"bundled\"\nstate_dir = {:?}\n[debug]\nlisten = \"unix://{}\"\nhttp = {agent:?}\n\
             [proxy]\nlisten = \"unix://{}\"\nhttp = {proxy:?}\nhealthz_bind_address = \"\"\n\
             [node]\nroot_dir = {:?}\n[kube]\nserver = {server:?}\ntoken_file = {:?}\n",
            at("state"),
            at("debug.sock"),
            at("proxy.sock"),
            at("kubelet"),
            at("token"),
        );
        self.write("keelson.toml", &text, 0o600);
    }

    fn run(&self, output: &Path) -> Output {
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        Command::new(env!("CARGO_BIN_EXE_keelson"))
            .args(["support-bundle", "--config"])
            .arg(self.path("keelson.toml"))
            .arg("-o")
            .arg(output)
            .env("PATH", path)
            .env("HOME", self.folder.path())
            .env("REGISTRY_TOKEN", BY_VALUE[5])
            .output()
            .expect("runs")
    }
}

/// Every file of the bundle by its name in the folder.
fn unpack(bundle: &Path) -> BTreeMap<String, String> {
    let file = fs::File::open(bundle).expect("a bundle");
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let mut files = BTreeMap::new();
    for entry in archive.entries().expect("a tar archive") {
        let mut entry = entry.expect("complete");
        let path = entry.path().expect("a path").display().to_string();
        let name = path.strip_prefix("keelson-support-bundled/").or(path.strip_prefix("keelson-support-"));
        let name = name.expect("one folder").to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).expect("text");
        files.insert(name, text);
    }
    files
}

#[track_caller]
fn has_no_secret(files: &BTreeMap<String, String>, output: &Output) {
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    for secret in BY_FORM.iter().chain(&BY_VALUE) {
        for (name, text) in files {
            assert!(!text.contains(secret), "{secret} is in {name}:\n{text}");
        }
        assert!(!said.contains(secret), "{secret} was printed: {said}");
    }
}

/// Answers every request with secrets, as long as the test runs.
fn leaky_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 1024]);
            let _ = write!(stream, "HTTP/1.0 200 OK\r\n\r\n# metrics\n{}", leaky());
        }
    });
    address
}

#[test]
fn no_secret_of_any_source_is_in_the_bundle() {
    let machine = Machine::new();
    let [agent, proxy] = [leaky_server(), leaky_server()];
    machine.settings([&agent, &proxy], "https://10.0.0.1:6443");
    let bundle = machine.path("out.tar.gz");
    let output = machine.run(&bundle);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::metadata(&bundle).expect("a bundle").permissions().mode() & 0o777, 0o600);
    let files = unpack(&bundle);
    has_no_secret(&files, &output);
    // The sources were asked, and what was removed is marked.
    for name in
        ["logs/keelson.log", "units/files.txt", "agent/metrics.txt", "proxy/metrics.txt", "kernel/nft-ip.txt"]
    {
        assert!(files[name].contains("<redacted>"), "{name}: {}", files[name]);
        assert!(files[name].contains("registry.example"), "{name}: {}", files[name]);
    }
    assert!(files["settings/effective.toml"].contains("node_name = \"bundled\""));
    assert!(files["kernel/uname.txt"].starts_with("Linux"));
    // Neither agent nor proxy answers at the sockets, which is in the manifest.
    let manifest: serde_json::Value = serde_json::from_str(&files["manifest.json"]).expect("JSON");
    let part = |file: &str| {
        let parts = manifest["parts"].as_array().expect("parts");
        parts.iter().find(|part| part["file"] == file).cloned().expect("listed")
    };
    let pulls = part("agent/pulls.json");
    assert_eq!(pulls["exit_code"], 1);
    assert!(pulls["error"].as_str().expect("an error").contains("cannot connect to the agent at"), "{pulls}");
    // The kubelet of another test may run: what is found of it is a test of its own.
    assert_eq!(part("kubelet/image-keys.txt")["source"], "image keys of the kubelet");
    assert!(part("logs/keelson.log")["redacted"].as_u64() > Some(10));
    assert!(files["MANIFEST.txt"].contains("Support bundle of keelson"), "{}", files["MANIFEST.txt"]);
    // A second run does not write over the first.
    let again = machine.run(&bundle);
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("pass another path with -o"), "{again:?}");
}

#[test]
fn wrong_settings_are_reported_without_their_secrets_and_defaults_are_used() {
    let machine = Machine::new();
    machine.settings(["", ""], &format!("https://user:{}@10.0.0.1:6443", BY_FORM[1]));
    let bundle = machine.path("out.tar.gz");
    let output = machine.run(&bundle);
    assert!(output.status.success(), "{output:?}");
    let files = unpack(&bundle);
    has_no_secret(&files, &output);
    let manifest = files.iter().find(|(name, _)| name.ends_with("MANIFEST.txt")).expect("a manifest").1;
    assert!(
        manifest.contains("Defaults in place of the settings:") && manifest.contains("kube.server"),
        "{manifest}"
    );
}
