//! Assigns numbers.
//!
//! Owns: [`Numbers`]. In: requests of service ports. Out: [`Number`]s, unique at any time.

use std::collections::HashSet;

use super::Existing;
use crate::element::Number;

/// Maximum number of an endpoint, from 1.
pub(super) const MAX_ENDPOINT: u16 = u16::MAX;

const MAX_WITH_AFFINITY: u32 = (u32::MAX - Number::FIRST_WITH_AFFINITY) / Number::STRIDE + 1;

/// Assigns numbers in turn, so that a released one stays unused for as long as possible: the kernel may still have
/// elements of its last owner, and clients that remember it.
#[derive(Debug)]
pub(super) struct Numbers {
    next_plain: u32,
    /// In [`Number::STRIDE`]s from [`Number::FIRST_WITH_AFFINITY`].
    next_with_affinity: u32,
    used: HashSet<u32>,
    with_affinity: u32,
    /// Released since the last operations were taken; still in `used`.
    released: HashSet<u32>,
}

impl Numbers {
    /// Continues after the existing numbers.
    pub(super) fn new(existing: &Existing) -> Self {
        let of = |affinity| existing.numbers().filter(move |number| number.has_affinity() == affinity);
        let last_plain = of(false).map(|number| number.0).max().unwrap_or(0);
        let last_with_affinity = of(true).map(|number| place(number.0)).max();
        Self {
            next_plain: last_plain + 1,
            next_with_affinity: last_with_affinity.map_or(0, |last| last + 1),
            used: HashSet::new(),
            with_affinity: 0,
            released: HashSet::new(),
        }
    }

    /// A number that is neither used nor in `existing`. `None`: all are assigned.
    pub(super) fn allocate(&mut self, affinity: bool, existing: &Existing) -> Option<Number> {
        let tries = if affinity {
            if self.with_affinity >= MAX_WITH_AFFINITY {
                return None;
            }
            MAX_WITH_AFFINITY as usize
        } else {
            self.used.len() + existing.len() + 2
        };
        for _ in 0..tries {
            let number = if affinity { self.turn_with_affinity() } else { self.turn_plain() };
            if !existing.has(number) && self.claim(number) {
                return Some(number);
            }
        }
        None
    }

    fn turn_plain(&mut self) -> Number {
        if self.next_plain == 0 || self.next_plain > Number::ID_MASK.0 {
            self.next_plain = 1;
        }
        self.next_plain += 1;
        Number(self.next_plain - 1)
    }

    fn turn_with_affinity(&mut self) -> Number {
        let place = self.next_with_affinity % MAX_WITH_AFFINITY;
        self.next_with_affinity = place + 1;
        Number(Number::FIRST_WITH_AFFINITY + place * Number::STRIDE)
    }

    /// Assigns an existing number; `false` if it is in use.
    pub(super) fn claim(&mut self, number: Number) -> bool {
        let claimed = self.used.insert(number.0);
        self.with_affinity += u32::from(claimed && number.has_affinity());
        claimed
    }

    /// Assigns a resting number again; `false` if it does not rest.
    pub(super) fn reclaim(&mut self, number: Number) -> bool {
        self.released.remove(&number.0)
    }

    /// Releases a number; it rests until [`Self::free_released`].
    pub(super) fn release(&mut self, number: Number) {
        self.released.insert(number.0);
    }

    /// Ends the rest, because the operations that delete elements of the resting numbers were taken.
    pub(super) fn free_released(&mut self) {
        for number in std::mem::take(&mut self.released) {
            self.used.remove(&number);
            self.with_affinity -= u32::from(Number(number).has_affinity());
        }
    }
}

/// Index of a number among those with affinity.
fn place(number: u32) -> u32 {
    (number - Number::FIRST_WITH_AFFINITY) / Number::STRIDE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_assigned_in_turn() {
        let none = Existing::default();
        let mut numbers = Numbers::new(&none);
        assert_eq!(numbers.allocate(false, &none), Some(Number(1)));
        assert_eq!(numbers.allocate(false, &none), Some(Number(2)));
        assert_eq!(numbers.allocate(true, &none), Some(Number(0x8000_0000)));
        assert_eq!(numbers.allocate(true, &none), Some(Number(0x8001_0000)));
        numbers.release(Number(1));
        assert!(!numbers.claim(Number(1)), "it rests");
        assert!(numbers.reclaim(Number(1)));
        numbers.release(Number(1));
        numbers.free_released();
        assert_eq!(numbers.allocate(false, &none), Some(Number(3)), "not the one that was free a moment ago");
        assert!(numbers.claim(Number(1)));
    }

    #[test]
    fn numbers_wrap_around() {
        let none = Existing::default();
        let mut numbers = Numbers::new(&none);
        assert!(numbers.claim(Number(1)));
        numbers.next_plain = 0xf_ffff;
        assert_eq!(numbers.allocate(false, &none), Some(Number(0xf_ffff)));
        assert_eq!(numbers.allocate(false, &none), Some(Number(2)));
    }

    #[test]
    fn there_are_32768_numbers_with_affinity() {
        let none = Existing::default();
        let mut numbers = Numbers::new(&none);
        let given: HashSet<_> = (0..32_768).map(|_| numbers.allocate(true, &none).unwrap()).collect();
        assert_eq!(given.len(), 32_768);
        assert!(given.iter().all(|number| number.has_affinity() && number.is_service_port()));
        assert_eq!(numbers.allocate(true, &none), None);
        numbers.release(Number(0x8000_0000));
        assert_eq!(numbers.allocate(true, &none), None, "it rests");
        numbers.free_released();
        assert_eq!(numbers.allocate(true, &none), Some(Number(0x8000_0000)));
    }
}
