use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::sleep;
use std::time::Instant;

use super::*;
use crate::memory::MemoryStore;
use crate::store::StateStoreExt as _;

/// Long enough for a slow machine, short enough for a test that hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit for calls on a store that is expected to hang.
const SHORT: Duration = Duration::from_millis(50);

/// A store whose calls each wait for a permit.
struct Gated {
    inner: MemoryStore,
    permits: Mutex<Receiver<Result<(), StoreError>>>,
}

impl Gated {
    fn gate(&self) -> Result<(), StoreError> {
        self.permits.lock().unwrap().recv().unwrap_or(Ok(()))
    }
}

impl StateStore for Gated {
    fn apply(&self, batch: &Batch) -> Result<(), StoreError> {
        self.gate()?;
        self.inner.apply(batch)
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.gate()?;
        self.inner.get(table, key)
    }

    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
        self.gate()?;
        self.inner.scan(table)
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
}

fn gated() -> (SyncSender<Result<(), StoreError>>, DeferredStore) {
    let (permits, gate) = sync_channel(100);
    let mut store = Some(Gated { inner: MemoryStore::new(), permits: Mutex::new(gate) });
    let opener = move || Ok(Arc::new(store.take().unwrap()) as Arc<dyn StateStore>);
    let store = DeferredStore::with_opener(Path::new("/gated"), SHORT, Box::new(opener)).unwrap();
    wait_for(&store, StoreState::is_open);
    (permits, store)
}

fn wait_for(store: &DeferredStore, wanted: impl Fn(&StoreState) -> bool) -> StoreState {
    let begun = Instant::now();
    loop {
        let state = store.state();
        if wanted(&state) {
            return state;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "still {state:?}");
        sleep(Duration::from_millis(5));
    }
}

fn full() -> StoreError {
    StoreError::Io { operation: "a write", path: "/x".into(), source: io::ErrorKind::StorageFull.into() }
}

fn in_use() -> OpenError {
    OpenError::InUse { path: "/x".into(), pid: Some(7) }
}

#[test]
fn i4_a_hanging_open_blocks_no_caller_and_completes() {
    let (release, held) = sync_channel::<()>(0);
    let opener = move || {
        let _ = held.recv();
        Ok(Arc::new(MemoryStore::new()) as Arc<dyn StateStore>)
    };
    let store = DeferredStore::with_opener(Path::new("/x"), TEST_TIMEOUT, Box::new(opener)).unwrap();
    // A call that waited for the opening would never return, because nothing releases it.
    let error = store.put_json(Table::Meta, b"k", &1).unwrap_err();
    assert!(matches!(error, StoreError::NotOpen { .. }), "{error:?}");
    assert!(matches!(store.state(), StoreState::Opening { .. }));
    assert_eq!(store.stats().last_error.as_deref(), Some("opening"));
    drop(release);
    wait_for(&store, StoreState::is_durable);
    store.put_json(Table::Meta, b"k", &1).unwrap();
    assert_eq!(store.get_json::<u32>(Table::Meta, b"k").unwrap(), Some(1));
}

#[test]
fn i4_opening_is_retried_with_the_reason_of_the_failure() {
    let (answers, outcomes) = sync_channel::<Result<(), OpenError>>(0);
    let opener = move || {
        outcomes.recv().unwrap()?;
        Ok(Arc::new(MemoryStore::new()) as Arc<dyn StateStore>)
    };
    let store = DeferredStore::with_opener(Path::new("/x"), TEST_TIMEOUT, Box::new(opener)).unwrap();
    answers.send(Err(in_use())).unwrap();
    let first = wait_for(&store, |state| matches!(state, StoreState::Unavailable { .. }));
    assert!(first.reason().unwrap().contains("process 7"), "{first:?}");
    let error = store.scan(Table::Pulls).unwrap_err().to_string();
    assert!(error.contains("/x") && error.contains("process 7"), "{error}");
    answers.send(Err(OpenError::io("write", "/x", io::ErrorKind::ReadOnlyFilesystem.into()))).unwrap();
    let second = wait_for(&store, |state| state.reason().is_some_and(|text| text.contains("read-only")));
    assert_eq!(second.since(), first.since(), "unavailable since the first failure");
    answers.send(Ok(())).unwrap();
    wait_for(&store, StoreState::is_durable);
    assert!(store.scan(Table::Pulls).unwrap().is_empty());
}

