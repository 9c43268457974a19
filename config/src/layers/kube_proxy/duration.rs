//! Durations as Go writes them, such as `1h30m`, `1.5s` and `0s`. Source: `time.ParseDuration`.

use std::time::Duration;

const UNITS: [(&str, f64); 7] =
    [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9), ("h", 3_600e9)];

/// Rounds to milliseconds, the resolution of settings. `None`: invalid or negative.
pub(super) fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut nanoseconds = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|length| *length > 0)?;
        let (number, tail) = rest.split_at(digits);
        let unit = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
        nanoseconds += number.parse::<f64>().ok()? * factor;
        rest = tail;
    }
    let seconds = (nanoseconds / 1e6).round() / 1e3;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p20_durations_are_read_as_go_reads_them() {
        for (text, milliseconds) in [
            ("0s", 0),
            ("0", 0),
            ("30s", 30_000),
            ("1h0m0s", 3_600_000),
            ("2h22m", 8_520_000),
            ("1.5s", 1_500),
            ("100ms", 100),
            ("1m0.5s", 60_500),
            ("+10s", 10_000),
            ("600us", 1),
        ] {
            assert_eq!(parse(text), Some(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "10", "s", "-1s", "1d", "1 s", "1..5s", "1h30", "1e3s"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
