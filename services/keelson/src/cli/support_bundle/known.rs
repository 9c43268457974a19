//! Values that are secret wherever they appear.
//!
//! In: the files and the environment variables in which the agent, the kubelet and the container runtime have
//! credentials. Out: their values, which are compared with the text of the bundle and never written.

use std::{
    fs,
    path::{Path, PathBuf},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use keelson_config::Settings;

use super::redact::{is_secret_name, secrets_of};

/// `settings_file`: also read for paths, because invalid settings are not in `settings`.
pub(super) fn known_secrets(settings: &Settings, settings_file: &Path) -> Vec<String> {
    let mut found: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| is_secret_name(name))
        .map(|(_, value)| value)
        .collect();
    let paths = fs::read_to_string(settings_file).map(|text| named_files(&text)).unwrap_or_default();
    for path in files(settings).into_iter().chain(paths) {
        let Ok(text) = fs::read_to_string(path) else { continue };
        let secrets = secrets_of(&text);
        // "auth" of a registry is the base64 of user:password.
        let decoded = secrets.iter().filter_map(|value| {
            let pair = String::from_utf8(BASE64_STANDARD.decode(value).ok()?).ok()?;
            Some(pair.split_once(':')?.1.to_owned())
        });
        found.extend(decoded.collect::<Vec<_>>());
        found.extend(secrets);
    }
    found
}

/// The files that lines such as `token_file = "/etc/keelson/token"` name.
fn named_files(toml: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in toml.lines() {
        let Some((key, value)) = line.split_once('=') else { continue };
        let value = PathBuf::from(value.trim().trim_matches(['"', '\'']));
        match key.trim() {
            "kubeconfig" | "bootstrap_kubeconfig" | "token_file" => files.push(value),
            "root_dir" => files.extend(["config.json", "kubeconfig"].map(|name| value.join(name))),
            _ => {}
        }
    }
    files
}

fn files(settings: &Settings) -> Vec<PathBuf> {
    let kube = &settings.kube;
    let mut files: Vec<PathBuf> = [&kube.kubeconfig, &kube.bootstrap_kubeconfig, &kube.token_file]
        .into_iter()
        .flatten()
        .cloned()
        .collect();
    let kubelet = &settings.node.root_dir;
    files.extend(["config.json", "kubeconfig"].map(|name| kubelet.join(name)));
    files.extend(
        [
            "/etc/kubernetes/kubelet.conf",
            "/etc/kubernetes/bootstrap-kubelet.conf",
            "/etc/kubernetes/admin.conf",
            "/etc/containerd/config.toml",
            "/var/run/secrets/kubernetes.io/serviceaccount/token",
        ]
        .map(PathBuf::from),
    );
    if let Some(home) = std::env::var_os("HOME") {
        files.extend([".docker/config.json", ".kube/config"].map(|name| PathBuf::from(&home).join(name)));
    }
    files
}
