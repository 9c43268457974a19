//! The one timer of an actor.

use std::time::Duration;

use actix::{Actor, AsyncContext as _, Context, SpawnHandle};

use crate::clock::Clock;

#[derive(Debug, Default)]
pub struct Timer(Option<(Duration, SpawnHandle)>);

impl Timer {
    /// Schedules `due` for the monotonic time `next` and replaces the previous schedule. `due` calls [`Timer::clear`]
    /// first.
    pub fn set<A>(
        &mut self,
        next: Option<Duration>,
        clock: &Clock,
        ctx: &mut Context<A>,
        due: fn(&mut A, &mut Context<A>),
    ) where
        A: Actor<Context = Context<A>>,
    {
        if self.0.map(|(at, _)| at) == next {
            return;
        }
        if let Some((_, planned)) = self.0.take() {
            ctx.cancel_future(planned);
        }
        self.0 = next.map(|at| (at, ctx.run_later(at.saturating_sub(clock.now().mono), due)));
    }

    /// Call it when the timer has fired or the actor has restarted.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}
