//! `keelson node [set-condition | clear-condition]`.
//!
//! In: the agent's heartbeats, and conditions from a user or a script. Out: Lease, status and conditions
//! as text or JSON; the result of setting or clearing a condition.

use std::{process::ExitCode, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use keelson_actor_system::clock::unix_ms;
use keelson_proto::node as pb;
use tonic::{Code, Status};

use super::{
    args::{AgentArgs, Output, exit_with},
    client,
    format::{clean, count, duration_ms, one_line, since_ms, status_word},
    table::Table,
};
use crate::output::{json, print, print_error};

/// Show the node's Lease, status and conditions; set or clear a condition.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson node                        state, Lease, status and conditions\n  \
    keelson node --check                exit code 1 unless heartbeats are healthy or disabled\n  \
    keelson node -o json | jq -r '.conditions[] | .type + \": \" + .status'\n  \
    keelson node set-condition KernelDeadlock False --reason KernelHasNoDeadlock --ttl 5m\n  \
    keelson node clear-condition KernelDeadlock")]
pub(crate) struct NodeArgs {
    #[command(subcommand)]
    change: Option<Change>,
    /// Exit with code 1 unless heartbeats are healthy or disabled.
    #[arg(long)]
    check: bool,
    /// Output format.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Subcommand)]
enum Change {
    /// Set a node condition; the agent reports it with the next node status.
    #[command(after_help = "Examples:\n  \
        keelson node set-condition KernelDeadlock False --reason KernelHasNoDeadlock\n  \
        keelson node set-condition example.com/DiskSlow True --reason LatencyHigh \\\n      \
        --message \"sda: 900 ms a write\" --ttl 5m\n\n\
        A call that changes nothing sends no request to the API server, so a script can repeat it at any rate.\n\
        A condition persists across restarts of the agent until it is cleared.")]
    SetCondition(SetArgs),
    /// Remove a condition that was set with set-condition from the node status.
    #[command(after_help = "Example: keelson node clear-condition KernelDeadlock")]
    ClearCondition {
        /// Condition type.
        #[arg(value_name = "TYPE")]
        kind: String,
    },
}

#[derive(Debug, Args)]
struct SetArgs {
    /// Condition type, a qualified name such as KernelDeadlock or example.com/DiskSlow.
    #[arg(value_name = "TYPE")]
    kind: String,
    /// Condition status: True, False or Unknown.
    #[arg(value_name = "STATUS", value_enum, ignore_case = true)]
    status: ConditionStatus,
    /// Reason of the condition, one word in CamelCase.
    #[arg(long, value_name = "REASON")]
    reason: String,
    /// Message of the condition.
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,
    /// Set the condition to Unknown, reason ReporterSilent, after this time without another call [default:
    /// never].
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    ttl: Option<Duration>,
}

/// As the API writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ConditionStatus {
    /// The condition holds.
    #[value(name = "True")]
    True,
    /// The condition does not hold.
    #[value(name = "False")]
    False,
    /// The state of the condition is not known.
    #[value(name = "Unknown")]
    Unknown,
}

