//! Heartbeats of the fake agent, and the conditions that are set in it.
//!
//! In: the scene, and conditions. Out: documents of `keelson.node.v1` as an agent would show them.

use keelson_debug::ConditionError;
use keelson_proto::node;

use crate::world::{Scene, now_ms};

/// A real agent allows more; so few can be reached by hand.
const MOST_CONDITIONS: usize = 4;
const OWN: [&str; 5] = ["MemoryPressure", "DiskPressure", "PIDPressure", "ImagePullsStalled", "Ready"];
const REFUSED: &str = "the API server https://10.96.0.1:443 cannot be reached: connection refused";

/// What is kept of heartbeats.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    scene: Scene,
    began: i64,
    set: Vec<node::Condition>,
}

impl Heartbeats {
    pub(crate) fn new(scene: Scene) -> Self {
        let began = now_ms();
        let set = vec![
            condition(
                "KernelDeadlock",
                "False",
                "KernelHasNoDeadlock",
                "the kernel has no deadlock",
                began - 86_400_000,
            ),
            condition(
                "hardware.example.com/NVMeWearAboveTheVendorsLimit",
                "Unknown",
                "ReporterSilent",
                "the reporter has said nothing for 5 min; what it said last: <b>nvme0n1</b> has used 71 % of its life",
                began - 1_260_000,
            ),
        ];
        let set = set.into_iter().map(|set| node::Condition { source: "reporter".into(), ..set }).collect();
        Self { scene, began, set }
    }

