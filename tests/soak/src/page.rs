//! Owns: the report page: one HTML file without scripts and without external resources. In: a timeline, and the report as text. Out:
//! a plot for each quantity, with the windows in which something was broken behind it, and violations as marks.

use crate::timeline::{Series, Timeline, Violation};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 120.0;
/// Left of a plot, for the numbers of its axis.
const LEFT: f64 = 56.0;
/// Points of a line. A plot has no more pixels.
const BUCKETS: usize = 480;
/// A line is interrupted where there is no value for this share of the run, and for at least [`LEAST_GAP`] seconds.
const GAP: f64 = 0.01;
const LEAST_GAP: f64 = 12.0;

/// Something was broken, in seconds of the run.
struct Band {
    what: String,
    from: f64,
    to: f64,
}

/// A part, and its values.
type Line<'a> = (String, &'a [(f64, f64)]);

pub(crate) fn render(title: &str, text: &str, timeline: &Timeline) -> String {
    let end = timeline.seconds(Instant::now()).max(1.0);
    let bands: Vec<Band> = timeline
        .windows()
        .iter()
        .map(|window| Band {
            what: format!("{:?}", window.what),
            from: timeline.seconds(window.from),
            to: window.to.map_or(end, |to| timeline.seconds(to)),
        })
        .collect();
    let violations = timeline.listed_violations();
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n",
        title = escaped(title)
    );
    let _ = writeln!(page, "<p>{}</p>", verdict(violations.len()));
    page += &list(&violations);
    page += &legend(&bands);
    page += &behind(end, &bands, &violations);
    for (quantity, lines) in by_quantity(&timeline.series()) {
        page += &plot(&quantity, &lines, end);
    }
    let _ = writeln!(page, "<h2>Report</h2>\n<pre>{}</pre>\n</body></html>", escaped(text));
    page
}

fn verdict(violations: usize) -> String {
    match violations {
        0 => "No violation.".to_owned(),
        n => format!("<b class=\"bad\">{n} violations.</b>"),
    }
}

fn list(violations: &[Violation]) -> String {
    let item = |one: &Violation| {
        let (invariant, what) = (escaped(&one.invariant), escaped(&one.what));
        format!("<li>{}: <b>{invariant}</b>: {what}</li>\n", clock(one.at_seconds))
    };
    match violations {
        [] => String::new(),
        some => format!("<ul>{}</ul>\n", some.iter().map(item).collect::<String>()),
    }
}

/// The plots by quantity, with the line of each part. First what the most parts have.
fn by_quantity(series: &Series) -> Vec<(String, Vec<Line<'_>>)> {
    let mut plots: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for (name, values) in series {
        let (part, quantity) = name.split_once(": ").unwrap_or(("", name));
        plots.entry(quantity.to_owned()).or_default().push((part.to_owned(), values.as_slice()));
    }
    let mut plots: Vec<_> = plots.into_iter().collect();
    plots.sort_by_key(|(_, lines)| std::cmp::Reverse(lines.len()));
    plots
}

