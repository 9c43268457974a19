//! Which callers are cut off because they do not read.
//!
//! Owns: the limits, and [`cut_off`], a pure decision. In: what each caller with waiting data holds. Out: those whose
//! connections are to be closed, each with the reason.
//!
//! A caller that reads slowly holds the snapshot that it is being sent, and what the connection buffers for it.
//! Snapshots share what has not changed between them: two of them differ by the Services that were replaced from one to
//! the other.

use std::{cmp::Reverse, time::Duration};

use keelson_serve::grpc::SEND_BUFFER;

use super::batch::CHUNK;

/// How long a caller may leave a chunk in its connection's buffer: about 60 kB, or one larger Service.
const READ_TIME: Duration = Duration::from_secs(60);
/// A caller that has left its chunk for this long counts as stalled. A caller whose batch is younger is not cut off for
/// the memory of its snapshot.
const STALLED: Duration = Duration::from_secs(5);
/// Interval of checks.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of bytes that connections buffer for stalled callers.
const MAX_BUFFERED_BYTES: usize = 48 * 1024 * 1024;
/// The same as a number of callers.
const MAX_STALLED: usize = MAX_BUFFERED_BYTES / (SEND_BUFFER + CHUNK);
/// Maximum number of bytes in snapshots that are older than the latest state.
const MAX_RETAINED_BYTES: u64 = 64 * 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SnapshotSize {
    /// Bytes of all its Services.
    pub(super) bytes: u64,
    /// Bytes of the Services that were replaced or deleted in this process before it was made.
    pub(super) replaced: u64,
}

/// A caller with waiting data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unread {
    pub(super) id: u64,
    /// Age of the chunk that it has not taken.
    pub(super) waiting: Duration,
    /// Age of the current batch.
    pub(super) sending: Duration,
    /// The snapshot of the current batch, until all of it was handed over.
    pub(super) snapshot: Option<SnapshotSize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    NotTaken,
    TooManyStalled,
    TooMuchRetained,
}

impl Reason {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::NotTaken => "it did not read for 60 s",
            Self::TooManyStalled => "too many clients do not read",
            Self::TooMuchRetained => "slow clients hold more than 64 MiB of old states",
        }
    }
}

pub(super) fn select_callers_to_close(mut unread: Vec<Unread>, newest: SnapshotSize) -> Vec<(u64, Reason)> {
    let mut cut = Vec::new();
    unread.retain(|caller| {
        let stays = caller.waiting < READ_TIME;
        if !stays {
            cut.push((caller.id, Reason::NotTaken));
        }
        stays
    });
    let mut stalled: Vec<_> = unread.iter().filter(|caller| caller.waiting >= STALLED).copied().collect();
    if stalled.len() > MAX_STALLED {
        stalled.sort_unstable_by_key(|caller| Reverse(caller.waiting));
        stalled.truncate(stalled.len() - MAX_STALLED);
        unread.retain(|caller| stalled.iter().all(|one| one.id != caller.id));
        cut.extend(stalled.iter().map(|caller| (caller.id, Reason::TooManyStalled)));
    }
    // Oldest first.
    unread.retain(|caller| caller.snapshot.is_some());
    unread.sort_unstable_by_key(|caller| Reverse(caller.sending));
    let mut holders = &unread[..];
    while let Some((oldest, others)) = holders.split_first() {
        if oldest.sending < STALLED || retained(holders, newest) <= MAX_RETAINED_BYTES {
            break;
        }
        cut.push((oldest.id, Reason::TooMuchRetained));
        holders = others;
    }
    cut
}

