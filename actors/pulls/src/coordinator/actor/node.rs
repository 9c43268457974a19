//! What the PullCoordinator has to do with the rest of the node.
//!
//! Owns: the handlers for news of pods and for the question whether pulls get on. In: `PodGone`, `PodForgotten`,
//! `PodsSynced`, `PullsFlow`. Out: the core's events and view.

use actix::{Context, Handler};

use super::PullCoordinator;
use crate::coordinator::{
    core::Event,
    messages::{PodForgotten, PodGone, PodsSynced, PullsFlow},
};

impl Handler<PodGone> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: PodGone, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<PodGone>();
        self.step(Event::PodGone { uid: message.uid, pod: message.pod }, ctx);
    }
}

impl Handler<PodForgotten> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: PodForgotten, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<PodForgotten>();
        self.step(Event::PodForgotten(message.uid), ctx);
    }
}

impl Handler<PodsSynced> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: PodsSynced, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<PodsSynced>();
        self.step(Event::PodsSynced(message.live), ctx);
    }
}

impl Handler<PullsFlow> for PullCoordinator {
    type Result = actix::MessageResult<PullsFlow>;

    fn handle(&mut self, _: PullsFlow, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling::<PullsFlow>();
        actix::MessageResult(self.core.flow(!self.behind, self.clock.now()))
    }
}
