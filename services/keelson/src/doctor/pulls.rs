//! Checks of image pulls: container runtime, the agent's CRI socket, the limit, and the kubelet's configuration.
//!
//! In: facts. Out: checks; [`before_attach`] has those that must not fail when the agent is put into the image path.

use super::{
    Check, Facts,
    facts::{Answer, Socket},
};
use crate::kubelet::{DROP_IN, Key, Kind, Sockets};

const KUBELET: &str = "kubelet";
const LIMIT: &str = "limit";

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![runtime(facts), own_socket(facts), limit(facts)];
    checks.extend(kubelet(facts));
    checks
}

/// What has to hold before the kubelet gets the agent's endpoint.
pub(crate) fn before_attach(facts: &Facts) -> Vec<Check> {
    let mut own = own_socket(facts);
    if !matches!(facts.cri.answer, Answer::Runtime { .. }) {
        own = Check::failed(own.name, own.found, "start the agent: systemctl enable --now keelson");
    }
    let mut limit = limit(facts);
    if effective_limit(facts) == Some(0) {
        limit = Check::failed(
            LIMIT,
            "the agent has no limit on parallel image pulls, and the kubelet would lose its own",
            "set pulls.max_parallel_image_pulls, for example to 3, and run: systemctl reload keelson",
        );
    }
    vec![runtime(facts), own, limit]
}

fn sockets(facts: &Facts) -> Sockets {
    Sockets(vec![facts.settings.cri.listen.path().to_owned()])
}

fn runtime(facts: &Facts) -> Check {
    const NAME: &str = "runtime";
    let socket = &facts.runtime;
    let shown = socket.shown();
    match (&socket.file, &socket.answer) {
        (_, Answer::Runtime { name, version }) => {
            Check::ok(NAME, format!("{shown} answers: {name} {version}"))
        }
        (None, _) => Check::failed(
            NAME,
            format!("{shown} does not exist"),
            "start the container runtime, or set cri.runtime_endpoint to its socket",
        ),
        (Some(_), Answer::Listens) => Check::failed(
            NAME,
            format!("{shown} does not answer CRI calls"),
            "set cri.runtime_endpoint to the socket of a container runtime",
        ),
        (Some(_), Answer::Silent(reason)) => Check::failed(
            NAME,
            format!("{shown}: {reason}"),
            "see the logs of the container runtime; run as root",
        ),
    }
}

fn own_socket(facts: &Facts) -> Check {
    const NAME: &str = "cri socket";
    let Socket { file, answer, .. } = &facts.cri;
    let shown = facts.cri.shown();
    match (file, answer) {
        (None, _) => Check::skipped(NAME, format!("{shown} does not exist: no agent runs")),
        (Some(file), _) if file.mode & 0o006 != 0 => Check::failed(
            NAME,
            format!(
                "{shown} is open to every user (mode {:04o}), and who can open it is root on the node",
                file.mode & 0o7777
            ),
            "set cri.socket_mode, or SocketMode= of keelson-cri.socket, to 0660",
        ),
        (Some(file), Answer::Runtime { name, version }) => Check::ok(
            NAME,
            format!("{shown} answers as {name} {version}; open to root and group {}", file.group),
        ),
        (Some(_), Answer::Listens) => Check::warning(
            NAME,
            format!("{shown} listens, and no call was answered"),
            "systemctl status keelson",
        ),
        (Some(_), Answer::Silent(reason)) => Check::failed(
            NAME,
            format!("{shown}: {reason}"),
            "systemctl status keelson; to take the agent out now: keelson bypass",
        ),
    }
}

/// The limit in force, or that of the settings. `None`: there is one, and not by a number.
fn effective_limit(facts: &Facts) -> Option<u32> {
    let pulls = &facts.settings.pulls;
    match facts.running_limit {
        Some(limit) => Some(limit),
        None if pulls.serialize_image_pulls => Some(1),
        None => Some(pulls.max_parallel_image_pulls),
    }
}

/// What the kubelet alone does; `None`: no limit.
fn kubelet_limit(facts: &Facts) -> Option<u64> {
    limit_of(|key| facts.kubelet.configured(key).map(|value| value.text))
}

