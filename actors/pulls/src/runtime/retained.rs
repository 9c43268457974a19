//! What the core of pulls asks about retained content.
//!
//! Owns: whether a reading of the image file system is under way. In: `MeasureLease`, `CheckImageFs` and `RenewLeases`
//! from the PullCoordinator. Out: `LeaseMeasured` and `ImageFsRead` for it; calls on the runtime and the host. At most one
//! reading of the file system is under way: one that hangs holds nothing else up.

use std::{future::Future, path::PathBuf};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, Handler, fut::wrap_future};
use keelson_actor_system::file_system::FileSystem;

use super::{
    actor::RuntimeClient,
    messages::{CheckImageFs, ImageFsRead, LeaseMeasured, MeasureLease, RenewLeases},
};

/// The last reading of the image file system.
#[derive(Debug, Default)]
pub(super) struct ImageFsCheck {
    is_under_way: bool,
    /// What the last one failed with: logged once.
    error: Option<String>,
}

impl RuntimeClient {
    fn image_fs(&self) -> impl Future<Output = Result<FileSystem, String>> + 'static {
        let (runtime, file_systems) = (self.runtime().clone(), self.file_systems().clone());
        async move {
            let path: Option<PathBuf> = runtime.image_fs().await.map_err(|error| error.to_string())?;
            let path = path.ok_or("the container runtime reports no image file system")?;
            file_systems.file_system(path).await
        }
    }

    fn image_fs_read(&mut self, read: Result<FileSystem, String>) {
        self.image_fs_check.is_under_way = false;
        let image_fs = match read {
            Ok(image_fs) => {
                self.image_fs_check.error = None;
                Some(image_fs)
            }
            Err(error) => {
                if self.image_fs_check.error.as_ref() != Some(&error) {
                    tracing::warn!(error, "cannot read the free space of the image file system");
                    self.recorder()
                        .error(format!("cannot read the free space of the image file system: {error}"));
                    self.image_fs_check.error = Some(error);
                }
                None
            }
        };
        if let Some(subscriber) = self.subscriber() {
            subscriber.image_fs_read(ImageFsRead { image_fs });
        }
    }
}

impl Handler<MeasureLease> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: MeasureLease, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<MeasureLease>();
        let Some(subscriber) = self.subscriber().cloned() else { return };
        let measured = self.runtime().lease_bytes(message.lease.clone());
        actix::spawn(async move {
            let bytes = measured.await;
            if let Err(error) = &bytes {
                tracing::debug!(lease = message.lease, %error, "cannot read the size of a lease");
            }
            subscriber.lease_measured(LeaseMeasured { lease: message.lease, bytes: bytes.ok() });
        });
    }
}

impl Handler<CheckImageFs> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, _: CheckImageFs, ctx: &mut Context<Self>) {
        let _handling = self.recorder().handling::<CheckImageFs>();
        if std::mem::replace(&mut self.image_fs_check.is_under_way, true) {
            return;
        }
        let read = self.image_fs();
        ctx.spawn(wrap_future::<_, Self>(read).map(|read, actor, _| actor.image_fs_read(read)));
    }
}

impl Handler<RenewLeases> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: RenewLeases, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<RenewLeases>();
        let renewed = self.runtime().renew_leases(message.leases);
        let recorder = self.recorder().clone();
        actix::spawn(async move {
            if let Err(error) = renewed.await {
                tracing::warn!(%error, "cannot renew the leases of image pulls");
                recorder.error(format!("cannot renew the leases of image pulls: {error}"));
            }
        });
    }
}
