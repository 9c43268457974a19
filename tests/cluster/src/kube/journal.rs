//! Owns: the writes to an etcd, key by key. In: an etcd. Out: every put from a moment on, with its size.

use super::etcd::Etcd;
use anyhow::{Context as _, Result};
use k8s_openapi::ByteString;
use keelson_harness::process::{Process, Program};
use keelson_harness::scratch::Scratch;
use serde::Deserialize;
use std::fs;
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// Such as `/registry/minions/NAME`.
    pub key: String,
    /// Length of key and value in bytes, as etcd counts them.
    pub bytes: usize,
}

/// Collects every put. Stopped on drop.
#[derive(Debug)]
pub struct Journal {
    log: PathBuf,
    _watch: Process,
}

impl Journal {
    /// Collects from the next write on.
    pub async fn start(scratch: &Scratch, etcd: &Etcd) -> Result<Self> {
        let from = etcd.revision().await? + 1;
        let log = scratch.numbered("journal-")?.join("watch.json");
        let program = Program {
            name: "etcdctl watch".to_owned(),
            path: super::etcd::etcdctl()?,
            args: vec![
                format!("--endpoints={}", etcd.endpoint()),
                "watch".to_owned(),
                "--prefix".to_owned(),
                "--write-out=json".to_owned(),
                format!("--rev={from}"),
                "/registry/".to_owned(),
            ],
            env: vec![("ETCDCTL_API".to_owned(), "3".to_owned())],
            log: log.clone(),
        };
        Ok(Self { log, _watch: program.start()? })
    }

    /// In their order.
    pub fn puts(&self) -> Result<Vec<Put>> {
        let log = fs::read_to_string(&self.log).with_context(|| format!("no {}", self.log.display()))?;
        parse(&log)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Line {
    #[serde(default)]
    events: Option<Vec<Event>>,
}

#[derive(Deserialize)]
struct Event {
    /// 1: a deletion.
    #[serde(default, rename = "type")]
    kind: i32,
    kv: KeyValue,
}

#[derive(Deserialize)]
struct KeyValue {
    key: ByteString,
    #[serde(default)]
    value: Option<ByteString>,
}

fn parse(log: &str) -> Result<Vec<Put>> {
    let mut puts = Vec::new();
    // The text after the last line break is still being written.
    for line in log.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let line: Line =
            serde_json::from_str(line).with_context(|| format!("unexpected output of etcdctl: {line}"))?;
        for Event { kind, kv } in line.events.unwrap_or_default() {
            if kind == 0 {
                let bytes = kv.key.0.len() + kv.value.map_or(0, |value| value.0.len());
                puts.push(Put { key: String::from_utf8_lossy(&kv.key.0).into_owned(), bytes });
            }
        }
    }
    Ok(puts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_are_counted_and_deletions_are_not() {
        let log = concat!(
            r#"{"Header":{"revision":7},"Events":[{"kv":{"key":"L2E=","value":"AAEC","version":1}},"#,
            r#"{"type":1,"kv":{"key":"L2I="}}],"Canceled":false}"#,
            "\n{\"Header\":{\"rev"
        );
        assert_eq!(parse(log).unwrap(), [Put { key: "/a".to_owned(), bytes: 5 }]);
        assert!(parse("no answer\n").is_err());
    }
}
