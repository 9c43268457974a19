//! What the table of settings expands to.
//!
//! Owns: the macro `settings!`. In: rows of the table, and the names that `settings.rs` imports. Out: a struct for each
//! section, `Settings`, and the lists of sections and keys.

macro_rules! is_live {
    (live) => {
        true
    };
    (restart) => {
        false
    };
}

macro_rules! settings {
    ($(
        $(#[doc = $section_doc:literal])+
        $section:ident: $Section:ident {
            $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $default:expr, $rule:expr, $live:ident; )+
        }
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $Section { $( $(#[doc = $doc])+ pub $field: $ty, )+ }

            impl Default for $Section {
                fn default() -> Self {
                    Self { $($field: $default,)+ }
                }
            }
        )+

        /// Checked settings.
        ///
        /// `Settings::default()` holds the defaults; [`load`](crate::load) replaces its empty node name with the host
        /// name.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Settings {
            $( $(#[doc = $section_doc])+ pub $section: $Section, )+
            pub feature_gates: FeatureGates,
        }

        static SECTIONS: LazyLock<Vec<Section>> = LazyLock::new(|| vec![
            $( Section { name: stringify!($section), doc: join(&[$($section_doc),+]) }, )+
            Section { name: GATES_SECTION, doc: GATES_DOC.into() },
        ]);

        static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| vec![$($(
            Key {
                path: concat!(stringify!($section), ".", stringify!($field)),
                section: stringify!($section),
                name: stringify!($field),
                kind: <$ty as Setting>::describe(&$rule),
                default: <$ty as Setting>::show(&$default),
                live: is_live!($live),
                doc: join(&[$($doc),+]),
                check: |raw| <$ty as Setting>::read(raw, &$rule).map(|value| value.show()),
            },
        )+)+]);

        impl Settings {
            /// Reads every key except the gates; `get` returns the merged value of a path.
            pub(crate) fn build(
                get: &dyn Fn(&'static str) -> Raw,
                feature_gates: FeatureGates,
            ) -> Result<Self, (&'static str, Fault)> {
                $( let $section = $Section { $(
                    $field: {
                        let path = concat!(stringify!($section), ".", stringify!($field));
                        <$ty as Setting>::read(&get(path), &$rule).map_err(|fault| (path, fault))?
                    },
                )+ }; )+
                Ok(Self { $($section,)+ feature_gates })
            }

            /// In canonical form, in the order of the table, the gates last.
            pub(crate) fn flatten(&self) -> Vec<FlatSetting> {
                let mut all = vec![$($( FlatSetting {
                    key: concat!(stringify!($section), ".", stringify!($field)).into(),
                    live: is_live!($live),
                    value: Setting::show(&self.$section.$field),
                }, )+)+];
                all.extend(Gate::ALL.map(|gate| FlatSetting {
                    key: format!("{GATES_SECTION}.{}", gate.name()),
                    live: false,
                    value: Json::Bool(self.feature_gates.enabled(gate)),
                }));
                all
            }

            pub(crate) fn replace_live(&self, new: &Self) -> Self {
                let mut merged = self.clone();
                $($( if is_live!($live) {
                    merged.$section.$field.clone_from(&new.$section.$field);
                } )+)+
                merged
            }
        }
    };
}
