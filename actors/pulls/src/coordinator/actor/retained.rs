//! What the PullCoordinator learns and says of retained content.
//!
//! Owns: the handlers for sizes, free space and disk pressure, and the log line and counter of a release. In:
//! `LeaseMeasured` and `ImageFsRead` from the RuntimeClient, `DiskPressure` from whoever knows the node's conditions. Out:
//! the core's events; metrics.

use actix::{Context, Handler};

use super::PullCoordinator;
use crate::{
    coordinator::{
        core::{Event, Release},
        messages::DiskPressure,
    },
    metrics::ReleaseLabel,
    runtime::{ImageFsRead, LeaseMeasured},
};

impl PullCoordinator {
    pub(super) fn released(&self, release: &Release) {
        let Release { image, bytes, reason } = release;
        let reason = reason.name();
        self.metrics.released.get_or_create(&ReleaseLabel { reason }).inc();
        tracing::info!(image = &**image, bytes, reason, "content of an unfinished image pull released");
        self.recorder().event(match bytes {
            Some(bytes) => format!("released {bytes} bytes of the unfinished pull of {image}: {reason}"),
            None => format!("released the content of the unfinished pull of {image}: {reason}"),
        });
    }
}

impl Handler<LeaseMeasured> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: LeaseMeasured, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<LeaseMeasured>();
        self.step(Event::LeaseMeasured { lease: message.lease, bytes: message.bytes }, ctx);
    }
}

impl Handler<ImageFsRead> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: ImageFsRead, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<ImageFsRead>();
        self.step(Event::ImageFs(message.image_fs), ctx);
    }
}

impl Handler<DiskPressure> for PullCoordinator {
    type Result = ();

    fn handle(&mut self, message: DiskPressure, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<DiskPressure>();
        self.step(Event::DiskPressure(message.is_true), ctx);
    }
}
