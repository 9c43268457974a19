//! Parsers of the settings of role `node`.
//!
//! Owns: the formats of the kubelet's flags: [`Thresholds`], [`ResourceList`], [`Taints`], [`Labels`], [`NodeIps`]. In:
//! texts. Out: values, or an error with what is wrong and the right format.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use super::quantity::Amount;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?}: {reason}")]
pub struct SettingError {
    /// The invalid part of the setting.
    pub text: String,
    /// What is wrong, and what would be right.
    pub reason: String,
}

fn invalid(text: &str, reason: impl Into<String>) -> SettingError {
    SettingError { text: text.chars().take(200).collect(), reason: reason.into() }
}

/// The parts between commas, without the empty ones.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    MemoryAvailable,
    NodeFsAvailable,
    NodeFsInodesFree,
    ImageFsAvailable,
    ImageFsInodesFree,
    PidAvailable,
}

impl Signal {
    pub const ALL: [Self; 6] = [
        Self::MemoryAvailable,
        Self::NodeFsAvailable,
        Self::NodeFsInodesFree,
        Self::ImageFsAvailable,
        Self::ImageFsInodesFree,
        Self::PidAvailable,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::NodeFsAvailable => "nodefs.available",
            Self::NodeFsInodesFree => "nodefs.inodesFree",
            Self::ImageFsAvailable => "imagefs.available",
            Self::ImageFsInodesFree => "imagefs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }
}

/// The amount that must be available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThresholdValue {
    /// Bytes, inodes or processes.
    Amount(Amount),
    Millionths(u32),
}

impl ThresholdValue {
    /// Of this capacity, rounded down as the kubelet does.
    #[must_use]
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Self::Amount(amount) => amount.units(),
            Self::Millionths(part) => {
                u64::try_from(u128::from(capacity) * u128::from(part) / 1_000_000).unwrap_or(u64::MAX)
            }
        }
    }
}

/// The kubelet's `evictionHard`: below these there is pressure.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Thresholds(BTreeMap<Signal, ThresholdValue>);

impl Thresholds {
    /// Parses `memory.available<100Mi,nodefs.available<10%`. A threshold of 0% or 100% is ignored, as by the kubelet.
    ///
    /// # Errors
    /// The part that is not a threshold, or that names a signal twice.
    pub fn parse(text: &str) -> Result<Self, SettingError> {
        let mut all = BTreeMap::new();
        let mut seen = Vec::new();
        for part in parts(text) {
            let form = "write signal<amount or signal<percent%, such as memory.available<100Mi";
            let (name, least) = part.split_once('<').ok_or_else(|| invalid(part, form))?;
            let (name, least) = (name.trim(), least.trim());
            let Some(signal) = Signal::ALL.into_iter().find(|signal| signal.name() == name) else {
                let known: Vec<_> = Signal::ALL.iter().map(|signal| signal.name()).collect();
                return Err(invalid(part, format!("unknown signal; the signals are {}", known.join(", "))));
            };
            if seen.contains(&signal) {
                return Err(invalid(part, "this signal already has a threshold; keep one"));
            }
            seen.push(signal);
            match threshold_value(part, least)? {
                ThresholdValue::Millionths(0 | 1_000_000) => {}
                least => {
                    all.insert(signal, least);
                }
            }
        }
        Ok(Self(all))
    }

    #[must_use]
    pub fn kubelet() -> Self {
        let percent = |percent: u32| ThresholdValue::Millionths(percent * 10_000);
        Self(BTreeMap::from([
            (Signal::MemoryAvailable, ThresholdValue::Amount(Amount::bytes(100 << 20))),
            (Signal::NodeFsAvailable, percent(10)),
            (Signal::NodeFsInodesFree, percent(5)),
            (Signal::ImageFsAvailable, percent(15)),
            (Signal::ImageFsInodesFree, percent(5)),
        ]))
    }

    #[must_use]
    pub fn get(&self, signal: Signal) -> Option<ThresholdValue> {
        self.0.get(&signal).copied()
    }
}

