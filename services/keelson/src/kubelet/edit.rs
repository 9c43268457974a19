//! Which lines of the kubelet's files change when the agent is put into the image path, or taken out of it.
//!
//! Owns: [`attach`] and [`bypass`]. In: a [`Kubelet`], the agent's sockets. Out: [`Plan`]s of edits; no I/O.
//!
//! `attach` gives the kubelet the agent's image endpoint, and turns its own queue off, which would hide pulls. `bypass`
//! restores what the copies of `attach` have. A key that was changed since then keeps its value.

use std::path::{Path, PathBuf};

use super::{DROP_IN, Key, Kind, Kubelet, Sockets, Source, flags, path_of, yaml};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Attach,
    Bypass,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Edit {
    pub(crate) path: PathBuf,
    /// `None`: there is no file yet.
    pub(crate) before: Option<String>,
    /// `None`: the file is removed.
    pub(crate) after: Option<String>,
    /// With [`Direction::Attach`]: `before` is what a bypass restores.
    pub(crate) saves: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) edits: Vec<Edit>,
    /// What the reader has to know.
    pub(crate) notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EditError {
    #[error("cannot edit {path}: {source}")]
    Yaml {
        path: String,
        #[source]
        source: yaml::YamlError,
    },
    #[error(
        "{path} sets --{flag}, which counts more than the kubelet's configuration file; remove the flag there, run systemctl daemon-reload, and try again"
    )]
    Unit { path: String, flag: &'static str },
    #[error(
        "the running kubelet (process {pid}) has --{flag}, and no file that is known sets it; remove the flag where the kubelet is started, and try again"
    )]
    Process { pid: i32, flag: &'static str },
    #[error("{path} does not exist; name the kubelet's configuration file with --kubelet-config")]
    NoConfig { path: String },
    #[error("{path}: after the change {key} would be {is}, which {from} sets; remove it there and try again")]
    NotInEffect { path: String, key: &'static str, is: String, from: String },
}

/// What the kubelet gets. Endpoints of the runtime stay: the readiness of a running kubelet must not depend on the agent.
fn wanted(endpoint: &str) -> [(Key, Option<&str>); 4] {
    [
        (Key::ImageEndpoint, Some(endpoint)),
        (Key::Serialize, Some("false")),
        (Key::Qps, Some("0")),
        (Key::MaxParallel, None),
    ]
}

fn is_met(key: Key, have: Option<&str>, want: Option<&str>) -> bool {
    match (key, have, want) {
        (Key::ImageEndpoint, Some(have), Some(want)) => path_of(have) == path_of(want),
        _ => have == want,
    }
}

/// `endpoint`: the agent's CRI socket, as the kubelet writes endpoints.
pub(crate) fn attach(kubelet: &Kubelet, endpoint: &str) -> Result<Plan, EditError> {
    refuse_fixed(kubelet, endpoint)?;
    let drop_in = kubelet.config_dir.as_ref().map(|folder| folder.join(DROP_IN));
    let target = drop_in.clone().unwrap_or_else(|| kubelet.config.clone());
    let mut sources = kubelet.sources.clone();
    if !sources.iter().any(|source| source.path == target) {
        if drop_in.is_none() {
            return Err(EditError::NoConfig { path: target.display().to_string() });
        }
        let (place, text) = (place_of_drop_in(&sources, &target), new_drop_in(&sources));
        sources.insert(place, Source { path: target.clone(), kind: Kind::DropIn, text, saved: None });
    }
    let target_place = sources.iter().position(|source| source.path == target).unwrap_or(0);
    for (place, source) in sources.iter_mut().enumerate() {
        for (key, want) in wanted(endpoint) {
            let have = source.value(key);
            // What an earlier source says does not count, except for a key that has to be absent.
            let counts = want.is_none() || place >= target_place;
            let is_missing = have.is_none() && place == target_place;
            if counts && (have.is_some() || is_missing) && !is_met(key, have.as_deref(), want) {
                source.text = changed(source, key, want)?;
            }
        }
    }
    let after = Kubelet { sources, ..kubelet.clone() };
    for (key, want) in wanted(endpoint) {
        let is = after.configured(key);
        if !is_met(key, is.as_ref().map(|value| value.text.as_str()), want) {
            let (is, from) = is.map_or_else(
                || ("unset".to_owned(), "no file".to_owned()),
                |value| (value.text, value.from.display().to_string()),
            );
            return Err(EditError::NotInEffect {
                path: target.display().to_string(),
                key: key.name(),
                is,
                from,
            });
        }
    }
    Ok(Plan { edits: edits(kubelet, &after, endpoint), notes: Vec::new() })
}

/// Whether the image endpoint in effect was set by an attach, also by one with another `cri.listen`.
fn is_attached(kubelet: &Kubelet, endpoint: &str) -> bool {
    let Some(value) = kubelet.configured(Key::ImageEndpoint) else { return false };
    let source = kubelet.sources.iter().find(|source| source.path == value.from);
    is_met(Key::ImageEndpoint, Some(&value.text), Some(endpoint))
        || source.is_some_and(|source| {
            let earlier = source.earlier().map(|earlier| earlier.value(Key::ImageEndpoint));
            is_drop_in(source) || earlier.is_some_and(|earlier| earlier != Some(value.text))
        })
}

/// Whether the file is the drop-in of an attach. A bypass removes it.
fn is_drop_in(source: &Source) -> bool {
    source.kind == Kind::DropIn && source.path.file_name().is_some_and(|name| name == DROP_IN)
}

/// With the empty lists of the configuration file: kubelet 1.36 gives such a key its default again once there is a drop-in,
/// and may then not start (`enforceNodeAllocatable: []`).
fn new_drop_in(sources: &[Source]) -> String {
    let mut text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n".to_owned();
    if !sources.iter().any(|source| source.kind == Kind::DropIn) {
        let config = sources.iter().find(|source| source.kind == Kind::Config);
        let keys = config.and_then(|source| yaml::parsed(&source.text).ok()).unwrap_or_default();
        let empty = keys.iter().filter(|(_, value)| value.as_array().is_some_and(Vec::is_empty));
        text.extend(empty.map(|(key, _)| format!("{key}: []\n")));
    }
    text
}

/// Flags that no edit reaches.
fn refuse_fixed(kubelet: &Kubelet, endpoint: &str) -> Result<(), EditError> {
    for (key, want) in wanted(endpoint) {
        let Some(flag) = key.flag() else { continue };
        let set_by = |kind: Kind| {
            kubelet.sources.iter().filter(move |source| source.kind == kind && source.value(key).is_some())
        };
        let differs = |value: &str| !is_met(key, Some(value), want);
        if let Some(unit) =
            set_by(Kind::Unit).find(|source| source.value(key).is_some_and(|value| differs(&value)))
        {
            return Err(EditError::Unit { path: unit.path.display().to_string(), flag });
        }
        let Some(process) = &kubelet.process else { continue };
        let is_fixed = process.flag(flag).is_some_and(|value| differs(&value))
            && set_by(Kind::Unit).chain(set_by(Kind::Flags)).next().is_none();
        if is_fixed && !is_past(kubelet, key) {
            return Err(EditError::Process { pid: process.pid, flag });
        }
    }
    Ok(())
}

/// Whether a file had this flag before `keelson attach` or after it, so that the running kubelet is older than the file.
fn is_past(kubelet: &Kubelet, key: Key) -> bool {
    let Some(flag) = key.flag() else { return false };
    let saved = kubelet
        .sources
        .iter()
        .filter(|source| source.kind == Kind::Flags)
        .filter_map(|source| source.saved.as_ref());
    saved.into_iter().any(|text| flags::value(text, flag).is_some())
}

fn place_of_drop_in(sources: &[Source], path: &Path) -> usize {
    let is_before = |source: &Source| {
        source.kind == Kind::Config || source.kind == Kind::DropIn && source.path.as_path() < path
    };
    sources.iter().take_while(|source| is_before(source)).count()
}

fn changed(source: &Source, key: Key, value: Option<&str>) -> Result<String, EditError> {
    if !source.kind.is_yaml() {
        let flag = key.flag().unwrap_or_default();
        return Ok(flags::set(&source.text, flag, value));
    }
    yaml::set(&source.text, key.name(), value)
        .map_err(|error| EditError::Yaml { path: source.path.display().to_string(), source: error })
}

/// The file with the endpoint in effect comes first: if no other one can be written, the kubelet has its limit still. A copy
/// is made of a file that no attach has written. If that is not known of a file with a copy, the kubelet decides.
fn edits(before: &Kubelet, after: &Kubelet, endpoint: &str) -> Vec<Edit> {
    let is_attached = is_attached(before, endpoint);
    let is_written = |old: &Source| {
        old.saved.is_some()
            || is_met(Key::ImageEndpoint, old.value(Key::ImageEndpoint).as_deref(), Some(endpoint))
    };
    let mut edits: Vec<Edit> = after
        .sources
        .iter()
        .map(|source| {
            let old = before.sources.iter().find(|old| old.path == source.path);
            let saves = old.is_some_and(|old| !(is_drop_in(old) || is_attached && is_written(old)));
            let before = old.map(|old| old.text.clone());
            Edit { path: source.path.clone(), before, after: Some(source.text.clone()), saves }
        })
        .filter(|edit| edit.before != edit.after)
        .collect();
    let decisive = after.configured(Key::ImageEndpoint).map(|value| value.from);
    edits.sort_by_key(|edit| Some(&edit.path) != decisive.as_ref());
    edits
}

/// `runtime`: the runtime's endpoint of the agent's settings, for a kubelet whose calls all go through the agent and whose
/// earlier endpoint is not known.
pub(crate) fn bypass(kubelet: &Kubelet, sockets: &Sockets, runtime: Option<&str>) -> Result<Plan, EditError> {
    let mut notes = Vec::new();
    let mut after = Kubelet { sources: Vec::new(), ..kubelet.clone() };
    for source in kubelet.sources.iter().filter(|source| !is_drop_in(source)) {
        let text = restored(source, sockets, runtime, &mut notes)?;
        after.sources.push(Source { text, ..source.clone() });
    }
    if after.sources != kubelet.sources {
        unset_serial(&mut after)?;
    }
    let mut edits = Vec::new();
    for Source { path, text, .. } in &kubelet.sources {
        let text_after = after.sources.iter().find(|source| source.path == *path).map(|source| &source.text);
        if text_after != Some(text) {
            let before = Some(text.clone());
            edits.push(Edit { path: path.clone(), before, after: text_after.cloned(), saves: false });
        }
    }
    Ok(Plan { edits, notes })
}

/// The kubelet does not start with `serializeImagePulls: true`, its default, and more than one parallel pull.
fn unset_serial(kubelet: &mut Kubelet) -> Result<(), EditError> {
    let Some(limit) = kubelet.configured(Key::MaxParallel) else { return Ok(()) };
    let serial = kubelet.configured(Key::Serialize);
    let is_serial = serial.as_ref().is_none_or(|value| value.text != "false");
    if !is_serial || limit.text.parse::<i64>().is_ok_and(|limit| limit < 2) {
        return Ok(());
    }
    let path = serial.map_or(limit.from, |value| value.from);
    let found = kubelet.sources.iter_mut().find(|source| source.path == path && source.kind != Kind::Unit);
    if let Some(source) = found {
        source.text = changed(source, Key::Serialize, Some("false"))?;
    }
    Ok(())
}

fn restored(
    source: &Source,
    sockets: &Sockets,
    runtime: Option<&str>,
    notes: &mut Vec<String>,
) -> Result<String, EditError> {
    let uses = |key: Key| source.value(key).is_some_and(|value| key.is_endpoint() && sockets.has(&value));
    let is_in_path = Key::ALL.into_iter().any(uses);
    if source.kind == Kind::Unit {
        if is_in_path {
            notes.push(format!(
                "{}: it sets an endpoint of the agent and is not changed; remove the flag there and run systemctl daemon-reload",
                source.path.display()
            ));
        }
        return Ok(source.text.clone());
    }
    match source.earlier() {
        Some(earlier) => from_saved(source, &earlier, sockets, runtime),
        None if is_in_path => without_saved(source, sockets, runtime, notes),
        None => Ok(source.text.clone()),
    }
}

/// Each key that still has the value of `attach` gets its earlier one.
fn from_saved(
    source: &Source,
    earlier: &Source,
    sockets: &Sockets,
    runtime: Option<&str>,
) -> Result<String, EditError> {
    let mut result = source.clone();
    for key in Key::ALL {
        let is = source.value(key);
        let was = match earlier.value(key) {
            // The kubelet had the agent before attach.
            Some(own) if key.is_endpoint() && sockets.has(&own) => {
                runtime.filter(|_| key == Key::RuntimeEndpoint).map(str::to_owned)
            }
            was => was,
        };
        let is_of_attach = match key {
            Key::ImageEndpoint | Key::RuntimeEndpoint => is.as_ref().is_some_and(|value| sockets.has(value)),
            Key::Serialize | Key::Qps | Key::MaxParallel => {
                let attached =
                    wanted("").into_iter().find(|(other, _)| *other == key).and_then(|(_, value)| value);
                is.as_deref() == attached
            }
        };
        if is_of_attach && is != was {
            result.text = changed(&result, key, was.as_deref())?;
        }
    }
    // With the order of its lines and its comments, if nothing else has changed.
    let is_same = source.kind.is_yaml() && is_equal(&result.text, &earlier.text);
    Ok(if is_same { earlier.text.clone() } else { result.text })
}

/// Whether both texts mean the same. An empty endpoint is none.
fn is_equal(one: &str, other: &str) -> bool {
    let content = |text: &str| {
        let mut keys = yaml::parsed(text).ok()?;
        for key in Key::ALL {
            if yaml::value(text, key.name()).is_none() {
                keys.remove(key.name());
            }
        }
        Some(keys)
    };
    content(one).is_some_and(|one| Some(one) == content(other))
}

/// The kubelet's defaults.
fn without_saved(
    source: &Source,
    sockets: &Sockets,
    runtime: Option<&str>,
    notes: &mut Vec<String>,
) -> Result<String, EditError> {
    let mut result = source.clone();
    for key in Key::ALL {
        let Some(value) = source.value(key) else { continue };
        let to = match key {
            Key::ImageEndpoint | Key::RuntimeEndpoint if !sockets.has(&value) => continue,
            Key::RuntimeEndpoint => runtime,
            // A limit of the kubelet stays.
            Key::MaxParallel => continue,
            Key::ImageEndpoint | Key::Serialize | Key::Qps => None,
        };
        result.text = changed(&result, key, to)?;
    }
    notes.push(format!(
        "{}: no values were saved by keelson attach, so the keys are removed and the kubelet's defaults apply (serializeImagePulls: true, registryPullQPS: 5)",
        source.path.display()
    ));
    Ok(result.text)
}

#[cfg(test)]
#[path = "edit_tests.rs"]
mod tests;
