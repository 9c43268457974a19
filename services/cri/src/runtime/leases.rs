//! The agent's leases on containerd, which keep what a pull has fetched beyond the pull.
//!
//! Owns: which leases are in use, and their creation, renewal and deletion. In: lease ids from the core of pulls. Out:
//! calls on containerd's lease API, in the namespace of the CRI.
//!
//! containerd pins what a call fetches to the lease named in its metadata, and deletes only leases that it made itself.
//! The agent's leases carry the owner's label, by which orphans are found, and an expiry of hours. It is renewed while
//! a pull runs in the lease or its bytes are retained; if the agent never comes back, they expire.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use keelson_proto::containerd::leases::{
    AddResourceRequest, CreateRequest, DeleteRequest, Lease, ListRequest, ListResourcesRequest, Resource,
    leases_client::LeasesClient,
};
use tonic::{Code, Request, Status, metadata::MetadataValue, transport::Channel};

pub(super) const NAMESPACE: &str = "k8s.io";
pub(super) const OWNER_LABEL: &str = "keelson.dev/owner";
const EXPIRE_LABEL: &str = "containerd.io/gc.expire";
/// How long bytes are kept when the agent does not come back. containerd's own leases for pulls last 24 h.
const LIFETIME: Duration = Duration::from_secs(2 * 3600);
/// A lease with less left than this is renewed before it is used again, and while its bytes are retained.
const RENEW_BELOW: Duration = Duration::from_secs(3600);
/// A lease in which a pull runs is renewed later: for a moment it does not exist, and a pull that needs it just then is
/// repeated. Most pulls have ended by then.
const RENEW_IN_USE_BELOW: Duration = Duration::from_secs(20 * 60);
/// Suffix of the second lease that pins the resources while a lease is made again.
const SPARE_SUFFIX: &str = "-renewing";

#[derive(Debug, Default)]
struct LeaseUse {
    running: u32,
    /// When this process last saw or set its expiry.
    verified: Option<SystemTime>,
}

type Uses = Arc<Mutex<HashMap<String, LeaseUse>>>;

pub(super) struct LeaseBook {
    client: LeasesClient<Channel>,
    owner: String,
    uses: Uses,
    locks: LeaseLocks,
    /// The leases belong to a successor: none is deleted any more.
    is_left: AtomicBool,
}

