//! Metrics of the process, with the names of Prometheus' client libraries.
//!
//! Owns: [`ProcessMetrics`]. In: `/proc/self`, at each scrape. Out: five families; one that cannot be read is absent.

use std::{
    fmt, fs,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

/// Ticks of `/proc/PID/stat` per second (`USER_HZ`): 100 on x86 and arm.
const TICKS: f64 = 100.0;

#[derive(Debug)]
pub struct ProcessMetrics {
    started_unix_seconds: f64,
}

impl ProcessMetrics {
    /// Made at the start of the process.
    #[must_use]
    pub fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started_unix_seconds: now.as_secs_f64() }
    }
}

impl Default for ProcessMetrics {
    fn default() -> Self {
        Self::new()
    }
}

/// User and system time in seconds, of `/proc/PID/stat`.
fn cpu_seconds(stat: &str) -> Option<f64> {
    // The name of the program may contain anything, and is in parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    // Fields 14 and 15 of proc(5); the first one here is the third.
    let mut times = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || times.next()?.parse::<u32>().ok();
    Some((f64::from(ticks()?) + f64::from(ticks()?)) / TICKS)
}

/// `VmRSS` of `/proc/PID/status`, in bytes.
fn resident_bytes(status: &str) -> Option<i64> {
    let rest = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    rest.trim().strip_suffix(" kB")?.parse::<i64>().ok()?.checked_mul(1024)
}

/// The soft limit of `/proc/PID/limits`; -1: unlimited.
fn max_descriptors(limits: &str) -> Option<i64> {
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match rest.split_ascii_whitespace().next()? {
        "unlimited" => Some(-1),
        number => number.parse().ok(),
    }
}

fn read<T>(file: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    parse(&fs::read_to_string(file).ok()?)
}

fn put(
    encoder: &mut DescriptorEncoder<'_>,
    (name, unit, help): (&str, Option<&Unit>, &str),
    kind: MetricType,
    value: &impl EncodeMetric,
) -> fmt::Result {
    value.encode(encoder.encode_descriptor(name, help, unit, kind)?)
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gauge = MetricType::Gauge;
        if let Some(bytes) = read("/proc/self/status", resident_bytes) {
            let family = ("process_resident_memory", Some(&Unit::Bytes), "Resident memory");
            put(&mut encoder, family, gauge, &ConstGauge::new(bytes))?;
        }
        if let Some(seconds) = read("/proc/self/stat", cpu_seconds) {
            let family = ("process_cpu", Some(&Unit::Seconds), "User and system processor time");
            put(&mut encoder, family, MetricType::Counter, &ConstCounter::new(seconds))?;
        }
        // One of them is that of the reading.
        if let Some(open) = fs::read_dir("/proc/self/fd").ok().and_then(|all| i64::try_from(all.count()).ok())
        {
            let family = ("process_open_fds", None, "Open file descriptors");
            put(&mut encoder, family, gauge, &ConstGauge::new(open.saturating_sub(1)))?;
        }
        if let Some(max) = read("/proc/self/limits", max_descriptors) {
            let family = ("process_max_fds", None, "Limit on open file descriptors (-1: none)");
            put(&mut encoder, family, gauge, &ConstGauge::new(max))?;
        }
        let family = ("process_start_time", Some(&Unit::Seconds), "Start time, in Unix seconds");
        put(&mut encoder, family, gauge, &ConstGauge::new(self.started_unix_seconds))
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn files_of_the_kernel_are_parsed_and_anything_else_is_no_value() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 900 0 12 0 250 50 0 0 20 0 9 0 33 44 55";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(resident_bytes("Name:\tx\nVmRSS:\t   17032 kB\nThreads:\t9\n"), Some(17_440_768));
        let limits =
            "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024   524288    files\n";
        assert_eq!(max_descriptors(limits), Some(1024));
        assert_eq!(max_descriptors("Max open files   unlimited  unlimited  files"), Some(-1));
        for broken in ["", "7 (a", "7 (a) S 1", "VmRSS: many", "Max open files"] {
            assert_eq!(
                (cpu_seconds(broken), resident_bytes(broken), max_descriptors(broken)),
                (None, None, None),
                "{broken}"
            );
        }
    }

    #[test]
    fn the_own_process_has_every_family() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessMetrics::new()));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for family in [
            "process_resident_memory_bytes",
            "process_cpu_seconds_total",
            "process_open_fds",
            "process_max_fds",
            "process_start_time_seconds",
        ] {
            let line = text.lines().find_map(|line| line.strip_prefix(family)).expect(family);
            let value: f64 = line.trim().parse().expect("a number");
            assert!(value > 0.0 || family.contains("cpu") || family.contains("max"), "{family} is {value}");
        }
    }
}
