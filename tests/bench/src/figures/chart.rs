//! The chart: ratios to the peer, as SVG.
//!
//! Owns: the picture. In: the figures that have a peer. Out: SVG without scripts, fonts or outside references, with the
//! same bytes for the same figures. A bar begins at 1, where both are equal; the axis is logarithmic. The background is
//! part of it, so that it is readable on any page, and is dark where the reader prefers that.

use std::fmt::Write as _;

use super::{Measured, format};

const WIDTH: f64 = 980.0;
/// Left edge of names.
const NAMES: f64 = 20.0;
/// Edges of the axis.
const LEFT: f64 = 372.0;
const RIGHT: f64 = 648.0;
/// Left edges of ratios and values.
const RATIOS: f64 = 664.0;
const VALUES: f64 = 734.0;
/// Heights of the title with the axis, a line, and the space at the end.
const HEAD: f64 = 96.0;
const LINE: f64 = 24.0;
const FOOT: f64 = 46.0;

const STYLE: &str = "\
.page { fill: #ffffff; stroke: #d1d9e0 }
text { fill: #1f2328; font: 13px sans-serif }
.title { font-size: 17px; font-weight: bold }
.part, .ratio { font-weight: bold }
.muted { fill: #59636e }
.grid { stroke: #d1d9e0 }
.equal { stroke: #59636e; stroke-width: 2 }
.less { fill: #0969da }
.more { fill: #bc4c00 }
.target { stroke: #1f2328; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; stroke: #3d444d }
text { fill: #f0f6fc }
.muted { fill: #9198a1 }
.grid { stroke: #3d444d }
.equal { stroke: #9198a1 }
.less { fill: #4493f8 }
.more { fill: #db6d28 }
.target { stroke: #f0f6fc }
}
";

/// A logarithmic axis of ratios.
struct Axis {
    /// The exponent of ten at its left end, at most -1.
    low: i32,
    /// The ratio at its right end: 2, 5, 10, 20...
    high: f64,
}

impl Axis {
    fn of(ratios: impl Iterator<Item = f64>) -> Self {
        let (mut axis, mut at) = (Self { low: -1, high: 2.0 }, 0_usize);
        for ratio in ratios {
            while 10_f64.powi(axis.low) > ratio && axis.low > -12 {
                axis.low -= 1;
            }
            while axis.high < ratio && at < 36 {
                axis.high *= [2.5, 2.0, 2.0][at % 3];
                at += 1;
            }
        }
        axis
    }

    fn x(&self, ratio: f64) -> f64 {
        let (low, high) = (f64::from(self.low), self.high.log10());
        let share = (ratio.log10() - low) / (high - low);
        LEFT + (RIGHT - LEFT) * share.clamp(0.0, 1.0)
    }
}

/// The document, built line by line.
struct Svg(String);

impl Svg {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{line}");
    }

    fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        self.line(format_args!("<text class=\"{class}\" x=\"{x:.0}\" y=\"{y:.0}\">{}</text>", escape(text)));
    }

    fn vertical(&mut self, class: &str, x: f64, from: f64, to: f64) {
        self.line(format_args!(
            "<line class=\"{class}\" x1=\"{x:.1}\" y1=\"{from:.0}\" x2=\"{x:.1}\" y2=\"{to:.0}\"/>"
        ));
    }
}

pub(super) fn svg(figures: &[Measured]) -> String {
    let shown: Vec<(&Measured, f64)> =
        figures.iter().filter_map(|figure| Some((figure, figure.ratio()?))).collect();
    let targets = shown.iter().filter_map(|(figure, _)| figure.target_ratio());
    let axis = Axis::of(shown.iter().map(|(_, ratio)| *ratio).chain(targets));
    let mut parts: Vec<_> = shown.iter().map(|(figure, _)| figure.key.definition().part).collect();
    parts.dedup();
    let bottom = HEAD + LINE * (shown.len() as f64 + 1.25 * parts.len() as f64);
    let mut svg = head(bottom + FOOT);
    draw_axis(&mut svg, &axis, bottom);
    let (mut y, mut part) = (HEAD, "");
    for (figure, ratio) in shown {
        let definition = figure.key.definition();
        if definition.part != part {
            part = definition.part;
            y += 1.25 * LINE;
            svg.text("part", NAMES, y - 7.0, part);
        }
        draw_bar(&mut svg, &axis, y, figure, ratio);
        y += LINE;
    }
    svg.text(
        "muted",
        NAMES,
        bottom + 28.0,
        "Vertical mark: target. Figures without a peer are in the table only.",
    );
    svg.0.push_str("</svg>\n");
    svg.0
}

fn head(height: f64) -> Svg {
    let mut svg = Svg(String::new());
    svg.line(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{WIDTH:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\">"
    ));
    svg.line(format_args!("<title>Keelson beside its peers</title>"));
    svg.line(format_args!("<style>\n{STYLE}</style>"));
    svg.line(format_args!(
        "<rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"6\"/>",
        WIDTH - 1.0,
        height - 1.0
    ));
    svg.text("title", NAMES, 32.0, "Keelson beside its peers, each measured in the same run");
    svg.text(
        "muted",
        NAMES,
        54.0,
        "Ratio of Keelson's value to the peer's, logarithmic. A bar to the left of 1: Keelson takes less.",
    );
    svg
}

fn draw_axis(svg: &mut Svg, axis: &Axis, bottom: f64) {
    let decades = (axis.low..0).map(|exponent| (10_f64.powi(exponent), "grid"));
    for (ratio, class) in decades.chain([(axis.high, "grid"), (1.0, "equal")]) {
        let label = match ratio {
            ratio if ratio < 1.0 => format!("1/{:.0}", 1.0 / ratio),
            ratio => format!("{ratio:.0}"),
        };
        let x = axis.x(ratio);
        svg.vertical(class, x, HEAD - 8.0, bottom);
        svg.line(format_args!(
            "<text class=\"muted\" x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{label}</text>",
            HEAD - 14.0
        ));
    }
}

fn draw_bar(svg: &mut Svg, axis: &Axis, y: f64, figure: &Measured, ratio: f64) {
    let (from, to) = (axis.x(ratio.min(1.0)), axis.x(ratio.max(1.0)));
    let class = if ratio <= 1.0 { "less" } else { "more" };
    svg.text("name", NAMES, y + 13.0, figure.key.definition().name);
    svg.line(format_args!(
        "<rect class=\"{class}\" x=\"{from:.1}\" y=\"{:.0}\" width=\"{:.1}\" height=\"12\"/>",
        y + 3.0,
        // Equal values have a visible bar too.
        (to - from).max(1.0)
    ));
    if let Some(target) = figure.target_ratio() {
        svg.vertical("target", axis.x(target), y, y + 18.0);
    }
    svg.text("ratio", RATIOS, y + 13.0, &format::ratio(ratio));
    let values = format::peer(figure).map(|peer| format!("{}, {peer}", format::keelson(figure)));
    svg.text("muted", VALUES, y + 13.0, &values.unwrap_or_default());
}

/// `text` as character data of XML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
