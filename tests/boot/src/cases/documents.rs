//! The commands that the documents show in blocks `console`, on a node that has everything they are about.
//!
//! Owns: what takes the place of names in them, and which of them do not end with 0. In: the documents. Out: a transcript.

use std::{collections::BTreeMap, fs, time::Instant};

use anyhow::{Context as _, Result, ensure};
use keelson_cluster::manifests::{COMPANION, NODE as NODE_RIGHTS};
use serde_json::json;

use super::{
    kube_proxy::{self, FORMER_SETTINGS, SETTINGS},
    kubelet, proxy,
};
use crate::{
    control_plane::ControlPlane,
    documents::{self, Line},
    guest::Output,
    node::Node,
};

/// The kubelet's files as kubeadm places them.
const KUBELET_KUBECONFIG: &str = "/etc/kubernetes/kubelet.conf";
const CNI: &str = "/etc/cni/net.d/10-none.conflist";

/// What a document writes for what differs from node to node, and what it is here.
const NAMES: &[(&str, &str)] = &[
    ("NODE", "node"),
    ("worker-7", "node"),
    ("actors NAME", "actors RuntimeClient"),
    // The registry here has no certificate.
    ("https://REGISTRY", "http://127.0.0.1:5999"),
    ("IMAGE", "127.0.0.1:5999/image6:latest"),
    ("203.0.113.10:80", "10.96.0.10:80"),
    ("pod web-0", "pod documents-node"),
    // Agent and proxy are a package of the host, so it has to be told the way: this is the node.
    ("why-pod web-7d4b9 -n shop", "why-pod documents-node -n default --via env"),
    ("why-service web -n shop --node node-7", "why-service echo -n default --node node --via env"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// With this exit code, whatever is printed.
    With(i64),
    /// With 0, or with 1 if a search finds nothing.
    Searching,
    /// Prints without an end.
    Never,
    /// Is run by another test.
    Elsewhere,
}

struct Exception {
    /// How the command begins.
    begins: &'static str,
    ends: Ends,
    reason: &'static str,
}

/// Commands that do not print something and exit with 0 on a healthy node.
const EXCEPTIONS: &[Exception] = &[
    Exception {
        begins: "promtool query",
        ends: Ends::Elsewhere,
        reason: "tests/suites/tests/monitoring has a Prometheus",
    },
    Exception {
        begins: "journalctl -u keelson -g panic",
        ends: Ends::Searching,
        reason: "journalctl finds nothing if no part has panicked",
    },
    Exception {
        begins: "journalctl -u keelson -g 'passed through'",
        ends: Ends::Searching,
        reason: "journalctl finds nothing if no pull has passed through",
    },
    Exception {
        begins: "journalctl -u keelson -g credentials",
        ends: Ends::Searching,
        reason: "journalctl finds nothing if they were always valid and readable by root alone",
    },
    Exception {
        begins: "journalctl -u keelson -g status",
        ends: Ends::Searching,
        reason: "journalctl finds nothing if each status was reported",
    },
    Exception {
        begins: "curl -s http://127.0.0.1:9440/metrics | grep keelson_image_pull_refused_total",
        ends: Ends::With(1),
        reason: "grep finds nothing: no pull was refused",
    },
    Exception {
        begins: "keelson pulls | grep -E 'TooMany",
        ends: Ends::With(1),
        reason: "grep finds nothing: no pull was refused",
    },
    Exception {
        begins: "keelson node | grep -E 'CONTESTED",
        ends: Ends::With(1),
        reason: "grep finds nothing: nobody else writes",
    },
    Exception {
        begins: "systemctl list-timers; grep",
        ends: Ends::With(1),
        reason: "grep finds nothing: no job calls nft",
    },
    Exception {
        begins: "keelson proxy state | grep sockets",
        ends: Ends::With(1),
        reason: "grep finds nothing: of the backend ebpf alone",
    },
    Exception { begins: "nft monitor", ends: Ends::Never, reason: "a program that follows changes" },
    Exception {
        begins: "curl -sN localhost:9440/debug/events",
        ends: Ends::Never,
        reason: "a stream of events",
    },
    Exception {
        begins: "grpcurl -plaintext -unix -d '{\"interval_ms\": 1000}'",
        ends: Ends::Never,
        reason: "a stream of pulls",
    },
];

/// What comments behind commands say of a healthy node, a word or several: it is printed here.
const SHOWN: &[&str] = &[
    "active",
    "ok",
    "[+]agent ok",
    "yes",
    "Ready",
    "synced",
    "connected",
    "running",
    "RESTARTS",
    "REPAIRED",
    "3",
    "from the settings",
    "runtime up",
    "0 failed",
    "Health: healthy",
    "last write succeeded",
    "expires in ...",
    "ip keelson",
    "ip6 keelson",
    "unix:///run/keelson-endpoints/endpoints.sock",
];

pub(crate) fn run(node: &mut Node) -> Result<String> {
    let control_plane = prepare(node)?;
    let seen = run_lines(node)?;
    removal_is_refused(node, "kubelet")?;
    let (bypass, _) = documents::taking_out()?;
    succeed(node, &bypass)?;
    node.bash("diff /var/lib/kubelet/config.yaml /var/tmp/config.yaml")
        .context("the kubelet has other settings than before")?;
    removal_is_refused(node, "keelson-proxy.service")?;
    remove(node)?;
    drop(control_plane);
    Ok(seen)
}

/// A node of an API server, with kubelet, agent, proxy, pods, a pull that failed, and Services.
fn prepare(node: &Node) -> Result<ControlPlane> {
    let control_plane = kube_proxy::control_plane(node)?;
    let sticky = include_str!("../../node/echo.yaml")
        .replace("echo", "sticky")
        .replace("10.96.0.10", "10.96.0.11")
        .replace("ipFamilies", "sessionAffinity: ClientIP, ipFamilies");
    for objects in [COMPANION, NODE_RIGHTS, &sticky] {
        control_plane.apply(objects)?;
    }
    let network = json!({"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]});
    let mut files = control_plane.node_files("node", KUBELET_KUBECONFIG)?;
    files.push((CNI.to_owned(), network.to_string()));
    for (path, content) in files {
        node.bash(&format!("mkdir -p $(dirname {path}) && umask 077 && printf '%s' '{content}' > {path}"))?;
    }
    kubelet::start(node, &["--kubeconfig", KUBELET_KUBECONFIG])?;
    proxy::start_pod(node)?;
    let settings = format!(
        "[kube]\\nkubeconfig = \"{KUBELET_KUBECONFIG}\"\\n[proxy]\\ncluster_cidr = [\"10.244.0.0/16\"]\\n"
    );
    node.bash(&format!("cp {SETTINGS} {FORMER_SETTINGS} && printf '\\n{settings}' >> {SETTINGS}"))?;
    node.replace("systemctl restart keelson.service")?;
    node.bash("cp /var/lib/kubelet/config.yaml /var/tmp/config.yaml && keelson attach --restart-kubelet")?;
    node.bash("systemctl enable --now keelson-proxy.service 2>&1")?;
    kubelet::start_pod(node, "documents", 5)?;
    let through =
        "/mnt/crictl --image-endpoint unix:///run/keelson/cri.sock --timeout 60s pull 127.0.0.1:5999";
    ensure!(
        node.vm.attempt(&format!("{through}/nothing:latest"))?.code != 0,
        "an image that is not there was pulled"
    );
    node.vm.wait_for(&in_shell("kubectl get node node | grep -qw Ready")).context("the node is not ready")?;
    node.vm.wait_for("keelson proxy state > /dev/null").context("the proxy does not sync")?;
    node.vm.wait_for(proxy::REACHED).context("the Service does not answer")?;
    // What leaves an Event, and an entry of session affinity.
    node.bash("keelson limit 4 && keelson limit --reset && (exec 3<> /dev/tcp/10.96.0.11/80)")?;
    Ok(control_plane)
}

/// As a person has it who looks at the node and has the cluster's kubectl there.
fn in_shell(command: &str) -> String {
    format!(
        "set +eu; mkdir -p /run/documents; cd /run/documents; export PATH=$PATH:/mnt KUBECONFIG=/etc/kubernetes/admin.conf; \
         {command}"
    )
}

fn concrete(command: &str) -> String {
    NAMES.iter().fold(command.to_owned(), |command, (name, here)| command.replace(name, here))
}

fn exception(command: &str) -> Option<&'static Exception> {
    EXCEPTIONS.iter().find(|exception| command.starts_with(exception.begins))
}

/// Runs a line for which there is no exception.
pub(crate) fn succeed(node: &Node, line: &Line) -> Result<String> {
    let output = node.vm.attempt(&in_shell(&concrete(&line.command)))?;
    let problem = problem(line, Ends::With(0), &output);
    ensure!(problem.is_none(), "{}:{}: {}: {problem:?}", line.document, line.number, line.command);
    Ok(output.stdout)
}

fn run_lines(node: &Node) -> Result<String> {
    let mut outputs: BTreeMap<String, Output> = BTreeMap::new();
    let (mut before, mut transcript, mut problems) = (String::new(), String::new(), Vec::new());
    let mut compared = 0;
    for line in documents::lines()?.iter().filter(|line| !line.is_of_taking_out()) {
        let command = concrete(&line.command);
        let exception = exception(&line.command);
        let ends = exception.map_or(Ends::With(0), |exception| exception.ends);
        if let Some(exception) = exception {
            transcript += &format!("({}: {})\n", exception.begins, exception.reason);
        }
        if ends == Ends::Elsewhere {
            continue;
        }
        // A second line that is equal to the one before it is there for what it prints then.
        if command == before || !outputs.contains_key(&command) {
            let started = Instant::now();
            let output = node.vm.attempt(&in_shell(&match ends {
                Ends::Never => followed(&command),
                Ends::With(_) | Ends::Searching | Ends::Elsewhere => command.clone(),
            }))?;
            transcript += &format!(
                "$ {command}\n{}{}(exit code {}, {:.1} s)\n\n",
                output.stdout,
                output.stderr,
                output.code,
                started.elapsed().as_secs_f64()
            );
            outputs.insert(command.clone(), output);
        }
        let output = outputs.get(&command).context("it was run")?;
        compared += parts(&line.comment).count();
        if let Some(problem) = problem(line, ends, output) {
            problems.push(format!("{}:{}: {command}: {problem}", line.document, line.number));
        }
        before = command;
    }
    fs::create_dir_all(&node.out)?;
    fs::write(node.out.join("commands.txt"), transcript)?;
    ensure!(problems.is_empty(), "commands of the documents failed:\n{}", problems.join("\n"));
    Ok(format!("{} commands; what a comment says of {compared} of them was printed", outputs.len()))
}

/// A program without an end, and a change that it may see.
fn followed(command: &str) -> String {
    format!(
        "(sleep 4; nft add table ip seen; nft delete table ip seen) & timeout 12 {command}; code=$?; wait; exit $code"
    )
}

/// What is wrong with the answer to a line.
fn problem(line: &Line, ends: Ends, output: &Output) -> Option<String> {
    // timeout(1) answers with 124.
    let expected = match ends {
        Ends::With(code) => code,
        Ends::Searching => output.code.min(1),
        Ends::Never | Ends::Elsewhere => 124,
    };
    let text = format!("{}{}", output.stdout, output.stderr);
    // `head` closes the pipe: that is no error in a shell of a person.
    let is_cut_off = expected == 0 && output.code == 141 && line.command.contains("| head");
    if output.code != expected && !is_cut_off {
        return Some(format!("exit code {} instead of {expected}: {}", output.code, text.trim()));
    }
    if expected != 1 && text.trim().is_empty() {
        return Some("it prints nothing".to_owned());
    }
    let missing = parts(&line.comment).find(|part| !has(&output.stdout, part))?;
    Some(format!("{missing:?} is not printed: {}", text.trim()))
}

/// Of a comment, what is in [`SHOWN`].
fn parts(comment: &str) -> impl Iterator<Item = &str> {
    comment.split([',', ';']).map(str::trim).filter(|part| SHOWN.contains(part))
}

fn has(output: &str, part: &str) -> bool {
    let word = |text: &str| text.trim_matches([',', ':', ';', '(', ')', '"']) == part;
    let words: Vec<&str> = output.split_whitespace().collect();
    if part.contains(' ') {
        words.join(" ").contains(part.trim_end_matches("..."))
    } else {
        words.into_iter().any(word)
    }
}

/// The package refuses it, and names the reason.
fn removal_is_refused(node: &Node, reason: &str) -> Result<()> {
    let output = node.vm.attempt("dpkg --remove keelson 2>&1")?;
    ensure!(
        output.code != 0 && output.stdout.contains(reason),
        "not refused for the {reason}: {}",
        output.stdout
    );
    node.bash("keelson pulls > /dev/null && keelson proxy state > /dev/null").map(drop)
}

/// What later cases begin with: no API server, kubelet, proxy, pods, or rules.
fn remove(node: &Node) -> Result<()> {
    kubelet::remove(node)?;
    node.bash("systemctl disable --now keelson-proxy.service 2>&1 && keelson proxy cleanup && keelson limit --reset")?;
    node.bash(&format!(
        "systemctl stop echo && ip netns delete pod && rm -r /var/lib/kubelet/pki {CNI} /run/documents"
    ))?;
    node.replace(&format!("cp {FORMER_SETTINGS} {SETTINGS} && systemctl restart keelson.service"))
}

#[test]
fn each_exception_and_name_is_of_a_command() -> Result<()> {
    let lines = documents::lines()?;
    let is_used = |found: &dyn Fn(&Line) -> bool| lines.iter().any(found);
    for exception in EXCEPTIONS {
        ensure!(
            is_used(&|line| line.command.starts_with(exception.begins)),
            "no command is {}",
            exception.begins
        );
        ensure!(!exception.reason.is_empty(), "{} has no reason", exception.begins);
    }
    for (name, _) in NAMES {
        ensure!(is_used(&|line| line.command.contains(name)), "no command has {name}");
    }
    for part in SHOWN {
        ensure!(is_used(&|line| parts(&line.comment).any(|found| found == *part)), "no comment says {part}");
    }
    Ok(())
}

#[test]
fn answers_are_held_against_code_and_comment() {
    let line = |comment: &str| Line {
        document: String::new(),
        number: 1,
        section: String::new(),
        command: String::new(),
        comment: comment.to_owned(),
    };
    let output = |code, stdout: &str| Output { code, stdout: stdout.to_owned(), stderr: String::new() };
    for (comment, ends, answer, is_right) in [
        ("active", Ends::With(0), output(0, "active\n"), true),
        ("active, on one of them", Ends::With(0), output(0, "inactive\n"), false),
        ("0 failed", Ends::With(0), output(0, "22 ok, 0  failed\n"), true),
        ("synced; changes pending", Ends::With(0), output(0, "stale\n"), false),
        ("the error", Ends::With(0), output(0, "anything\n"), true),
        ("the error", Ends::With(0), output(0, " \n"), false),
        ("the error", Ends::With(0), output(1, "anything\n"), false),
        ("the error", Ends::With(1), output(1, ""), true),
        ("", Ends::Searching, output(1, "-- No entries --\n"), true),
        ("", Ends::Searching, output(0, "a line\n"), true),
        ("", Ends::Searching, output(2, "no such program\n"), false),
        ("", Ends::Never, output(124, "event\n"), true),
        ("", Ends::Never, output(0, "event\n"), false),
    ] {
        let found = problem(&line(comment), ends, &answer);
        assert_eq!(found.is_none(), is_right, "{comment}: {found:?}");
    }
}
