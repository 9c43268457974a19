//! Owns: the choice of measurements. In: the words after `proxy` on the command line. Out: [`Options`].

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::subject::{Backend, Kind};

/// Number of Services, and endpoints per Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) services: usize,
    pub(super) each: usize,
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.services, self.each)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// From nothing to in sync.
    Cold,
    Change,
    Churn,
    /// Beside another program that commits all the time.
    Neighbour,
    /// Everything at once, with kills, for a long time. Only if it is named.
    Long,
    Connections,
}

impl Part {
    const ALL: [(&'static str, Self); 6] = [
        ("cold", Self::Cold),
        ("change", Self::Change),
        ("churn", Self::Churn),
        ("neighbour", Self::Neighbour),
        ("long", Self::Long),
        ("connections", Self::Connections),
    ];
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) sizes: Vec<Size>,
    pub(super) parts: Vec<Part>,
    pub(super) subjects: Vec<Kind>,
    pub(super) backend: Backend,
    /// Maximum number of cold syncs of each kind.
    pub(super) rounds: usize,
    /// Timeout of a cold sync.
    pub(super) patience: Duration,
    /// Maximum number of single changes.
    pub(super) changes: usize,
    /// Maximum duration of the single changes.
    pub(super) changing: Duration,
    pub(super) churn: Duration,
    pub(super) long: Duration,
    pub(super) turns: usize,
    /// A part of the names of the connections that are measured: the more often they take turns, the closer are their figures.
    pub(super) way: String,
    /// Source ranges of Services without connections.
    pub(super) ranges: usize,
}

impl Default for Options {
    fn default() -> Self {
        let sizes = [(100, 10), (1_000, 10), (10_000, 10), (5_000, 50), (44_000, 1)];
        Self {
            sizes: sizes.map(|(services, each)| Size { services, each }).to_vec(),
            parts: Part::ALL.map(|(_, part)| part).into_iter().filter(|part| *part != Part::Long).collect(),
            subjects: Kind::ALL.to_vec(),
            backend: Backend::Nft,
            rounds: 5,
            patience: Duration::from_secs(300),
            changes: 300,
            changing: Duration::from_secs(60),
            churn: Duration::from_secs(60),
            long: Duration::from_secs(1_800),
            turns: 5,
            way: String::new(),
            ranges: 0,
        }
    }
}

/// The flags, printed for an unknown one.
const FLAGS: &str = "--sizes 1000x10,44000x1 --parts cold,change,churn,neighbour,long,connections --subjects keelson,keelson-nft,kube-proxy --backend nft|iptables|iptables-legacy|ipvs|userspace|ebpf \
                     --rounds N --patience SECONDS --changes N --changing SECONDS --churn SECONDS --long SECONDS --turns N --way TEXT --ranges N";

impl Options {
    /// From the whole command line; None if `proxy` is not in it.
    pub(super) fn of(wanted: &[String]) -> Result<Option<Self>> {
        if wanted.is_empty() {
            return Ok(Some(Self::default()));
        }
        let Some(at) = wanted.iter().position(|word| word == "proxy") else { return Ok(None) };
        let mut options = Self::default();
        let mut words = wanted.iter().skip(at + 1);
        while let Some(flag) = words.next() {
            if !flag.starts_with("--") {
                // Another measurement.
                continue;
            }
            let (flag, value) = match flag.split_once('=') {
                Some((flag, value)) => (flag, value),
                None => (flag.as_str(), words.next().map(String::as_str).unwrap_or_default()),
            };
            options.set(flag, value).with_context(|| format!("{flag} {value:?}; the flags are {FLAGS}"))?;
        }
        Ok(Some(options))
    }

    fn set(&mut self, flag: &str, value: &str) -> Result<()> {
        let seconds = || Ok::<_, anyhow::Error>(Duration::from_secs(number(value)?));
        match flag {
            "--sizes" => self.sizes = value.split(',').map(size).collect::<Result<_>>()?,
            "--parts" => {
                self.parts = value.split(',').map(|name| one_of(&Part::ALL, name)).collect::<Result<_>>()?
            }
            "--subjects" => {
                let named = Kind::ALL.map(|kind| (kind.name(), kind));
                self.subjects = value.split(',').map(|name| one_of(&named, name)).collect::<Result<_>>()?;
            }
            "--backend" => {
                self.backend = one_of(&Backend::ALL.map(|backend| (backend.name(), backend)), value)?;
            }
            "--rounds" => self.rounds = number(value)?,
            "--patience" => self.patience = seconds()?,
            "--changes" => self.changes = number(value)?,
            "--changing" => self.changing = seconds()?,
            "--churn" => self.churn = seconds()?,
            "--long" => self.long = seconds()?,
            "--turns" => self.turns = number(value)?,
            "--way" => value.clone_into(&mut self.way),
            "--ranges" => self.ranges = number(value)?,
            _ => bail!("unknown flag"),
        }
        Ok(())
    }

