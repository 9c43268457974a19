//! Tests of the source with real folders.
//!
//! Owns: [`Rig`], a source with a folder of its own, and [`RecordingSink`], a sink that records what may be published
//! when.

mod bytes;
mod changes;
mod faults;
mod formats;
mod sink;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant, SystemTime},
};

use futures_util::future::BoxFuture;
use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{
    Ack, EndpointSlice, EventSink, NodeView, ObjectEvent, Service, ServiceCidr, SourceEvent, SourceKind,
};
use keelson_proto::{endpoints::FileFault, kubernetes::ObjectMeta};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::{FilesHandle, FilesParts, FilesSource, FilesTiming};

/// Only a failing test waits this long.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn service(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  clusterIP: {ip}\n  ports:\n  \
         - port: 80\n    protocol: TCP\n"
    )
}

const A: (&str, &str) = ("service default/a", "10.0.0.1");
const A2: (&str, &str) = ("service default/a", "10.0.0.2");
const B: (&str, &str) = ("service default/b", "10.0.0.9");
const S: (&str, &str) = ("slice default/a-1", "10.1.0.1");

/// The manifests of [`A`], [`A2`], [`B`] and [`S`].
fn a() -> String {
    service("a", A.1)
}

fn a2() -> String {
    service("a", A2.1)
}

fn b() -> String {
    service("b", B.1)
}

fn s() -> String {
    slice("a-1", "a", S.1)
}

/// A file of several documents.
fn documents(all: &[String]) -> String {
    all.join("---\n")
}

fn slice(name: &str, service: &str, address: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}\n  labels:\n    \
         kubernetes.io/service-name: {service}\naddressType: IPv4\nports:\n- name: ''\n  port: 80\nendpoints:\n\
         - addresses: [{address}]\n"
    )
}

fn node(name: &str, zone: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  labels: {{topology.kubernetes.io/zone: {zone}}}\n"
    )
}

/// What would be published: `services/default/a` with its cluster IP, and so on.
type State = BTreeMap<String, String>;

