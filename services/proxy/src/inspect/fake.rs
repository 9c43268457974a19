//! A scripted proxy for tests.

use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::{StreamExt as _, stream};
use keelson_proto::proxy as pb;
use keelson_serve::{Check, ViewError, history::History};
use tokio::sync::watch;

use super::{Chunks, ProxyView};
use crate::explain::Question;

#[derive(Debug)]
pub(super) struct Script {
    pub(super) state: Result<pb::State, ViewError>,
    pub(super) explanation: Result<pb::Explanation, ViewError>,
    /// The ruleset, in chunks.
    pub(super) text: Result<Vec<Result<String, ViewError>>, ViewError>,
    /// The stream never ends after the chunks.
    pub(super) endless: bool,
    pub(super) live: Vec<Check>,
    pub(super) ready: Vec<Check>,
    /// No call is ever answered.
    pub(super) stuck: bool,
    pub(super) asked: Vec<Question>,
}

#[derive(Debug, Clone)]
pub(super) struct Fake {
    script: Arc<Mutex<Script>>,
    bump: Arc<watch::Sender<u64>>,
}

pub(super) fn check(name: &str, ok: bool, message: &str) -> Check {
    Check { name: name.into(), ok, message: message.into(), since_unix_ms: 0 }
}

pub(super) fn state() -> pb::State {
    let family = pb::FamilyState {
        family: "IPv4".into(),
        state: "synced".into(),
        services: 2,
        elements: [("slots".to_owned(), 7)].into(),
        ..Default::default()
    };
    pb::State {
        backend: "nft".into(),
        link: "following".into(),
        instance_id: u64::MAX.to_string(),
        rev: 7,
        families: vec![family],
        healthy: true,
        ..Default::default()
    }
}

pub(super) fn explanation() -> pb::Explanation {
    let way = pb::Way {
        from: "a pod".into(),
        verdict: "forwarded".into(),
        masqueraded: false,
        endpoints: vec!["10.244.0.2:8080".into()],
        steps: vec!["services: is in cluster-ip-ports".into()],
    };
    pb::Explanation {
        frontend: "10.96.0.10:80/TCP is the cluster IP of default/web".into(),
        service_port: "default/web".into(),
        ways: vec![way],
    }
}

impl Fake {
    pub(super) fn new() -> Self {
        let script = Script {
            state: Ok(state()),
            explanation: Ok(explanation()),
            text: Ok(vec![Ok("table ip keelson {\n".into()), Ok("}\n".into())]),
            endless: false,
            live: vec![check("alive", true, "")],
            ready: vec![check("link", true, ""), check("kernel", true, "")],
            stuck: false,
            asked: Vec::new(),
        };
        Self { script: Arc::new(Mutex::new(script)), bump: Arc::new(watch::channel(0).0) }
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    pub(super) fn advance(&self, rev: u64) {
        if let Ok(state) = &mut self.script().state {
            state.rev = rev;
        }
        self.bump.send_modify(|n| *n += 1);
    }

    async fn perhaps_stuck(&self) {
        if self.script().stuck {
            std::future::pending::<()>().await;
        }
    }
}

impl ProxyView for Fake {
    async fn state(&self) -> Result<pb::State, ViewError> {
        self.perhaps_stuck().await;
        self.script().state.clone()
    }

    async fn explain(&self, question: Question) -> Result<pb::Explanation, ViewError> {
        self.perhaps_stuck().await;
        let mut script = self.script();
        script.asked.push(question);
        script.explanation.clone()
    }

    async fn print(&self) -> Result<Chunks, ViewError> {
        self.perhaps_stuck().await;
        let pieces = stream::iter(self.script().text.clone()?);
        Ok(match self.script().endless {
            true => pieces.chain(stream::pending()).boxed(),
            false => pieces.boxed(),
        })
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.bump.subscribe()
    }

    fn history(&self) -> History {
        History::new(&[])
    }

    async fn livez(&self) -> Vec<Check> {
        self.perhaps_stuck().await;
        self.script().live.clone()
    }

    async fn readyz(&self) -> Vec<Check> {
        self.perhaps_stuck().await;
        self.script().ready.clone()
    }

    async fn metrics(&self) -> String {
        self.perhaps_stuck().await;
        "# TYPE up gauge\nup 1\n# EOF\n".into()
    }
}
