//! Owns: [`RandomWriter`], which writes Services, slices and a node's zone at random, in every field that has a
//! meaning. In: a seed and a rate. Out: writes, until it is stopped.

use super::objects::{Kind, Writer, endpoint, slice};
use anyhow::{Context as _, Result, bail};
use http::Method;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use tokio::task::JoinHandle;

const SERVICES: usize = 24;
const SLICES: [&str; 4] = ["a", "b", "c", "six"];
const ZONES: [&str; 3] = ["zone-a", "zone-b", "zone-c"];

/// A random writer in the background. Stopped on drop.
#[derive(Debug)]
pub struct RandomWriter {
    /// Held by the writer during each write.
    turn: Arc<Mutex<()>>,
    stop: watch::Sender<bool>,
    writes: Arc<AtomicUsize>,
    task: JoinHandle<()>,
    /// The error that stopped the writer.
    refused: Arc<std::sync::Mutex<Option<String>>>,
}

/// Nothing is written while this lives.
#[derive(Debug)]
pub struct Paused(#[expect(dead_code, reason = "held, not looked at")] OwnedMutexGuard<()>);

impl RandomWriter {
    /// Writes into the writer's namespace at most `per_second` times per second. `node` is the node whose zone also
    /// changes, and which has endpoints.
    pub fn start(writer: &Writer, node: &str, seed: u64, per_second: u32) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (turn, writes) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
        let author = Author {
            writer: writer.clone(),
            node: node.to_owned(),
            random: SmallRng::seed_from_u64(seed),
            pause: Duration::from_secs(1) / per_second.max(1),
        };
        let refused = Arc::<std::sync::Mutex<Option<String>>>::default();
        let (running, noted) = (author.run(turn.clone(), writes.clone(), stopped), refused.clone());
        let task = tokio::spawn(async move {
            if let Err(error) = running.await {
                *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{error:#}"));
            }
        });
        Self { turn, stop, writes, task, refused }
    }

    fn check_healthy(&self) -> Result<()> {
        match &*self.refused.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => bail!("the random writer ended: {error}"),
            None => Ok(()),
        }
    }

    /// Waits for the current write, and blocks further ones until the guard is dropped.
    pub async fn pause(&self) -> Result<Paused> {
        let paused = Paused(self.turn.clone().lock_owned().await);
        self.check_healthy()?;
        Ok(paused)
    }

    pub fn writes(&self) -> usize {
        self.writes.load(Ordering::Relaxed)
    }

    /// Stops it. Returns the number of writes, or the error that stopped it before.
    pub async fn stop(mut self) -> Result<usize> {
        self.stop.send_replace(true);
        (&mut self.task).await.context("the writer panicked")?;
        self.check_healthy()?;
        Ok(self.writes())
    }
}

impl Drop for RandomWriter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Author {
    writer: Writer,
    node: String,
    random: SmallRng,
    pause: Duration,
}

