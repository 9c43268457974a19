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
use tokio::task::JoinHandle;

use super::{FilesHandle, FilesParts, FilesSource, FilesTiming};

/// Only a failing test waits this long.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn service(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  clusterIP: {ip}\n  ports:\n  \
         - port: 80\n    protocol: TCP\n"
    )
}

pub(super) fn slice(name: &str, service: &str, address: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}\n  labels:\n    \
         kubernetes.io/service-name: {service}\naddressType: IPv4\nports:\n- name: ''\n  port: 80\nendpoints:\n\
         - addresses: [{address}]\n"
    )
}

pub(super) fn node(name: &str, zone: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  labels: {{topology.kubernetes.io/zone: {zone}}}\n"
    )
}

/// What would be published: `services/default/a` with its cluster IP, and so on.
pub(super) type State = BTreeMap<String, String>;

pub(super) fn state(entries: &[(&str, &str)]) -> State {
    entries.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

#[derive(Default)]
pub(super) struct Recorded {
    objects: [BTreeMap<String, (String, bool)>; 3],
    open: [bool; 3],
    listed: [bool; 3],
    node: Option<NodeView>,
    /// Every state that could have been published, in order, without repetitions.
    pub(super) states: Vec<State>,
    pub(super) events: Vec<SourceEvent>,
    pub(super) health: BTreeMap<SourceKind, JobHealth>,
    /// Kinds that must be listed again.
    pub(super) forgotten: Vec<SourceKind>,
}

fn name(metadata: Option<&ObjectMeta>) -> String {
    metadata.map_or_else(String::new, |metadata| format!("{}/{}", metadata.namespace, metadata.name))
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
                (
                    name(service.metadata.as_ref()),
                    service.spec.as_ref().map_or_else(String::new, |s| s.cluster_ip.clone()),
                )
            }),
            SourceEvent::EndpointSlices(seen) => self.apply(1, seen, |slice: &EndpointSlice| {
                let addresses: Vec<String> =
                    slice.endpoints.iter().flat_map(|e| e.addresses.clone()).collect();
                (name(slice.metadata.as_ref()), addresses.join(","))
            }),
            SourceEvent::ServiceCidrs(seen) => self.apply(2, seen, |cidr: &ServiceCidr| {
                (
                    name(cidr.metadata.as_ref()),
                    cidr.spec.as_ref().map_or_else(String::new, |s| s.cidrs.join(",")),
                )
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
pub(super) struct RecordingSink(Arc<Mutex<Recorded>>);

impl RecordingSink {
    pub(super) fn get(&self) -> MutexGuard<'_, Recorded> {
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
pub(super) fn quick() -> FilesTiming {
    FilesTiming {
        settle: Duration::from_millis(50),
        settle_while_open: Duration::from_secs(20),
        settle_max: Duration::from_secs(40),
        poll: Duration::from_secs(120),
        poll_missing: Duration::from_millis(20),
    }
}

/// Makes a file old enough to have settled.
pub(super) fn set_old_time(path: &Path) {
    let time = SystemTime::now() - Duration::from_secs(3600);
    fs::File::open(path).unwrap().set_modified(time).unwrap();
}

pub(super) struct Rig {
    home: TempDir,
    pub(super) folder: PathBuf,
    pub(super) recorded: RecordingSink,
    pub(super) handle: FilesHandle,
    task: JoinHandle<()>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Rig {
    pub(super) fn new(files: &[(&str, &str)]) -> Self {
        Self::with(files, |_| {})
    }

    pub(super) fn with(files: &[(&str, &str)], change: impl FnOnce(&mut FilesParts)) -> Self {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("manifests");
        fs::create_dir(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
            set_old_time(&folder.join(name));
        }
        set_old_time(&folder);
        Self::over(home, folder, change)
    }

    pub(super) fn over(home: TempDir, folder: PathBuf, change: impl FnOnce(&mut FilesParts)) -> Self {
        let recorded = RecordingSink::default();
        let mut parts = FilesParts::new(folder.clone(), "n1".to_owned(), Arc::new(recorded.clone()));
        parts.timing = quick();
        change(&mut parts);
        let source = FilesSource::new(parts);
        let handle = source.handle();
        let task = tokio::spawn(source.run());
        Self { home, folder, recorded, handle, task }
    }

    pub(super) fn home(&self) -> &Path {
        self.home.path()
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.join(name), text).unwrap();
    }

    /// Replaces a file by rename.
    pub(super) fn replace(&self, name: &str, text: &str) {
        let new = self.home.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.folder.join(name)).unwrap();
    }

    pub(super) fn remove(&self, name: &str) {
        fs::remove_file(self.folder.join(name)).unwrap();
    }

    pub(super) async fn until(&self, what: &str, holds: impl Fn(&Recorded, &[FileFault]) -> bool) {
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

    pub(super) async fn state(&self, entries: &[(&str, &str)]) {
        let wanted = state(entries);
        self.until(&format!("not so: {wanted:#?}"), |recorded, _| recorded.states.last() == Some(&wanted))
            .await;
    }

    /// Waits for these faults: file, line, a part of the reason, whether an earlier version is in use.
    pub(super) async fn faults(&self, wanted: &[(&str, u32, &str, bool)]) {
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
