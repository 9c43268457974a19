//! Amounts of resources in the API's notation.
//!
//! Owns: [`Amount`], a number with the API's suffixes (`resource.Quantity`): exact, down to a billionth. In: texts of
//! the settings and of the Node; numbers of the host. Out: the canonical text, so that equal amounts are equal texts
//! and an unchanged status is not written.

use std::{cmp::Ordering, fmt, str::FromStr};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const ONE: i128 = 1_000_000_000;
/// Maximum amount of the API: 2^63-1. Larger ones are reduced to it, as in the API.
const MAX_UNITS: i128 = (i64::MAX as i128) * ONE;
/// Longer texts are not amounts.
const MAX_TEXT_LEN: usize = 64;

const DECIMAL: [(&str, i32); 9] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Suffixes {
    /// `m`, `k`, `M`...
    #[default]
    Decimal,
    /// `Ki`, `Mi`...
    Binary,
    /// `e3`, `e6`...
    Exponent,
}

/// Compares by value: `1Gi` equals `1024Mi`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Amount {
    billionths: i128,
    suffixes: Suffixes,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity; write a number with an optional suffix, such as 100m, 2, 500M or 1Gi")]
pub struct AmountError {
    /// Truncated if it is long.
    pub text: String,
}

impl Amount {
    /// Written with `Ki`, `Mi`...
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self::of(i128::from(bytes), Suffixes::Binary)
    }

    /// Written with `k`, `M`...
    #[must_use]
    pub fn count(count: u64) -> Self {
        Self::of(i128::from(count), Suffixes::Decimal)
    }

    fn of(units: i128, suffixes: Suffixes) -> Self {
        Self { billionths: units.saturating_mul(ONE).min(MAX_UNITS), suffixes }
    }

    /// The difference, at least 0.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self { billionths: self.billionths.saturating_sub(other.billionths).max(0), ..self }
    }

    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self {
            billionths: self.billionths.saturating_add(other.billionths).clamp(-MAX_UNITS, MAX_UNITS),
            ..self
        }
    }

    #[must_use]
    pub fn saturating_mul(self, factor: u32) -> Self {
        Self {
            billionths: self.billionths.saturating_mul(factor.into()).clamp(-MAX_UNITS, MAX_UNITS),
            ..self
        }
    }

    #[must_use]
    pub fn is_positive(self) -> bool {
        self.billionths > 0
    }

    /// In whole units, rounded up as in the API; 0 if negative.
    #[must_use]
    pub fn units(self) -> u64 {
        let units = self.billionths.max(0);
        u64::try_from(units / ONE + i128::from(units % ONE > 0)).unwrap_or(u64::MAX)
    }

    /// The same text for equal amounts, whatever their suffixes.
    #[must_use]
    pub fn plain(self) -> String {
        Self { suffixes: Suffixes::Decimal, ..self }.to_string()
    }

    #[must_use]
    pub fn quantity(self) -> Quantity {
        Quantity(self.to_string())
    }
}

impl PartialEq for Amount {
    fn eq(&self, other: &Self) -> bool {
        self.billionths == other.billionths
    }
}

impl Eq for Amount {}

