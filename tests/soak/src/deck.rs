//! Random choices that a seed repeats.
//!
//! Owns: random choices. In: a seed and the name of the chooser. Out: the same choices for the same seed.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use std::time::Duration;

/// A separate generator for every chooser, so that one does not change the choices of another.
pub(crate) fn chooser(seed: u64, name: &str) -> SmallRng {
    // FNV-1a.
    let own = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    SmallRng::seed_from_u64(seed ^ own)
}

pub(crate) fn seconds(rng: &mut SmallRng, from: f64, to: f64) -> Duration {
    Duration::from_secs_f64(rng.random_range(from..to))
}

/// Cards that are all drawn once before one is drawn again, so that a short run has every fault.
#[derive(Debug)]
pub(crate) struct Deck<T> {
    cards: Vec<T>,
    left: Vec<T>,
}

impl<T: Clone> Deck<T> {
    pub(crate) fn new(cards: Vec<T>) -> Self {
        Self { cards, left: Vec::new() }
    }

    /// None if there are no cards at all.
    pub(crate) fn draw(&mut self, rng: &mut SmallRng) -> Option<T> {
        if self.left.is_empty() {
            self.left.clone_from(&self.cards);
            self.left.shuffle(rng);
        }
        self.left.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_is_drawn_before_any_repeats() {
        let (mut deck, mut rng) = (Deck::new(vec![1, 2, 3, 4]), chooser(7, "test"));
        for _ in 0..5 {
            let mut round: Vec<_> = (0..4).filter_map(|_| deck.draw(&mut rng)).collect();
            round.sort_unstable();
            assert_eq!(round, [1, 2, 3, 4]);
        }
    }

    #[test]
    fn the_same_seed_and_name_give_the_same_choices() {
        let draw = |seed, name| {
            let mut rng = chooser(seed, name);
            (0..8).map(|_| rng.random::<u64>()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, "a"), draw(1, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
        assert_ne!(draw(1, "a"), draw(2, "a"));
    }
}
