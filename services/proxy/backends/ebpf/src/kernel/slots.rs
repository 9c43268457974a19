//! The map `slots`, through its memory.
//!
//! Owns: [`Slots`], [`Window`]. In: the opened map, values by place. Out: values.
//!
//! With many Services most elements are slots. The kernel lets a process map the memory of an array (`BPF_F_MMAPABLE`), and a slot is then a
//! copy of 24 bytes in place of a system call. Only what is needed is mapped, and only for a moment: it would count as memory of
//! the process. The few slots of one change are written by system calls.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd as _, AsRawFd as _, RawFd},
};

use aya::maps::{Array, Map, MapData, MapError};
use memmap2::{MmapMut, MmapOptions};

use crate::layout::{Layout as _, SlotValue};

/// The distance of two slots, in bytes: the kernel rounds sizes up to 8.
const SIZE: usize = 24;

/// Slots that are at most so far from each other are written through one window. A page of memory has 170.
const NEAR: u32 = 170;

/// So few are written by a system call each: mapping memory and unmapping it takes longer.
const FEW: usize = 16;

pub(super) struct Slots {
    fd: RawFd,
    /// Keeps the map open, and has compared its sizes.
    array: Array<MapData, [u8; SIZE]>,
}

/// The memory of `first` and the places after it.
pub(super) struct Window {
    first: u32,
    memory: MmapMut,
}

impl Slots {
    pub(super) fn new(data: MapData) -> Result<Self, MapError> {
        let fd = data.fd().as_fd().as_raw_fd();
        Ok(Self { fd, array: Map::Array(data).try_into()? })
    }

    /// `None`: the map has none of these places.
    pub(super) fn window(&self, places: Range<u32>) -> io::Result<Option<Window>> {
        let Range { start: first, end } = places;
        let end = end.min(self.array.len());
        if first >= end {
            return Ok(None);
        }
        let size = |count: u32| usize::try_from(count).map_or(usize::MAX, |count| count.saturating_mul(SIZE));
        let mut options = MmapOptions::new();
        options.offset(size(first) as u64).len(size(end - first));
        #[allow(unsafe_code, reason = "others can change what is mapped, and so it has no safe interface")]
        // SAFETY: the descriptor is that of `array`. Programs of eBPF read slots and never write them. Another process that
        // writes them ends what this one knows of the map anyway; bytes are copied once, and any 24 of them are a value, which
        // the next comparison finds and repairs.
        let memory = unsafe { options.map_mut(self.fd) }?;
        Ok(Some(Window { first, memory }))
    }

    /// Writes values; those of near places should follow each other in order. No set has these places, or programs may read half
    /// of a value.
    pub(super) fn put(&mut self, slots: &[(u32, SlotValue)]) -> io::Result<()> {
        let is_near = |(one, _): &(u32, _), (next, _): &(u32, _)| one < next && next - one <= NEAR;
        for run in slots.chunk_by(is_near) {
            match run {
                [(first, _), .., (last, _)] if run.len() > FEW => {
                    self.put_by_memory(*first..last.saturating_add(1), run)?
                }
                run => run.iter().try_for_each(|(place, value)| self.put_one(*place, *value))?,
            }
        }
        Ok(())
    }

    fn put_one(&mut self, place: u32, value: SlotValue) -> io::Result<()> {
        self.array.set(place, value.to_bytes(), 0).map_err(|error| match error {
            MapError::OutOfBounds { .. } => no_place(place),
            MapError::SyscallError(error) => error.io_error,
            error => io::Error::other(error),
        })
    }

    fn put_by_memory(&self, places: Range<u32>, run: &[(u32, SlotValue)]) -> io::Result<()> {
        let mut window = self.window(places)?;
        for (place, value) in run {
            let slot = window.as_mut().and_then(|window| window.slot(*place));
            *slot.ok_or_else(|| no_place(*place))? = value.to_bytes();
        }
        Ok(())
    }
}

fn no_place(place: u32) -> io::Error {
    io::Error::other(format!("there is no place {place}"))
}

impl Window {
    fn slot(&mut self, place: u32) -> Option<&mut [u8; SIZE]> {
        let at = usize::try_from(place.checked_sub(self.first)?).ok()?;
        self.memory.as_chunks_mut().0.get_mut(at)
    }

    /// Places and values, of those that the window has.
    pub(super) fn values(&self, places: Range<u32>) -> impl Iterator<Item = (u32, SlotValue)> {
        let at = |place: u32| usize::try_from(place.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let slots = self.memory.as_chunks().0;
        let found = slots.get(at(places.start)..at(places.end).min(slots.len())).unwrap_or_default();
        places.zip(found).map(|(place, bytes)| (place, SlotValue::from_bytes(*bytes)))
    }
}