/// Upper bound of the bytes that only these callers keep.
fn retained(unread: &[Unread], newest: SnapshotSize) -> u64 {
    let mut sizes: Vec<_> = unread.iter().filter_map(|caller| caller.snapshot).collect();
    sizes.sort_unstable_by_key(|size| size.replaced);
    sizes.dedup_by_key(|size| size.replaced);
    sizes.push(newest);
    let beyond_next =
        |pair: &[SnapshotSize]| pair[0].bytes.min(pair[1].replaced.saturating_sub(pair[0].replaced));
    sizes.windows(2).map(beyond_next).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1024 * 1024;

    fn size(bytes: u64, replaced: u64) -> SnapshotSize {
        SnapshotSize { bytes: bytes * MIB, replaced: replaced * MIB }
    }

    fn unread(id: u64, waiting: u64, sending: u64, snapshot: Option<SnapshotSize>) -> Unread {
        let seconds = Duration::from_secs;
        Unread { id, waiting: seconds(waiting), sending: seconds(sending), snapshot }
    }

    fn selected(callers: &[Unread], newest: SnapshotSize) -> Vec<(u64, Reason)> {
        select_callers_to_close(callers.to_vec(), newest)
    }

    #[test]
    fn e16_a_caller_may_read_slowly_but_takes_a_chunk_in_time() {
        let newest = size(20, 0);
        for (waiting, sending, expected) in [
            (0, 0, vec![]),
            (59, 59, vec![]),
            // Takes a chunk now and then.
            (1, 3600, vec![]),
            (60, 60, vec![(1, Reason::NotTaken)]),
            (3600, 3600, vec![(1, Reason::NotTaken)]),
        ] {
            for snapshot in [Some(newest), None] {
                assert_eq!(
                    selected(&[unread(1, waiting, sending, snapshot)], newest),
                    expected,
                    "{waiting} s"
                );
            }
        }
    }

    #[test]
    fn e16_retained_bytes_of_snapshots_exclude_shared_services() {
        let newest = size(20, 100);
        for (what, snapshots, expected) in [
            ("no caller is behind", vec![], 0),
            ("all read the newest", vec![size(20, 100); 500], 0),
            ("one is a little behind", vec![size(20, 99)], 1),
            ("one is so far behind that nothing is shared", vec![size(20, 10)], 20),
            ("many at the same", vec![size(20, 90); 500], 10),
            ("each at its own", (0..100).map(|replaced| size(20, replaced)).collect(), 100),
            (
                "each at its own, all of it replaced each time",
                vec![size(20, 0), size(20, 40), size(20, 80)],
                60,
            ),
        ] {
            let callers: Vec<_> = snapshots.iter().map(|size| unread(0, 0, 0, Some(*size))).collect();
            assert_eq!(retained(&callers, newest), expected * MIB, "{what}");
        }
    }

    #[test]
    fn e16_callers_at_many_revisions_keep_no_more_than_the_limit() {
        // Each revision replaces 8 MiB.
        let newest = size(20, 160);
        let callers: Vec<_> =
            (0..20).map(|at| unread(at, 1, 40 - at, Some(size(20, at * 8)))).rev().collect();
        let cut = selected(&callers, newest);
        let expected: Vec<_> = (0..12).map(|at| (at, Reason::TooMuchRetained)).collect();
        assert_eq!(cut, expected, "the oldest go, and 8 revisions of 8 MiB stay");
        // A caller that has just begun to read is not cut off.
        let new: Vec<_> = (0..20).map(|at| unread(at, 1, 4, Some(size(20, at * 8)))).collect();
        assert_eq!(select_callers_to_close(new, newest), []);
    }

    #[test]
    fn e16_the_number_of_stalled_callers_is_limited() {
        let most = MAX_STALLED as u64;
        assert!((128..512).contains(&most), "{most}");
        let busy = (0..2000).map(|id| unread(10_000 + id, 1, 30, None));
        let stalled = (0..most + 2).map(|id| unread(id, 5 + id % 50, 5 + id % 50, None));
        let all: Vec<_> = busy.chain(stalled).collect();
        let cut = selected(&all, size(1, 0));
        assert_eq!(cut.len(), 2);
        for (id, reason) in cut {
            assert_eq!((id % 50, reason), (49, Reason::TooManyStalled), "{id}");
        }
    }
}
