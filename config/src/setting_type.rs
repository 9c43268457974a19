//! How a setting is read from a layer, described and shown.
//!
//! Owns: [`Setting`], and [`Text`] for values that are written as one text. In: a layer's value ([`Raw`]). Out: the
//! value, or a fault with a correction.

use std::fmt::Display;

use serde_json::Value as Json;

use crate::error::{Fault, quote};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Raw {
    Bool(bool),
    Int(i64),
    /// Text that the source marked as text.
    Text(String),
    /// Text of a source without types (environment, flags): the setting decides its type.
    Untyped(String),
    List(Vec<String>),
    /// Something that no setting takes; the text names it in an error.
    Other(&'static str),
}

impl From<Json> for Raw {
    fn from(value: Json) -> Self {
        match value {
            Json::Bool(is) => Self::Bool(is),
            Json::Number(number) => {
                number.as_i64().map_or(Self::Other("a number with a fraction"), Self::Int)
            }
            Json::String(text) => Self::Text(text),
            Json::Array(items) => {
                let texts: Option<_> = items.iter().map(|item| item.as_str().map(str::to_owned)).collect();
                texts.map_or(Self::Other("a list with a value that is not a string"), Self::List)
            }
            Json::Object(_) => Self::Other("an object"),
            Json::Null => Self::Other("nothing"),
        }
    }
}

impl Raw {
    pub(crate) fn wrong(&self, expected: impl Into<String>) -> Fault {
        let found = match self {
            Self::Bool(b) => format!("{b}"),
            Self::Int(i) => format!("the number {i}"),
            Self::Text(t) => format!("the string {}", quote(t)),
            Self::Untyped(t) => quote(t),
            Self::List(_) => "a list".into(),
            Self::Other(what) => (*what).into(),
        };
        Fault::WrongType { expected: expected.into(), found }
    }

    pub(crate) fn text(&self, expected: &str) -> Result<&str, Fault> {
        match self {
            Self::Text(t) | Self::Untyped(t) => Ok(t),
            _ => Err(self.wrong(expected)),
        }
    }

    /// The non-empty texts of a list. Sources without lists separate items with commas, which no item contains.
    pub(crate) fn texts(&self, expected: &str) -> Result<impl Iterator<Item = &str>, Fault> {
        let texts: Vec<&str> = match self {
            Self::List(texts) => texts.iter().map(String::as_str).collect(),
            _ => self.text(expected)?.split(',').collect(),
        };
        Ok(texts.into_iter().map(str::trim).filter(|text| !text.is_empty()))
    }
}

pub(crate) trait Setting: Sized {
    /// What narrows the type for one key.
    type Rule;

    fn read(raw: &Raw, rule: &Self::Rule) -> Result<Self, Fault>;

    /// The canonical form, which [`Setting::read`] reads back: a bool, an integer, a text or a list of texts.
    fn show(&self) -> Json;

    /// Type and bounds, for the reference.
    fn describe(rule: &Self::Rule) -> String;
}

/// The rule of a setting without bounds.
pub(crate) struct Any;

/// Bounds, and the meaning of zero if it has one.
pub(crate) struct Within<T> {
    min: T,
    max: T,
    zero: Option<&'static str>,
}

pub(crate) const fn within<T>(min: T, max: T) -> Within<T> {
    Within { min, max, zero: None }
}

/// Zero, with this meaning, or a value within the bounds.
pub(crate) const fn zero_or<T>(zero: &'static str, min: T, max: T) -> Within<T> {
    Within { min, max, zero: Some(zero) }
}

impl<T: PartialOrd + Default> Within<T> {
    pub(crate) fn admits(&self, value: &T) -> bool {
        (self.min <= *value && *value <= self.max) || (self.zero.is_some() && *value == T::default())
    }

    pub(crate) fn words<D: Display>(&self, show: impl Fn(&T) -> D) -> String {
        let range = format!("{} to {}", show(&self.min), show(&self.max));
        match self.zero {
            Some(meaning) => format!("{range}, or {} for {meaning}", show(&T::default())),
            None => range,
        }
    }
}

/// A value that is written as one text. `T`, `Option<T>` (empty text: `None`) and `Vec<T>` are then settings.
pub(crate) trait Text: Sized {
    /// Meaning of the empty text of an `Option`.
    const EMPTY: &'static str = "";

    /// The type in words; in the plural if it is used in lists.
    fn kind() -> String;

    /// What an error asks for, with an example.
    fn expected() -> String;

    fn parse(text: &str) -> Result<Self, Fault>;

    fn write(&self) -> String;
}

/// Implements [`Text`] for a type with `Display`.
macro_rules! text {
    ($ty:ty, $kind:literal, $expected:literal, $parse:expr $(, $empty:literal)?) => {
        impl crate::setting_type::Text for $ty {
            $(const EMPTY: &'static str = $empty;)?

            fn kind() -> String {
                $kind.into()
            }

            fn expected() -> String {
                $expected.into()
            }

            fn parse(text: &str) -> Result<Self, Fault> {
                $parse(text)
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }
    };
}
pub(crate) use text;

impl<T: Text> Setting for T {
    type Rule = Any;

    fn read(raw: &Raw, _: &Any) -> Result<Self, Fault> {
        T::parse(raw.text(&T::expected())?)
    }

    fn show(&self) -> Json {
        self.write().into()
    }

    fn describe(_: &Any) -> String {
        T::kind()
    }
}

impl<T: Text> Setting for Option<T> {
    type Rule = Any;

    fn read(raw: &Raw, _: &Any) -> Result<Self, Fault> {
        let text = raw.text(&format!("{}, or \"\"{}", T::expected(), T::EMPTY))?;
        if text.trim().is_empty() { Ok(None) } else { T::parse(text).map(Some) }
    }

    fn show(&self) -> Json {
        self.as_ref().map(T::write).unwrap_or_default().into()
    }

    fn describe(_: &Any) -> String {
        format!("{}, or \"\"{}", T::kind(), T::EMPTY)
    }
}

impl<T: Text> Setting for Vec<T> {
    type Rule = Any;

    fn read(raw: &Raw, _: &Any) -> Result<Self, Fault> {
        raw.texts(&format!("a list of {}", T::expected()))?.map(T::parse).collect()
    }

    fn show(&self) -> Json {
        self.iter().map(T::write).collect()
    }

    fn describe(_: &Any) -> String {
        format!("list of {}; as text, comma-separated", T::kind())
    }
}
