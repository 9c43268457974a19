//! Memory that is not used any more goes back to the system.
//!
//! Owns: a thread that looks every other second how large the process is, and when it has grown asks the allocator to give back
//! what it can spare. In: `/proc/self/statm`. Out: fewer pages.
//!
//! glibc gives back only the end of its heap. A process that has taken in a large cluster leaves holes in the middle, and would
//! keep them for months: 13 MB of the proxy's 46 and some of the agent's at 10,000 Services.

use std::{fs, thread, time::Duration};

/// How often it looks.
const LOOK: Duration = Duration::from_secs(2);

/// A process that has grown by so much since memory was given back, in bytes, is worth the milliseconds that it takes.
const GROWN: usize = 2 << 20;

/// Starts the thread. Without it a process is larger than it has to be, and nothing else.
pub(crate) fn give_back() {
    let started = thread::Builder::new().name("memory".to_owned()).stack_size(64 << 10).spawn(|| {
        let mut least = resident().unwrap_or(0);
        loop {
            thread::sleep(LOOK);
            let Some(now) = resident() else { return };
            if now >= least + GROWN {
                trim();
                least = resident().unwrap_or(now);
            }
            least = least.min(now);
        }
    });
    if let Err(error) = started {
        tracing::debug!(%error, "memory is not given back");
    }
}

/// What the process has in memory, in bytes.
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
    #[allow(unsafe_code, reason = "there is no safe interface to malloc_trim")]
    let _given = unsafe { libc::malloc_trim(0) };
}

/// Other allocators give back by themselves what they can.
#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn holes_in_the_heap_are_given_back() {
        // Small pieces, of which every 64th stays: no end of the heap is free.
        let mut pieces: Vec<Option<Box<[u8; 1024]>>> =
            (0..65_536).map(|number| Some(Box::new([number as u8; 1024]))).collect();
        let full = resident().unwrap();
        for (number, piece) in pieces.iter_mut().enumerate() {
            if number % 64 != 0 {
                *piece = None;
            }
        }
        trim();
        let given = full.saturating_sub(resident().unwrap());
        assert!(given > 32 << 20, "{given} bytes of 64 MiB");
        // What stayed is what it was.
        for (number, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.is_some()) {
            assert_eq!(piece.as_deref(), Some(&[number as u8; 1024]));
        }
    }
}