fn threshold_value(part: &str, least: &str) -> Result<ThresholdValue, SettingError> {
    if let Some(percent) = least.strip_suffix('%') {
        let number = percent.trim().parse::<Amount>().map_err(|error| invalid(part, error.to_string()))?;
        let range = || invalid(part, "a percentage must be 0% to 100%");
        if number < Amount::default() || number > Amount::count(100) {
            return Err(range());
        }
        // A percent is ten thousand millionths.
        let millionths = number.saturating_mul(10_000).units();
        return u32::try_from(millionths).map(ThresholdValue::Millionths).map_err(|_| range());
    }
    let amount = least.parse::<Amount>().map_err(|error| invalid(part, error.to_string()))?;
    if !amount.is_positive() {
        return Err(invalid(part, "a threshold must be more than 0"));
    }
    Ok(ThresholdValue::Amount(amount))
}

/// The kubelet's `kubeReserved` or `systemReserved`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResourceList(BTreeMap<String, Amount>);

impl ResourceList {
    /// Resources that can be reserved (kubelet).
    pub const NAMES: [&'static str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];

    /// Parses `cpu=100m,memory=1Gi`.
    ///
    /// # Errors
    /// The part that is not a reservation, or that names a resource twice.
    pub fn parse(text: &str) -> Result<Self, SettingError> {
        let mut all = BTreeMap::new();
        for part in parts(text) {
            let form = "write resource=amount, such as cpu=100m";
            let (name, amount) = part.split_once('=').ok_or_else(|| invalid(part, form))?;
            let name = name.trim();
            if !Self::NAMES.contains(&name) {
                let known = Self::NAMES.join(", ");
                return Err(invalid(
                    part,
                    format!("this resource cannot be reserved; the resources are {known}"),
                ));
            }
            let amount = amount.trim().parse::<Amount>().map_err(|error| invalid(part, error.to_string()))?;
            if amount < Amount::default() {
                return Err(invalid(part, "a reservation must be 0 or more"));
            }
            if all.insert(name.to_owned(), amount).is_some() {
                return Err(invalid(part, "this resource is already reserved; keep one"));
            }
        }
        Ok(Self(all))
    }

    #[must_use]
    pub fn get(&self, resource: &str) -> Amount {
        self.0.get(resource).copied().unwrap_or_default()
    }
}

/// The prefix, if any, and the local part of a qualified name.
fn qualified(name: &str) -> Result<(Option<&str>, &str), String> {
    let (prefix, local) = match name.split_once('/') {
        Some((prefix, local)) => (Some(prefix), local),
        None => (None, name),
    };
    let subdomain = |text: &str| {
        let label = |label: &str| {
            let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            !label.is_empty()
                && label.chars().all(|c| edge(c) || c == '-')
                && label.starts_with(edge)
                && label.ends_with(edge)
        };
        text.len() <= 253 && text.split('.').all(label)
    };
    if prefix.is_some_and(|prefix| !subdomain(prefix)) {
        return Err(
            "the part before the slash must be a DNS subdomain in lower case, such as example.com".into()
        );
    }
    if local.is_empty() || !is_word(local) {
        return Err(
            "a name must have 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at each end"
                .into(),
        );
    }
    Ok((prefix, local))
}

/// Checks the API's rules for a qualified name, such as `example.com/KernelDeadlock`.
///
/// # Errors
/// The rule that the name breaks.
pub(super) fn check_qualified_name(name: &str) -> Result<(), String> {
    qualified(name).map(drop)
}

/// A label's value or the local part of a name: empty, or up to 63 characters with letters or digits at both ends.
fn is_word(text: &str) -> bool {
    let edge = |c: char| c.is_ascii_alphanumeric();
    text.is_empty()
        || (text.len() <= 63
            && text.chars().all(|c| edge(c) || matches!(c, '-' | '_' | '.'))
            && text.starts_with(edge)
            && text.ends_with(edge))
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels(pub BTreeMap<String, String>);

impl Labels {
    /// Parses `a=b,c=d`, as the kubelet's `--node-labels`.
    ///
    /// # Errors
    /// The part that is not a label, or one that a node may not give itself.
    pub fn parse_list(text: &str) -> Result<Self, SettingError> {
        let mut all = BTreeMap::new();
        for part in parts(text) {
            let (key, value) = part.split_once('=').ok_or_else(|| invalid(part, "write key=value"))?;
            let (key, value) = (key.trim(), value.trim());
            let (prefix, _) = qualified(key).map_err(|error| invalid(part, error))?;
            if !is_word(value) {
                return Err(invalid(
                    part,
                    "a label value must have at most 63 letters, digits, '-', '_' and '.', with a letter or \
                     digit at each end",
                ));
            }
            if prefix.is_some_and(|prefix| !may_label(prefix, key)) {
                return Err(invalid(
                    part,
                    "the API server does not allow a node to set this label on itself; use another prefix, \
                     or node.kubernetes.io/",
                ));
            }
            if all.insert(key.to_owned(), value.to_owned()).is_some() {
                return Err(invalid(part, "this label is already set; keep one"));
            }
        }
        Ok(Self(all))
    }
}

/// What the admission plugin NodeRestriction lets a node set of the labels below kubernetes.io and k8s.io.
fn may_label(prefix: &str, key: &str) -> bool {
    let below = |domain: &str| {
        prefix == domain || prefix.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'))
    };
    if !below("kubernetes.io") && !below("k8s.io") {
        return true;
    }
    if below("kubelet.kubernetes.io") || below("node.kubernetes.io") {
        return true;
    }
    matches!(
        key,
        "kubernetes.io/hostname"
            | "kubernetes.io/os"
            | "kubernetes.io/arch"
            | "topology.kubernetes.io/zone"
            | "topology.kubernetes.io/region"
            | "failure-domain.beta.kubernetes.io/zone"
            | "failure-domain.beta.kubernetes.io/region"
            | "beta.kubernetes.io/os"
            | "beta.kubernetes.io/arch"
            | "beta.kubernetes.io/instance-type"
    )
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taint {
    pub key: String,
    /// Often empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

impl Taint {
    /// Parses `key=value:NoSchedule,other:NoExecute`, as the kubelet's `--register-with-taints`.
    ///
    /// # Errors
    /// The part that is not a taint, or a second one of the same key and effect.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, SettingError> {
        let mut all: Vec<Self> = Vec::new();
        for part in parts(text) {
            let form = "write key=value:Effect or key:Effect, with NoSchedule, PreferNoSchedule or NoExecute";
            let (rest, effect) = part.rsplit_once(':').ok_or_else(|| invalid(part, form))?;
            let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
            if !matches!(effect, "NoSchedule" | "PreferNoSchedule" | "NoExecute") || !is_word(value) {
                return Err(invalid(part, form));
            }
            qualified(key).map_err(|error| invalid(part, error))?;
            if all.iter().any(|taint| taint.key == key && taint.effect == effect) {
                return Err(invalid(part, "a taint with this key and effect is already set; keep one"));
            }
            all.push(Self { key: key.into(), value: value.into(), effect: effect.into() });
        }
        Ok(all)
    }
}

impl fmt::Display for Taint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}:{}", self.key, self.value, self.effect)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeIps(pub Vec<IpAddr>);

impl NodeIps {
    /// Parses `10.0.0.7,fd00::7`: at most one of each family, as the kubelet's `--node-ip`.
    ///
    /// # Errors
    /// The part that is not an address of a node, or a second one of its family.
    pub fn parse_list(text: &str) -> Result<Self, SettingError> {
        let mut all: Vec<IpAddr> = Vec::new();
        for part in parts(text) {
            let ip: IpAddr = part.parse().map_err(|_| invalid(part, "this is not an IP address"))?;
            if ip.is_loopback() || ip.is_multicast() || ip.is_unspecified() {
                return Err(invalid(part, "other machines cannot reach a node at this address"));
            }
            if all.iter().any(|other| other.is_ipv4() == ip.is_ipv4()) {
                return Err(invalid(part, "an address of this family is already set; keep one"));
            }
            all.push(ip);
        }
        Ok(Self(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T: fmt::Debug>(result: Result<T, SettingError>, expected: &str) {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error:?} says {expected:?}");
    }

    #[test]
    fn the_kubelets_default_thresholds_are_read() {
        let text = "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<15%,\
                    imagefs.inodesFree<5%";
        let thresholds = Thresholds::parse(text).expect("thresholds");
        assert_eq!(thresholds, Thresholds::kubelet());
        let least = |signal, of| thresholds.get(signal).map(|least| least.of(of));
        assert_eq!(least(Signal::MemoryAvailable, 1), Some(100 << 20));
        assert_eq!(least(Signal::NodeFsAvailable, 1005), Some(100));
        assert_eq!(least(Signal::ImageFsAvailable, u64::MAX), Some(u64::MAX / 100 * 15 + 2));
        assert_eq!(least(Signal::PidAvailable, 100), None);
        assert_eq!(Thresholds::parse("").expect("none"), Thresholds::default());
        let halves = Thresholds::parse(" pid.available < 2.5% ").expect("half percents");
        assert_eq!(halves.get(Signal::PidAvailable), Some(ThresholdValue::Millionths(25_000)));
        let none = Thresholds::parse("nodefs.available<0%,memory.available<100%").expect("none");
        assert_eq!(none, Thresholds::default(), "the kubelet drops these");
    }

    #[test]
    fn invalid_thresholds_are_refused() {
        refused(Thresholds::parse("memory.available=1"), "write signal<amount");
        refused(Thresholds::parse("memory<1"), "the signals are memory.available, nodefs.available");
        refused(Thresholds::parse("memory.available<1,memory.available<0%"), "already");
        refused(Thresholds::parse("memory.available<101%"), "be 0% to 100%");
        refused(Thresholds::parse("memory.available<-1%"), "be 0% to 100%");
        refused(Thresholds::parse("memory.available<0"), "more than 0");
        refused(Thresholds::parse("memory.available<1 GB"), "is not a quantity");
    }

    #[test]
    fn reservations_are_read() {
        let list = ResourceList::parse("cpu=100m, memory=1Gi").expect("a list");
        assert_eq!((list.get("cpu").to_string(), list.get("pid").to_string()), ("100m".into(), "0".into()));
        refused(ResourceList::parse("cpu"), "write resource=amount");
        refused(ResourceList::parse("gpu=1"), "the resources are cpu, memory");
        refused(ResourceList::parse("cpu=1,cpu=2"), "already");
        refused(ResourceList::parse("cpu=-1"), "0 or more");
        refused(ResourceList::parse("cpu=one"), "is not a quantity");
    }

    #[test]
    fn labels_are_read_by_the_rules_of_the_api_and_of_nodes() {
        let labels = Labels::parse_list("a=b,example.com/c=,node.kubernetes.io/x=1").expect("labels");
        assert_eq!(labels.0.len(), 3);
        assert!(Labels::parse_list("topology.kubernetes.io/zone=z,pool.kubelet.kubernetes.io/x=1").is_ok());
        refused(Labels::parse_list("a"), "key=value");
        refused(Labels::parse_list("a=b,a=c"), "already");
        refused(Labels::parse_list("-a=b"), "1 to 63 letters");
        refused(Labels::parse_list("Ex/a=b"), "DNS subdomain");
        refused(Labels::parse_list("a=b c"), "label value");
        refused(Labels::parse_list("node-role.kubernetes.io/worker=1"), "does not allow a node");
        refused(Labels::parse_list("node-restriction.kubernetes.io/x=1"), "does not allow a node");
        assert!(Labels::parse_list("notkubernetes.io/x=1").is_ok());
    }

    #[test]
    fn taints_are_read() {
        let taints = Taint::parse_list("k=v:NoSchedule,example.com/k:NoExecute").expect("taints");
        let texts: Vec<_> = taints.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["k=v:NoSchedule", "example.com/k=:NoExecute"]);
        refused(Taint::parse_list("k=v"), "write key=value:Effect");
        refused(Taint::parse_list("k=v:Never"), "NoSchedule");
        refused(Taint::parse_list("=v:NoSchedule"), "1 to 63 letters");
        refused(Taint::parse_list("k=a:NoSchedule,k=b:NoSchedule"), "already");
    }

    #[test]
    fn addresses_are_read() {
        assert_eq!(NodeIps::parse_list("10.0.0.7, fd00::7").expect("two").0.len(), 2);
        refused(NodeIps::parse_list("10.0.0.7,10.0.0.8"), "family");
        refused(NodeIps::parse_list("127.0.0.1"), "cannot reach");
        refused(NodeIps::parse_list("host"), "not an IP address");
    }
}
