//! The hook that ends the process after a panic. It has a process of its own, because the hook is global.

use std::sync::{Arc, Mutex};

use keelson_actor_system::supervise;

fn panics_in(name: &str, text: &'static str) {
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || panic!("{text}"));
    assert!(thread.is_ok_and(|thread| thread.join().is_err()));
}

#[test]
fn a_panic_is_fatal_unless_the_store_catches_it() {
    let ends = Arc::new(Mutex::new(Vec::new()));
    let notes = ends.clone();
    supervise::end_on_panic(Arc::new(move |reason| notes.lock().expect("unharmed").push(reason.to_owned())));

    // Panics on threads of sled become an error of the store.
    panics_in("sled-io-0", "sled broke");
    assert_eq!(ends.lock().expect("unharmed").len(), 0);

    panics_in("other", "the thread broke");
    let ends = ends.lock().expect("unharmed").clone();
    assert_eq!(ends.len(), 1, "{ends:?}");
    assert!(ends[0].contains("the thread broke") && ends[0].contains("panic.rs"), "{ends:?}");
}
