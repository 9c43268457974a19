//! Sizes in bytes, written as Kubernetes quantities: `2Gi`, `500M`, `1048576`.
//!
//! Owns: [`ByteSize`]. In: a number, or text with one of the suffixes of resource.Quantity. Out: bytes; the canonical text
//! has the largest binary suffix that divides the value.

use std::fmt;

use serde_json::Value as Json;

use crate::error::{Fault, quote};
use crate::setting_type::{Raw, Setting, Within};

const SUFFIXES: [(&str, u64); 8] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl ByteSize {
    pub(crate) const fn mebibytes(count: u64) -> Self {
        Self(count << 20)
    }

    pub(crate) const fn gibibytes(count: u64) -> Self {
        Self(count << 30)
    }

    fn parse(text: &str) -> Option<Self> {
        let (digits, factor) = SUFFIXES
            .iter()
            .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
            .unwrap_or((text, 1));
        // Neither sign nor fraction: `parse` alone would accept "+1".
        let is_integer = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        is_integer.then(|| digits.parse::<u64>().ok()?.checked_mul(factor)).flatten().map(Self)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary =
            SUFFIXES[..4].iter().rev().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor));
        match binary {
            Some((suffix, factor)) => write!(f, "{}{suffix}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Setting for ByteSize {
    type Rule = Within<Self>;

    fn read(raw: &Raw, rule: &Self::Rule) -> Result<Self, Fault> {
        const EXPECTED: &str = "a size in bytes, such as \"2Gi\" or 0";
        let (size, value) = match raw {
            Raw::Int(number) => (u64::try_from(*number).ok().map(Self), number.to_string()),
            Raw::Text(text) | Raw::Untyped(text) => match Self::parse(text) {
                Some(size) => (Some(size), quote(text)),
                None => return Err(raw.wrong(EXPECTED)),
            },
            _ => return Err(raw.wrong(EXPECTED)),
        };
        size.filter(|size| rule.admits(size))
            .ok_or_else(|| Fault::OutOfRange { value, allowed: rule.words(ToString::to_string) })
    }

    fn show(&self) -> Json {
        Json::from(self.to_string())
    }

    fn describe(rule: &Self::Rule) -> String {
        format!("size in bytes, {}", rule.words(ToString::to_string))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting_type::zero_or;

    fn read(raw: &Raw) -> Result<u64, Fault> {
        ByteSize::read(raw, &zero_or("off", ByteSize::mebibytes(1), ByteSize::gibibytes(1024)))
            .map(|size| size.0)
    }

    #[test]
    fn sizes_are_quantities() {
        let text = |text: &str| read(&Raw::Text(text.into())).ok();
        assert_eq!(text("2Gi"), Some(2 << 30));
        assert_eq!(text("1500Mi"), Some(1500 << 20));
        assert_eq!(text("5M"), Some(5_000_000));
        assert_eq!(text("1048576"), Some(1 << 20));
        assert_eq!(read(&Raw::Int(0)).ok(), Some(0));
        for wrong in ["2GB", "Gi", "-1Gi", "+1Gi", "1.5Gi", "99999999999999Ti", "1Ki", ""] {
            assert_eq!(text(wrong), None, "{wrong}");
        }
        assert_eq!(read(&Raw::Int(-1)).ok(), None);
    }

    #[test]
    fn the_canonical_text_reads_back() {
        for (bytes, shown) in [(0, "0"), (2 << 30, "2Gi"), (1500 << 20, "1500Mi"), (5_000_000, "5000000")] {
            assert_eq!(ByteSize(bytes).to_string(), shown);
            assert_eq!(ByteSize::parse(shown), Some(ByteSize(bytes)));
        }
    }
}
