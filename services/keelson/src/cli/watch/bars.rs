//! Progress bars on a terminal.
//!
//! Owns: one bar per running pull, and a summary line below them. Finished pulls scroll away above.
//! In: lists. Out: what `indicatif` draws.

use std::{collections::BTreeMap, io, time::Duration};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use keelson_proto::debug as pb;

use super::{changes::Changes, screen::Screen};
use crate::cli::format::{image, percent, progress, state, summary};

// Names and bars are kept short, so that bytes and rate fit on 80 columns.

/// With a percentage: `image  ━━━━━━╸    62%  240 MiB of 387 MiB ...`.
const KNOWN: &str = "{prefix:30!}  {bar:12.cyan/dim}  {wide_msg}";
/// If the size is not known.
const UNKNOWN: &str = "{prefix:30!}  {spinner:.cyan} {wide_msg}";
const SUMMARY: &str = "{wide_msg:.bold}";
/// How many queued pulls are named.
const NEXT: usize = 3;

pub(super) struct Bars {
    multi: MultiProgress,
    summary: ProgressBar,
    pulls: BTreeMap<u64, ProgressBar>,
    changes: Changes,
}

impl Bars {
    pub(super) fn new() -> Self {
        let multi = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let summary = multi.add(ProgressBar::new_spinner().with_style(style(SUMMARY)));
        Self { multi, summary, pulls: BTreeMap::new(), changes: Changes::default() }
    }

    fn bar(&mut self, pull: &pb::Pull) -> &ProgressBar {
        let (multi, summary) = (&self.multi, &self.summary);
        self.pulls.entry(pull.id).or_insert_with(|| {
            let bar = multi.insert_before(summary, ProgressBar::new(100).with_style(style(UNKNOWN)));
            bar.set_prefix(label(&pull.image));
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        })
    }

    fn drop_others(&mut self, list: &pb::PullList) {
        let multi = &self.multi;
        self.pulls.retain(|id, bar| {
            let runs = list.pulls.iter().any(|pull| pull.id == *id && shown(pull));
            if !runs {
                bar.finish_and_clear();
                multi.remove(bar);
            }
            runs
        });
    }
}

impl Screen for Bars {
    fn show(&mut self, list: &pb::PullList) -> io::Result<()> {
        for line in self.changes.ends(list) {
            self.multi.println(line)?;
        }
        self.changes.began();
        self.drop_others(list);
        for pull in list.pulls.iter().filter(|pull| shown(pull)) {
            let total = pull.progress.as_ref().map_or(0, |progress| progress.bytes_total);
            let done = pull.progress.as_ref().map_or(0, |progress| progress.bytes_done);
            let bar = self.bar(pull);
            bar.set_style(style(if total > 0 { KNOWN } else { UNKNOWN }));
            bar.set_position(percent(done, total));
            bar.set_message(message(pull));
        }
        self.summary.set_message(below(list));
        self.summary.tick();
        Ok(())
    }

    fn note(&mut self, text: &str) -> io::Result<()> {
        for (_, bar) in std::mem::take(&mut self.pulls) {
            bar.finish_and_clear();
            self.multi.remove(&bar);
        }
        self.summary.set_message("");
        self.multi.println(text)
    }

    fn end(&mut self) {
        // The bars are useful only while they change. If the terminal is gone, there is nothing to clear.
        let _ = self.multi.clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    // An invalid template would still leave a usable line.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner());
    style.progress_chars("━╸ ")
}

/// Pulls that have, or had, a slot.
fn shown(pull: &pb::Pull) -> bool {
    use pb::PullState as S;
    matches!(pull.state(), S::Running | S::RunningPresent | S::WaitingForRuntime | S::Abandoned)
}

/// The end of a long name is more informative than its beginning.
fn label(name: &str) -> String {
    const WIDTH: usize = 30;
    let name = image(name);
    let length = name.chars().count();
    if length <= WIDTH {
        return name;
    }
    let end: String = name.chars().skip(length - (WIDTH - 1)).collect();
    format!("…{end}")
}

fn message(pull: &pb::Pull) -> String {
    let mut parts = Vec::new();
    if pull.state() != pb::PullState::Running {
        parts.push(state(pull));
    }
    parts.extend(pull.progress.as_ref().map(progress).filter(|text| !text.is_empty()));
    if parts.is_empty() {
        parts.push("running".into());
    }
    if pull.attempts > 1 {
        parts.push(format!("attempt {}", pull.attempts));
    }
    if pull.resumed {
        parts.push("resumed".into());
    }
    parts.join("  ")
}

fn below(list: &pb::PullList) -> String {
    let waiting = list.pulls.iter().filter(|pull| pull.position > 0);
    let next: Vec<String> = waiting.take(NEXT).map(|pull| label(&pull.image)).collect();
    match next.is_empty() {
        true => summary(list),
        false => format!("{}; next: {}", summary(list), next.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_parse() {
        for template in [KNOWN, UNKNOWN, SUMMARY] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }

    #[test]
    fn labels_fit() {
        assert_eq!(label("a/b:1"), "a/b:1");
        let long = label(&format!("registry.example/{}/worker:2026", "x".repeat(60)));
        assert_eq!(long.chars().count(), 30);
        assert!(long.starts_with('…') && long.ends_with("/worker:2026"), "{long}");
    }

    #[test]
    fn messages_and_the_line_below() {
        use pb::PullState as S;
        let pull =
            pb::Pull { state: S::WaitingForRuntime.into(), attempts: 2, resumed: true, ..Default::default() };
        assert_eq!(message(&pull), "waiting for runtime  attempt 2  resumed");
        assert_eq!(message(&pb::Pull { state: S::Running.into(), ..Default::default() }), "running");
        let queued =
            |position: u32| pb::Pull { image: format!("q/{position}"), position, ..Default::default() };
        let list = pb::PullList {
            queued: 5,
            oldest_wait_ms: 61_000,
            callers: 1,
            pulls: (1..=5).map(queued).collect(),
            runtime_health: "up".into(),
            ..Default::default()
        };
        let expected =
            "0 running, no limit, 5 queued (oldest 1m01s), 1 caller, runtime up; next: q/1, q/2, q/3";
        assert_eq!(below(&list), expected);
    }
}
