//! Numbers, times and names as text.
//!
//! In: values of the debug API. Out: short texts. Control characters of external texts never reach the
//! terminal.

use keelson_proto::debug as pb;

/// `0 B`, `999 B`, `1.5 KiB`, `240 MiB`...
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value < 99.95 { format!("{value:.1} {}", UNITS[unit]) } else { format!("{value:.0} {}", UNITS[unit]) }
}

/// `420ms`, `9.4s`, `42s`, `3m07s`, `2h05m`, `4d11h`. A negative duration counts as zero.
pub(crate) fn duration_ms(ms: i64) -> String {
    let ms = ms.max(0);
    let seconds = ms / 1000;
    match seconds {
        0 => format!("{ms}ms"),
        1..10 => format!("{}.{}s", seconds, ms % 1000 / 100),
        10..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// Time since `since`, or `-` if it is not set.
pub(crate) fn since_ms(since: i64, now: i64) -> String {
    if since == 0 { "-".into() } else { duration_ms(now.saturating_sub(since)) }
}

/// `31us`, `1.9ms`, `2.0s`.
pub(crate) fn micros(us: u64) -> String {
    match us {
        0..1_000 => format!("{us}us"),
        1_000..1_000_000 => format!("{:.1}ms", us as f64 / 1e3),
        _ => format!("{:.1}s", us as f64 / 1e6),
    }
}

/// 0 to 100; 0 while the total is unknown.
pub(crate) fn percent(done: u64, total: u64) -> u64 {
    if total == 0 { 0 } else { (u128::from(done.min(total)) * 100 / u128::from(total)) as u64 }
}

/// `1 pull`, `2 pulls`.
pub(crate) fn count(number: u64, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

/// Removes everything from external text that a terminal would interpret.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || is_direction(c) { '\u{fffd}' } else { c }).collect()
}

/// Marks that change the direction of text can make a name look like another.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A state of the debug API as a status word of the glossary.
pub(crate) fn status_word(state: &str) -> String {
    match state {
        "not-watched" => "pending".into(),
        state => clean(state),
    }
}

/// [`clean`] on one line.
pub(crate) fn one_line(text: &str) -> String {
    clean(&keelson_serve::text::one_line(text))
}

/// `a, b and 3 more`: the first `max` names.
pub(crate) fn first_names(names: &[String], max: usize) -> String {
    let first: Vec<String> = names.iter().take(max).map(|name| clean(name)).collect();
    match names.len().checked_sub(max) {
        Some(more @ 1..) => format!("{} and {more} more", first.join(", ")),
        _ => first.join(", "),
    }
}

/// An image's name with its digest cut to twelve digits, as in other tools.
pub(crate) fn image(name: &str) -> String {
    let name = clean(name);
    match name.split_once("@sha256:") {
        Some((front, digest)) if digest.len() > 12 && digest.is_ascii() => {
            format!("{front}@sha256:{}", &digest[..12])
        }
        _ => name,
    }
}

pub(crate) fn state(pull: &pb::Pull) -> String {
    use pb::PullState as S;
    let words = match pull.state() {
        S::Unspecified => "unknown",
        S::Checking => "checking",
        S::Queued => "queued",
        S::Running => "running",
        S::RunningPresent => "running (present)",
        S::WaitingForRuntime => "waiting for runtime",
        S::Retrying => "retrying",
        S::Held => "held",
        S::Abandoned => "abandoned",
        S::Succeeded => "succeeded",
        S::Failed => "failed",
        S::Cancelled => "cancelled",
    };
    words.into()
}

/// `62%  240 MiB of 388 MiB  20.1 MiB/s  7.3s left  5/9 layers`.
pub(crate) fn progress(progress: &pb::Progress) -> String {
    let mut parts = Vec::new();
    if progress.bytes_total > 0 {
        parts.push(format!("{}%", percent(progress.bytes_done, progress.bytes_total)));
        parts.push(format!("{} of {}", bytes(progress.bytes_done), bytes(progress.bytes_total)));
    } else if progress.bytes_done > 0 {
        parts.push(bytes(progress.bytes_done));
    }
    let left = progress.bytes_total.saturating_sub(progress.bytes_done);
    if progress.bytes_per_second > 0 && left > 0 {
        parts.push(format!("{}/s", bytes(progress.bytes_per_second)));
        let ms = u128::from(left) * 1000 / u128::from(progress.bytes_per_second);
        parts.push(format!("{} left", duration_ms(i64::try_from(ms).unwrap_or(i64::MAX))));
    } else if progress.idle_ms >= 5_000 && left > 0 {
        parts.push(format!("no data for {}", duration_ms(progress.idle_ms)));
    }
    if progress.layers_total > 0 {
        parts.push(format!("{}/{} layers", progress.layers_done, progress.layers_total));
    }
    if matches!(progress.phase.as_str(), "resolving" | "unpacking") {
        parts.push(progress.phase.clone());
    }
    parts.join("  ")
}

/// `3 of 3 in use`, `7 running, no limit`.
pub(crate) fn in_use(list: &pb::PullList) -> String {
    match list.limit.as_ref().map_or(0, |limit| limit.max_parallel_image_pulls) {
        0 => format!("{} running, no limit", list.running),
        limit => format!("{} of {limit} in use", list.running),
    }
}

/// `3 of 3 in use, 12 queued (oldest 1m37s), 15 callers, runtime up`.
pub(crate) fn summary(list: &pb::PullList) -> String {
    let mut text = format!("{}, {} queued", in_use(list), list.queued);
    if list.queued > 0 {
        text.push_str(&format!(" (oldest {})", duration_ms(list.oldest_wait_ms)));
    }
    text.push_str(&format!(
        ", {}, runtime {}",
        count(list.callers.into(), "caller"),
        clean(&list.runtime_health)
    ));
    if list.retained > 0 {
        text.push_str(&format!(
            ", {} retained of {}",
            bytes(list.retained_bytes),
            count(list.retained.into(), "unfinished pull")
        ));
    }
    if !list.runtime_error.is_empty() {
        text.push_str(&format!(": {}", one_line(&list.runtime_error)));
    }
    text
}

/// How long a finished pull ran, or waited if it never started.
pub(crate) fn run_time_ms(pull: &pb::Pull) -> Option<i64> {
    let start = if pull.started_unix_ms == 0 { pull.requested_unix_ms } else { pull.started_unix_ms };
    (pull.finished_unix_ms > 0 && start > 0).then(|| pull.finished_unix_ms.saturating_sub(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_every_size() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (102_348, "99.9 KiB"),
            (102_400, "100 KiB"),
            (1_048_575, "1.0 MiB"),
            (251_658_240, "240 MiB"),
            (1 << 40, "1.0 TiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(count), text, "{count}");
        }
    }

    #[test]
    fn durations_of_every_size() {
        for (ms, text) in [
            (-5, "0ms"),
            (0, "0ms"),
            (999, "999ms"),
            (1_000, "1.0s"),
            (9_999, "9.9s"),
            (10_000, "10s"),
            (59_999, "59s"),
            (60_000, "1m00s"),
            (187_000, "3m07s"),
            (7_500_000, "2h05m"),
            (385_200_000, "4d11h"),
            (i64::MAX, "106751991167d07h"),
        ] {
            assert_eq!(duration_ms(ms), text, "{ms}");
        }
        assert_eq!(since_ms(0, 10), "-");
        assert_eq!(since_ms(i64::MIN, i64::MAX), duration_ms(i64::MAX));
    }

    #[test]
    fn states_are_shown_as_status_words() {
        for (state, word) in
            [("not-watched", "pending"), ("failing", "failing"), ("stale", "stale"), ("\x1b", "\u{fffd}")]
        {
            assert_eq!(status_word(state), word);
        }
    }

    #[test]
    fn small_numbers() {
        assert_eq!(
            [micros(0), micros(999), micros(1_920), micros(2_000_113)],
            ["0us", "999us", "1.9ms", "2.0s"]
        );
        assert_eq!(
            [percent(1, 0), percent(0, 9), percent(1, 3), percent(9, 9), percent(10, 9)],
            [0, 0, 33, 100, 100]
        );
        assert_eq!(percent(u64::MAX - 1, u64::MAX), 99);
        assert_eq!([count(0, "pull"), count(1, "pull"), count(2, "pull")], ["0 pulls", "1 pull", "2 pulls"]);
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        assert_eq!(image("evil\x1b[2Jname:\u{202e}1"), "evil\u{fffd}[2Jname:\u{fffd}1");
        assert_eq!(one_line("a\r\nb\x07  c"), "a b\u{fffd} c");
        assert_eq!(image(&format!("a/b@sha256:{}", "7d".repeat(32))), "a/b@sha256:7d7d7d7d7d7d");
        assert_eq!(image("a/b@sha256:short"), "a/b@sha256:short");
        let odd = format!("a/b@sha256:{}", "\u{e9}".repeat(40));
        assert_eq!(image(&odd), odd);
    }

    #[test]
    fn downloads() {
        let full = pb::Progress {
            bytes_done: 240 << 20,
            bytes_total: 387 << 20,
            layers_done: 5,
            layers_total: 9,
            bytes_per_second: 21 << 20,
            idle_ms: 20,
            phase: "downloading".into(),
        };
        assert_eq!(progress(&full), "62%  240 MiB of 387 MiB  21.0 MiB/s  7.0s left  5/9 layers");
        let stalled = pb::Progress { bytes_per_second: 0, idle_ms: 65_000, ..full.clone() };
        assert_eq!(progress(&stalled), "62%  240 MiB of 387 MiB  no data for 1m05s  5/9 layers");
        let unpacking =
            pb::Progress { bytes_done: 387 << 20, layers_done: 9, phase: "unpacking".into(), ..full };
        assert_eq!(progress(&unpacking), "100%  387 MiB of 387 MiB  9/9 layers  unpacking");
        let start = pb::Progress { phase: "resolving".into(), ..pb::Progress::default() };
        assert_eq!(progress(&start), "resolving");
        let huge = pb::Progress { bytes_total: u64::MAX, bytes_per_second: 1, ..pb::Progress::default() };
        assert_eq!(progress(&huge), "0%  0 B of 16.0 EiB  1 B/s  106751991167d07h left");
        assert_eq!(progress(&pb::Progress::default()), "");
    }
}
