//! Queries of the core of pulls about retained content.
//!
//! At most one reading of the image file system is under way: one that hangs blocks nothing else.

use std::{future::Future, path::PathBuf, time::Duration};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, fut::wrap_future};
use keelson_actor_system::file_system::FileSystem;

use super::RuntimeClient;
use crate::runtime::messages::RuntimeEvent;

impl RuntimeClient {
    fn image_fs(&self) -> impl Future<Output = Result<FileSystem, String>> + 'static {
        let (runtime, file_systems) = (self.runtime.clone(), self.file_systems.clone());
        async move {
            let path: Option<PathBuf> = runtime.image_fs().await.map_err(|error| error.to_string())?;
            let path = path.ok_or("the container runtime reports no image file system")?;
            file_systems.file_system(path).await
        }
    }

    fn image_fs_read(&mut self, read: Result<FileSystem, String>) {
        self.is_reading_image_fs = false;
        match &read {
            Ok(_) => self.image_fs_failure.clear(),
            Err(error) if self.image_fs_failure.is_new(error) => {
                tracing::warn!(error, "cannot read the free space of the image file system");
                self.recorder()
                    .error(format!("cannot read the free space of the image file system: {error}"));
            }
            Err(_) => {}
        }
        self.publish(RuntimeEvent::ImageFsRead(read.ok()));
    }

    pub(super) fn check_image_fs(&mut self, ctx: &mut Context<Self>) {
        if !std::mem::replace(&mut self.is_reading_image_fs, true) {
            let read = self.image_fs();
            ctx.spawn(wrap_future::<_, Self>(read).map(|read, actor, _| actor.image_fs_read(read)));
        }
    }

    pub(super) fn measure_lease(&self, lease: String, until: Duration) {
        let Some(subscriber) = self.subscriber.clone() else { return };
        let measured = self.runtime.lease_bytes(lease.clone());
        actix::spawn(async move {
            let bytes = measured.await;
            if let Err(error) = &bytes {
                tracing::debug!(lease, %error, "cannot read the size of a lease");
            }
            subscriber.send(RuntimeEvent::LeaseMeasured { lease, until, bytes: bytes.ok() });
        });
    }

    pub(super) fn renew_leases(&self, leases: Vec<String>) {
        let renewed = self.runtime.renew_leases(leases);
        let recorder = self.recorder().clone();
        actix::spawn(async move {
            if let Err(error) = renewed.await {
                tracing::warn!(%error, "cannot renew the leases of image pulls");
                recorder.error(format!("cannot renew the leases of image pulls: {error}"));
            }
        });
    }
}
