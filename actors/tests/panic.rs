//! A panic anywhere ends the process: in a process of its own, because the hook is the process's.

use std::sync::{Arc, Mutex};

use actix::{Actor, Context, Handler, Message, Supervised};
use keelson_actors::supervise;

struct Fragile;

impl Actor for Fragile {
    type Context = Context<Self>;
}

impl Supervised for Fragile {}

#[derive(Message)]
#[rtype(result = "()")]
struct Break;

impl Handler<Break> for Fragile {
    type Result = ();

    fn handle(&mut self, _: Break, _: &mut Context<Self>) {
        panic!("the actor broke");
    }
}

#[test]
fn a_panic_is_fatal_unless_the_store_catches_it() {
    let ends = Arc::new(Mutex::new(Vec::new()));
    let notes = ends.clone();
    supervise::end_on_panic(Arc::new(move |reason| notes.lock().expect("unharmed").push(reason.to_owned())));

    // Threads that belong to sled end in an error of the store.
    let guarded = std::thread::Builder::new().name("sled-io-0".into()).spawn(|| panic!("sled broke"));
    assert!(guarded.expect("a thread").join().is_err());
    assert_eq!(ends.lock().expect("unharmed").len(), 0);

    actix::System::new().block_on(async {
        let fragile = supervise::start(None, |_| Fragile);
        assert!(fragile.send(Break).await.is_err(), "actix does not restart an actor that panicked");
    });
    let ends = ends.lock().expect("unharmed").clone();
    assert_eq!(ends.len(), 1, "{ends:?}");
    assert!(ends[0].contains("the actor broke") && ends[0].contains("panic.rs"), "{ends:?}");
}
