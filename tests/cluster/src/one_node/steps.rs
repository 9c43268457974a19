//! Owns: what a run has done, and the time that it took. In: steps. Out: a line for each, and the sum.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Steps {
    started: Instant,
    last: Instant,
    count: usize,
}

impl Steps {
    pub fn start() -> Self {
        let now = Instant::now();
        Self { started: now, last: now, count: 0 }
    }

    /// Prints what has been done since the last step.
    pub fn done(&mut self, what: &str) {
        let now = Instant::now();
        let took = now - self.last;
        self.last = now;
        eprintln!("{:7.1} s  {what}", took.as_secs_f64());
        self.count += 1;
    }

    pub fn total(&self) -> Duration {
        self.started.elapsed()
    }

    /// Number of steps so far.
    pub fn count(&self) -> usize {
        self.count
    }
}