/// As [`kubelet_limit`], before `keelson attach`, if that was run.
fn kubelet_limit_before(facts: &Facts) -> Option<u64> {
    limit_of(|key| {
        let saved = facts.kubelet.sources.iter().rev().find_map(|source| source.earlier()?.value(key));
        saved.or_else(|| facts.kubelet.configured(key).map(|value| value.text))
    })
}

fn limit_of(value: impl Fn(Key) -> Option<String>) -> Option<u64> {
    if value(Key::Serialize).is_none_or(|text| text == "true") {
        return Some(1);
    }
    value(Key::MaxParallel)?.parse().ok().filter(|limit| *limit > 0)
}

/// O1: nothing that is installed loosens a limit without saying so.
fn limit(facts: &Facts) -> Check {
    let is_attached = !facts.kubelet.uses(&sockets(facts)).is_empty();
    let limit = effective_limit(facts).unwrap_or(0);
    let from = if facts.running_limit.is_some() { "in force" } else { "in the settings" };
    match (limit, is_attached) {
        (0, true) if kubelet_limit(facts).is_none() => Check::failed(
            LIMIT,
            "neither the agent nor the kubelet limits parallel image pulls",
            "set pulls.max_parallel_image_pulls, or now: keelson limit 3",
        ),
        (0, _) => Check::warning(
            LIMIT,
            "the agent has no limit on parallel image pulls; the kubelet's own queue is all there is",
            "set pulls.max_parallel_image_pulls before keelson attach turns the kubelet's queue off",
        ),
        (limit, _) => {
            let explicit =
                facts.kubelet.sources.iter().any(|source| source.value(Key::MaxParallel).is_some());
            match kubelet_limit_before(facts).filter(|_| facts.kubelet.exists()) {
                Some(own) if own < u64::from(limit) && (explicit || own > 1) => Check::warning(
                    LIMIT,
                    format!("{limit} pulls at a time ({from}); the kubelet alone allows {own}"),
                    format!("if that is not intended, set pulls.max_parallel_image_pulls to {own}"),
                ),
                Some(own) => {
                    Check::ok(LIMIT, format!("{limit} pulls at a time ({from}); the kubelet alone: {own}"))
                }
                None => Check::ok(LIMIT, format!("{limit} pulls at a time ({from})")),
            }
        }
    }
}

fn kubelet(facts: &Facts) -> Vec<Check> {
    let kubelet = &facts.kubelet;
    if !kubelet.exists() {
        let found = format!("no kubelet runs, and {} does not exist", kubelet.config.display());
        return vec![Check::skipped(KUBELET, found)];
    }
    let mut checks: Vec<Check> =
        kubelet.errors.iter().map(|error| Check::warning(KUBELET, error.clone(), "run as root")).collect();
    let used = kubelet.uses(&sockets(facts));
    match used.iter().find(|(key, _)| *key == Key::ImageEndpoint) {
        Some((_, value)) => {
            checks.push(Check::ok(
                KUBELET,
                format!("image pulls go through the agent ({})", value.from.display()),
            ));
            checks.extend(own_queue(facts));
            checks.extend(kubeadm(facts, &value.from));
        }
        None if !used.is_empty() => checks.push(Check::ok(KUBELET, "all calls go through the agent")),
        None => checks.push(not_attached(facts)),
    }
    checks.extend(runtime_endpoint(facts));
    checks.extend(restart_pending(facts));
    checks
}

fn not_attached(facts: &Facts) -> Check {
    let was = facts.kubelet.sources.iter().find(|source| source.saved.is_some());
    if let Some(source) = was {
        return Check::failed(
            KUBELET,
            format!(
                "the agent was put into the image path, and {} was rewritten since then (as `kubeadm upgrade node` does): pulls go past the agent",
                source.path.display()
            ),
            "keelson attach; with a drop-in directory or kubeadm's --patches it stays (docs/kubeadm.md)",
        );
    }
    let is = |key: Key, value: &str| facts.kubelet.configured(key).is_some_and(|found| found.text == value);
    if is(Key::Serialize, "false")
        && is(Key::Qps, "0")
        && facts.kubelet.configured(Key::MaxParallel).is_none()
    {
        return Check::warning(
            KUBELET,
            "pulls go past the agent, and the kubelet does not limit them: serializeImagePulls is false, registryPullQPS 0",
            "keelson attach, or remove both keys",
        );
    }
    Check::skipped(KUBELET, "it does not use the agent; keelson attach puts the agent into the image path")
}