#[test]
fn i6_a_disk_that_hangs_fails_calls_after_the_limit_then_at_once_until_it_answers() {
    let (permits, store) = gated();
    let error = store.put_json(Table::Meta, b"first", &1).unwrap_err();
    assert!(matches!(error, StoreError::TimedOut { .. }), "{error:?}");
    let state = wait_for(&store, |state| !state.is_open());
    assert!(matches!(state, StoreState::Unavailable { next_try: None, .. }), "{state:?}");
    let error = store.put_json(Table::Meta, b"second", &2).unwrap_err();
    assert!(matches!(error, StoreError::NotOpen { .. }), "{error:?}");
    permits.send(Ok(())).unwrap();
    wait_for(&store, StoreState::is_durable);
    for _ in 0..2 {
        permits.send(Ok(())).unwrap();
    }
    // The first write reached the disk late, the second one was never attempted.
    assert_eq!(store.get_json::<u32>(Table::Meta, b"first").unwrap(), Some(1));
    assert_eq!(store.get_json::<u32>(Table::Meta, b"second").unwrap(), None);
}

#[test]
fn i6_writes_that_timed_out_in_the_queue_are_not_made() {
    let (permits, store) = gated();
    let store = Arc::new(store);
    let writers: Vec<_> = (0..4_u32)
        .map(|id| {
            let store = store.clone();
            std::thread::spawn(move || store.put_json(Table::Meta, &id.to_be_bytes(), &id))
        })
        .collect();
    for writer in writers {
        writer.join().unwrap().unwrap_err();
    }
    for _ in 0..2 {
        permits.send(Ok(())).unwrap();
    }
    wait_for(&store, StoreState::is_durable);
    assert!(store.scan(Table::Meta).unwrap().len() <= 1, "at most the one that the disk had already");
}

#[test]
fn i6_a_store_that_times_out_below_stays_unavailable_until_the_disk_answers() {
    let (permits, store) = gated();
    let timed_out = || StoreError::TimedOut { operation: "a write", path: "/x".into(), seconds: 30 };
    permits.send(Err(timed_out())).unwrap();
    store.put_json(Table::Meta, b"k", &1).unwrap_err();
    wait_for(&store, |state| matches!(state, StoreState::Unavailable { .. }));
    permits.send(Err(timed_out())).unwrap();
    permits.send(Ok(())).unwrap();
    // Without a writer, the thread checks by itself.
    wait_for(&store, StoreState::is_durable);
}

#[test]
fn a_failing_store_is_tried_until_a_write_succeeds() {
    let (permits, store) = gated();
    permits.send(Err(full())).unwrap();
    store.put_json(Table::Meta, b"k", &1).unwrap_err();
    let state = wait_for(&store, |state| matches!(state, StoreState::Failing { .. }));
    assert!(state.is_open() && !state.is_durable());
    permits.send(Ok(())).unwrap();
    store.put_json(Table::Meta, b"k", &1).unwrap();
    wait_for(&store, StoreState::is_durable);
    permits.send(Err(full())).unwrap();
    store.put_json(Table::Meta, b"k", &1).unwrap_err();
    permits.send(Ok(())).unwrap();
    wait_for(&store, StoreState::is_durable);
}

