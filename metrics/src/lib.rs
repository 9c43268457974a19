//! Declaration of metric families.
//!
//! Owns: [`families!`], which generates a struct, its `Default` and its registration from one line per family, and
//! the types and labels that several crates share; [`ProcessMetrics`]. In: declarations. Out: a [`Registry`] that a
//! service encodes.

mod process;

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry, Unit},
};

pub use process::ProcessMetrics;

/// For seconds and other fractions.
pub type FloatGauge = Gauge<f64, AtomicU64>;
/// Created with `Family::new_with_constructor`.
pub type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;

/// Label `result`: a closed set of words in snake case, or the kinds of API errors.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    pub result: &'static str,
}

/// Label `reason`: a closed set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    pub reason: &'static str,
}

/// Declares metric families. A line is `field: type = value, "name" Unit, "help";`. The value is optional if the type
/// has a default; the unit is optional. The help is also the documentation of the field. Fields in `with { }` are
/// state that is not exposed.
///
/// ```
/// use keelson_metrics::families;
/// use prometheus_client::{metrics::{counter::Counter, histogram::Histogram}, registry::Registry};
///
/// families! {
///     /// Metrics of the oven. Clones share their values.
///     #[derive(Debug, Clone)]
///     pub struct OvenMetrics;
///     pub fn register;
///     "keelson_oven" {
///         pub loaves: Counter, "loaves", "Loaves baked";
///         pub duration: Histogram = Histogram::new([60.0, 600.0]), "duration" Seconds, "Duration of a batch";
///     }
/// }
/// let (metrics, mut registry) = (OvenMetrics::default(), Registry::default());
/// metrics.loaves.inc();
/// metrics.register(&mut registry);
/// let mut text = String::new();
/// prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
/// assert!(text.contains("# HELP keelson_oven_loaves Loaves baked.\n"));
/// assert!(text.contains("keelson_oven_loaves_total 1\n"));
/// assert!(text.contains("# UNIT keelson_oven_duration_seconds seconds\n"));
/// ```
#[macro_export]
macro_rules! families {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident;
        $register_vis:vis fn $register:ident;
        $($prefix:literal {
            $($field_vis:vis $field:ident: $ty:ty $(= $value:expr)?, $metric:literal $($unit:ident)?, $help:literal;)+
        })+
        $(with { $($other_vis:vis $other:ident: $other_ty:ty,)+ })?
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($(#[doc = $help] $field_vis $field: $ty,)+)+
            $($($other_vis $other: $other_ty,)+)?
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($($field: $crate::family_value!($($value)?),)+)+
                    $($($other: <$other_ty>::default(),)+)?
                }
            }
        }

        impl $name {
            $register_vis fn $register(&self, registry: &mut ::prometheus_client::registry::Registry) {
                $({
                    let families = registry.sub_registry_with_prefix($prefix);
                    $($crate::enter(
                        families, $metric, $help, None$(.or(Some(::prometheus_client::registry::Unit::$unit)))?,
                        self.$field.clone(),
                    );)+
                })+
            }

            /// One line per family: name, kind and help.
            #[cfg(test)]
            fn list() -> String {
                let mut list = String::new();
                $($(list.push_str(&$crate::describe(
                    $prefix, $metric, None$(.or(Some(::prometheus_client::registry::Unit::$unit)))?,
                    stringify!($ty), $help,
                ));)+)+
                list
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! family_value {
    () => {
        Default::default()
    };
    ($value:expr) => {
        $value
    };
}

#[doc(hidden)]
pub fn enter(registry: &mut Registry, name: &str, help: &str, unit: Option<Unit>, family: impl Metric) {
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, family),
        None => registry.register(name, help, family),
    }
}

/// One line of the list of families: name, kind and help. Tests compare the list, because names are an interface.
#[doc(hidden)]
#[must_use]
pub fn describe(prefix: &str, name: &str, unit: Option<Unit>, kind: &str, help: &str) -> String {
    let kind = ["Histogram", "Counter"].into_iter().find(|known| kind.contains(known)).unwrap_or("Gauge");
    let unit = unit.map(|unit| format!("_{}", unit.as_str())).unwrap_or_default();
    format!("{prefix}_{name}{unit} {}: {help}.\n", kind.to_lowercase())
}
