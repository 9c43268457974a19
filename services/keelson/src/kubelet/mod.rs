//! The kubelet's settings that decide whether image pulls go through the agent.
//!
//! Owns: where a kubelet has them ([`find`](mod@find)), what they are in effect ([`Kubelet::configured`]), and their edits
//! ([`edit`]). In: files below a root folder, the command line of a running kubelet. Out: values with their origin. Nothing
//! here writes except [`files`].
//!
//! A kubelet reads its configuration file, then the drop-in directory (`--config-dir`), then its flags; the last one
//! counts. Source: `cmd/kubelet/app/server.go`.

pub(crate) mod diff;
pub(crate) mod edit;
pub(crate) mod files;
mod find;
mod flags;
pub(crate) mod yaml;

use std::path::{Path, PathBuf};

pub(crate) use find::{Options, find, processes};

/// The configuration file that kubeadm writes.
pub(crate) const CONFIG: &str = "/var/lib/kubelet/config.yaml";
/// The drop-in of `keelson attach`.
pub(crate) const DROP_IN: &str = "20-keelson.conf";

/// The settings that `keelson attach` changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    ImageEndpoint,
    RuntimeEndpoint,
    Serialize,
    Qps,
    MaxParallel,
}

impl Key {
    pub(crate) const ALL: [Self; 5] =
        [Self::ImageEndpoint, Self::RuntimeEndpoint, Self::Serialize, Self::Qps, Self::MaxParallel];

    /// The field of KubeletConfiguration.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::ImageEndpoint => "imageServiceEndpoint",
            Self::RuntimeEndpoint => "containerRuntimeEndpoint",
            Self::Serialize => "serializeImagePulls",
            Self::Qps => "registryPullQPS",
            Self::MaxParallel => "maxParallelImagePulls",
        }
    }

    /// The flag without `--`; `None`: there is only the field.
    pub(crate) const fn flag(self) -> Option<&'static str> {
        match self {
            Self::ImageEndpoint => Some("image-service-endpoint"),
            Self::RuntimeEndpoint => Some("container-runtime-endpoint"),
            Self::Serialize => Some("serialize-image-pulls"),
            Self::Qps => Some("registry-qps"),
            Self::MaxParallel => None,
        }
    }

    pub(crate) const fn is_endpoint(self) -> bool {
        matches!(self, Self::ImageEndpoint | Self::RuntimeEndpoint)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The configuration file.
    Config,
    /// A file of the drop-in directory.
    DropIn,
    /// A file of systemd: only read.
    Unit,
    /// A file with flags that the unit reads.
    Flags,
}

impl Kind {
    pub(crate) const fn is_yaml(self) -> bool {
        matches!(self, Self::Config | Self::DropIn)
    }
}

/// A file with settings of the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) kind: Kind,
    pub(crate) text: String,
    /// The text of the copy that `keelson attach` made.
    pub(crate) saved: Option<String>,
}

impl Source {
    pub(crate) fn value(&self, key: Key) -> Option<String> {
        match self.kind.is_yaml() {
            true => yaml::value(&self.text, key.name()),
            false => flags::value(&self.text, key.flag()?),
        }
    }

    /// As the copy has it.
    pub(crate) fn earlier(&self) -> Option<Self> {
        let text = self.saved.clone()?;
        Some(Self { text, ..self.clone() })
    }
}

/// The kubelet that runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) arguments: Vec<String>,
}

impl Process {
    pub(crate) fn flag(&self, name: &str) -> Option<String> {
        flag_of(&self.arguments, name)
    }
}

/// The last value of `--name` among arguments.
fn flag_of(arguments: &[String], name: &str) -> Option<String> {
    let long = format!("--{name}");
    let mut found = None;
    for (place, argument) in arguments.iter().enumerate() {
        if let Some(value) = argument.strip_prefix(&long).and_then(|rest| rest.strip_prefix('=')) {
            found = Some(value.to_owned());
        } else if *argument == long {
            found = arguments.get(place + 1).filter(|next| !next.starts_with('-')).cloned();
        }
    }
    found
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) text: String,
    pub(crate) from: PathBuf,
}

