//! `keelson pulls [--watch]`.
//!
//! In: the debug API's pulls. Out: running, queued and finished pulls as a table or JSON, once; or, in
//! [`watch`], as they change.

use std::process::ExitCode;

use clap::Args;
use keelson_actor_system::clock::unix_ms;
use keelson_proto::debug as pb;

use super::{
    args::{AgentArgs, Output, exit},
    client,
    format::{clean, count, duration_ms, image, one_line, progress, since_ms, state, summary},
    table::Table,
    watch,
};
use crate::output::{json, print};

/// Show queued, running and finished image pulls.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson pulls                                running, queued and recently finished pulls\n  \
    keelson pulls --watch                        progress bars; reconnects after a restart of the agent\n  \
    keelson pulls --until-idle                   watch until no pull is running or queued\n  \
    keelson pulls -o json | jq '.pulls[] | select(.state == \"running\") | .image'\n  \
    keelson pulls --watch -o json                one JSON document per change, one per line\n\n\
    States: checking (whether the image is present), queued, running, running (present) (the image is present; \
    does not count towards the limit), waiting for runtime, retrying (when_full = \"reject\"), held (after a \
    restart, until its caller returns with credentials), abandoned (no caller is left; cancelled soon).")]
pub(crate) struct PullsArgs {
    /// Watch for changes until Ctrl-C.
    #[arg(short, long)]
    watch: bool,
    /// Watch until no pull is running or queued.
    #[arg(long)]
    until_idle: bool,
    /// Maximum number of queued pulls to list; counts include all pulls.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    max_queued: u32,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    agent: AgentArgs,
}

/// While watching, only the first connection must succeed.
pub(crate) async fn run_pulls(args: PullsArgs) -> anyhow::Result<ExitCode> {
    exit(run(args).await)
}

async fn run(args: PullsArgs) -> anyhow::Result<()> {
    if args.watch || args.until_idle {
        let socket = client::socket(&args.agent)?;
        let watch = watch::Watch { socket, max_queued: args.max_queued, until_idle: args.until_idle };
        return watch.run(args.output).await;
    }
    let mut client = client::open(&args.agent).await?;
    let request = pb::ListPullsRequest { max_queued: args.max_queued };
    let list = client.list_pulls(client::request(request)).await.map_err(client::Refused::from)?.into_inner();
    let text = match args.output {
        Output::Json => json(&list)?,
        Output::Table => table(&list, unix_ms()),
    };
    print(&text)?;
    Ok(())
}

fn table(list: &pb::PullList, now: i64) -> String {
    let mut text = format!("{}\n", summary(list));
    if list.passed_through > 0 {
        let pulls = count(list.passed_through, "pull");
        text.push_str(&format!(
            "{pulls} passed through to the runtime without admission since the agent started\n"
        ));
    }
    let mut current = Table::new(&["ID", "IMAGE", "STATE", "FOR", "CALLERS", "POD", "PROGRESS"]);
    for pull in &list.pulls {
        current.row(current_row(pull, now));
    }
    if !current.is_empty() {
        text.push('\n');
        text.push_str(&current.text());
    }
    let listed = list.pulls.iter().filter(|pull| pull.position > 0).count() as u64;
    if u64::from(list.queued) > listed {
        text.push_str(&format!(
            "and {} more queued (--max-queued lists more)\n",
            u64::from(list.queued) - listed
        ));
    }
    let mut finished =
        Table::new(&["ID", "FINISHED", "ENDED", "WAITED", "TOOK", "ATTEMPTS", "REASON", "ERROR"]);
    for pull in &list.finished {
        let ended = format!("{} {} ago", state(pull), since_ms(pull.finished_unix_ms, now));
        let took = if pull.pull_time_ms > 0 { duration_ms(pull.pull_time_ms) } else { String::new() };
        finished.row([
            pull.id.to_string(),
            image(&pull.image),
            ended,
            duration_ms(pull.queue_wait_ms),
            took,
            pull.attempts.to_string(),
            clean(&pull.reason),
            one_line(&pull.error),
        ]);
    }
    if !finished.is_empty() {
        text.push('\n');
        text.push_str(&finished.text());
    }
    text
}

