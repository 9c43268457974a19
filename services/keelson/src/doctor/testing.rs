//! A node for tests of checks: no agent runs, no kubelet, no API server.

use std::sync::Arc;

use keelson_config::Settings;

use super::facts::{Answer, Facts, FileMode, Socket, StateFolder};
use crate::kubelet::Kubelet;

pub(super) fn settings(change: impl FnOnce(&mut Settings)) -> Arc<Settings> {
    let mut settings = Settings::default();
    settings.agent.node_name = "n1".into();
    settings.pulls.max_parallel_image_pulls = 3;
    change(&mut settings);
    Arc::new(settings)
}

pub(super) fn absent(path: &str) -> Socket {
    Socket { path: path.into(), file: None, answer: Answer::Silent("absent".into()) }
}

/// Open to root and a group.
pub(super) fn socket(path: &str, answer: Answer) -> Socket {
    let file = FileMode { owner: 0, group: "keelson-cri".into(), mode: 0o660 };
    Socket { path: path.into(), file: Some(file), answer }
}

pub(super) fn runtime(name: &str) -> Answer {
    Answer::Runtime { name: name.into(), version: "2".into() }
}

pub(super) fn facts() -> Facts {
    Facts {
        settings: settings(|_| ()),
        now: 0,
        hostname: "N1".into(),
        state: StateFolder::default(),
        cri: absent("/run/keelson/cri.sock"),
        debug: absent("/run/keelson/debug.sock"),
        runtime: socket("/run/containerd/containerd.sock", runtime("containerd")),
        running_limit: None,
        kubelet: Kubelet::default(),
        patches: Vec::new(),
        cluster: None,
        listeners: Vec::new(),
        endpoints: None,
        has_manifests: false,
        proxy: None,
    }
}
