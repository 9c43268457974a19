//! `keelson state`.
//!
//! In: the debug API's storage. Out: location and state of the store.

use std::process::ExitCode;

use clap::Args;
use keelson_actor_system::clock::unix_ms;
use keelson_proto::debug as pb;

use super::{
    args::{AgentArgs, Output, exit},
    client,
    format::{bytes, clean, duration_ms, one_line, since_ms},
    table::Table,
};
use crate::output::{json, print};

/// Show the state store.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson state\n  \
    keelson state -o json | jq .size_bytes\n\n\
    The state store holds no secrets. It can be deleted while the agent is stopped: queued and running pulls are \
    then lost, and their callers retry.")]
pub(crate) struct StateArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    agent: AgentArgs,
}

pub(crate) async fn run_state(args: StateArgs) -> anyhow::Result<ExitCode> {
    exit(run(args).await)
}

async fn run(args: StateArgs) -> anyhow::Result<()> {
    let mut client = client::open(&args.agent).await?;
    let answer = client.get_storage(client::request(pb::GetStorageRequest {})).await;
    let storage = answer.map_err(client::Refused::from)?.into_inner();
    let text = match args.output {
        Output::Json => json(&storage)?,
        Output::Table => describe(&storage, unix_ms()),
    };
    print(&text)?;
    Ok(())
}

fn health(storage: &pb::Storage, now: i64) -> String {
    match (storage.not_open_reason.as_str(), storage.last_error.as_str()) {
        ("", "") => "healthy, last write succeeded".to_owned(),
        ("", error) => format!("FAILING, last write failed: {}", one_line(error)),
        (reason, _) => {
            let since = match storage.not_open_since_unix_ms {
                0 => String::new(),
                since => format!(", since {}", since_ms(since, now)),
            };
            let next_try = match storage.next_try_unix_ms {
                0 => String::new(),
                next_try => format!(", retry in {}", duration_ms(next_try.saturating_sub(now))),
            };
            format!("not open: {}{since}{next_try}", one_line(reason))
        }
    }
}

fn describe(storage: &pb::Storage, now: i64) -> String {
    let health = health(storage, now);
    let mut text = format!(
        "Backend:  {}\nPath:     {}\nSchema:   {}\nSize:     {}\nHealth:   {health}\n",
        clean(&storage.backend),
        clean(&storage.path),
        storage.schema_version,
        bytes(storage.size_bytes),
    );
    if !storage.damaged_moved_to.is_empty() {
        let folder = clean(&storage.damaged_moved_to);
        text.push_str(&format!("Damaged:  the previous state store was damaged and was moved to {folder}\n"));
    }
    let mut table = Table::new(&["TABLE", "RECORDS"]);
    for entry in &storage.tables {
        table.row([clean(&entry.name), entry.records.to_string()]);
    }
    if !table.is_empty() {
        text.push('\n');
        text.push_str(&table.text());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::contains;

    #[test]
    fn a_healthy_store_and_a_failing_one() {
        let sound = pb::Storage {
            backend: "sled".into(),
            path: "/var/lib/keelson/state".into(),
            schema_version: 1,
            size_bytes: 524_288,
            tables: vec![pb::StorageTable { name: "pulls".into(), records: 16 }],
            ..pb::Storage::default()
        };
        let expected = "\
Backend:  sled
Path:     /var/lib/keelson/state
Schema:   1
Size:     512 KiB
Health:   healthy, last write succeeded

TABLE  RECORDS
pulls  16
";
        assert_eq!(describe(&sound, 0), expected);
        let broken = pb::Storage {
            last_error: "no space left on device".into(),
            damaged_moved_to: "/var/lib/keelson/state.damaged-1".into(),
            tables: Vec::new(),
            ..sound
        };
        let text = describe(&broken, 0);
        contains(&text, "Health:   FAILING, last write failed: no space left on device\n");
        assert!(text.ends_with("was moved to /var/lib/keelson/state.damaged-1\n"), "{text}");
    }

    #[test]
    fn i4_a_store_that_is_not_open_has_reason_and_times() {
        let away = |next_try_unix_ms| pb::Storage {
            not_open_reason: "cannot open the lock file /x/lock: Read-only file system".into(),
            not_open_since_unix_ms: 100_000,
            next_try_unix_ms,
            ..pb::Storage::default()
        };
        let why = "cannot open the lock file /x/lock: Read-only file system, since 1m30s";
        assert_eq!(health(&away(202_000), 190_000), format!("not open: {why}, retry in 12s"));
        assert_eq!(health(&away(0), 190_000), format!("not open: {why}"));
        let opening = pb::Storage { not_open_reason: "opening".into(), ..pb::Storage::default() };
        assert_eq!(health(&opening, 190_000), "not open: opening");
    }
}
