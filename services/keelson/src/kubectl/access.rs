//! The way to the API server and to agent and proxy on a node.
//!
//! Owns: the calls of `kubectl`. In: questions. Out: JSON, or why there is no answer. Only `get` and `exec` are used, and
//! in a pod only commands of `keelson` that read.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use serde_json::Value;
use tokio::process::Command;

use super::value::{list, text};

/// Time for one call.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time that kubectl gives the API server for an answer.
const REQUEST_TIMEOUT: &str = "--request-timeout=15s";

/// Whose answer is wanted on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Agent,
    Proxy,
}

impl Peer {
    const fn label(self) -> &'static str {
        match self {
            Self::Agent => "app.kubernetes.io/name=keelson-agent",
            Self::Proxy => "app.kubernetes.io/name=keelson-proxy",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Proxy => "proxy",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum AccessError {
    #[error("cannot run {program}: {source}; install it, or add its folder to PATH")]
    Start { program: String, source: std::io::Error },
    #[error("`{command}` did not end within {} s", TIMEOUT.as_secs())]
    Timeout { command: String },
    #[error("`{command}` failed: {reason}")]
    Failed { command: String, reason: String },
    #[error("the answer of `{command}` is not JSON: {source}")]
    NotJson { command: String, source: serde_json::Error },
    #[error("the node {node} has no running pod of the {}; if it is a package of the host, pass --via 'ssh root@{{node}}'", peer.name())]
    NoPod { peer: Peer, node: String },
}

#[derive(Debug)]
pub(super) struct Access {
    /// Flags of every call of kubectl.
    flags: Vec<OsString>,
    via: Option<String>,
}

impl Access {
    pub(super) fn new(context: Option<String>, kubeconfig: Option<PathBuf>, via: Option<String>) -> Self {
        let mut flags: Vec<OsString> = vec![REQUEST_TIMEOUT.into()];
        if let Some(context) = context {
            flags.push(format!("--context={context}").into());
        }
        if let Some(kubeconfig) = kubeconfig {
            flags.extend(["--kubeconfig".into(), kubeconfig.into()]);
        }
        Self { flags, via }
    }

    /// `kubectl get ARGS -o json`.
    pub(super) async fn get(&self, namespace: Option<&str>, args: &[&str]) -> Result<Value, AccessError> {
        let mut words: Vec<OsString> = vec!["get".into()];
        words.extend(args.iter().map(OsString::from));
        words.extend(["-o".into(), "json".into()]);
        if let Some(namespace) = namespace {
            words.extend(["-n".into(), namespace.into()]);
        }
        self.kubectl(words).await
    }

    async fn kubectl(&self, mut words: Vec<OsString>) -> Result<Value, AccessError> {
        // Before `--` of exec.
        let at = words.iter().position(|word| word == "--").unwrap_or(words.len());
        words.splice(at..at, self.flags.iter().cloned());
        let mut command = Command::new("kubectl");
        command.args(&words);
        run("kubectl", command, &words).await
    }

    /// The JSON that `keelson ARGS -o json` prints on the node. Exit code 1 with JSON is an answer: it says that something
    /// is wrong.
    pub(super) async fn on_node(&self, peer: Peer, node: &str, args: &[&str]) -> Result<Value, AccessError> {
        let question = args.iter().copied().chain(["-o", "json"]);
        if let Some(via) = &self.via {
            let mut words: Vec<String> =
                via.split_whitespace().map(|word| word.replace("{node}", node)).collect();
            words.push("keelson".into());
            words.extend(question.map(str::to_owned));
            let program = words.remove(0);
            let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
            let mut command = Command::new(&program);
            command.args(&words);
            return run(&program, command, &words).await;
        }
        let (namespace, pod) = self.pod(peer, node).await?;
        let mut words: Vec<OsString> =
            ["exec", "-n", &namespace, &pod, "--", "/usr/bin/keelson"].map(OsString::from).into();
        words.extend(question.map(OsString::from));
        self.kubectl(words).await
    }

    /// Namespace and name of the peer's running pod on the node.
    async fn pod(&self, peer: Peer, node: &str) -> Result<(String, String), AccessError> {
        let field = format!("spec.nodeName={node},status.phase=Running");
        let args = ["pods", "--all-namespaces", "-l", peer.label(), "--field-selector", &field];
        let pods = self.get(None, &args).await?;
        let running =
            list(&pods, "/items").iter().find(|pod| pod.pointer("/metadata/deletionTimestamp").is_none());
        let pod = running.ok_or_else(|| AccessError::NoPod { peer, node: node.into() })?;
        Ok((text(pod, "/metadata/namespace").into(), text(pod, "/metadata/name").into()))
    }
}

async fn run(program: &str, mut command: Command, words: &[OsString]) -> Result<Value, AccessError> {
    let shown = || {
        let words = words.iter().map(|word| word.to_string_lossy().into_owned());
        std::iter::once(program.to_owned()).chain(words).collect::<Vec<_>>().join(" ")
    };
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(TIMEOUT, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(source)) => return Err(AccessError::Start { program: program.into(), source }),
        Err(_) => return Err(AccessError::Timeout { command: shown() }),
    };
    answer(output.status, &output.stdout, &output.stderr, shown)
}

/// JSON is an answer whatever the exit code says. The reason of a failure is the last line, before what kubectl says of the
/// command in a pod.
fn answer(
    status: ExitStatus,
    stdout: &[u8],
    stderr: &[u8],
    command: impl Fn() -> String,
) -> Result<Value, AccessError> {
    match serde_json::from_slice(stdout) {
        Ok(document) => Ok(document),
        Err(source) if status.success() => Err(AccessError::NotJson { command: command(), source }),
        Err(_) => {
            let said = String::from_utf8_lossy(stderr);
            let is_reason =
                |line: &&str| !line.is_empty() && !line.starts_with("command terminated with exit code");
            let reason = said.lines().map(str::trim).rfind(is_reason);
            let reason = reason.map_or_else(|| status.to_string(), str::to_owned);
            Err(AccessError::Failed { command: command(), reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn via(script: &str) -> Access {
        Access::new(None, None, Some(script.into()))
    }

    #[tokio::test]
    async fn the_command_for_the_node_gets_the_question() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("run");
        std::fs::write(
            &script,
            "for w in \"$@\"; do echo \"\\\"$w\\\"\"; done | paste -sd, | sed 's/.*/[&]/'; exit 1",
        )
        .unwrap();
        let access = via(&format!("sh {} on-{{node}}", script.display()));
        let said = access.on_node(Peer::Agent, "n1", &["pulls"]).await.unwrap();
        assert_eq!(said, serde_json::json!(["on-n1", "keelson", "pulls", "-o", "json"]));
    }

    #[tokio::test]
    async fn what_failed_and_why_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("run");
        std::fs::write(
            &script,
            "echo first >&2; echo no way >&2; echo command terminated with exit code 1 >&2; exit 3",
        )
        .unwrap();
        let error = via(&format!("sh {}", script.display()))
            .on_node(Peer::Agent, "n1", &["pulls"])
            .await
            .unwrap_err();
        assert!(error.to_string().ends_with("keelson pulls -o json` failed: no way"), "{error}");
        let error = via("/no/such/program").on_node(Peer::Agent, "n1", &["pulls"]).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot run /no/such/program: No such file"), "{error}");
        let missing = AccessError::NoPod { peer: Peer::Proxy, node: "n1".into() }.to_string();
        assert!(
            missing.ends_with(
                "no running pod of the proxy; if it is a package of the host, pass --via 'ssh root@{node}'"
            ),
            "{missing}"
        );
    }
}