    /// As `SetCondition`, with the refusals that can be tried by hand.
    pub(crate) fn set(&mut self, asked: node::SetConditionRequest) -> Result<bool, ConditionError> {
        self.on()?;
        let kind = asked.r#type;
        if OWN.contains(&kind.as_str()) {
            return Err(ConditionError::NotYours(format!("{kind} is reported by the agent itself")));
        }
        if kind.is_empty() || asked.reason.is_empty() {
            return Err(ConditionError::Invalid("a condition needs a type and a reason".into()));
        }
        let place = self.set.iter().position(|old| old.r#type == kind);
        let old = place.map(|place| self.set.remove(place));
        if old.is_none() && self.set.len() >= MOST_CONDITIONS {
            let text = format!("{MOST_CONDITIONS} conditions are set; clear one of them first");
            return Err(ConditionError::TooMany(text));
        }
        let since =
            old.as_ref().filter(|old| old.status == asked.status).map(|old| old.last_transition_unix_ms);
        let new =
            condition(&kind, &asked.status, &asked.reason, &asked.message, since.unwrap_or_else(now_ms));
        let new = node::Condition { source: "reporter".into(), ..new };
        let changed = old.as_ref() != Some(&new);
        self.set.insert(place.unwrap_or(self.set.len()), new);
        Ok(changed)
    }

    /// As `ClearCondition`.
    pub(crate) fn clear(&mut self, kind: &str) -> Result<(), ConditionError> {
        self.on()?;
        let place = self.set.iter().position(|old| old.r#type == kind);
        let not_set = || ConditionError::NotSet(format!("no condition of type {kind:?} was set"));
        self.set.remove(place.ok_or_else(not_set)?);
        Ok(())
    }

    fn on(&self) -> Result<(), ConditionError> {
        match self.scene {
            Scene::Idle => Err(ConditionError::Unavailable(
                "heartbeats are disabled: no API server is configured".into(),
            )),
            _ => Ok(()),
        }
    }

    /// As `GetHeartbeats`: well in the busy scene, off in the idle one, failing where everything is away.
    pub(crate) fn now(&self) -> node::Heartbeats {
        let failing = self.scene == Scene::Down;
        if self.scene == Scene::Idle {
            let reason = "no API server is configured".into();
            return node::Heartbeats { state: "off".into(), reason, ..Default::default() };
        }
        let state = if failing { "failing" } else { "well" };
        let since = if failing { self.began - 124_000 } else { 0 };
        let reason = if failing { REFUSED } else { "" };
        node::Heartbeats {
            state: state.into(),
            reason: if failing { format!("the Lease is not renewed: {REFUSED}") } else { String::new() },
            failing_since_unix_ms: since,
            role: "node".into(),
            node_name: "worker-7.eu-central-1.compute.internal".into(),
            server: "https://10.96.0.1:443".into(),
            lease: Some(self.lease(state, reason, since)),
            status: Some(self.status()),
            conditions: self.conditions(),
            credentials: vec![self.credential()],
            credential_warnings: Vec::new(),
        }
    }

    /// Expiring where everything is away.
    fn credential(&self) -> node::Credential {
        let (state, left) = if self.scene == Scene::Down { ("expiring", 3) } else { ("healthy", 243) };
        node::Credential {
            kind: "client_certificate".into(),
            file: "/var/lib/keelson/pki/client-current.pem".into(),
            user: "system:node:worker-7.eu-central-1.compute.internal".into(),
            not_before_unix_ms: self.began - (365 - left) * 86_400_000,
            expires_unix_ms: self.began + left * 86_400_000,
            state: state.into(),
            ..Default::default()
        }
    }

    fn lease(&self, state: &str, reason: &str, failing_since_unix_ms: i64) -> node::Lease {
        let now = now_ms();
        // Renewed every ten seconds while all is well.
        let renewed =
            if failing_since_unix_ms > 0 { failing_since_unix_ms } else { now - (now - self.began) % 10_000 };
        node::Lease {
            name: "worker-7.eu-central-1.compute.internal".into(),
            holder: "worker-7.eu-central-1.compute.internal".into(),
            state: state.into(),
            reason: reason.into(),
            failing_since_unix_ms,
            duration_seconds: 40,
            transitions: 1,
            renewed_unix_ms: renewed,
            age_ms: now - renewed,
            renewals: 9_378,
            contention: "uncontested".into(),
        }
    }

    fn status(&self) -> node::Status {
        let age_ms = now_ms() - self.began + 131_000;
        node::Status {
            state: "well".into(),
            reported_unix_ms: now_ms() - age_ms,
            age_ms,
            next_report_in_ms: 300_000 - age_ms,
            reports: 341,
            computations: 9_376,
            ..Default::default()
        }
    }

    fn conditions(&self) -> Vec<node::Condition> {
        let day = self.began - 93_784_000;
        let mut all = vec![
            condition("MemoryPressure", "False", "KubeletHasSufficientMemory", "there is enough memory", day),
            condition(
                "DiskPressure",
                "False",
                "KubeletHasNoDiskPressure",
                "there is enough room on the disks",
                day,
            ),
            condition("PIDPressure", "False", "KubeletHasSufficientPID", "there are enough process ids", day),
        ];
        if self.scene == Scene::Down {
            let text = "the container runtime does not answer on /run/containerd/containerd.sock: connection refused";
            all[1] = condition(
                "DiskPressure",
                "True",
                "KubeletHasDiskPressure",
                "nodefs has 4 % left",
                self.began - 700_000,
            );
            all.push(condition("ImagePullsStalled", "Unknown", "PullsUnknown", text, self.began - 12_000));
            all.push(condition("Ready", "False", "KubeletNotReady", text, self.began - 12_000));
        } else {
            all.push(condition(
                "ImagePullsStalled",
                "False",
                "PullsNotStalled",
                "no image pull is stalled",
                day,
            ));
            all.push(condition("Ready", "True", "KubeletReady", "the node is ready", day));
        }
        all.extend(self.set.iter().cloned());
        all
    }
}

fn condition(kind: &str, status: &str, reason: &str, message: &str, since: i64) -> node::Condition {
    node::Condition {
        r#type: kind.into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        last_transition_unix_ms: since,
        source: "agent".into(),
        contested: false,
    }
}
