//! `keelson actors [NAME]`.
//!
//! In: the debug API's actors and its readiness. Out: failing checks and a table of all actors, or one actor in
//! detail.

use std::process::ExitCode;

use clap::Args;
use keelson_actor_system::clock::unix_ms;
use keelson_proto::debug as pb;
use serde_json::Value;
use tonic::Response;

use super::{
    args::{AgentArgs, Output, exit},
    client,
    format::{clean, micros, one_line, since_ms},
    table::Table,
};
use crate::output::{json, print};

/// Show the actors of a running agent, or one actor in detail.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson actors                       failing readiness checks, then all actors\n  \
    keelson actors PullCoordinator       one actor: messages, last events, state\n  \
    keelson actors -o json | jq -r '.actors[] | select(.status != \"running\") | .name'")]
pub(crate) struct ActorsArgs {
    /// Show this actor in detail.
    name: Option<String>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    agent: AgentArgs,
}

pub(crate) async fn run_actors(args: ActorsArgs) -> anyhow::Result<ExitCode> {
    exit(run(args).await)
}

async fn run(args: ActorsArgs) -> anyhow::Result<()> {
    let mut client = client::open(&args.agent).await?;
    let text = match args.name {
        Some(name) => {
            let answer = client.get_actor(client::request(pb::GetActorRequest { name })).await;
            let actor = answer.map_err(client::Refused::from)?.into_inner();
            match args.output {
                Output::Json => json(&actor)?,
                Output::Table => one(&actor, unix_ms()),
            }
        }
        None => {
            let answer = client.list_actors(client::request(pb::ListActorsRequest {})).await;
            let actors = answer.map_err(client::Refused::from)?.into_inner().actors;
            let readiness = client.get_readiness(client::request(pb::GetReadinessRequest {})).await;
            // The table is also useful without the readiness.
            let readiness = readiness.map(Response::into_inner).map_err(client::Refused::from);
            match args.output {
                Output::Json => json(&document(&actors, &readiness))?,
                Output::Table => {
                    let now = unix_ms();
                    readiness_problems(&readiness, now) + &all(&actors, now)
                }
            }
        }
    };
    print(&text)?;
    Ok(())
}

/// `readiness` is null if the agent did not answer; `readiness_error` says why.
fn document(actors: &[pb::Actor], readiness: &Result<pb::Readiness, client::Refused>) -> Value {
    let error = readiness.as_ref().err().map(ToString::to_string).unwrap_or_default();
    serde_json::json!({ "actors": actors, "readiness": readiness.as_ref().ok(), "readiness_error": error })
}