fn state(entries: &[(&str, &str)]) -> State {
    entries.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

#[derive(Default)]
struct Recorded {
    objects: [BTreeMap<String, (String, bool)>; 3],
    open: [bool; 3],
    listed: [bool; 3],
    node: Option<NodeView>,
    /// Every state that could have been published, in order, without repetitions.
    states: Vec<State>,
    events: Vec<SourceEvent>,
    health: BTreeMap<SourceKind, JobHealth>,
    /// Kinds that must be listed again.
    forgotten: Vec<SourceKind>,
}

fn name(metadata: &Option<ObjectMeta>) -> String {
    metadata.as_ref().map_or_else(String::new, |metadata| format!("{}/{}", metadata.namespace, metadata.name))
}

impl Recorded {
    fn apply<T>(&mut self, kind: usize, seen: Vec<ObjectEvent<T>>, show: fn(&T) -> (String, String)) {
        let objects = &mut self.objects[kind];
        for seen in seen {
            match seen {
                ObjectEvent::Listing => {
                    self.open[kind] = true;
                    objects.values_mut().for_each(|object| object.1 = false);
                }
                ObjectEvent::Upsert(object) => {
                    assert!(self.open[kind] || self.listed[kind], "sent before a listing");
                    let (name, text) = show(&object);
                    objects.insert(name, (text, true));
                }
                ObjectEvent::Deleted(name) => {
                    assert!(self.listed[kind], "sent before a listing");
                    objects.remove(name.as_str());
                }
                ObjectEvent::ListComplete => {
                    assert!(self.open[kind], "no listing is open");
                    self.open[kind] = false;
                    self.listed[kind] = true;
                    objects.retain(|_, object| object.1);
                }
                ObjectEvent::Refused => panic!("a folder refuses nothing"),
            }
        }
    }

    fn take(&mut self, event: SourceEvent) -> Ack {
        let kind = match &event {
            SourceEvent::Services(_) => SourceKind::Services,
            SourceEvent::EndpointSlices(_) => SourceKind::EndpointSlices,
            SourceEvent::ServiceCidrs(_) => SourceKind::ServiceCidrs,
            SourceEvent::Node(_) => SourceKind::Node,
            SourceEvent::Health(kind, _) => *kind,
        };
        let health = matches!(event, SourceEvent::Health(..));
        if let Some(at) = self.forgotten.iter().position(|forgotten| *forgotten == kind)
            && !health
        {
            self.forgotten.remove(at);
            if kind != SourceKind::Node {
                let place = kind as usize;
                self.objects[place].clear();
                (self.open[place], self.listed[place]) = (false, false);
            }
            return Ack::Relist;
        }
        self.events.push(event.clone());
        match event {
            SourceEvent::Services(seen) => self.apply(0, seen, |service: &Service| {
                (name(&service.metadata), service.spec.clone().unwrap_or_default().cluster_ip)
            }),
            SourceEvent::EndpointSlices(seen) => self.apply(1, seen, |slice: &EndpointSlice| {
                let addresses: Vec<String> =
                    slice.endpoints.iter().flat_map(|e| e.addresses.clone()).collect();
                (name(&slice.metadata), addresses.join(","))
            }),
            SourceEvent::ServiceCidrs(seen) => self.apply(2, seen, |cidr: &ServiceCidr| {
                (name(&cidr.metadata), cidr.spec.clone().unwrap_or_default().cidrs.join(","))
            }),
            SourceEvent::Node(view) => self.node = Some(view),
            SourceEvent::Health(kind, health) => {
                self.health.insert(kind, health);
            }
        }
        self.note();
        Ack::Accepted
    }

    fn note(&mut self) {
        if self.open.contains(&true) || self.listed.contains(&false) {
            return;
        }
        let Some(node) = &self.node else { return };
        let mut state = State::new();
        for (kind, objects) in ["service", "slice", "cidr"].iter().zip(&self.objects) {
            state.extend(objects.iter().map(|(name, (text, _))| (format!("{kind} {name}"), text.clone())));
        }
        if node.exists {
            state.insert(format!("node {}", node.name), node.zone.clone().unwrap_or_default());
        }
        if self.states.last() != Some(&state) {
            self.states.push(state);
        }
    }
}

#[derive(Clone, Default)]
struct RecordingSink(Arc<Mutex<Recorded>>);

impl RecordingSink {
    fn get(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap()
    }
}

impl EventSink for RecordingSink {
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Ack> {
        let answer = self.get().take(event);
        Box::pin(async move {
            tokio::task::yield_now().await;
            answer
        })
    }
}

/// Short intervals that still show a missing notice.
fn quick() -> FilesTiming {
    FilesTiming {
        settle: Duration::from_millis(50),
        settle_while_open: Duration::from_secs(20),
        settle_max: Duration::from_secs(40),
        poll: Duration::from_secs(120),
        poll_missing: Duration::from_millis(20),
    }
}

/// Makes a file old enough to have settled.
fn set_old_time(path: &Path) {
    let time = SystemTime::now() - Duration::from_secs(3600);
    fs::File::open(path).unwrap().set_modified(time).unwrap();
}

struct Rig {
    home: TempDir,
    folder: PathBuf,
    recorded: RecordingSink,
    handle: FilesHandle,
    /// Aborted on drop.
    _task: JoinSet<()>,
}

/// An empty folder.
fn manifests() -> (TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("manifests");
    fs::create_dir(&folder).unwrap();
    (home, folder)
}

impl Rig {
    fn new(files: &[(&str, &str)]) -> Self {
        Self::with(files, |_| {})
    }

    fn with(files: &[(&str, &str)], change: impl FnOnce(&mut FilesParts)) -> Self {
        let (home, folder) = manifests();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
            set_old_time(&folder.join(name));
        }
        set_old_time(&folder);
        Self::over(home, folder, change)
    }

    fn over(home: TempDir, folder: PathBuf, change: impl FnOnce(&mut FilesParts)) -> Self {
        let recorded = RecordingSink::default();
        let mut parts = FilesParts::new(folder.clone(), "n1".to_owned(), Arc::new(recorded.clone()));
        parts.timing = quick();
        change(&mut parts);
        let source = FilesSource::new(parts);
        let handle = source.handle();
        Self { home, folder, recorded, handle, _task: JoinSet::from_iter([source.run()]) }
    }

    fn home(&self) -> &Path {
        self.home.path()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.join(name), text).unwrap();
    }

    /// Replaces a file by rename.
    fn replace(&self, name: &str, text: &str) {
        let new = self.home.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.folder.join(name)).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.folder.join(name)).unwrap();
    }

    async fn until(&self, what: &str, holds: impl Fn(&Recorded, &[FileFault]) -> bool) {
        let start = Instant::now();
        loop {
            let faults = self.handle.faults();
            {
                let recorded = self.recorded.get();
                if holds(&recorded, &faults) {
                    return;
                }
                assert!(
                    start.elapsed() < TEST_TIMEOUT,
                    "{what}; states {:#?}, faults {faults:#?}, health {:?}",
                    recorded.states,
                    recorded.health
                );
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn is_healthy(&self) {
        let healthy = |recorded: &Recorded, _: &[FileFault]| {
            recorded.health.len() == 4 && recorded.health.values().all(|health| *health == JobHealth::Healthy)
        };
        self.until("it is failing", healthy).await;
    }

    async fn state(&self, entries: &[(&str, &str)]) {
        let wanted = state(entries);
        self.until(&format!("not so: {wanted:#?}"), |recorded, _| recorded.states.last() == Some(&wanted))
            .await;
    }

    /// Waits for these faults: file, line, a part of the reason, whether an earlier version is in use.
    async fn faults(&self, wanted: &[(&str, u32, &str, bool)]) {
        self.until(&format!("not so: {wanted:#?}"), |_, faults| {
            faults.len() == wanted.len()
                && faults.iter().zip(wanted).all(|(fault, (file, line, reason, earlier))| {
                    fault.file == *file
                        && fault.line == *line
                        && fault.reason.contains(reason)
                        && fault.earlier_in_use == *earlier
                })
        })
        .await;
    }
}
