//! Owns: the requests that an API server received. In: its audit log. Out: one event for each request.
//!
//! The suites count writes and check their users here: outside the agent, behind every proxy.

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;

/// One request, as the API server logged it. A watch is logged twice: the latest entry counts.
#[derive(Clone, Debug)]
pub struct AuditEvent {
    /// Its progress: `ResponseStarted` for a running watch, `ResponseComplete`, or `Panic`.
    pub stage: String,
    /// Such as `system:node:NAME`.
    pub user: String,
    pub user_agent: String,
    /// The verb of the API: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: String,
    pub uri: String,
    /// Such as `leases`; empty for a path without a resource, such as `/readyz`.
    pub resource: String,
    /// Such as `status`; empty if there is none.
    pub subresource: String,
    /// Empty if there is none.
    pub namespace: String,
    /// Name of the object; empty for a list, and for a creation, whose name is in the body.
    pub name: String,
    /// HTTP status of the response; None if there was none.
    pub code: Option<u16>,
    pub received: Timestamp,
    /// When it reached `stage`.
    pub ended: Timestamp,
    /// The request body, with [`super::ApiOptions::audit_bodies`].
    pub body: Option<serde_json::Value>,
    /// Annotations of the server, such as `authorization.k8s.io/decision`.
    pub annotations: BTreeMap<String, String>,
}

impl AuditEvent {
    /// Whether it may have changed something: any verb but `get`, `list` and `watch`.
    pub fn is_write(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }

    /// Whether it is for a resource; `resource` includes `/SUBRESOURCE` if there is one.
    pub fn is_for(&self, verb: &str, resource: &str) -> bool {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        self.verb == verb && self.resource == resource && self.subresource == subresource
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    #[serde(rename = "auditID")]
    audit_id: String,
    stage: String,
    #[serde(rename = "requestURI")]
    request_uri: String,
    verb: String,
    user: User,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    object_ref: ObjectRef,
    response_status: Option<ResponseStatus>,
    request_object: Option<serde_json::Value>,
    request_received_timestamp: Timestamp,
    stage_timestamp: Timestamp,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ObjectRef {
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize)]
struct ResponseStatus {
    code: Option<u16>,
}

/// The log of an API server, read as it grows.
#[derive(Debug)]
pub(super) struct AuditLog {
    file: PathBuf,
    /// How many bytes of it are read.
    read: u64,
    /// One for each request, in the order of their first entries.
    events: Vec<AuditEvent>,
    /// The place in `events` of each audit ID.
    places: HashMap<String, usize>,
}

impl AuditLog {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, read: 0, events: Vec::new(), places: HashMap::new() }
    }

    /// Reads what was written since the last call, and returns all events.
    pub(super) fn read(&mut self) -> Result<&[AuditEvent]> {
        let mut new = String::new();
        File::open(&self.file)
            .and_then(|mut file| {
                file.seek(SeekFrom::Start(self.read))?;
                file.read_to_string(&mut new)
            })
            .with_context(|| format!("cannot read {}", self.file.display()))?;
        // The text after the last line break is still being written.
        for line in new.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            self.read += line.len() as u64;
            let line: Line =
                serde_json::from_str(line).with_context(|| format!("not a line of an audit log: {line}"))?;
            let place = *self.places.entry(line.audit_id.clone()).or_insert(self.events.len());
            let event = AuditEvent::from(line);
            match self.events.get_mut(place) {
                Some(earlier) => *earlier = event,
                None => self.events.push(event),
            }
        }
        Ok(&self.events)
    }
}

impl From<Line> for AuditEvent {
    fn from(line: Line) -> Self {
        Self {
            stage: line.stage,
            user: line.user.username,
            user_agent: line.user_agent,
            verb: line.verb,
            uri: line.request_uri,
            resource: line.object_ref.resource,
            subresource: line.object_ref.subresource,
            namespace: line.object_ref.namespace,
            name: line.object_ref.name,
            code: line.response_status.and_then(|status| status.code),
            received: line.request_received_timestamp,
            ended: line.stage_timestamp,
            body: line.request_object,
            annotations: line.annotations,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_harness::scratch::Scratch;
    use std::io::Write as _;

    fn line(id: &str, stage: &str, verb: &str, code: u16) -> String {
        let line = serde_json::json!({
            "kind": "Event", "auditID": id, "stage": stage, "verb": verb,
            "requestURI": "/api/v1/nodes/a/status", "user": {"username": "system:node:a"},
            "objectRef": {"resource": "nodes", "name": "a", "subresource": "status"},
            "responseStatus": {"metadata": {}, "code": code},
            "requestReceivedTimestamp": "2026-01-02T03:04:05.000006Z",
            "stageTimestamp": "2026-01-02T03:04:06.000000Z",
        });
        format!("{line}\n")
    }

    #[test]
    fn a_request_counts_once_with_its_last_stage() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.path().join("audit.log");
        let mut log = AuditLog::new(file.clone());
        let append = |text: &str| {
            let mut file = File::options().create(true).append(true).open(&file).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };

        let patch = line("2", "ResponseComplete", "patch", 403);
        let (head, rest) = patch.split_at(20);
        append(&line("1", "ResponseStarted", "watch", 200));
        append(head);
        let events = log.read().unwrap();
        assert_eq!(events.len(), 1, "half a line is none");
        assert_eq!(events[0].stage, "ResponseStarted");

        append(rest);
        append(&line("1", "ResponseComplete", "watch", 200));
        let events = log.read().unwrap();
        assert_eq!(events.len(), 2);
        assert_eq!(events[0].stage, "ResponseComplete");
        assert!(!events[0].is_write());
        assert!(events[1].is_write() && events[1].is_for("patch", "nodes/status"));
        assert!(!events[1].is_for("patch", "nodes"));
        assert_eq!((events[1].code, events[1].user.as_str()), (Some(403), "system:node:a"));
    }
}
