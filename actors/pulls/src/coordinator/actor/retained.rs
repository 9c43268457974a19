//! Log line, debug event and counter of released content.

use super::PullCoordinator;
use crate::{coordinator::core::Release, metrics::ReasonLabel};

impl PullCoordinator {
    pub(super) fn released(&self, release: &Release) {
        let Release { image, bytes, reason } = release;
        let reason = reason.name();
        self.metrics.released.get_or_create(&ReasonLabel { reason }).inc();
        tracing::info!(image = &**image, bytes, reason, "content of an unfinished image pull released");
        self.recorder().event(match bytes {
            Some(bytes) => format!("released {bytes} bytes of the unfinished pull of {image}: {reason}"),
            None => format!("released the content of the unfinished pull of {image}: {reason}"),
        });
    }
}