#[test]
fn closing_releases_the_folder_and_fails_later_calls() {
    let dir = tempfile::tempdir().unwrap();
    let store = DeferredStore::start(dir.path()).unwrap();
    wait_for(&store, StoreState::is_durable);
    store.put_json(Table::Meta, b"k", &1).unwrap();
    assert!(store.close(TEST_TIMEOUT));
    assert_eq!(store.state(), StoreState::Closed);
    let error = store.put_json(Table::Meta, b"k", &2).unwrap_err();
    assert!(matches!(error, StoreError::NotOpen { .. }), "{error:?}");
    let again = crate::open(dir.path()).unwrap().store;
    assert_eq!(again.get_json::<u32>(Table::Meta, b"k").unwrap(), Some(1));
    assert!(store.close(Duration::ZERO), "closed already");
}

#[test]
fn a_store_released_by_another_holder_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let holder = crate::open(dir.path()).unwrap();
    let store = DeferredStore::start(dir.path()).unwrap();
    wait_for(&store, |state| matches!(state, StoreState::Unavailable { .. }));
    drop(holder);
    wait_for(&store, StoreState::is_durable);
}

/// I4: slow is not damaged. An open that times out is retried and sets nothing aside, however often, and it does not
/// count as a process that ended while it opened the store.
#[test]
fn i4_an_open_that_times_out_is_retried_and_sets_nothing_aside() {
    let dir = tempfile::tempdir().unwrap();
    crate::open(dir.path()).unwrap().store.put_json(Table::Meta, b"k", &1).unwrap();
    let mut timed_out = 0;
    while timed_out < 10 {
        match crate::open::open_within(dir.path(), Duration::ZERO) {
            Err(OpenError::TimedOut { .. }) => timed_out += 1,
            // The thread of the last attempt still runs.
            Err(OpenError::InUse { .. }) => sleep(Duration::from_millis(2)),
            // This thread was late.
            Ok(opened) => drop(opened),
            Err(error) => panic!("{error}"),
        }
    }
    let (path, mut limits) = (dir.path().to_owned(), [Duration::ZERO; 2].into_iter());
    let opener = move || {
        let opened = crate::open::open_within(&path, limits.next().unwrap_or(TEST_TIMEOUT))?;
        Ok(opened.store as Arc<dyn StateStore>)
    };
    let store = DeferredStore::with_opener(dir.path(), TEST_TIMEOUT, Box::new(opener)).unwrap();
    wait_for(&store, StoreState::is_durable);
    assert_eq!(store.get_json::<u32>(Table::Meta, b"k").unwrap(), Some(1));
    let entries = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    assert_eq!(names, ["lock", "state"]);
}

#[test]
fn i6_close_returns_after_its_limit_while_the_disk_hangs() {
    let (permits, store) = gated();
    store.put_json(Table::Meta, b"k", &1).unwrap_err();
    assert!(!store.close(SHORT));
    assert_eq!(store.state(), StoreState::Closed);
    // The disk answers, but the state stays closed.
    permits.send(Ok(())).unwrap();
    drop(permits);
    drop(store);
}

#[test]
fn a_panic_of_the_opener_or_of_a_call_is_a_failure() {
    struct Panics;
    impl StateStore for Panics {
        fn apply(&self, _: &Batch) -> Result<(), StoreError> {
            panic!("below")
        }
        fn get(&self, _: Table, _: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
            Ok(None)
        }
        fn scan(&self, _: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
            Ok(Vec::new())
        }
        fn stats(&self) -> StoreStats {
            MemoryStore::new().stats()
        }
    }
    let mut attempts = 0;
    let opener = move || {
        attempts += 1;
        assert!(attempts > 1, "the first attempt panics");
        Ok(Arc::new(Panics) as Arc<dyn StateStore>)
    };
    let store = DeferredStore::with_opener(Path::new("/x"), TEST_TIMEOUT, Box::new(opener)).unwrap();
    wait_for(&store, StoreState::is_open);
    store.put_json(Table::Meta, b"k", &1).unwrap_err();
    wait_for(&store, |state| matches!(state, StoreState::Failing { .. }));
    assert_eq!(store.get(Table::Meta, b"k").unwrap(), None);
    wait_for(&store, StoreState::is_open);
}
