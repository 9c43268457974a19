//! The cached list of images.

use std::{path::PathBuf, sync::Arc, time::Duration};

use keelson_actor_system::reports::RuntimeImage;
use tokio::time::Instant;

use super::types::RuntimeError;

/// How long a list of images is used (kubelet: 30 s); the end of a pull outdates it earlier.
const FRESH: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Default)]
pub(super) struct ImageCache {
    pub(super) images: Arc<Vec<RuntimeImage>>,
    pub(super) image_fs: Option<PathBuf>,
    /// When the images were requested, and how many pulls had ended then.
    read: Option<(Instant, u64)>,
    pub(super) ended: u64,
}

impl ImageCache {
    /// The images may have changed: the next request reads them again.
    pub(super) fn outdate(&mut self) {
        self.ended += 1;
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.read.is_some_and(|(at, ended)| ended == self.ended && at.elapsed() < FRESH)
    }

    pub(super) fn take(&mut self, reading: Reading) {
        if let Ok(images) = reading.images {
            self.images = Arc::new(images);
            self.read = Some((reading.at, reading.ended));
        }
        if let Ok(image_fs) = reading.image_fs {
            self.image_fs = image_fs;
        }
    }
}

pub(super) struct Reading {
    pub(super) images: Result<Vec<RuntimeImage>, RuntimeError>,
    pub(super) image_fs: Result<Option<PathBuf>, RuntimeError>,
    pub(super) at: Instant,
    pub(super) ended: u64,
}