/// One line per reason why the agent is not ready, then an empty line; empty if it is ready.
fn readiness_problems(readiness: &Result<pb::Readiness, client::Refused>, now: i64) -> String {
    let readiness = match readiness {
        Ok(readiness) => readiness,
        Err(error) => return format!("cannot read readiness: {error}\n\n"),
    };
    let mut text = String::new();
    for check in readiness.checks.iter().filter(|check| !check.ok) {
        let since = match check.since_unix_ms {
            0 => String::new(),
            since => format!(" (for {})", since_ms(since, now)),
        };
        text.push_str(&format!("not ready: {}: {}{since}\n", clean(&check.name), one_line(&check.message)));
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

/// An actor that is not configured to run is disabled.
fn status(actor: &pb::Actor) -> String {
    clean(&actor.status)
}

fn all(actors: &[pb::Actor], now: i64) -> String {
    let mut table = Table::new(&["NAME", "STATUS", "MAILBOX", "HANDLED", "P99", "RESTARTS", "UP", "SUMMARY"]);
    for actor in actors {
        let handled: u64 = actor.messages.iter().map(|message| message.handled).sum();
        let p99 = actor.messages.iter().map(|message| message.p99_us).max();
        table.row([
            clean(&actor.name),
            status(actor),
            format!("{}/{}", actor.mailbox_depth, actor.mailbox_capacity),
            handled.to_string(),
            p99.map(micros).unwrap_or_default(),
            actor.restarts.to_string(),
            since_ms(actor.started_unix_ms, now),
            one_line(&actor.summary),
        ]);
    }
    let mut text = table.text();
    let failed: Vec<&pb::Actor> = actors.iter().filter(|actor| !actor.last_error.is_empty()).collect();
    if !failed.is_empty() {
        text.push_str("\nLast errors:\n");
    }
    for actor in failed {
        let ago = since_ms(actor.last_error_unix_ms, now);
        text.push_str(&format!("  {} ({ago} ago): {}\n", clean(&actor.name), one_line(&actor.last_error)));
    }
    text
}

fn one(actor: &pb::Actor, now: i64) -> String {
    let mut lines = vec![
        format!("Name:      {}", clean(&actor.name)),
        format!("Status:    {}", status(actor)),
        format!(
            "Summary:   {}",
            if actor.summary.is_empty() { "-".into() } else { one_line(&actor.summary) }
        ),
        format!("Up:        {}", since_ms(actor.started_unix_ms, now)),
        format!("Mailbox:   {} of {}", actor.mailbox_depth, actor.mailbox_capacity),
        format!("Restarts:  {}", actor.restarts),
    ];
    if !actor.last_error.is_empty() {
        let ago = since_ms(actor.last_error_unix_ms, now);
        lines.push(format!("Error:     {} ({ago} ago)", one_line(&actor.last_error)));
    }
    let mut text = lines.join("\n");
    text.push('\n');
    if !actor.messages.is_empty() {
        text.push('\n');
        text.push_str(&messages(&actor.messages));
    }
    if !actor.events.is_empty() {
        text.push_str("\nEvents, oldest first:\n");
    }
    for event in &actor.events {
        text.push_str(&format!("  {:>8} ago  {}\n", since_ms(event.unix_ms, now), one_line(&event.text)));
    }
    if !actor.state_json.is_empty() {
        text.push_str("\nState:\n");
        text.push_str(&state(&actor.state_json));
    }
    text
}

fn messages(messages: &[pb::MessageStats]) -> String {
    let mut table = Table::new(&["MESSAGE", "HANDLED", "BUSY", "P50", "P90", "P99", "MAX"]);
    for message in messages {
        table.row([
            clean(&message.message),
            message.handled.to_string(),
            message.rejected_busy.to_string(),
            micros(message.p50_us),
            micros(message.p90_us),
            micros(message.p99_us),
            micros(message.max_us),
        ]);
    }
    table.text()
}

fn state(text: &str) -> String {
    let parsed = serde_json::from_str::<Value>(text).and_then(|value| serde_json::to_string_pretty(&value));
    let shown = parsed.unwrap_or_else(|_| text.to_owned());
    shown.lines().map(|line| format!("  {}\n", clean(line))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor() -> pb::Actor {
        pb::Actor {
            name: "PullCoordinator".into(),
            status: "running".into(),
            summary: "3 running, 12 queued".into(),
            mailbox_depth: 2,
            mailbox_capacity: 1024,
            restarts: 1,
            started_unix_ms: 1_000,
            last_error: "the store\nrefused".into(),
            last_error_unix_ms: 40_000,
            messages: vec![pb::MessageStats {
                message: "RequestPull".into(),
                handled: u64::MAX / 2,
                rejected_busy: 3,
                p50_us: 58,
                p90_us: 137,
                p99_us: 1_920,
                max_us: 2_000_000,
            }],
            events: vec![pb::ActorEvent { unix_ms: 60_000, text: "pull 7 started\x1b[31m".into() }],
            state_json: r#"{"limit":3}"#.into(),
        }
    }

    #[test]
    fn all_as_a_table() {
        let off =
            pb::Actor { name: "LeaseRenewer".into(), status: "disabled".into(), ..pb::Actor::default() };
        let expected = "\
NAME             STATUS    MAILBOX  HANDLED              P99    RESTARTS  UP     SUMMARY
PullCoordinator  running   2/1024   9223372036854775807  1.9ms  1         1m00s  3 running, 12 queued
LeaseRenewer     disabled  0/0      0                    -      0         -      -

Last errors:
  PullCoordinator (21s ago): the store refused
";
        assert_eq!(all(&[actor(), off], 61_000), expected);
    }

    fn readiness() -> pb::Readiness {
        let check = |name: &str, ok, message: &str, since_unix_ms| pb::Check {
            name: name.into(),
            ok,
            message: message.into(),
            since_unix_ms,
        };
        let checks = vec![
            check("agent", true, "ok", 0),
            check("runtime", false, "connection\nrefused", 49_000),
            check("state", false, "the disk is full", 0),
        ];
        pb::Readiness { ready: false, checks }
    }

    #[test]
    fn unhealthy_actors_come_first() {
        let expected = "\
not ready: runtime: connection refused (for 12s)
not ready: state: the disk is full

";
        assert_eq!(readiness_problems(&Ok(readiness()), 61_000), expected);
        let well = pb::Check { name: "agent".into(), ok: true, ..pb::Check::default() };
        assert_eq!(readiness_problems(&Ok(pb::Readiness { ready: true, checks: vec![well] }), 61_000), "");
        let silent = tonic::Status::unavailable("an actor may be stuck").into();
        let expected = "cannot read readiness: the agent cannot answer yet: an actor may be stuck\n\n";
        assert_eq!(readiness_problems(&Err(silent), 61_000), expected);
    }

    #[test]
    fn json_of_all_has_the_readiness() {
        let shown = document(&[actor()], &Ok(readiness()));
        assert_eq!(shown["actors"][0]["name"], "PullCoordinator");
        assert_eq!(shown["readiness"]["checks"][1]["since_unix_ms"], 49_000);
        assert_eq!(shown["readiness_error"], "");
        let silent = document(&[], &Err(tonic::Status::not_found("x").into()));
        assert_eq!((&silent["readiness"], &silent["readiness_error"]), (&Value::Null, &Value::from("x")));
    }

    #[test]
    fn one_in_full() {
        let expected = "\
Name:      PullCoordinator
Status:    running
Summary:   3 running, 12 queued
Up:        1m00s
Mailbox:   2 of 1024
Restarts:  1
Error:     the store refused (21s ago)

MESSAGE      HANDLED              BUSY  P50   P90    P99    MAX
RequestPull  9223372036854775807  3     58us  137us  1.9ms  2.0s

Events, oldest first:
      1.0s ago  pull 7 started\u{fffd}[31m

State:
  {
    \"limit\": 3
  }
";
        assert_eq!(one(&actor(), 61_000), expected);
    }

    #[test]
    fn json_embeds_the_state() {
        let document: Value = serde_json::from_str(&json(&actor()).unwrap()).unwrap();
        assert_eq!(document["state"]["limit"], 3);
        assert_eq!(document["messages"][0]["rejected_busy"], 3);
    }
}
