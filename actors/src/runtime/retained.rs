//! What the core of pulls asks about retained content.
//!
//! Owns: whether a reading of the image file system is under way. In: `MeasureLease`, `CheckImageFs` and `RenewLeases`
//! from the PullCoordinator. Out: `LeaseMeasured` and `ImageFsRead` for it; calls on the runtime and the host. At most one
//! reading of the file system is under way: one that hangs holds nothing else up.

use std::{future::Future, path::PathBuf};

use actix::{ActorFutureExt as _, AsyncContext as _, Context, Handler, fut::wrap_future};

use super::actor::RuntimeClient;
use crate::{host::FileSystem, inspect::verbs};

verbs! {
    /// Ask how many bytes a lease holds.
    MeasureLease => () {
        /// Its ID in containerd.
        lease: String,
    }
    /// Ask how much of the image file system is free.
    CheckImageFs => () {}
    /// Give these leases a new expiry where theirs is near.
    RenewLeases => () {
        /// Their IDs in containerd.
        leases: Vec<String>,
    }
    /// To the coordinator: how many bytes a lease holds.
    LeaseMeasured => () {
        /// Its ID in containerd.
        lease: String,
        /// `None`: the runtime could not say.
        bytes: Option<u64>,
    }
    /// To the coordinator: the size of the image file system.
    ImageFsRead => () {
        /// `None`: not known.
        image_fs: Option<FileSystem>,
    }
}

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
        if let Some(coordinator) = self.coordinator() {
            coordinator.deliver(ImageFsRead { image_fs });
        }
    }
}

impl Handler<MeasureLease> for RuntimeClient {
    type Result = ();

    fn handle(&mut self, message: MeasureLease, _: &mut Context<Self>) {
        let _handling = self.recorder().handling::<MeasureLease>();
        let Some(coordinator) = self.coordinator().cloned() else { return };
        let measured = self.runtime().lease_bytes(message.lease.clone());
        actix::spawn(async move {
            let bytes = measured.await;
            if let Err(error) = &bytes {
                tracing::debug!(lease = message.lease, %error, "cannot read the size of a lease");
            }
            coordinator.deliver(LeaseMeasured { lease: message.lease, bytes: bytes.ok() });
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