    /// Those that have the backend.
    pub(super) fn subjects(&self) -> impl Iterator<Item = Kind> {
        let has = |kind: &Kind| match kind {
            Kind::Keelson => true,
            Kind::KeelsonNft => self.backend == Backend::Ebpf,
            Kind::KubeProxy => self.backend.mode().is_some(),
        };
        self.subjects.iter().copied().filter(has)
    }

    pub(super) fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// Whether single changes beside another program are measured at this size. Commits tell the name of their process, and
    /// only those of the backend nft are of one.
    pub(super) fn has_neighbour(&self, size: Size) -> bool {
        self.has(Part::Neighbour) && self.is_main(size) && self.backend == Backend::Nft
    }

    /// Whether connections are measured at this size: with few Services, and at the main size; with other backends,
    /// whose connections may meet more with more Services, at every size.
    pub(super) fn has_connections(&self, size: Size) -> bool {
        self.has(Part::Connections)
            && (size.services <= 100 || self.is_main(size) || self.backend != Backend::Nft)
    }

    /// Whether very many changes are measured at this size: at the main size; with other backends than nft at every size,
    /// because the cost of a change may depend on it.
    pub(super) fn has_churn(&self, size: Size) -> bool {
        self.has(Part::Churn) && (self.is_main(size) || self.backend != Backend::Nft)
    }

    /// Whether this is the main size: 10,000 x 10 if it is measured at all.
    pub(super) fn is_main(&self, size: Size) -> bool {
        let usual = Size { services: 10_000, each: 10 };
        let main = if self.sizes.contains(&usual) { Some(&usual) } else { self.sizes.first() };
        main == Some(&size)
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().ok().with_context(|| format!("{text:?} is not a number"))
}

fn size(text: &str) -> Result<Size> {
    let (services, each) = text.split_once('x').with_context(|| format!("{text:?} is not a size"))?;
    let size = Size { services: number(services)?, each: number(each)? };
    ensure!(size.services > 0 && size.each > 0, "{text:?} has no endpoints");
    Ok(size)
}

fn one_of<T: Copy>(known: &[(&str, T)], name: &str) -> Result<T> {
    let found = known.iter().find(|(known, _)| *known == name);
    found.map(|(_, one)| *one).with_context(|| format!("{name:?} is unknown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Option<Options>> {
        Options::of(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags_select_what_is_measured() {
        assert_eq!(of("").unwrap(), Some(Options::default()));
        assert_eq!(of("calls pulls").unwrap(), None);
        let options =
            of("calls proxy --sizes 10x2,3x4 --parts=cold,churn --subjects kube-proxy --churn 5 --ranges 7")
                .unwrap();
        let options = options.unwrap();
        assert_eq!(options.sizes, [Size { services: 10, each: 2 }, Size { services: 3, each: 4 }]);
        assert_eq!(options.parts, [Part::Cold, Part::Churn]);
        assert_eq!((options.subjects, options.churn), (vec![Kind::KubeProxy], Duration::from_secs(5)));
        assert_eq!((options.ranges, Options::default().ranges), (7, 0));
        assert_eq!(of("proxy --way node").unwrap().unwrap().way, "node");
        let iptables = of("proxy --backend iptables").unwrap().unwrap();
        assert_eq!(iptables.backend, Backend::Iptables);
        let main = Size { services: 10_000, each: 10 };
        let other = Size { services: 1_000, each: 10 };
        assert!(Options::default().has_neighbour(main) && !iptables.has_neighbour(main));
        assert!(!Options::default().has_churn(other) && iptables.has_churn(other));
        assert!(!Options::default().has_connections(other) && iptables.has_connections(other));
        let userspace = of("proxy --backend userspace").unwrap().unwrap();
        assert_eq!(userspace.subjects().collect::<Vec<_>>(), [Kind::Keelson], "kube-proxy has no such mode");
        assert_eq!(iptables.subjects().collect::<Vec<_>>(), [Kind::Keelson, Kind::KubeProxy]);
        let ebpf = of("proxy --backend ebpf").unwrap().unwrap();
        assert_eq!(ebpf.subjects().collect::<Vec<_>>(), Kind::ALL);
        for wrong in [
            "--sizes 10",
            "--sizes 0x1",
            "--parts all",
            "--rounds many",
            "--colour red",
            "--rounds",
            "--backend pf",
        ] {
            assert!(of(&format!("proxy {wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_main_size_is_ten_thousand_if_it_is_measured() {
        let options = Options::default();
        let main: Vec<_> = options.sizes.iter().filter(|size| options.is_main(**size)).collect();
        assert_eq!(main, [&Size { services: 10_000, each: 10 }]);
        let options = of("proxy --sizes 5x5,6x6").unwrap().unwrap();
        assert!(
            options.is_main(Size { services: 5, each: 5 }) && !options.is_main(Size { services: 6, each: 6 })
        );
    }
}
