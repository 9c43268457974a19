//! The figures that are kept in the repository.
//!
//! Owns: `docs/performance/figures.toml`, and what is made from it: the chart `docs/images/performance.svg` and the
//! table at the beginning of `docs/performance.md`. In: what a run has measured. Out: these files; figures that were
//! not measured stay as they are.

mod catalogue;
mod chart;
mod format;
mod table;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

pub(crate) use catalogue::Key;
use catalogue::Target;

const FIGURES: &str = "docs/performance/figures.toml";
const CHART: &str = "docs/images/performance.svg";
const PAGE: &str = "docs/performance.md";

const HEAD: &str = "\
# The figures of the chart and of the table at the beginning of docs/performance.md. `make bench` replaces those that it
# measures; names, peers and targets are in tests/bench/src/figures/catalogue.rs. Less is better. `ratio` is there if it
# is not the quotient of both values, but the median of the ratios of alternating rounds.
";

/// A figure, in the unit of its definition.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Measured {
    key: Key,
    keelson: f64,
    /// The peer's value in the same run.
    peer: Option<f64>,
    /// The median of the ratios of alternating rounds; None: the quotient of both values.
    ratio: Option<f64>,
}

impl Measured {
    pub(crate) fn alone(key: Key, keelson: f64) -> Self {
        Self { key, keelson: format::significant(keelson, 4), peer: None, ratio: None }
    }

    pub(crate) fn beside(key: Key, keelson: f64, peer: f64) -> Self {
        Self { peer: Some(format::significant(peer, 4)), ..Self::alone(key, keelson) }
    }

    /// `ratio` is that of rounds.
    pub(crate) fn with_ratio(self, ratio: Option<f64>) -> Self {
        Self { ratio: ratio.map(|ratio| format::significant(ratio, 3)), ..self }
    }

    fn ratio(&self) -> Option<f64> {
        self.ratio.or_else(|| Some(self.keelson / self.peer?))
    }

    /// Whether the target is met; None without a target.
    fn meets_target(&self) -> Option<bool> {
        match self.key.definition().target? {
            Target::Value(most) => Some(self.keelson <= most),
            // As it is shown.
            Target::Ratio(most) => Some(format::significant(self.ratio()?, 3) <= most),
        }
    }

    /// The target as a ratio to the peer's value.
    fn target_ratio(&self) -> Option<f64> {
        match self.key.definition().target? {
            Target::Value(most) => Some(most / self.peer?),
            Target::Ratio(most) => Some(most),
        }
    }

    /// Fails if it has no ratio although its definition has a peer, or the reverse.
    fn check(&self) -> Result<()> {
        let definition = self.key.definition();
        match (definition.peer, self.ratio()) {
            (Some(_), Some(ratio)) => {
                let both = self.keelson > 0.0 && self.peer.is_some_and(|peer| peer > 0.0);
                ensure!(both && ratio > 0.0 && ratio.is_finite(), "both values have to be above zero");
            }
            (None, None) => ensure!(self.keelson.is_finite() && self.keelson >= 0.0, "it has no value"),
            (Some(peer), None) => bail!("the value of {peer} is missing"),
            (None, Some(_)) => bail!("it has no peer"),
        }
        Ok(())
    }
}

/// What is in `docs/performance/figures.toml`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    figure: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: String,
    part: String,
    name: String,
    unit: String,
    keelson: f64,
    peer: Option<String>,
    peer_value: Option<f64>,
    ratio: Option<f64>,
    target: Option<f64>,
    target_ratio: Option<f64>,
}

impl Entry {
    fn new(figure: &Measured) -> Self {
        let definition = figure.key.definition();
        let (target, target_ratio) = match definition.target {
            Some(Target::Value(most)) => (Some(most), None),
            Some(Target::Ratio(most)) => (None, Some(most)),
            None => (None, None),
        };
        Self {
            id: definition.id.to_owned(),
            part: definition.part.to_owned(),
            name: definition.name.to_owned(),
            unit: definition.unit.name().to_owned(),
            keelson: figure.keelson,
            peer: definition.peer.map(str::to_owned),
            peer_value: figure.peer,
            ratio: figure.ratio,
            target,
            target_ratio,
        }
    }

    /// Its values; the rest is the definition's.
    fn measured(&self) -> Result<Measured> {
        let key = Key::ALL.iter().copied().find(|key| key.definition().id == self.id);
        let key = key.context("tests/bench/src/figures/catalogue.rs has no such figure; remove it")?;
        let figure = Measured { key, keelson: self.keelson, peer: self.peer_value, ratio: self.ratio };
        figure.check()?;
        Ok(figure)
    }
}

/// FigureList in the order of the catalogue, each at most once.
#[derive(Clone, Debug, Default, PartialEq)]
struct FigureList(Vec<Measured>);

impl FigureList {
    fn parse(text: &str) -> Result<Self> {
        let document: Document = toml::from_str(text)?;
        let mut figures = Self::default();
        for entry in &document.figure {
            let figure = entry.measured().with_context(|| format!("figure {:?}", entry.id))?;
            figures.replace(figure);
        }
        Ok(figures)
    }

    fn replace(&mut self, figure: Measured) {
        match self.0.binary_search_by_key(&figure.key, |figure| figure.key) {
            Ok(at) => self.0[at] = figure,
            Err(at) => self.0.insert(at, figure),
        }
    }

    fn render(&self) -> Result<String> {
        let document = Document { figure: self.0.iter().map(Entry::new).collect() };
        Ok(format!("{HEAD}\n{}", toml::to_string(&document)?))
    }
}

/// The checkout that the program was built from.
fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(root: &Path, path: &str) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path} of {}", root.display()))
}

/// The files and their contents: figures, chart, page.
fn files(root: &Path, figures: &FigureList) -> Result<[(&'static str, String); 3]> {
    let page =
        table::insert(&read(root, PAGE)?, &figures.0).with_context(|| format!("cannot change {PAGE}"))?;
    Ok([(FIGURES, figures.render()?), (CHART, chart::svg(&figures.0)), (PAGE, page)])
}

fn load(root: &Path) -> Result<FigureList> {
    FigureList::parse(&read(root, FIGURES)?)
        .with_context(|| format!("cannot use {FIGURES}; correct it by hand"))
}

fn record_in(root: &Path, measured: &[Measured]) -> Result<()> {
    let mut figures = load(root)?;
    for figure in measured {
        figures.replace(*figure);
    }
    for (path, text) in files(root, &figures)? {
        fs::write(root.join(path), text)
            .with_context(|| format!("cannot write {path} of {}", root.display()))?;
    }
    Ok(())
}

/// Replaces figures, chart and table at once, so that a later measurement that fails loses nothing. A build for tests
/// writes nothing.
pub(crate) fn record(measured: &[Measured]) -> Result<()> {
    let (usable, unusable): (Vec<_>, Vec<_>) =
        measured.iter().copied().partition(|figure| figure.check().is_ok());
    for figure in unusable {
        eprintln!("figure {} is left as it was: {figure:?}", figure.key.definition().id);
    }
    if usable.is_empty() {
        return Ok(());
    }
    if cfg!(debug_assertions) {
        eprintln!("figures are left as they were: this is a debug build; use make bench");
        return Ok(());
    }
    record_in(&checkout(), &usable)
}