impl ConditionStatus {
    fn name(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// `5m`, `90s`, `1h 30m`, at least a millisecond.
fn ttl(text: &str) -> Result<Duration, String> {
    let ttl = humantime::parse_duration(text).map_err(|error| format!("{error}; write 90s, 5m or 1h"))?;
    match i64::try_from(ttl.as_millis()) {
        Ok(1..) => Ok(ttl),
        Ok(_) => {
            Err("the duration is shorter than 1 ms; omit --ttl for a condition that does not expire".into())
        }
        Err(_) => Err("the duration is too long; omit --ttl for a condition that does not expire".into()),
    }
}

pub(crate) async fn run_node(args: NodeArgs) -> anyhow::Result<ExitCode> {
    exit_with(run(args).await)
}

async fn run(args: NodeArgs) -> anyhow::Result<ExitCode> {
    match args.change {
        // As a conflict in clap this would exclude all options with subcommands, including --socket.
        Some(_) if args.check => {
            print_error("keelson: --check cannot be used with set-condition or clear-condition");
            Ok(ExitCode::from(2))
        }
        None => show(&args.agent, args.output, args.check).await,
        Some(Change::SetCondition(set)) => set_condition(&args.agent, args.output, set).await,
        Some(Change::ClearCondition { kind }) => clear_condition(&args.agent, args.output, kind).await,
    }
}

async fn show(agent: &AgentArgs, output: Output, check: bool) -> anyhow::Result<ExitCode> {
    let mut client = client::open_node(agent).await?;
    let answer = client.get_heartbeats(client::request(pb::GetHeartbeatsRequest {})).await;
    let heartbeats = answer.map_err(client::Refused::from)?.into_inner();
    let text = match output {
        Output::Json => json(&heartbeats)?,
        Output::Table => describe(&heartbeats, unix_ms()),
    };
    print(&text)?;
    Ok(if check && !is_healthy(&heartbeats) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Healthy, or heartbeats are disabled.
fn is_healthy(heartbeats: &pb::Heartbeats) -> bool {
    matches!(heartbeats.state.as_str(), "healthy" | "disabled")
}

async fn set_condition(agent: &AgentArgs, output: Output, set: SetArgs) -> anyhow::Result<ExitCode> {
    let status = set.status.name();
    let request = pb::SetConditionRequest {
        r#type: set.kind.clone(),
        status: status.into(),
        reason: set.reason,
        message: set.message.unwrap_or_default(),
        ttl_ms: set.ttl.map_or(0, |ttl| i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)),
    };
    let mut client = client::open_node(agent).await?;
    let answer = client.set_condition(client::request(request)).await.map_err(refused)?.into_inner();
    let kind = clean(&set.kind);
    let text = match (output, answer.changed) {
        (Output::Json, _) => json(&answer)?,
        (Output::Table, true) => {
            format!("condition {kind} is set to {status}; the agent reports it with the next node status")
        }
        (Output::Table, false) => {
            format!("condition {kind} is unchanged: it is {status} with the same reason and message")
        }
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

async fn clear_condition(agent: &AgentArgs, output: Output, kind: String) -> anyhow::Result<ExitCode> {
    let mut client = client::open_node(agent).await?;
    let request = pb::ClearConditionRequest { r#type: kind.clone() };
    let answer = client.clear_condition(client::request(request)).await.map_err(refused)?.into_inner();
    let text = match output {
        Output::Json => json(&answer)?,
        Output::Table => {
            format!("condition {} is cleared; the agent removes it with the next node status", clean(&kind))
        }
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// For a condition, RESOURCE_EXHAUSTED is not transient, and disabled heartbeats stay disabled.
fn refused(status: Status) -> anyhow::Error {
    match status.code() {
        Code::ResourceExhausted | Code::Unavailable => {
            anyhow::anyhow!("cannot change the condition: {}", one_line(status.message()))
        }
        _ => client::Refused::from(status).into(),
    }
}

fn describe(heartbeats: &pb::Heartbeats, now: i64) -> String {
    let state = state(&heartbeats.state, &heartbeats.reason, heartbeats.failing_since_unix_ms, now);
    let mut lines = vec![format!("State:    {state}")];
    let named = [
        ("Role:     ", &heartbeats.role),
        ("Node:     ", &heartbeats.node_name),
        ("Server:   ", &heartbeats.server),
    ];
    for (name, value) in named.into_iter().filter(|(_, value)| !value.is_empty()) {
        lines.push(format!("{name}{}", one_line(value)));
    }
    lines.extend(
        heartbeats.credentials.iter().map(|credential| format!("Identity: {}", identity(credential, now))),
    );
    lines.extend(
        heartbeats.credential_warnings.iter().map(|text| format!("          warning: {}", one_line(text))),
    );
    if let Some(lease) = &heartbeats.lease {
        let state = self::state(&lease.state, &lease.reason, lease.failing_since_unix_ms, now);
        lines.push(format!("Lease:    {state}"));
        if lease.state != "disabled" {
            lines.push(format!("          {}", lease_facts(lease)));
        }
    }
    if let Some(status) = &heartbeats.status {
        let state = self::state(&status.state, &status.reason, status.failing_since_unix_ms, now);
        lines.push(format!("Status:   {state}"));
        lines.push(format!("          {}", status_facts(status)));
    }
    let mut text = lines.join("\n");
    text.push('\n');
    let conditions = conditions(&heartbeats.conditions, now);
    if !conditions.is_empty() {
        text.push('\n');
        text.push_str(&conditions.text());
    }
    text
}

/// `healthy`, `failing for 3m12s: why`, `disabled: why`.
fn state(state: &str, reason: &str, failing_since: i64, now: i64) -> String {
    let mut text = status_word(state);
    if failing_since > 0 {
        text.push_str(&format!(" for {}", since_ms(failing_since, now)));
    }
    if !reason.is_empty() {
        text.push_str(&format!(": {}", one_line(reason)));
    }
    text
}

/// `system:node:worker-7, client certificate /var/lib/.../current.pem, expires in 87d`.
fn identity(credential: &pb::Credential, now: i64) -> String {
    let kind = credential.kind.replace('_', " ");
    let place = match credential.file.as_str() {
        "" => format!("{kind} in the kubeconfig"),
        file => format!("{kind} {file}"),
    };
    let bound = match credential.bound_node.as_str() {
        "" => String::new(),
        node => format!("bound to node {node}"),
    };
    let left = credential.expires_unix_ms.saturating_sub(now);
    let end = match credential.state.as_str() {
        "healthy" => format!("expires in {}", duration_ms(left)),
        "expiring" => format!("EXPIRES in {}", duration_ms(left)),
        "expired" => format!("EXPIRED {} ago", duration_ms(left.saturating_neg())),
        _ => "no expiry date".into(),
    };
    let mut facts = vec![clean(&credential.user), clean(&place), clean(&bound), end];
    facts.retain(|fact| !fact.is_empty());
    facts.join(", ")
}

/// `worker-7, renewed 4.1s ago, lasts 40s, 318 renewals, 1 transition`; another holder is named.
fn lease_facts(lease: &pb::Lease) -> String {
    let lasts = lease.duration_seconds.saturating_mul(1_000);
    let renewed = match lease.renewed_unix_ms {
        0 => "not renewed yet".into(),
        _ if lasts > 0 && lease.age_ms > lasts => {
            format!("EXPIRED: renewed {} ago, lasts {}", duration_ms(lease.age_ms), duration_ms(lasts))
        }
        _ => format!("renewed {} ago, lasts {}", duration_ms(lease.age_ms), duration_ms(lasts)),
    };
    let mut facts = vec![clean(&lease.name), renewed];
    if !lease.holder.is_empty() && lease.holder != lease.name {
        facts.push(format!("held by {}", clean(&lease.holder)));
    }
    match lease.contention.as_str() {
        "contested" => facts.push("CONTESTED: another process renews it".into()),
        "standing back" => facts.push("STANDING BACK: another process renews it".into()),
        _ => {}
    }
    facts.push(count(lease.renewals, "renewal"));
    facts.push(count(u64::try_from(lease.transitions).unwrap_or(0), "transition"));
    facts.retain(|fact| !fact.is_empty());
    facts.join(", ")
}

/// `reported 2m00s ago, next report in 3m00s or on a change, 12 reports of 640 computations`.
fn status_facts(status: &pb::Status) -> String {
    let reported = match status.reported_unix_ms {
        0 => "not reported yet".into(),
        _ => format!("reported {} ago", duration_ms(status.age_ms)),
    };
    let next = match status.next_report_in_ms {
        _ if status.on_change_only => "next report on a change".into(),
        ..=0 => "next report due now".into(),
        ms => format!("next report in {} or on a change", duration_ms(ms)),
    };
    let reports = count(status.reports, "report");
    format!("{reported}, {next}, {reports} of {}", count(status.computations, "computation"))
}

/// `agent`, `reporter`; `reporter, CONTESTED` for a condition that another process writes too.
fn source(condition: &pb::Condition) -> String {
    let source = clean(&condition.source);
    if condition.contested { format!("{source}, CONTESTED") } else { source }
}

fn conditions(conditions: &[pb::Condition], now: i64) -> Table {
    let mut table = Table::new(&["CONDITION", "STATUS", "FOR", "SOURCE", "REASON", "MESSAGE"]);
    for condition in conditions {
        table.row([
            clean(&condition.r#type),
            clean(&condition.status),
            since_ms(condition.last_transition_unix_ms, now),
            source(condition),
            clean(&condition.reason),
            one_line(&condition.message),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::{contains, parsed};

    fn condition(kind: &str, status: &str, message: &str) -> pb::Condition {
        pb::Condition {
            r#type: kind.into(),
            status: status.into(),
            reason: "Because".into(),
            message: message.into(),
            last_transition_unix_ms: 1_000,
            source: "agent".into(),
            contested: false,
        }
    }

    fn healthy() -> pb::Heartbeats {
        pb::Heartbeats {
            state: "healthy".into(),
            role: "node".into(),
            node_name: "worker-7".into(),
            server: "https://192.0.2.1:6443".into(),
            lease: Some(pb::Lease {
                name: "worker-7".into(),
                holder: "worker-7".into(),
                state: "healthy".into(),
                duration_seconds: 40,
                transitions: 1,
                renewed_unix_ms: 60_000,
                age_ms: 4_100,
                renewals: 318,
                ..Default::default()
            }),
            status: Some(pb::Status {
                state: "healthy".into(),
                reported_unix_ms: 1_000,
                age_ms: 120_000,
                next_report_in_ms: 180_000,
                reports: 12,
                computations: 640,
                ..Default::default()
            }),
            conditions: vec![
                condition("Ready", "True", "no problem"),
                condition("example.com/DiskSlow", "Unknown", "odd\n\x1b[31mtext"),
            ],
            ..Default::default()
        }
    }

    #[test]
    fn healthy_heartbeats() {
        let expected = "\
State:    healthy
Role:     node
Node:     worker-7
Server:   https://192.0.2.1:6443
Lease:    healthy
          worker-7, renewed 4.1s ago, lasts 40s, 318 renewals, 1 transition
Status:   healthy
          reported 2m00s ago, next report in 3m00s or on a change, 12 reports of 640 computations

CONDITION             STATUS   FOR    SOURCE  REASON   MESSAGE
Ready                 True     1m00s  agent   Because  no problem
example.com/DiskSlow  Unknown  1m00s  agent   Because  odd \u{fffd}[31mtext
";
        assert_eq!(describe(&healthy(), 61_000), expected);
    }

    #[test]
    fn failing_heartbeats_have_a_reason_and_a_time() {
        let mut failing = healthy();
        (failing.state, failing.reason) = ("failing".into(), "lease:\nconnection refused".into());
        failing.failing_since_unix_ms = 10_000;
        let lease = failing.lease.as_mut().unwrap();
        (lease.state, lease.reason) = ("failing".into(), "connection refused".into());
        (lease.failing_since_unix_ms, lease.age_ms) = (10_000, 51_000);
        lease.holder = "another".into();
        let status = failing.status.as_mut().unwrap();
        (status.reported_unix_ms, status.next_report_in_ms) = (0, -7);
        failing.conditions.clear();
        let expected = "\
State:    failing for 51s: lease: connection refused
Role:     node
Node:     worker-7
Server:   https://192.0.2.1:6443
Lease:    failing for 51s: connection refused
          worker-7, EXPIRED: renewed 51s ago, lasts 40s, held by another, 318 renewals, 1 transition
Status:   healthy
          not reported yet, next report due now, 12 reports of 640 computations
";
        assert_eq!(describe(&failing, 61_000), expected);
    }

    #[test]
    fn e7_a_lease_that_is_disabled_is_no_failure() {
        let mut companion = healthy();
        companion.role = "companion".into();
        let (state, reason) = ("disabled".into(), "node.companion_lease is false".into());
        companion.lease = Some(pb::Lease { state, reason, ..pb::Lease::default() });
        let status = companion.status.as_mut().unwrap();
        (status.next_report_in_ms, status.on_change_only) = (0, true);
        companion.conditions.clear();
        let expected = "\
State:    healthy
Role:     companion
Node:     worker-7
Server:   https://192.0.2.1:6443
Lease:    disabled: node.companion_lease is false
Status:   healthy
          reported 2m00s ago, next report on a change, 12 reports of 640 computations
";
        assert_eq!(describe(&companion, 61_000), expected);
        assert!(is_healthy(&companion));
    }

    #[test]
    fn e3_e22_second_writers_are_shown() {
        let mut contested = healthy();
        contested.conditions[1].contested = true;
        let text = describe(&contested, 61_000);
        contains(&text, "example.com/DiskSlow  Unknown  1m00s  agent, CONTESTED  Because");
        let lease = contested.lease.as_mut().unwrap();
        for (contention, shown) in [
            ("uncontested", "worker-7, renewed 4.1s ago, lasts 40s, 318 renewals, 1 transition"),
            (
                "contested",
                "worker-7, renewed 4.1s ago, lasts 40s, CONTESTED: another process renews it, 318 renewals, \
                 1 transition",
            ),
            (
                "standing back",
                "worker-7, renewed 4.1s ago, lasts 40s, STANDING BACK: another process renews it, 318 \
                 renewals, 1 transition",
            ),
        ] {
            lease.contention = contention.into();
            assert_eq!(lease_facts(lease), shown);
        }
    }

    #[test]
    fn disabled_and_starting_heartbeats() {
        let off = pb::Heartbeats {
            state: "disabled".into(),
            reason: "no API server is configured".into(),
            ..Default::default()
        };
        assert_eq!(describe(&off, 0), "State:    disabled: no API server is configured\n");
        let lease = pb::Lease { name: "keelson-n1".into(), state: "pending".into(), ..pb::Lease::default() };
        assert_eq!(lease_facts(&lease), "keelson-n1, not renewed yet, 0 renewals, 0 transitions");
    }

    /// E4: the agent's identity at the API server, and its expiry.
    #[test]
    fn e4_credentials_are_shown_with_their_end() {
        let credential = |state: &str, expires_unix_ms| pb::Credential {
            kind: "client_certificate".into(),
            file: "/pki/current.pem".into(),
            user: "system:node:a".into(),
            state: state.into(),
            expires_unix_ms,
            ..Default::default()
        };
        for (state, end, expected) in [
            ("healthy", 61_000, "expires in 1m00s"),
            ("expiring", 61_000, "EXPIRES in 1m00s"),
            ("expired", 1_000, "EXPIRED 0ms ago"),
            ("unknown", 0, "no expiry date"),
        ] {
            let text = identity(&credential(state, end), 1_000);
            assert_eq!(text, format!("system:node:a, client certificate /pki/current.pem, {expected}"));
        }
        let token = pb::Credential { kind: "token".into(), bound_node: "a".into(), ..Default::default() };
        assert_eq!(identity(&token, 0), "token in the kubeconfig, bound to node a, no expiry date");
        let mut shown = healthy();
        shown.credentials = vec![credential("healthy", 61_000)];
        shown.credential_warnings = vec!["chmod 600\n/t".into()];
        let text = describe(&shown, 1_000);
        let lines: Vec<&str> = text.lines().skip(3).take(3).collect();
        assert_eq!(
            lines,
            [
                "Server:   https://192.0.2.1:6443",
                "Identity: system:node:a, client certificate /pki/current.pem, expires in 1m00s",
                "          warning: chmod 600 /t",
            ]
        );
    }

    #[test]
    fn check_passes_healthy_and_disabled_parts() {
        for (state, passes) in
            [("healthy", true), ("disabled", true), ("pending", false), ("failing", false), ("", false)]
        {
            assert_eq!(is_healthy(&pb::Heartbeats { state: state.into(), ..healthy() }), passes, "{state}");
        }
    }

    #[test]
    fn refusals_in_words() {
        let text = |status: Status| refused(status).to_string();
        assert_eq!(text(Status::resource_exhausted("32 are set")), "cannot change the condition: 32 are set");
        assert_eq!(
            text(Status::unavailable("heartbeats are disabled")),
            "cannot change the condition: heartbeats are disabled"
        );
        assert_eq!(text(Status::permission_denied("Ready is the agent's own")), "Ready is the agent's own");
        assert_eq!(text(Status::not_found("none of type \"X\" was set")), "none of type \"X\" was set");
    }

    #[test]
    fn command_lines() {
        assert!(parsed::<NodeArgs>(&[]).unwrap().change.is_none());
        assert!(parsed::<NodeArgs>(&["--check", "-o", "json"]).unwrap().check);
        let line =
            ["set-condition", "a/B", "false", "--reason", "R", "--ttl", "1m 30s", "--socket", "unix:///x"];
        let args: NodeArgs = parsed(&line).unwrap();
        assert!(args.agent.socket.is_some());
        let Some(Change::SetCondition(set)) = args.change else { panic!("{args:?}") };
        assert_eq!(
            (set.kind.as_str(), set.status, set.reason.as_str()),
            ("a/B", ConditionStatus::False, "R")
        );
        assert_eq!((set.message, set.ttl), (None, Some(Duration::from_secs(90))));
        let line = ["--socket", "unix:///x", "-o", "json", "clear-condition", "a/B"];
        let args: NodeArgs = parsed(&line).unwrap();
        assert!(args.agent.socket.is_some() && args.output == Output::Json);
        assert!(matches!(args.change, Some(Change::ClearCondition { kind }) if kind == "a/B"));
        for wrong in [
            &["set-condition", "A", "Yes", "--reason", "R"][..],
            &["set-condition", "A", "True"],
            &["set-condition", "A", "True", "--reason", "R", "--ttl", "0s"],
            &["set-condition", "A", "True", "--reason", "R", "--ttl", "5"],
            &["clear-condition"],
            &["condition"],
        ] {
            assert!(parsed::<NodeArgs>(wrong).is_err(), "{wrong:?}");
        }
    }
}
