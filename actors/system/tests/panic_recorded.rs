//! I9: a panic in an actor is recorded and the actor restarts. It has a process of its own, because the hook is
//! global.

use actix::{Actor, Context, Handler, Supervised};
use keelson_actor_system::{
    inspect::{ActorMessage, MailboxError, Recorder, Status},
    supervise::{self, Supervision},
};

struct Fragile {
    supervision: Supervision,
    handled: u32,
}

impl Actor for Fragile {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        self.supervision.resume(ctx, |_, _| {});
    }
}

impl Supervised for Fragile {
    fn restarting(&mut self, _: &mut Context<Self>) {
        self.supervision.restarting();
        assert!(self.handled < 100, "the restart broke too");
    }
}

struct Count {
    breaks: bool,
}

impl actix::Message for Count {
    type Result = u32;
}

impl ActorMessage for Count {
    fn name(&self) -> &'static str {
        "Count"
    }
}

impl Handler<Count> for Fragile {
    type Result = u32;

    fn handle(&mut self, message: Count, _: &mut Context<Self>) -> u32 {
        let _handling = self.supervision.recorder().handling(&message);
        self.handled += 1;
        assert!(!message.breaks, "the actor broke");
        self.handled
    }
}

#[test]
fn an_actor_that_panics_restarts_with_its_mailbox() {
    supervise::record_panics();
    actix::System::new().block_on(async {
        let arbiter = actix::Arbiter::new();
        let recorder = Recorder::new("Fragile", 10);
        let notes = recorder.clone();
        let fragile = supervise::start(Some(&arbiter.handle()), recorder.clone(), move |_| Fragile {
            supervision: Supervision::new(notes),
            handled: 0,
        });
        assert_eq!(fragile.ask(Count { breaks: false }).await, Ok(1));
        let (broken, behind) =
            tokio::join!(fragile.ask(Count { breaks: true }), fragile.ask(Count { breaks: false }));
        assert_eq!(broken, Err(MailboxError::Closed("Fragile")));
        assert_eq!(behind, Ok(3), "the same address, the same actor");
        assert_eq!((recorder.restarts(), recorder.depth(), supervise::panics() > 0), (1, 0, true));
        let error = recorder.overview().last_error;
        assert!(error.contains("the actor broke") && error.contains("panic_recorded.rs:"), "{error}");
        assert_eq!((recorder.current_status(), recorder.failure()), (Status::Running, None));
    });
}

#[test]
fn an_actor_that_panics_in_its_restart_is_disabled() {
    actix::System::new().block_on(async {
        let recorder = Recorder::new("Fragile", 10);
        let notes = recorder.clone();
        let fragile = supervise::start(None, recorder.clone(), move |_| Fragile {
            supervision: Supervision::new(notes),
            handled: 99,
        });
        assert!(fragile.ask(Count { breaks: true }).await.is_err());
        assert!(fragile.ask(Count { breaks: false }).await.is_err());
        assert_eq!(recorder.current_status(), Status::Stopped);
        let failure = recorder.failure().expect("it is disabled");
        assert!(failure.reason.contains("the restart broke too"), "{failure:?}");
    });
}