/// What is known of the kubelet of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Kubelet {
    /// In rising precedence.
    pub(crate) sources: Vec<Source>,
    /// The configuration file, whether it exists or not.
    pub(crate) config: PathBuf,
    /// The drop-in directory that the kubelet reads.
    pub(crate) config_dir: Option<PathBuf>,
    pub(crate) process: Option<Process>,
    /// Files that exist and cannot be read.
    pub(crate) errors: Vec<String>,
}

impl Kubelet {
    /// The value that a kubelet has that starts now.
    pub(crate) fn configured(&self, key: Key) -> Option<Value> {
        let value = |source: &Source| Some(Value { text: source.value(key)?, from: source.path.clone() });
        self.sources.iter().rev().find_map(value)
    }

    /// Any other flag or field: of the running kubelet, the files with flags, or the configuration.
    pub(crate) fn other(&self, flag: &str, field: &str) -> Option<String> {
        let running = self.process.as_ref().and_then(|process| process.flag(flag));
        running.or_else(|| {
            self.sources.iter().rev().find_map(|source| match source.kind.is_yaml() {
                true => yaml::value(&source.text, field),
                false => flags::value(&source.text, flag),
            })
        })
    }

    /// Endpoints of a kubelet that starts now which lead to one of `sockets`.
    pub(crate) fn uses(&self, sockets: &Sockets) -> Vec<(Key, Value)> {
        let endpoints = [Key::ImageEndpoint, Key::RuntimeEndpoint];
        let used =
            |key| self.configured(key).filter(|value| sockets.has(&value.text)).map(|value| (key, value));
        endpoints.into_iter().filter_map(used).collect()
    }

    pub(crate) fn exists(&self) -> bool {
        self.process.is_some() || self.sources.iter().any(|source| source.kind == Kind::Config)
    }
}

/// Paths of the agent's CRI socket: that of the settings, and the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sockets(pub(crate) Vec<PathBuf>);

impl Sockets {
    pub(crate) fn has(&self, endpoint: &str) -> bool {
        self.0.iter().any(|socket| socket.as_path() == path_of(endpoint))
    }
}

/// The kubelet accepts a path without a scheme.
fn path_of(endpoint: &str) -> &Path {
    Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint))
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    pub(crate) fn source(kind: Kind, path: &str, text: &str) -> Source {
        Source { path: path.into(), kind, text: text.into(), saved: None }
    }

    pub(crate) fn kubelet(sources: Vec<Source>) -> Kubelet {
        Kubelet { sources, config: CONFIG.into(), ..Kubelet::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{kubelet, source},
        *,
    };

    #[test]
    fn the_last_source_counts() {
        let sources = vec![
            source(Kind::Config, "/c", "serializeImagePulls: true\nregistryPullQPS: 5\n"),
            source(Kind::DropIn, "/d/10.conf", "serializeImagePulls: false\n"),
            source(Kind::Flags, "/env", "A=\"--registry-qps=7\"\n"),
        ];
        let kubelet = kubelet(sources);
        let value = |key| kubelet.configured(key).map(|value| (value.text, value.from.display().to_string()));
        assert_eq!(value(Key::Serialize), Some(("false".into(), "/d/10.conf".into())));
        assert_eq!(value(Key::Qps), Some(("7".into(), "/env".into())));
        assert_eq!(value(Key::MaxParallel), None);
    }

    #[test]
    fn endpoints_with_and_without_a_scheme() {
        let sockets = Sockets(vec!["/run/keelson/cri.sock".into()]);
        for (endpoint, expected) in [
            ("unix:///run/keelson/cri.sock", true),
            ("/run/keelson/cri.sock", true),
            ("unix:///run/containerd/containerd.sock", false),
            ("", false),
        ] {
            assert_eq!(sockets.has(endpoint), expected, "{endpoint}");
        }
    }

    #[test]
    fn flags_of_a_process() {
        let arguments = ["kubelet", "--config", "/a", "--v=2", "--v=3", "--fail-swap-on"].map(str::to_owned);
        let value = |name| flag_of(&arguments, name);
        assert_eq!(value("config").as_deref(), Some("/a"));
        assert_eq!(value("v").as_deref(), Some("3"));
        assert_eq!(value("fail-swap-on"), None);
        assert_eq!(value("config-dir"), None);
    }
}
