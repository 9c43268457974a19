//! When a file that is being written may be read.
//!
//! Owns: [`Pending`], a file that has changed and was not read yet. In: its stamps, and `now`. Out: whether to read it,
//! or when to check again. No I/O, no clock.

use std::time::{Duration, Instant};

/// Intervals of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilesTiming {
    /// Time without a change after which a file that is written in place is read, and after which a missing file
    /// is dropped: editors write by moving the old file away first.
    pub settle: Duration,
    /// As `settle`, while a program has the file open for writing.
    pub settle_while_open: Duration,
    /// Maximum wait for a file that never settles.
    pub settle_max: Duration,
    /// Interval of scans without a notice. Network file systems give no notices, nor does a link whose target is
    /// changed elsewhere.
    pub poll: Duration,
    /// As `poll`, while the folder is missing.
    pub poll_missing: Duration,
}

impl Default for FilesTiming {
    fn default() -> Self {
        Self {
            settle: Duration::from_millis(100),
            settle_while_open: Duration::from_secs(1),
            settle_max: Duration::from_secs(5),
            poll: Duration::from_secs(5),
            poll_missing: Duration::from_secs(1),
        }
    }
}

/// Distinguishes versions of a file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) size: u64,
    /// Seconds and nanoseconds.
    pub(super) modified: (i64, i64),
    pub(super) changed: (i64, i64),
}

impl Stamp {
    pub(super) fn same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// A file that has changed, or vanished (no stamp), and was not read yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pending {
    stamp: Option<Stamp>,
    first: Instant,
    quiet_since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// Read or drop it.
    Now,
    /// Check again after this time.
    In(Duration),
}

impl Pending {
    pub(super) fn new(stamp: Option<Stamp>, now: Instant) -> Self {
        Self { stamp, first: now, quiet_since: now }
    }

    /// `open`: a program has it open for writing.
    pub(super) fn see(
        &mut self,
        stamp: Option<Stamp>,
        open: bool,
        now: Instant,
        timing: &FilesTiming,
    ) -> Due {
        if stamp != self.stamp {
            self.stamp = stamp;
            self.quiet_since = now;
        }
        let needed = if open { timing.settle_while_open } else { timing.settle };
        let quiet = needed.saturating_sub(now.saturating_duration_since(self.quiet_since));
        let most = timing.settle_max.saturating_sub(now.saturating_duration_since(self.first));
        let left = quiet.min(most);
        if left.is_zero() { Due::Now } else { Due::In(left) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(size: u64) -> Option<Stamp> {
        Some(Stamp { device: 1, inode: 1, size, modified: (0, 0), changed: (0, 0) })
    }

    #[test]
    fn a_file_is_due_when_it_was_quiet_or_has_been_waited_for_long_enough() {
        let timing = FilesTiming::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let ms = |ms| Due::In(Duration::from_millis(ms));
        let mut pending = Pending::new(stamp(1), start);
        assert_eq!(pending.see(stamp(1), false, at(40), &timing), ms(60));
        assert_eq!(pending.see(stamp(2), false, at(90), &timing), ms(100), "it was written to");
        assert_eq!(pending.see(stamp(2), true, at(190), &timing), ms(900), "and is still open");
        assert_eq!(pending.see(stamp(2), false, at(190), &timing), Due::Now);
        assert_eq!(pending.see(stamp(3), true, at(4950), &timing), ms(50), "not for ever");
        assert_eq!(pending.see(stamp(4), true, at(5000), &timing), Due::Now);
        let mut gone = Pending::new(None, start);
        assert_eq!(gone.see(None, false, at(99), &timing), ms(1));
        assert_eq!(gone.see(None, false, at(100), &timing), Due::Now);
    }
}