/// A queue of the kubelet hides pulls from the agent.
fn own_queue(facts: &Facts) -> Vec<Check> {
    let value = |key: Key| facts.kubelet.configured(key);
    let set = [
        (Key::Serialize, value(Key::Serialize).filter(|value| value.text == "false").is_none()),
        (Key::Qps, value(Key::Qps).filter(|value| value.text == "0").is_none()),
        (Key::MaxParallel, value(Key::MaxParallel).is_some()),
    ];
    set.into_iter()
        .filter(|(_, hides)| *hides)
        .map(|(key, _)| {
            let is = value(key).map_or_else(
                || "not set".to_owned(),
                |value| format!("{} ({})", value.text, value.from.display()),
            );
            Check::warning(
                "kubelet queue",
                format!(
                    "{} is {is}: the kubelet queues pulls itself and hides them from the agent",
                    key.name()
                ),
                "keelson attach",
            )
        })
        .collect()
}

/// O6: what a file of kubeadm loses at the next `kubeadm upgrade node`.
fn kubeadm(facts: &Facts, from: &std::path::Path) -> Option<Check> {
    const NAME: &str = "kubeadm";
    let is_kubeadm = facts.kubelet.sources.iter().any(|source| source.path.ends_with("kubeadm-flags.env"));
    let is_config =
        facts.kubelet.sources.iter().any(|source| source.path == from && source.kind == Kind::Config);
    if !is_kubeadm || !is_config {
        return None;
    }
    if let Some(patch) = facts.patches.first() {
        return Some(Check::ok(
            NAME,
            format!("{} keeps the endpoint over kubeadm upgrades with --patches", patch.display()),
        ));
    }
    Some(Check::warning(
        NAME,
        format!("`kubeadm upgrade node` writes {} anew, and the agent drops out", from.display()),
        format!(
            "use a drop-in directory ({DROP_IN}) or kubeadm's --patches (docs/kubeadm.md), or run keelson attach after each upgrade"
        ),
    ))
}

/// O5, O7: the kubelet's other endpoint, which decides whether pods wait with the agent.
fn runtime_endpoint(facts: &Facts) -> Option<Check> {
    const NAME: &str = "kubelet runtime endpoint";
    let value = facts.kubelet.configured(Key::RuntimeEndpoint)?;
    if !sockets(facts).has(&value.text) {
        return None;
    }
    let is_crio = matches!(&facts.runtime.answer, Answer::Runtime { name, .. } if name == "cri-o");
    Some(match is_crio {
        true => Check::failed(
            NAME,
            "all calls go through the agent, and the kubelet recognizes CRI-O by the name of its socket: it takes statistics of pods elsewhere",
            "set containerRuntimeEndpoint to CRI-O's socket, and imageServiceEndpoint to the agent's",
        ),
        false => Check::warning(
            NAME,
            format!(
                "{} is the agent's: the node becomes NotReady while the agent does not answer",
                Key::RuntimeEndpoint.name()
            ),
            "set containerRuntimeEndpoint to the runtime's socket; image pulls need imageServiceEndpoint alone",
        ),
    })
}

/// The running kubelet has flags of before.
fn restart_pending(facts: &Facts) -> Option<Check> {
    let process = facts.kubelet.process.as_ref()?;
    let differs = |key: &Key| {
        let Some(running) = key.flag().and_then(|flag| process.flag(flag)) else { return false };
        facts.kubelet.configured(*key).is_none_or(|value| value.text != running)
    };
    let key = Key::ALL.into_iter().find(differs)?;
    let flag = key.flag().unwrap_or_default();
    Some(Check::warning(
        "kubelet flags",
        format!(
            "the running kubelet (process {}) has another --{flag} than its files, and flags count more than files",
            process.pid
        ),
        "systemctl restart kubelet; if it stays, remove the flag where the kubelet is started",
    ))
}

#[cfg(test)]
#[path = "pulls_tests.rs"]
mod tests;