/// Creation, renewal and deletion of one lease are serialized. Different leases do not wait for each other, because
/// each call waits for containerd's disk.
#[derive(Debug, Default)]
struct LeaseLocks(Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl LeaseLocks {
    async fn take(&self, lease: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // No task holds or awaits an entry that only the map refers to.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(lease.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

/// Keeps a lease from being deleted while a pull runs in it.
pub(super) struct LeaseInUse {
    lease: String,
    uses: Uses,
}

impl Drop for LeaseInUse {
    fn drop(&mut self) {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of) = uses.get_mut(&self.lease) {
            of.running = of.running.saturating_sub(1);
        }
    }
}

pub(super) fn in_namespace<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}

impl LeaseBook {
    pub(super) fn new(channel: Channel, owner: &str) -> Self {
        Self {
            client: LeasesClient::new(channel),
            owner: owner.to_owned(),
            uses: Uses::default(),
            locks: LeaseLocks::default(),
            is_left: AtomicBool::new(false),
        }
    }

    pub(super) fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
    }

    fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Relaxed)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, LeaseUse>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call without effect, to find out whether the runtime has a lease API.
    pub(super) async fn ask(&self) -> Result<(), Status> {
        let none = ListRequest { filters: vec!["id==keelson-probe".into()] };
        self.client.clone().list(in_namespace(none)).await.map(drop)
    }

    pub(super) async fn exists(&self, lease: &str) -> Result<bool, Status> {
        self.find(lease).await.map(|found| found.is_some())
    }

    async fn find(&self, lease: &str) -> Result<Option<Lease>, Status> {
        let filter = ListRequest { filters: vec![format!("id=={lease}")] };
        let found = self.client.clone().list(in_namespace(filter)).await?.into_inner().leases;
        Ok(found.into_iter().next())
    }

    pub(super) fn using(&self, lease: &str) -> LeaseInUse {
        self.lock().entry(lease.to_owned()).or_default().running += 1;
        LeaseInUse { lease: lease.to_owned(), uses: self.uses.clone() }
    }

    /// Creates the lease, or renews it if it expires soon.
    pub(super) async fn ensure(&self, lease: &str) -> Result<(), Status> {
        let _turn = self.locks.take(lease).await;
        let fresh = |of: &LeaseUse| {
            of.verified.and_then(|at| at.elapsed().ok()).is_some_and(|age| age < LIFETIME - RENEW_BELOW)
        };
        if self.lock().get(lease).is_some_and(fresh) {
            return Ok(());
        }
        match self.create(lease).await {
            Err(status) if status.code() == Code::AlreadyExists => {
                // This pull is counted already.
                let is_shared = self.lock().get(lease).is_some_and(|of| of.running > 1);
                let below = if is_shared { RENEW_IN_USE_BELOW } else { RENEW_BELOW };
                self.prolong(lease, below).await?;
            }
            made => made?,
        }
        self.verified(lease, Some(SystemTime::now()));
        Ok(())
    }

    /// Creates a lease again that has vanished although it was seen.
    pub(super) async fn renew(&self, lease: &str) -> Result<(), Status> {
        self.verified(lease, None);
        self.ensure(lease).await
    }

    fn verified(&self, lease: &str, at: Option<SystemTime>) {
        self.lock().entry(lease.to_owned()).or_default().verified = at;
    }

    async fn create(&self, lease: &str) -> Result<(), Status> {
        let expires = humantime::format_rfc3339_seconds(SystemTime::now() + LIFETIME).to_string();
        let labels =
            [(OWNER_LABEL.to_owned(), self.owner.clone()), (EXPIRE_LABEL.to_owned(), expires)].into();
        let request = CreateRequest { id: lease.to_owned(), labels };
        self.client.clone().create(in_namespace(request)).await.map(drop)
    }

    /// The expiry of a lease cannot be changed. A second lease therefore pins what the first one pins while the first
    /// is made again; at no moment is anything unpinned. Returns whether the lease exists.
    async fn prolong(&self, lease: &str, below: Duration) -> Result<bool, Status> {
        let Some(found) = self.find(lease).await? else { return Ok(false) };
        let left = found
            .labels
            .get(EXPIRE_LABEL)
            .and_then(|text| humantime::parse_rfc3339(text).ok())
            .map(|at| at.duration_since(SystemTime::now()).unwrap_or_default());
        if left.is_some_and(|left| left >= below) {
            return Ok(true);
        }
        let spare = format!("{lease}{SPARE_SUFFIX}");
        self.copy(lease, &spare).await?;
        self.remove(lease, false).await?;
        self.copy(&spare, lease).await?;
        self.remove(&spare, false).await?;
        Ok(true)
    }

    /// Renews a lease whose bytes are needed for longer, but does not create a missing one.
    pub(super) async fn extend(&self, lease: &str) -> Result<(), Status> {
        let _turn = self.locks.take(lease).await;
        let in_use = self.lock().get(lease).is_some_and(|of| of.running > 0);
        let below = if in_use { RENEW_IN_USE_BELOW } else { RENEW_BELOW };
        self.prolong(lease, below).await.map(drop)
    }

    async fn copy(&self, from: &str, to: &str) -> Result<(), Status> {
        match self.create(to).await {
            Err(status) if status.code() == Code::AlreadyExists => {}
            made => made?,
        }
        let mut client = self.client.clone();
        let list = ListResourcesRequest { id: from.to_owned() };
        for resource in client.list_resources(in_namespace(list)).await?.into_inner().resources {
            let Resource { id, r#type } = resource;
            let add = AddResourceRequest { id: to.to_owned(), resource: Some(Resource { id, r#type }) };
            client.add_resource(in_namespace(add)).await?;
        }
        Ok(())
    }

    /// `collect`: containerd answers after a garbage collection.
    async fn remove(&self, lease: &str, collect: bool) -> Result<(), Status> {
        let request = DeleteRequest { id: lease.to_owned(), sync: collect };
        match self.client.clone().delete(in_namespace(request)).await {
            Err(status) if status.code() != Code::NotFound => Err(status),
            _ => Ok(()),
        }
    }

    /// Deletes a lease, unless a pull uses it again, or a successor has it.
    pub(super) async fn delete(&self, lease: &str, collect: bool) -> Result<(), Status> {
        let _turn = self.locks.take(lease).await;
        {
            let mut uses = self.lock();
            if self.is_left() || uses.get(lease).is_some_and(|of| of.running > 0) {
                return Ok(());
            }
            uses.remove(lease);
        }
        self.remove(lease, collect).await
    }

    /// A lease that should be gone and may be there: nothing protects it from being reaped, unless a pull uses it.
    pub(super) fn forget(&self, lease: &str) {
        let mut uses = self.lock();
        if uses.get(lease).is_some_and(|of| of.running == 0) {
            uses.remove(lease);
        }
    }

    /// Deletes every lease of this owner but `keep` and those known to this process.
    pub(super) async fn reap(&self, keep: &BTreeSet<String>) -> Result<Vec<String>, Status> {
        let filter = format!("labels.\"{OWNER_LABEL}\"=={}", self.owner);
        let found = self.client.clone().list(in_namespace(ListRequest { filters: vec![filter] })).await?;
        let found = found.into_inner().leases;
        let exists = |id: &str| found.iter().any(|lease| lease.id == id);
        let mut reaped = Vec::new();
        for lease in &found {
            let ours = lease.labels.get(OWNER_LABEL) == Some(&self.owner);
            let (base, is_spare) = match lease.id.strip_suffix(SPARE_SUFFIX) {
                Some(base) => (base, true),
                None => (&*lease.id, false),
            };
            // A pull that uses it meanwhile creates it again after this turn.
            let _turn = self.locks.take(base).await;
            if self.is_left() {
                break;
            }
            let known = keep.contains(base) || self.lock().contains_key(base);
            // An agent that was killed while it renewed the lease left its bytes to the spare one, until that expires.
            let needed = known && !(is_spare && exists(base));
            if ours && !needed {
                self.remove(&lease.id, false).await?;
                reaped.push(lease.id.clone());
            }
        }
        Ok(reaped)
    }
}
