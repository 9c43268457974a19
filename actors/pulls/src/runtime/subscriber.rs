//! Who is told what the runtime does.
//!
//! Owns: the trait [`Subscriber`], by which the RuntimeClient knows the actor that gave it its work, and [`Subscribe`]. In:
//! messages of the RuntimeClient. Out: the same messages in that actor's mailbox, past its bound: each belongs to a message that the
//! actor sent, or tells a change of the runtime.

use std::{fmt, sync::Arc};

use actix::{Actor, Context, Handler};
use keelson_actor_system::{inspect::Mailbox, verbs};

use super::messages::{ImageFsRead, LeaseMeasured, PullFinished, PullPresence, PullProgress, RuntimeChanged};

verbs! {
    /// Tell this actor what the runtime does.
    Subscribe => () {
        /// Replaces the one before.
        to: Arc<dyn Subscriber>,
    }
}

/// The actor whose pulls the RuntimeClient makes.
pub trait Subscriber: fmt::Debug + Send + Sync + 'static {
    /// An attempt ended.
    fn pull_finished(&self, message: PullFinished);

    /// Whether an image is there.
    fn pull_presence(&self, message: PullPresence);

    /// How far a pull is.
    fn pull_progress(&self, message: PullProgress);

    /// The runtime came or went.
    fn runtime_changed(&self, message: RuntimeChanged);

    /// How many bytes a lease holds.
    fn lease_measured(&self, message: LeaseMeasured);

    /// The size of the image file system.
    fn image_fs_read(&self, message: ImageFsRead);
}

impl<A> Subscriber for Mailbox<A>
where
    A: Actor<Context = Context<A>>
        + Handler<PullFinished>
        + Handler<PullPresence>
        + Handler<PullProgress>
        + Handler<RuntimeChanged>
        + Handler<LeaseMeasured>
        + Handler<ImageFsRead>,
{
    fn pull_finished(&self, message: PullFinished) {
        self.deliver(message);
    }

    fn pull_presence(&self, message: PullPresence) {
        self.deliver(message);
    }

    fn pull_progress(&self, message: PullProgress) {
        self.deliver(message);
    }

    fn runtime_changed(&self, message: RuntimeChanged) {
        self.deliver(message);
    }

    fn lease_measured(&self, message: LeaseMeasured) {
        self.deliver(message);
    }

    fn image_fs_read(&self, message: ImageFsRead) {
        self.deliver(message);
    }
}
