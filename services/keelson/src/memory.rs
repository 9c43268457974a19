//! Returns unused memory to the kernel.
//!
//! Owns: the allocator's settings, and a thread that reads the size of the process every two seconds, and requests the
//! allocator to return free pages when the process has grown, at most once in ten seconds. In: `/proc/self/statm`. Out:
//! fewer pages.
//!
//! glibc returns only the end of its heap. A process that has loaded a large cluster leaves holes in the middle, and
//! would keep them for months: 13 MB of the proxy's 46 and some of the agent's at 10,000 Services. glibc also raises
//! the size above which an allocation is a separate mapping, to up to 32 MiB, as soon as such a mapping is freed: large
//! tables are then in the heap, are cleared explicitly, and leave holes too. A fixed size avoids this: 7 MB less of
//! both processes.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// Interval of checks.
const LOOK: Duration = Duration::from_secs(2);

/// Minimum time between two trims, which lock the heap: a process may grow and shrink by more than [`MIN_GROWTH`] all the
/// time.
const PAUSE: Duration = Duration::from_secs(10);

/// Minimum growth since the last trim, in bytes, that is worth the milliseconds of a trim.
const MIN_GROWTH: usize = 1 << 20;

/// Minimum size of an allocation that is a separate mapping, in bytes: glibc's default at the start of a process.
#[cfg(target_env = "gnu")]
const MAPPED: i32 = 128 << 10;

/// Number of arenas of the heap. By default there are eight for each processor.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;

/// Starts the thread. Without it only the process is larger.
pub(crate) fn release_free_memory() {
    let started = thread::Builder::new().name("memory".to_owned()).stack_size(64 << 10).spawn(|| {
        let mut pace = Pace::new(resident().unwrap_or(0));
        loop {
            thread::sleep(LOOK);
            let Some(now) = resident() else { return };
            if pace.is_trim_due(Instant::now(), now) {
                trim();
                pace.least = resident().unwrap_or(now);
            }
        }
    });
    if let Err(error) = started {
        tracing::debug!(%error, "cannot return memory to the kernel");
    }
}

#[derive(Debug)]
struct Pace {
    /// The smallest size since the last trim, in bytes.
    least: usize,
    trimmed: Option<Instant>,
}

impl Pace {
    const fn new(least: usize) -> Self {
        Self { least, trimmed: None }
    }

    /// Whether to trim `now`, at a size of this many bytes; if so, it counts as done.
    fn is_trim_due(&mut self, now: Instant, size: usize) -> bool {
        self.least = self.least.min(size);
        let has_rested = self.trimmed.is_none_or(|at| now.saturating_duration_since(at) >= PAUSE);
        let is_due = has_rested && size >= self.least + MIN_GROWTH;
        if is_due {
            self.trimmed = Some(now);
        }
        is_due
    }
}

/// Fixes the size above which an allocation is a separate mapping, and limits the number of arenas, each of which has
/// its own holes. Must be called before other threads exist.
#[cfg(target_env = "gnu")]
pub(crate) fn set_up_allocator() {
    // SAFETY: mallopt takes two numbers and no pointer. glibc marks it as unsafe beside other threads; there are none yet. The only
    // other way is the environment, which each way to start the process would have to set.
    #[allow(unsafe_code, reason = "mallopt has no safe interface")]
    let _set = unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
        libc::mallopt(libc::M_ARENA_MAX, ARENAS)
    };
}

/// Other allocators have no such settings.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn set_up_allocator() {}

/// Resident memory of the process, in bytes.
fn resident() -> Option<usize> {
    const PAGE: usize = 4096;
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE)
}

#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: malloc_trim takes a number and no pointer, touches free memory only, and may be called at any time from any
    // thread (glibc marks it MT-Safe). There is no other way to ask for it.
    #[allow(unsafe_code, reason = "malloc_trim has no safe interface")]
    let _given = unsafe { libc::malloc_trim(0) };
}

/// Other allocators return memory by themselves.
#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_grows_and_shrinks_is_trimmed_once_in_a_pause() {
        let begin = Instant::now();
        let mut pace = Pace::new(10 << 20);
        let mut trims = Vec::new();
        for seconds in (2_u64..=30).step_by(2) {
            let size = if seconds % 4 == 0 { 12 << 20 } else { 10 << 20 };
            if pace.is_trim_due(begin + Duration::from_secs(seconds), size) {
                trims.push(seconds);
            }
        }
        assert_eq!(trims, [4, 16, 28]);
    }

    #[test]
    fn growth_is_counted_from_the_smallest_size() {
        let begin = Instant::now();
        let mut pace = Pace::new(10 << 20);
        assert!(!pace.is_trim_due(begin, (11 << 20) - 1));
        assert!(!pace.is_trim_due(begin, 8 << 20));
        assert!(pace.is_trim_due(begin, 9 << 20));
    }
}

/// The settings apply to the whole process, so each test runs in a process of its own.
#[cfg(all(test, target_env = "gnu"))]
mod allocator_tests {
    #![allow(clippy::expect_used)]

    use std::{env, hint::black_box, process::Command};

    use super::*;

    /// Set in the process in which a test's body runs.
    const ALONE: &str = "KEELSON_TEST_ALONE";

    /// Runs the body of the test of this name in another process, on its only thread.
    fn alone(test: &str, body: fn()) {
        if env::var_os(ALONE).is_some() {
            return body();
        }
        let output = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "--test-threads=1", &format!("memory::allocator_tests::{test}")])
            .env(ALONE, "1")
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    fn size() -> usize {
        resident().expect("/proc")
    }

    /// Also after a larger one was freed.
    #[test]
    fn large_allocations_stay_mappings() {
        alone("large_allocations_stay_mappings", || {
            set_up_allocator();
            // Freeing this would raise the size to its own.
            drop(black_box(vec![1_u8; 16 << 20]));
            let before = size();
            let table = black_box(vec![1_u8; 12 << 20]);
            // Placed after it in the heap, so that its end is not free.
            let after: Vec<_> = (0..1_024).map(|_| black_box(vec![1_u8; 1_024])).collect();
            drop(table);
            let grown = size().saturating_sub(before);
            assert!(grown < 8 << 20, "{grown} bytes are left of a table that was freed");
            drop(after);
        });
    }

    #[test]
    fn holes_in_the_heap_are_given_back() {
        alone("holes_in_the_heap_are_given_back", || {
            // Small pieces, of which every 64th is kept: no end of the heap is free.
            let mut pieces: Vec<Option<Box<[u8; 1024]>>> =
                (0..65_536).map(|number| Some(Box::new([number as u8; 1024]))).collect();
            let full = size();
            for (number, piece) in pieces.iter_mut().enumerate() {
                if number % 64 != 0 {
                    *piece = None;
                }
            }
            trim();
            let given = full.saturating_sub(size());
            assert!(given > 32 << 20, "{given} bytes of 64 MiB");
            // The kept pieces are unchanged.
            for (number, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.is_some()) {
                assert_eq!(piece.as_deref(), Some(&[number as u8; 1024]));
            }
        });
    }
}
