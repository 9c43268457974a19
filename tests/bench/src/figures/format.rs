//! Numbers as text.
//!
//! Owns: rounding, units, ratios. In: figures. Out: text for chart and table.

use super::Measured;
use super::catalogue::{Target, Unit};

/// `value` rounded to this number of significant digits.
pub(super) fn significant(value: f64, digits: usize) -> f64 {
    // A decimal exponent rounds the decimal digits themselves; multiplying would add binary errors.
    format!("{value:.*e}", digits.saturating_sub(1)).parse().unwrap_or(value)
}

/// `8.5 s` for 8,500 ms.
fn amount(value: f64, unit: Unit) -> String {
    let (value, unit) = match unit {
        Unit::Count => return format!("{value}"),
        Unit::Microseconds if value >= 10_000.0 => (value / 1e3, Unit::Milliseconds),
        Unit::Milliseconds if value >= 1_000.0 => (value / 1e3, Unit::Seconds),
        unit => (value, unit),
    };
    format!("{} {}", significant(value, 4), unit.name())
}

pub(super) fn keelson(figure: &Measured) -> String {
    amount(figure.keelson, figure.key.definition().unit)
}

/// `kube-proxy 8.5 s`; None without a peer.
pub(super) fn peer(figure: &Measured) -> Option<String> {
    let definition = figure.key.definition();
    Some(format!("{} {}", definition.peer?, amount(figure.peer?, definition.unit)))
}

/// `0.45`, and `1/167` for what is below a tenth.
pub(super) fn ratio(ratio: f64) -> String {
    if ratio >= 0.1 { format!("{ratio:.2}") } else { format!("1/{:.0}", significant(1.0 / ratio, 3)) }
}

/// The largest value that meets the target: `25 ms`, or `ratio 0.5`.
pub(super) fn target(figure: &Measured) -> Option<String> {
    let definition = figure.key.definition();
    Some(match definition.target? {
        Target::Value(most) => amount(most, definition.unit),
        Target::Ratio(most) => format!("ratio {most}"),
    })
}
