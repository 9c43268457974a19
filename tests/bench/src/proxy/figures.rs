//! What the repository keeps of a run ([`crate::figures`]).
//!
//! Owns: the choice of rows. In: a report, of the sizes and durations that the figures name. Out: figures; none if one of
//! both subjects was not wanted, not measured or did not complete.

use super::change::{AFTER_CHANGES, ENDPOINT};
use super::cold::total;
use super::connections::TO_CLUSTER_IP;
use super::options::{Options, Size};
use super::report::{Report, median};
use super::subject::{Backend, Kind};
use crate::figures::{Key, Measured};
use crate::quantile;

/// Sizes of the figures of the backends nft and iptables.
const LARGE: Size = Size { services: 10_000, each: 10 };
const SMALL: Size = Size { services: 1_000, each: 10 };

pub(super) fn figures(report: &Report, options: &Options) -> Vec<Measured> {
    if options.subjects != Kind::ALL {
        return Vec::new();
    }
    let rows = Rows { report, options };
    let of_backend = match options.backend {
        Backend::Nft => vec![
            beside(Key::NftBothStart, |kind| rows.first_sync(LARGE, kind, true)),
            rows.first_sync(LARGE, Kind::Keelson, false)
                .map(|took| Measured::alone(Key::NftProxyStarts, took)),
            beside(Key::NftChange, |kind| rows.change(LARGE, kind, 0.99)),
            beside(Key::NftProcessor, |kind| rows.processor_of_churn(kind)),
            beside(Key::NftMemory, |kind| rows.memory(kind)),
            rows.connection(),
        ],
        Backend::Iptables => vec![
            beside(Key::IptablesBothStart, |kind| rows.first_sync(SMALL, kind, true)),
            beside(Key::IptablesChange, |kind| rows.change(SMALL, kind, 0.5)),
        ],
        Backend::IptablesLegacy | Backend::Ipvs | Backend::Userspace | Backend::Ebpf => Vec::new(),
    };
    of_backend.into_iter().flatten().collect()
}

/// The value of Keelson beside that of kube-proxy.
fn beside(key: Key, of: impl Fn(Kind) -> Option<f64>) -> Option<Measured> {
    Some(Measured::beside(key, of(Kind::Keelson)?, of(Kind::KubeProxy)?))
}

struct Rows<'a> {
    report: &'a Report,
    options: &'a Options,
}

impl Rows<'_> {
    /// Median, in seconds.
    fn first_sync(&self, size: Size, kind: Kind, both: bool) -> Option<f64> {
        let row = self.report.cold.iter().find(|row| (row.size, row.kind, row.both) == (size, kind, both))?;
        Some(row.median()?.as_secs_f64())
    }

    /// Milliseconds until another endpoint is in the kernel.
    fn change(&self, size: Size, kind: Kind, q: f64) -> Option<f64> {
        let is_wanted = |what| what == (size, kind, ENDPOINT);
        let row = self.report.change.iter().find(|row| is_wanted((row.size, row.kind, row.what)))?;
        quantile(&row.acknowledged, q)
    }

    /// Seconds, of changes at the default rate for the default time.
    fn processor_of_churn(&self, kind: Kind) -> Option<f64> {
        let row = self.report.churn.iter().find(|row| (row.size, row.kind) == (LARGE, kind))?;
        (self.options.churn == Options::default().churn).then(|| total(&row.usage))
    }

    /// VmRSS of all processes, in MB.
    fn memory(&self, kind: Kind) -> Option<f64> {
        let is_wanted = |what| what == (LARGE, kind, AFTER_CHANGES);
        let row = self.report.memory.iter().find(|row| is_wanted((row.size, row.kind, row.when)))?;
        Some(row.memory.iter().map(|memory| memory.now).sum())
    }

    /// Microseconds of processor time, and the ratio of rounds.
    fn connection(&self) -> Option<Measured> {
        let way = |kind| {
            let is_wanted = |what| what == (LARGE, Some(kind), TO_CLUSTER_IP);
            self.report.ways.iter().find(|way| is_wanted((way.size, way.kind, way.name)))
        };
        let figure = beside(Key::NftConnection, |kind| median(&way(kind)?.tcp_cost))?;
        Some(figure.with_ratio(self.report.ratio(way(Kind::Keelson)?, |way| &way.tcp_cost)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::report::Cold;
    use super::*;

    fn cold(kind: Kind, both: bool, seconds: u64) -> Cold {
        Cold {
            size: LARGE,
            service_ports: 1,
            endpoints: 1,
            kind,
            both,
            took: vec![(seconds > 0).then(|| Duration::from_secs(seconds))],
            patience: Duration::from_secs(300),
            processor: Vec::new(),
            transactions: Vec::new(),
            own: None,
        }
    }

    #[test]
    fn both_subjects_have_to_complete() {
        let of_subjects = |peer, backend, subjects: &[Kind]| {
            let rows = [
                cold(Kind::Keelson, true, 3),
                cold(Kind::Keelson, false, 1),
                cold(Kind::KubeProxy, true, peer),
            ];
            let report = Report { cold: rows.into(), ..Report::default() };
            figures(&report, &Options { backend, subjects: subjects.to_vec(), ..Options::default() })
        };
        let of = |peer, backend| of_subjects(peer, backend, &Kind::ALL);
        let proxy_alone = Measured::alone(Key::NftProxyStarts, 1.0);
        let both = Measured::beside(Key::NftBothStart, 3.0, 90.0);
        assert_eq!(of(90, Backend::Nft), [both, proxy_alone]);
        assert_eq!(of(0, Backend::Nft), [proxy_alone], "kube-proxy did not complete");
        assert_eq!(of_subjects(90, Backend::Nft, &[Kind::Keelson]), [], "kube-proxy was not wanted");
        assert_eq!(of(90, Backend::Iptables), [], "figures of iptables are of another size");
        assert_eq!(of(90, Backend::IptablesLegacy), []);
    }
}
