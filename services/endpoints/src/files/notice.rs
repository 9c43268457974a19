//! Notices of changes in the folder.
//!
//! Owns: [`WatchScope`]: an inotify watch that follows the folder when another one replaces it. In: events of the
//! kernel. Out: [`Hints`], and whether to scan the folder now. Notices are hints; a scan of the folder decides.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd, RawFd},
    path::Path,
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::folder::Hints;

/// Maximum number of consecutive reads, so that a process that writes without pause cannot delay a scan indefinitely.
const MOST_READS: usize = 64;

struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// The result of some notices.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Noticed {
    pub(super) hints: Hints,
    /// Something is complete, not only being written.
    pub(super) now: bool,
}

impl Noticed {
    fn take(&mut self, event: &InotifyEvent) {
        let name = || event.name.as_ref().and_then(|name| name.to_str()).map(str::to_owned);
        let mask = event.mask;
        if mask.intersects(AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO) {
            if let Some(name) = name() {
                self.hints.open.remove(&name);
                self.hints.whole.insert(name);
            }
            self.now = true;
        } else if mask.contains(AddWatchFlags::IN_MODIFY) {
            if let Some(name) = name() {
                self.hints.whole.remove(&name);
                self.hints.open.insert(name);
            }
        } else {
            self.now = true;
        }
    }
}

pub(super) struct WatchScope {
    descriptor: AsyncFd<Descriptor>,
    watch: Option<WatchDescriptor>,
}

impl WatchScope {
    /// Fails when the limit of instances is reached (`fs.inotify.max_user_instances`).
    pub(super) fn new() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        // The replacement is unsafe, because a type may return another descriptor each time or close it; this one owns
        // it.
        #[allow(deprecated)]
        let descriptor = AsyncFd::with_interest(Descriptor(inotify), Interest::READABLE)?;
        Ok(Self { descriptor, watch: None })
    }

    /// Watches the folder that is at the path now. Fails if there is none, or when the limit of watches is reached
    /// (`fs.inotify.max_user_watches`).
    pub(super) fn follow(&mut self, path: &Path) -> io::Result<()> {
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let inotify = &self.descriptor.get_ref().0;
        let watch = inotify.add_watch(path, flags);
        if let Some(old) = self.watch.take_if(|old| watch != Ok(*old)) {
            // The kernel has already done so if the folder was deleted.
            let _gone = inotify.rm_watch(old);
        }
        self.watch = Some(watch?);
        Ok(())
    }

    /// Waits for notices. Cancel safe.
    pub(super) async fn next(&self) -> io::Result<Noticed> {
        loop {
            let mut ready = self.descriptor.readable().await?;
            let mut noticed = Noticed::default();
            let mut any = false;
            for _ in 0..MOST_READS {
                match self.descriptor.get_ref().0.read_events() {
                    Ok(events) => {
                        any = true;
                        events.iter().for_each(|event| noticed.take(event));
                    }
                    Err(Errno::EAGAIN) => {
                        ready.clear_ready();
                        break;
                    }
                    Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if any {
                return Ok(noticed);
            }
        }
    }
}