impl PartialOrd for Amount {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Amount {
    fn cmp(&self, other: &Self) -> Ordering {
        self.billionths.cmp(&other.billionths)
    }
}

/// Whether two texts are equal amounts; texts that are not amounts are compared as texts.
#[must_use]
pub(super) fn same(one: &Quantity, other: &Quantity) -> bool {
    one.0 == other.0
        || matches!((one.0.parse::<Amount>(), other.0.parse::<Amount>()), (Ok(one), Ok(other)) if one == other)
}

/// A power of two or of ten.
enum Scale {
    Two(u32),
    Ten(i32),
}

fn scale(suffix: &str) -> Option<(Scale, Suffixes)> {
    if suffix.is_empty() {
        return Some((Scale::Ten(0), Suffixes::Decimal));
    }
    if let Some((_, power)) = BINARY.iter().find(|(name, _)| *name == suffix) {
        return Some((Scale::Two(*power), Suffixes::Binary));
    }
    if let Some((_, power)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        return Some((Scale::Ten(*power), Suffixes::Decimal));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    Some((Scale::Ten(exponent.parse().ok()?), Suffixes::Exponent))
}

/// `digits` (a number without its point) times the scale and ten to the `-fraction`, in billionths, rounded up.
fn billionths(digits: i128, fraction: i32, scale: &Scale) -> i128 {
    let (two, mut ten) = match scale {
        Scale::Two(power) => (*power, 0),
        Scale::Ten(power) => (0, *power),
    };
    ten = ten.saturating_sub(fraction).saturating_add(9);
    let mut value = digits.checked_mul(1 << two).unwrap_or(i128::MAX);
    while ten > 0 && value != 0 {
        let Some(more) = value.checked_mul(10) else { return MAX_UNITS };
        value = more;
        ten -= 1;
    }
    let mut rest = false;
    while ten < 0 && value != 0 {
        rest |= value % 10 != 0;
        value /= 10;
        ten += 1;
    }
    (value + i128::from(rest)).min(MAX_UNITS)
}

impl FromStr for Amount {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let wrong = || AmountError { text: text.chars().take(MAX_TEXT_LEN).collect() };
        if text.len() > MAX_TEXT_LEN {
            return Err(wrong());
        }
        let (negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (units, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (units.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(wrong());
        }
        let (scale, suffixes) = scale(suffix).ok_or_else(wrong)?;
        // Beyond 30 digits the value is at its bound, or the digit is far below a billionth of the smallest suffix.
        let digits = format!("{units}{fraction}");
        let digits = digits.trim_start_matches('0');
        let digits = if digits.is_empty() { 0 } else { digits.parse().unwrap_or(i128::MAX) };
        let places = i32::try_from(fraction.len()).unwrap_or(i32::MAX);
        let value = billionths(digits, places, &scale);
        Ok(Self { billionths: if negative { -value } else { value }, suffixes })
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.billionths;
        if value == 0 {
            return f.write_str("0");
        }
        // As in the API: small or fractional amounts take decimal suffixes.
        if self.suffixes == Suffixes::Binary && value % ONE == 0 && value.abs() >= 1024 * ONE {
            value /= ONE;
            let best = BINARY.iter().rev().find(|(_, power)| value % (1 << power) == 0);
            let (name, power) = best.copied().unwrap_or(("", 0));
            return write!(f, "{}{name}", value >> power);
        }
        let mut power = -9;
        while value % 1000 == 0 && power < 18 {
            value /= 1000;
            power += 3;
        }
        match (power, self.suffixes) {
            (0, _) => write!(f, "{value}"),
            (power, Suffixes::Exponent) => write!(f, "{value}e{power}"),
            (power, _) => {
                let name = DECIMAL.iter().find(|(_, of)| *of == power).map_or("", |(name, _)| *name);
                write!(f, "{value}{name}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn amount(text: &str) -> Amount {
        text.parse().expect("an amount")
    }

    #[test]
    fn amounts_print_as_the_api_server_prints_them() {
        for (text, printed) in [
            ("0", "0"),
            ("0Gi", "0"),
            ("4", "4"),
            ("4000m", "4"),
            ("3900m", "3900m"),
            ("0.1", "100m"),
            (".5", "500m"),
            ("5.", "5"),
            ("+7", "7"),
            ("-1500m", "-1500m"),
            ("110", "110"),
            ("4000", "4k"),
            ("1500", "1500"),
            ("100Mi", "100Mi"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("512Ki", "512Ki"),
            ("0.5Ki", "512"),
            ("1025Ki", "1025Ki"),
            ("1e3", "1e3"),
            ("1E3", "1e3"),
            ("12e-1", "1200e-3"),
            ("1E", "1E"),
            ("1u", "1u"),
            ("0.1n", "1n"),
            ("1234567890123", "1234567890123"),
            ("9223372036854775807", "9223372036854775807"),
            ("99999999999999999999999999", "9223372036854775807"),
            ("8Ei", "9223372036854775807"),
            ("1e400", "9223372036854775807e0"),
        ] {
            let printed = printed.strip_suffix("e0").unwrap_or(printed);
            assert_eq!(amount(text).to_string(), printed, "{text}");
        }
    }

    #[test]
    fn invalid_amounts_are_errors() {
        for text in ["", "m", "1.2.3", "1 Gi", "1gi", "Gi", "1e", "1Kii", "--1", "0x10", "1,5", "ein", "."] {
            let error = text.parse::<Amount>().expect_err(text);
            assert!(error.to_string().contains("such as 100m"), "{error}");
        }
        assert!("1".repeat(1000).parse::<Amount>().is_err());
    }

    #[test]
    fn amounts_compare_and_compute_by_value() {
        assert_eq!(amount("1Gi"), amount("1024Mi"));
        assert!(amount("100M") < amount("100Mi"));
        assert!(same(&Quantity("0.5".into()), &Quantity("500m".into())));
        assert!(
            !same(&Quantity("x".into()), &Quantity("y".into()))
                && same(&Quantity("x".into()), &Quantity("x".into()))
        );
        assert_eq!(amount("8Gi").saturating_sub(amount("100Mi")).to_string(), "8092Mi");
        assert_eq!(amount("1").saturating_sub(amount("2")).to_string(), "0");
        assert_eq!(amount("100m").saturating_add(amount("200m")).to_string(), "300m");
        assert_eq!((amount("1500m").units(), amount("-3").units()), (2, 0));
        assert_eq!(Amount::bytes(101_206_228_992).to_string(), "98834208Ki");
        assert_eq!(Amount::bytes(u64::MAX).to_string(), "9223372036854775807");
    }

    /// As `resource.Quantity`: BinarySI writes a number that 1024 does not divide without a suffix, and a number
    /// without a suffix is DecimalSI when it is parsed.
    #[test]
    fn bytes_without_a_suffix_are_read_back_as_decimal() {
        let bytes = Amount::bytes(316_920_183_895_741_000);
        assert_eq!(bytes.to_string(), "316920183895741000");
        assert_eq!(amount("316920183895741000").to_string(), "316920183895741k");
        assert!(
            same(&bytes.quantity(), &Quantity("316920183895741k".into())),
            "no change for the API server"
        );
    }

    proptest! {
        #[test]
        fn printed_amounts_parse_to_the_same_value(units in 0u64..=u64::MAX, milli in 0u64..1_000_000_000, binary: bool) {
            for amount in [
                if binary { Amount::bytes(units) } else { Amount::count(units) },
                format!("{milli}m").parse().expect("an amount"),
            ] {
                let text = amount.to_string();
                let again: Amount = text.parse().expect("an amount");
                prop_assert_eq!(again, amount, "{}", &text);
                let printed = again.to_string();
                // See `bytes_without_a_suffix_are_read_back_as_decimal`.
                if amount.suffixes != Suffixes::Binary || !text.ends_with(|c: char| c.is_ascii_digit()) {
                    prop_assert_eq!(&printed, &text);
                }
                let third: Amount = printed.parse().expect("an amount");
                prop_assert_eq!((third, third.to_string()), (amount, printed));
            }
        }

        #[test]
        fn nothing_panics(text in "[-+.0-9eEKMGTPkmunix]{0,70}") {
            let _ = text.parse::<Amount>().map(|amount| (amount.to_string(), amount.units()));
        }
    }
}