impl Author {
    async fn run(
        mut self,
        turn: Arc<Mutex<()>>,
        writes: Arc<AtomicUsize>,
        stopped: watch::Receiver<bool>,
    ) -> Result<()> {
        while !*stopped.borrow() {
            let held = turn.lock().await;
            match self.write().await {
                Ok(()) => {
                    writes.fetch_add(1, Ordering::Relaxed);
                }
                // It exists, does not exist, or is invalid for this change: as good as any other random write.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => {}
                // The API server is down, starting or overloaded: the next write follows anyway.
                Err(kube::Error::Api(status)) if matches!(status.code, 429 | 500..) => {}
                Err(error @ kube::Error::Api(_)) => return Err(error).context("a random write is refused"),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
            drop(held);
            tokio::time::sleep(self.pause).await;
        }
        Ok(())
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    fn one<T: Copy>(&mut self, of: &[T], otherwise: T) -> T {
        of.choose(&mut self.random).copied().unwrap_or(otherwise)
    }

    async fn write(&mut self) -> kube::Result<()> {
        let name = format!("churn-{:02}", self.random.random_range(0..SERVICES));
        let suffix = self.one(&SLICES, "a");
        let slice_name = format!("{name}-{suffix}");
        let (method, kind, name, body) = match self.random.random_range(0..100) {
            0..14 => (Method::POST, Kind::Service, String::new(), Some(self.service(&name))),
            14..22 => (Method::DELETE, Kind::Service, name, None),
            22..36 => (Method::PATCH, Kind::Service, name, Some(self.change())),
            36..40 => (Method::PATCH, Kind::Service, format!("{name}/status"), Some(self.ingress())),
            40..60 => (Method::POST, Kind::Slice, String::new(), Some(self.slice(&name, suffix))),
            60..90 => (Method::PUT, Kind::Slice, slice_name, Some(self.slice(&name, suffix))),
            90..97 => (Method::DELETE, Kind::Slice, slice_name, None),
            _ => (Method::PATCH, Kind::Node, self.node.clone(), Some(self.zone())),
        };
        self.writer.request(method, kind, &name, body.as_ref()).await.map(drop)
    }

    fn service(&mut self, name: &str) -> Value {
        let mut ports = vec![json!({"name": "p", "port": 80, "protocol": "TCP"})];
        if self.chance(50) {
            ports.push(json!({"name": "q", "port": 80, "protocol": "UDP"}));
        }
        if self.chance(20) {
            ports.push(json!({"name": "r", "port": 8443, "protocol": "SCTP"}));
        }
        let kind = self.one(&["ClusterIP", "ClusterIP", "NodePort", "LoadBalancer"], "ClusterIP");
        let mut spec = json!({"type": kind, "ports": ports, "ipFamilyPolicy": "PreferDualStack"});
        match self.random.random_range(0..20) {
            0 => spec = json!({"type": "ExternalName", "externalName": "elsewhere.example"}),
            1 => spec = json!({"clusterIP": "None", "ports": ports}),
            2..5 => spec["ipFamilyPolicy"] = json!("SingleStack"),
            5..7 => {
                spec["ipFamilyPolicy"] = json!("SingleStack");
                spec["ipFamilies"] = json!(["IPv6"]);
            }
            _ => {}
        }
        if spec["type"] == "LoadBalancer" && self.chance(50) {
            spec["loadBalancerSourceRanges"] = json!(["192.0.2.0/24", "2001:db8:1::/48"]);
        }
        if self.chance(30) && spec["type"] != "ExternalName" {
            spec["externalIPs"] = json!(["203.0.113.7", "2001:db8::7"]);
        }
        if matches!(spec["type"].as_str(), Some("NodePort" | "LoadBalancer")) {
            spec["externalTrafficPolicy"] = json!(self.one(&["Cluster", "Local"], "Local"));
        }
        let mut metadata = json!({"name": name});
        if self.chance(5) {
            metadata["labels"] = json!({"service.kubernetes.io/service-proxy-name": "another"});
        }
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    }

    fn change(&mut self) -> Value {
        match self.random.random_range(0..5) {
            0 => json!({"spec": {"internalTrafficPolicy": self.one(&["Cluster", "Local"], "Local")}}),
            1 => {
                let name = self.one(&[Some(""), Some("another"), None], None);
                json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": name}}})
            }
            2 => json!({"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig":
                {"clientIP": {"timeoutSeconds": self.random.random_range(1..1000)}}}}),
            3 => json!({"spec": {"sessionAffinity": "None", "sessionAffinityConfig": null}}),
            // A change without effect.
            _ => {
                json!({"metadata": {"annotations": {"example.org/at": self.random.random::<u32>().to_string()}}})
            }
        }
    }

    fn ingress(&mut self) -> Value {
        let mode = self.one(&["VIP", "Proxy"], "VIP");
        let mut ingress = vec![json!({"ip": "198.51.100.1", "ipMode": mode})];
        if self.chance(50) {
            ingress.push(json!({"ip": "2001:db8:2::1"}));
        }
        json!({"status": {"loadBalancer": {"ingress": ingress}}})
    }

    fn slice(&mut self, name: &str, suffix: &str) -> Value {
        let v6 = suffix == "six";
        let endpoints: Vec<Value> =
            (0..self.random.random_range(1..7)).map(|_| self.random_endpoint(v6)).collect();
        let mut ports = vec![json!({"name": "p", "port": self.random.random_range(8080..8083)})];
        if self.chance(60) {
            ports.push(json!({"name": "q", "port": 53, "protocol": "UDP"}));
        }
        slice(name, suffix, &ports, &endpoints)
    }

    fn random_endpoint(&mut self, v6: bool) -> Value {
        let number = self.random.random_range(1..40);
        let address = if v6 { format!("2001:db8:3::{number:x}") } else { format!("10.200.0.{number}") };
        let own = self.node.clone();
        let node = if self.chance(30) { own.as_str() } else { "elsewhere" };
        let mut more = json!({});
        let conditions = match self.random.random_range(0..8) {
            0..4 => json!({"ready": true, "serving": true, "terminating": false}),
            4 => json!({"ready": false, "serving": true, "terminating": true}),
            5 => json!({"ready": false, "serving": false, "terminating": true}),
            6 => json!({"ready": false, "serving": false}),
            _ => json!({}),
        };
        more["conditions"] = conditions;
        if self.chance(60) {
            more["hints"] = json!({"forZones": [{"name": self.one(&ZONES, "zone-a")}]});
        }
        endpoint(&address, node, &more)
    }

    fn zone(&mut self) -> Value {
        let zone = self.one(&[Some("zone-a"), Some("zone-b"), None], None);
        json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}})
    }
}
