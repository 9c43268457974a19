//! The last hour of a process, for plots.
//!
//! Owns: a ring of samples ([`History`]), and the loop that takes them ([`History::sample`]). In: values of quantities
//! that a process declares ([`Series`]), every [`INTERVAL`]. Out: a [`HistoryDocument`]. It is kept in memory alone: 360 samples of
//! an 8-byte time and 4 bytes for each series, 9 KiB for four series. A restart loses it.

use std::{
    collections::VecDeque,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use serde::Serialize;

/// Interval of samples.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Number of samples: an hour.
pub const SAMPLES: usize = 360;

/// How a page writes the values of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    Count,
    BytesPerSecond,
    Microseconds,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The value at the time of the sample.
    Gauge,
    /// A number that grows; a sample has its increase since the previous one.
    Counter,
}

/// A plotted quantity.
#[derive(Debug, Clone, Copy)]
pub struct Series {
    /// In snake case, unique.
    pub name: &'static str,
    /// Title of the plot.
    pub title: &'static str,
    pub unit: Unit,
    pub kind: Kind,
}

/// Clones share their samples.
#[derive(Debug, Clone)]
pub struct History {
    series: &'static [Series],
    ring: Arc<Mutex<Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    samples: VecDeque<Sample>,
    /// The last values of counters.
    last: Vec<Option<f64>>,
}

#[derive(Debug)]
struct Sample {
    at_unix_ms: i64,
    /// NaN: not known.
    values: Box<[f32]>,
}

/// JSON of `/debug/history`.
#[derive(Debug, Serialize)]
pub struct HistoryDocument {
    interval_ms: u64,
    /// Times of the samples, oldest first.
    at_unix_ms: Vec<i64>,
    series: Vec<SeriesDocument>,
}

#[derive(Debug, Serialize)]
struct SeriesDocument {
    name: &'static str,
    title: &'static str,
    unit: Unit,
    /// The value of each sample; of a counter, its increase since the previous sample. `null`: not known.
    values: Vec<Option<f32>>,
}

impl History {
    #[must_use]
    pub fn new(series: &'static [Series]) -> Self {
        Self { series, ring: Arc::default() }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sample; the oldest one goes when there are [`SAMPLES`]. `values`: one for each series, in their order;
    /// `None`: not known now.
    pub fn record(&self, at_unix_ms: i64, values: &[Option<f64>]) {
        let mut ring = self.ring();
        ring.last.resize(self.series.len(), None);
        let mut sample = Vec::with_capacity(self.series.len());
        for (index, series) in self.series.iter().enumerate() {
            let value = values.get(index).copied().flatten();
            let shown = match series.kind {
                Kind::Gauge => value,
                Kind::Counter => {
                    let last = ring.last[index];
                    ring.last[index] = value.or(last);
                    // A counter that is less than before began again.
                    value.zip(last).map(|(value, last)| if value < last { value } else { value - last })
                }
            };
            sample.push(shown.map_or(f32::NAN, |value| value as f32));
        }
        if ring.samples.len() >= SAMPLES {
            ring.samples.pop_front();
        }
        ring.samples.push_back(Sample { at_unix_ms, values: sample.into() });
    }

    /// Records what `read` returns, now and [`INTERVAL`] after each sample; never returns.
    pub async fn sample<F>(&self, mut read: impl FnMut() -> F)
    where
        F: Future<Output = Vec<Option<f64>>>,
    {
        loop {
            let values = read().await;
            let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            self.record(i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX), &values);
            tokio::time::sleep(INTERVAL).await;
        }
    }

    #[must_use]
    pub fn document(&self) -> HistoryDocument {
        let ring = self.ring();
        let values = |index: usize| {
            let values = ring.samples.iter().map(|sample| sample.values[index]);
            values.map(|value| (!value.is_nan()).then_some(value)).collect()
        };
        HistoryDocument {
            interval_ms: INTERVAL.as_millis() as u64,
            at_unix_ms: ring.samples.iter().map(|sample| sample.at_unix_ms).collect(),
            series: self
                .series
                .iter()
                .enumerate()
                .map(|(index, &Series { name, title, unit, .. })| SeriesDocument {
                    name,
                    title,
                    unit,
                    values: values(index),
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const SERIES: &[Series] = &[
        Series { name: "queued", title: "Queued", unit: Unit::Count, kind: Kind::Gauge },
        Series { name: "revisions", title: "Revisions", unit: Unit::Count, kind: Kind::Counter },
    ];

    fn values(history: &History, index: usize) -> Vec<Option<f32>> {
        history.document().series[index].values.clone()
    }

    #[test]
    fn a_counter_is_shown_by_its_increase() {
        let history = History::new(SERIES);
        let counted = [Some(5.0), Some(7.0), None, Some(10.0), Some(2.0)];
        for (at, value) in (0..).zip(counted) {
            history.record(at, &[Some(3.0), value]);
        }
        assert_eq!(values(&history, 0), [Some(3.0); 5]);
        // The first one has nothing before it; the last one began again.
        assert_eq!(values(&history, 1), [None, Some(2.0), None, Some(3.0), Some(2.0)]);
    }

    #[test]
    fn the_oldest_samples_go_and_json_is_an_interface() {
        let history = History::new(SERIES);
        for at in 0..=SAMPLES as i64 {
            history.record(at, &[Some(at as f64)]);
        }
        let document = history.document();
        assert_eq!((document.at_unix_ms.len(), document.at_unix_ms[0]), (SAMPLES, 1));
        let small = History::new(SERIES);
        small.record(7, &[Some(1.5), Some(1.0)]);
        assert_eq!(
            serde_json::to_value(small.document()).unwrap(),
            serde_json::json!({
                "interval_ms": 10_000,
                "at_unix_ms": [7],
                "series": [
                    {"name": "queued", "title": "Queued", "unit": "count", "values": [1.5]},
                    {"name": "revisions", "title": "Revisions", "unit": "count", "values": [null]},
                ],
            })
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_sample_is_taken_at_once_and_every_interval() {
        let history = History::new(SERIES);
        let sampled = history.clone();
        let taken = Arc::new(AtomicU32::new(0));
        let counter = taken.clone();
        let task = tokio::spawn(async move {
            sampled
                .sample(|| {
                    let number = counter.fetch_add(1, Ordering::Relaxed);
                    async move {
                        // One that takes long delays those behind it, and is followed by no burst.
                        let wait = if number == 2 { INTERVAL * 3 } else { Duration::ZERO };
                        tokio::time::sleep(wait).await;
                        vec![Some(f64::from(number)), None]
                    }
                })
                .await;
        });
        for (after, expected) in [(1, 1), (10, 2), (10, 2), (30, 3), (10, 4), (10, 5)] {
            tokio::time::sleep(Duration::from_secs(after)).await;
            assert_eq!(values(&history, 0).len(), expected, "{:?}", values(&history, 0));
        }
        task.abort();
    }
}