fn current_row(pull: &pb::Pull, now: i64) -> [String; 7] {
    let state = match pull.position {
        0 => state(pull),
        position => format!("{} #{position}", state(pull)),
    };
    let since = if pull.started_unix_ms == 0 { pull.requested_unix_ms } else { pull.started_unix_ms };
    let mut notes: Vec<String> = pull.progress.iter().map(progress).filter(|text| !text.is_empty()).collect();
    if pull.attempts > 1 {
        notes.push(format!("attempt {}", pull.attempts));
    }
    if pull.resumed {
        notes.push("resumed".into());
    }
    if !pull.error.is_empty() {
        notes.push(one_line(&pull.error));
    }
    [
        pull.id.to_string(),
        image(&pull.image),
        state,
        since_ms(since, now),
        pull.callers.to_string(),
        clean(&pull.pod),
        notes.join("  "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> pb::PullList {
        let running = pb::Pull {
            id: 41,
            image: "docker.io/library/postgres:17.2".into(),
            state: pb::PullState::Running.into(),
            callers: 2,
            attempts: 2,
            pod: "shop/db-0".into(),
            requested_unix_ms: 1,
            started_unix_ms: 50_000,
            progress: Some(pb::Progress {
                bytes_done: 1 << 20,
                bytes_total: 4 << 20,
                ..pb::Progress::default()
            }),
            resumed: true,
            ..pb::Pull::default()
        };
        let queued = pb::Pull {
            id: 42,
            image: format!("ghcr.io/acme/x@sha256:{}", "ab".repeat(32)),
            state: pb::PullState::Queued.into(),
            position: 1,
            callers: 1,
            requested_unix_ms: 30_000,
            ..pb::Pull::default()
        };
        let failed = pb::Pull {
            id: 40,
            image: "docker.io/library/nothing:1".into(),
            state: pb::PullState::Failed.into(),
            attempts: 4,
            requested_unix_ms: 10_000,
            started_unix_ms: 12_000,
            finished_unix_ms: 55_000,
            error: "not found".into(),
            reason: "NotFound".into(),
            queue_wait_ms: 2_000,
            pull_time_ms: 43_000,
            ..pb::Pull::default()
        };
        pb::PullList {
            limit: Some(pb::Limit { max_parallel_image_pulls: 3, ..pb::Limit::default() }),
            running: 1,
            queued: 10_000,
            callers: 10_002,
            oldest_wait_ms: 97_000,
            pulls: vec![running, queued],
            finished: vec![failed],
            runtime_health: "up".into(),
            runtime_error: String::new(),
            retained: 2,
            retained_bytes: 3 << 20,
            passed_through: 0,
        }
    }

    #[test]
    fn pulls_as_a_table() {
        let expected = "\
1 of 3 in use, 10000 queued (oldest 1m37s), 10002 callers, runtime up, 3.0 MiB retained of 2 unfinished pulls

ID  IMAGE                               STATE      FOR  CALLERS  POD        PROGRESS
41  docker.io/library/postgres:17.2     running    10s  2        shop/db-0  25%  1.0 MiB of 4.0 MiB  attempt 2  resumed
42  ghcr.io/acme/x@sha256:abababababab  queued #1  30s  1        -          -
and 9999 more queued (--max-queued lists more)

ID  FINISHED                     ENDED            WAITED  TOOK  ATTEMPTS  REASON    ERROR
40  docker.io/library/nothing:1  failed 5.0s ago  2.0s    43s   4         NotFound  not found
";
        assert_eq!(table(&list(), 60_000), expected);
    }

    #[test]
    fn nothing_at_all_is_one_line() {
        let idle = pb::PullList {
            runtime_health: "down".into(),
            runtime_error: "a\nb".into(),
            ..Default::default()
        };
        assert_eq!(table(&idle, 0), "0 running, no limit, 0 queued, 0 callers, runtime down: a b\n");
    }

    #[test]
    fn json_has_short_states() {
        let document: serde_json::Value = serde_json::from_str(&json(&list()).unwrap()).unwrap();
        assert_eq!(document["pulls"][0]["state"], "running");
        assert_eq!(document["pulls"][1]["progress"], serde_json::Value::Null);
        assert_eq!(document["finished"][0]["state"], "failed");
    }
}