fn kinds(bands: &[Band]) -> Vec<&str> {
    let mut kinds: Vec<_> = bands.iter().map(|band| band.what.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

fn hue(kinds: &[&str], what: &str) -> usize {
    kinds.iter().position(|kind| *kind == what).unwrap_or(0) * 360 / kinds.len().max(1)
}

fn legend(bands: &[Band]) -> String {
    let kinds = kinds(bands);
    let mut text = "<p class=\"legend\">broken on purpose: ".to_owned();
    for kind in &kinds {
        let count = bands.iter().filter(|band| band.what == *kind).count();
        let hue = hue(&kinds, kind);
        let _ = write!(text, "<span style=\"background:hsl({hue} 70% 60% / .5)\">{kind} {count}</span> ");
    }
    text + "<span class=\"mark\">violation</span></p>\n"
}

fn plot(quantity: &str, lines: &[Line<'_>], end: f64) -> String {
    let top = nice(lines.iter().flat_map(|(_, values)| *values).map(|(_, value)| *value).fold(0.0, f64::max));
    let x = |at: f64| LEFT + at / end * (WIDTH - LEFT);
    let y = |value: f64| HEIGHT - value / top * (HEIGHT - 6.0);
    let mut svg = format!("<h3>{}", escaped(quantity));
    for (n, (part, values)) in lines.iter().enumerate() {
        let last = values.last().map_or(0.0, |(_, value)| *value);
        let most = values.iter().map(|(_, value)| *value).fold(0.0, f64::max);
        let part = escaped(part);
        let _ = write!(
            svg,
            " <small class=\"line{n}\">{part}: last {}, most {}</small>",
            short(last),
            short(most)
        );
    }
    let _ = writeln!(svg, "</h3><svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">", HEIGHT + 16.0);
    svg += "<use href=\"#behind\"/>\n";
    for (share, value) in [(0.0, 0.0), (0.5, top / 2.0), (1.0, top)] {
        let at = y(share * top);
        let _ = writeln!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{WIDTH}\"/><text x=\"{}\" y=\"{:.1}\" class=\"value\">{}</text>",
            LEFT - 4.0,
            at + 4.0,
            short(value)
        );
    }
    let step = tick(end);
    for n in 0..=(end / step) as u32 {
        let at = f64::from(n) * step;
        let anchor = if n == 0 { "start" } else { "middle" };
        let (x, y, label) = (x(at).min(WIDTH - 22.0), HEIGHT + 13.0, clock(at));
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>");
    }
    for (n, (_, values)) in lines.iter().enumerate() {
        let mut path = String::new();
        for run in runs(&thinned(values, end), end) {
            for (index, (at, value)) in run.iter().enumerate() {
                let _ = write!(path, "{}{:.1} {:.1}", if index == 0 { "M" } else { "L" }, x(*at), y(*value));
            }
            // A line to itself, so that a single value is seen.
            path += "h1";
        }
        let _ = writeln!(svg, "<path class=\"line line{n}\" d=\"{path}\"/>");
    }
    svg + "</svg>\n"
}

/// Seconds between the labels of the time axis: at most eight fit.
fn tick(end: f64) -> f64 {
    const STEPS: [f64; 10] = [10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0];
    STEPS.into_iter().find(|step| end / step <= 8.0).unwrap_or(end / 8.0)
}

/// What is behind every plot: the windows in which something was broken, and the violations. Plots refer to it.
fn behind(end: f64, bands: &[Band], violations: &[Violation]) -> String {
    let x = |at: f64| LEFT + at / end * (WIDTH - LEFT);
    let mut svg =
        "<svg width=\"0\" height=\"0\" style=\"position:absolute\"><defs><g id=\"behind\">\n".to_owned();
    let kinds = kinds(bands);
    for band in bands {
        let (from, width) = (x(band.from), (x(band.to) - x(band.from)).max(1.0));
        let (hue, what, at) = (hue(&kinds, &band.what), &band.what, clock(band.from));
        let _ = writeln!(
            svg,
            "<rect x=\"{from:.1}\" y=\"0\" width=\"{width:.1}\" height=\"{HEIGHT}\" fill=\"hsl({hue} 70% 60%)\" \
             fill-opacity=\".3\"><title>{what} at {at}, {:.1} s</title></rect>",
            band.to - band.from
        );
    }
    for violation in violations {
        let at = x(violation.at_seconds);
        let _ = writeln!(
            svg,
            "<path class=\"violation\" d=\"M{at:.1} 0V{HEIGHT}\"><title>{}</title></path>",
            escaped(&violation.invariant)
        );
    }
    svg + "</g></defs></svg>\n"
}

/// The largest value of each bucket.
fn thinned(values: &[(f64, f64)], end: f64) -> Vec<(f64, f64)> {
    let mut thin: Vec<(usize, (f64, f64))> = Vec::new();
    for (at, value) in values {
        let bucket = (at / end * BUCKETS as f64) as usize;
        match thin.last_mut() {
            Some((last, (_, most))) if *last == bucket => *most = most.max(*value),
            _ => thin.push((bucket, (*at, *value))),
        }
    }
    thin.into_iter().map(|(_, point)| point).collect()
}

/// The parts between gaps.
fn runs(values: &[(f64, f64)], end: f64) -> Vec<Vec<(f64, f64)>> {
    // A quantity that is measured rarely has no gaps.
    let steps = values.windows(2).filter_map(|pair| Some(pair.get(1)?.0 - pair.first()?.0)).collect();
    let usual = crate::lives::median(steps).unwrap_or(0.0);
    let gap = (end * GAP).max(LEAST_GAP).max(usual * 3.0);
    let mut runs: Vec<Vec<(f64, f64)>> = Vec::new();
    for point in values {
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(|last| point.0 - last.0 <= gap) => run.push(*point),
            _ => runs.push(vec![*point]),
        }
    }
    runs
}

/// The end of an axis: 1, 2 or 5 times a power of ten.
fn nice(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(most.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|end| *end >= most).unwrap_or(most)
}

fn short(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        small if small < 0.1 => 4,
        small if small < 10.0 => 2,
        small if small < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// Time since the start of the run.
fn clock(seconds: f64) -> String {
    let whole = seconds as u64;
    format!("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const STYLE: &str = "\
:root{color-scheme:light dark;--line0:#0b62c4;--line1:#b3450c;--line2:#1c7c3c;--line3:#7b3fb5;--line4:#8a6d00;--line5:#00727a}\
@media(prefers-color-scheme:dark){:root{--line0:#6db1ff;--line1:#ff9a5c;--line2:#6ed38c;--line3:#c79bff;--line4:#e6c84b;--line5:#5cd5df}}\
body{font:14px/1.5 system-ui,sans-serif;max-width:980px;margin:1.5rem auto;padding:0 .75rem}\
h1{font-size:1.4rem}h3{font-size:1rem;margin:1rem 0 0}small{font-weight:normal;margin-left:.75rem}\
svg{width:100%;display:block}text{font-size:11px;fill:currentColor}.value{text-anchor:end}\
.grid{stroke:currentColor;stroke-opacity:.2;fill:none}.line{fill:none;stroke-width:1.2;stroke-linecap:round}\
.violation{stroke:#d00;stroke-width:1.5;stroke-dasharray:4 2}.bad{color:#d00}\
.legend span{padding:0 .4rem;margin-right:.2rem;border-radius:3px;white-space:nowrap}.mark{border:1px dashed #d00}\
small.line0{color:var(--line0)}small.line1{color:var(--line1)}small.line2{color:var(--line2)}\
small.line3{color:var(--line3)}small.line4{color:var(--line4)}small.line5{color:var(--line5)}\
path.line0{stroke:var(--line0)}path.line1{stroke:var(--line1)}path.line2{stroke:var(--line2)}\
path.line3{stroke:var(--line3)}path.line4{stroke:var(--line4)}path.line5{stroke:var(--line5)}\
pre{white-space:pre-wrap;overflow-wrap:anywhere}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_ends_at_a_round_number() {
        let ends = [0.0, 0.003, 1.0, 1.1, 4.0, 37.0, 640.0].map(nice).map(short);
        assert_eq!(ends, ["1.00", "0.0050", "1.00", "2.00", "5.00", "50.0", "1000"]);
    }

    #[test]
    fn a_line_is_interrupted_where_values_are_missing() {
        let values: Vec<_> =
            (0..100).filter(|n| !(40..60).contains(n)).map(|n| (f64::from(n), 1.0)).collect();
        assert_eq!(runs(&values, 100.0).iter().map(Vec::len).collect::<Vec<_>>(), [40, 40]);
        let rare: Vec<_> = (0..5).map(|n| (f64::from(n) * 60.0, 1.0)).collect();
        assert_eq!(runs(&rare, 300.0).len(), 1);
    }

    #[test]
    fn a_thin_line_keeps_the_largest_values() {
        let values: Vec<_> = (0..48_000).map(|n| (f64::from(n), if n == 777 { 9.0 } else { 1.0 })).collect();
        let thin = thinned(&values, 48_000.0);
        assert_eq!(thin.len(), BUCKETS);
        assert_eq!(thin.iter().filter(|(_, value)| *value > 8.0).count(), 1);
    }

    #[test]
    fn a_time_axis_has_few_labels() {
        for end in [30.0, 200.0, 3600.0, 7500.0, 90_000.0, 900_000.0] {
            let labels = end / tick(end);
            assert!((2.0..=8.0).contains(&labels), "{labels} for {end} s");
        }
    }

    #[test]
    fn texts_are_escaped_and_times_are_read() {
        assert_eq!(escaped("<a \"b\" & c>"), "&lt;a &quot;b&quot; &amp; c&gt;");
        assert_eq!(clock(7325.9), "2:02:05");
    }
}
