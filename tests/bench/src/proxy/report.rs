//! Results.
//!
//! Owns: [`Report`]: tables that are printed after all measurements, or after an error. In: rows. Out: Markdown on
//! standard output.

use std::collections::BTreeMap;
use std::time::Duration;

use super::options::Size;
use super::subject::{Kind, PATIENCE};
use super::usage::{Memory, Usage};
use crate::quantile;

pub(super) struct Cold {
    pub(super) size: Size,
    pub(super) service_ports: usize,
    pub(super) endpoints: usize,
    pub(super) kind: Kind,
    /// The agent started at the same time.
    pub(super) both: bool,
    /// Time until all rules were in the kernel; None if it timed out.
    pub(super) took: Vec<Option<Duration>>,
    pub(super) patience: Duration,
    /// Seconds of processor time, of all processes.
    pub(super) processor: Vec<f64>,
    pub(super) transactions: Vec<usize>,
    /// The subject's own metric, in seconds.
    pub(super) own: Option<f64>,
}

pub(super) struct Change {
    pub(super) size: Size,
    pub(super) kind: Kind,
    pub(super) what: &'static str,
    /// Milliseconds from the API server's response to the writer until the rules had changed, sorted; negative if the
    /// response came later.
    pub(super) acknowledged: Vec<f64>,
    /// The same from the event of a plain watch.
    pub(super) watched: Vec<f64>,
    /// Milliseconds of processor time per change, of all processes.
    pub(super) processor: f64,
    /// Transactions per change; None: the kernel does not count them.
    pub(super) transactions: Option<f64>,
}

pub(super) struct ChurnRow {
    pub(super) size: Size,
    pub(super) kind: Kind,
    pub(super) written: usize,
    pub(super) lasted: Duration,
    /// None: the kernel does not count them.
    pub(super) transactions: Option<usize>,
    /// Time from the last change until a connection used it.
    pub(super) lag: Option<Duration>,
    pub(super) usage: Vec<Usage>,
    pub(super) before: Vec<Memory>,
    pub(super) after: Vec<Memory>,
}

pub(super) struct Resident {
    pub(super) size: Size,
    pub(super) kind: Kind,
    pub(super) when: &'static str,
    pub(super) memory: Vec<Memory>,
    /// Maximum memory of a program that it ran to change rules, in MB.
    pub(super) children: f64,
}

/// Beside another program that commits.
pub(super) struct NeighbourResult {
    pub(super) size: Size,
    pub(super) kind: Kind,
    /// Commits of the other program per second.
    pub(super) rate: f64,
    /// Milliseconds from the API server's response to a change until its commit, sorted.
    pub(super) changes: Vec<f64>,
    /// Time from the start of a proxy until the commit of what had changed meanwhile. None if not within the bench's
    /// timeout.
    pub(super) restarts: Vec<Option<Duration>>,
    /// Time until a removed element is restored.
    pub(super) repair: Option<Duration>,
}

pub(super) struct Long {
    pub(super) size: Size,
    pub(super) kind: Kind,
    pub(super) lasted: Duration,
    /// Number of changes.
    pub(super) written: usize,
    /// Commits of another program per second.
    pub(super) neighbour: f64,
    pub(super) kills: usize,
    /// One entry per minute.
    pub(super) memory: Vec<Vec<Memory>>,
    pub(super) connections: usize,
    /// Answered by a pod that never was an endpoint of the Service.
    pub(super) wrong: usize,
    /// Refused or not answered.
    pub(super) failed: usize,
    /// Longest time that a removed endpoint still answered.
    pub(super) stalest: Duration,
}

#[derive(Default)]
pub(super) struct Way {
    pub(super) size: Size,
    /// The subject whose rules were used.
    pub(super) kind: Option<Kind>,
    pub(super) name: &'static str,
    /// Connections per second, of each round.
    pub(super) tcp_rate: Vec<f64>,
    pub(super) udp_rate: Vec<f64>,
    /// Microseconds of processor time per connection, of each round, with one client.
    pub(super) tcp_cost: Vec<f64>,
    pub(super) udp_cost: Vec<f64>,
    /// Microseconds of processor time of the first packet of a flow, of each round.
    pub(super) first_cost: Vec<f64>,
    /// Microseconds, of all rounds, with one client.
    pub(super) tcp: Vec<f64>,
    pub(super) udp: Vec<f64>,
    pub(super) failed: Failed,
    /// Of one established connection, of each round: requests per second, bytes per second.
    pub(super) requests: Vec<f64>,
    pub(super) stream: Vec<f64>,
}

/// Numbers of attempts that failed, by error.
pub(super) type Failed = BTreeMap<String, usize>;

#[derive(Default)]
pub(super) struct Report {
    pub(super) cold: Vec<Cold>,
    pub(super) change: Vec<Change>,
    pub(super) churn: Vec<ChurnRow>,
    pub(super) neighbour: Vec<NeighbourResult>,
    pub(super) long: Vec<Long>,
    pub(super) memory: Vec<Resident>,
    pub(super) ways: Vec<Way>,
}

impl Report {
    pub(super) fn print(&self) {
        self.print_cold();
        self.print_change();
        self.print_churn();
        self.print_neighbour();
        self.print_long();
        self.print_memory();
        self.print_ways();
    }

    fn print_cold(&self) {
        if self.cold.is_empty() {
            return;
        }
        println!(
            "\n| cold sync: until all is in the kernel | service ports, endpoints | rounds | median | kube-proxy's median by this | processor time | transactions | by its own figure | target |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for row in &self.cold {
            let what = match (row.kind, row.both) {
                (Kind::Keelson, true) => "agent and `keelson proxy` start at once",
                (Kind::Keelson, false) => "`keelson proxy` starts",
                (Kind::KeelsonNft, true) => "agent and `keelson proxy` with nft start at once",
                (Kind::KeelsonNft, false) => "`keelson proxy` with nft starts",
                (Kind::KubeProxy, _) => "kube-proxy starts",
            };
            let peer = self.cold.iter().find(|peer| peer.kind == Kind::KubeProxy && peer.size == row.size);
            let ratio = peer.filter(|_| row.kind.is_keelson()).and_then(|peer| {
                let ratio =
                    peer.median().unwrap_or(peer.patience).as_secs_f64() / row.median()?.as_secs_f64();
                let at_least = if peer.median().is_none() { "> " } else { "" };
                Some(format!("{at_least}{ratio:.0}"))
            });
            println!(
                "| {}, {what} | {}, {} | {} | {} | {} | {} | {} | {} | {} |",
                row.size,
                row.service_ports,
                row.endpoints,
                row.took.len(),
                row.median().map_or_else(|| format!("> {:.0} s", row.patience.as_secs_f64()), seconds),
                ratio.unwrap_or_default(),
                median(&row.processor).map_or_else(String::new, |time| format!("{time:.2} s")),
                middle(&row.transactions).map_or_else(String::new, |count| count.to_string()),
                row.own.map_or_else(String::new, |time| format!("{time:.2} s")),
                row.target(),
            );
        }
    }

    fn print_change(&self) {
        if self.change.is_empty() {
            return;
        }
        println!(
            "\n| one Service changed: until the rules have it | changes | after the API server's answer, p50 | p99 | most | beyond a plain watch event, p50 | p99 | processor time | transactions | target (p99) |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        for row in &self.change {
            let at = |of: &[f64], q| quantile(of, q).map_or_else(String::new, milliseconds);
            let target = if row.kind == Kind::Keelson && row.size.services == 10_000 { "25 ms" } else { "" };
            println!(
                "| {}, {}, {} | {} | {} | {} | {} | {} | {} | {:.1} ms | {} | {target} |",
                row.size,
                row.what,
                row.kind.title(),
                row.acknowledged.len(),
                at(&row.acknowledged, 0.5),
                at(&row.acknowledged, 0.99),
                at(&row.acknowledged, 1.0),
                at(&row.watched, 0.5),
                at(&row.watched, 0.99),
                row.processor,
                row.transactions.map_or_else(String::new, |count| format!("{count:.2}")),
            );
        }
    }

    fn print_churn(&self) {
        if self.churn.is_empty() {
            return;
        }
        println!(
            "\n| very many changes | changes a second, for | transactions | the last one in effect after | processor time | of it agent | proxy, user | proxy, system | programs | VmRSS before | after | most |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
        for row in &self.churn {
            let all: f64 = row.usage.iter().copied().map(Usage::all).sum();
            let agent = if row.usage.len() > 1 { row.usage.first().copied().map(Usage::all) } else { None };
            let proxy = row.usage.last().copied().unwrap_or_default();
            println!(
                "| {}, {} | {:.0}, {:.0} s | {} | {} | {all:.1} s | {} | {:.1} s | {:.1} s | {:.1} s | {} | {} | {} |",
                row.size,
                row.kind.title(),
                row.written as f64 / row.lasted.as_secs_f64(),
                row.lasted.as_secs_f64(),
                row.transactions.map_or_else(String::new, |count| count.to_string()),
                row.lag.map_or_else(|| "never".to_owned(), seconds),
                agent.map_or_else(String::new, |time| format!("{time:.1} s")),
                proxy.user,
                proxy.system,
                proxy.children,
                parts(&row.before, |memory| memory.now),
                parts(&row.after, |memory| memory.now),
                parts(&row.after, |memory| memory.most),
            );
        }
    }

    fn print_neighbour(&self) {
        if self.neighbour.is_empty() {
            return;
        }
        println!(
            "\n| with a program that commits | its commits a second | changes | after the API server's answer, p50 | p99 | restart with a change, median | a removed element is back after | targets |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        for row in &self.neighbour {
            let at = |q| quantile(&row.changes, q).map_or_else(String::new, milliseconds);
            let mut restarts: Vec<_> =
                row.restarts.iter().map(|took| took.unwrap_or(Duration::MAX)).collect();
            restarts.sort_unstable();
            let restart = quantile(&restarts, 0.5).map_or_else(String::new, |took| match took {
                Duration::MAX => format!("> {}", seconds(PATIENCE)),
                took => seconds(took),
            });
            let target = if row.kind == Kind::Keelson && row.rate > 0.0 {
                "p99 as alone, restart within 2 times, 30 s"
            } else {
                ""
            };
            println!(
                "| {}, {} | {:.0} | {} | {} | {} | {} | {} | {target} |",
                row.size,
                row.kind.title(),
                row.rate,
                row.changes.len(),
                at(0.5),
                at(0.99),
                restart,
                row.repair.map_or_else(String::new, seconds),
            );
        }
    }

    fn print_long(&self) {
        if self.long.is_empty() {
            return;
        }
        println!(
            "\n| a long run | for | changes | commits of another program a second | kills | connections | to a wrong endpoint | refused or lost | a removed endpoint answered for at most | VmRSS after a minute | at the end | most |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
        for row in &self.long {
            let sum = |memory: &[Memory]| memory.iter().map(|memory| memory.now).sum::<f64>();
            let most = row.memory.iter().map(|memory| sum(memory)).fold(0.0, f64::max);
            let shown = |memory: Option<&Vec<Memory>>| {
                memory.map_or_else(String::new, |memory| parts(memory, |memory| memory.now))
            };
            println!(
                "| {}, {} | {:.0} s | {} | {:.0} | {} | {} | {} | {} | {} | {} | {} | {most:.1} MB |",
                row.size,
                row.kind.title(),
                row.lasted.as_secs_f64(),
                row.written,
                row.neighbour,
                row.kills,
                row.connections,
                row.wrong,
                row.failed,
                seconds(row.stalest),
                shown(row.memory.first()),
                shown(row.memory.last()),
            );
        }
    }

    fn print_memory(&self) {
        if self.memory.is_empty() {
            return;
        }
        println!(
            "\n| memory | VmRSS | Pss | most so far (VmHWM) | most of a program it ran | target (VmRSS, Pss) |"
        );
        println!("|---|---|---|---|---|---|");
        for row in &self.memory {
            let main = (row.size, row.kind) == (Size { services: 10_000, each: 10 }, Kind::Keelson);
            println!(
                "| {}, {}, {} | {} | {} | {} | {} | {} |",
                row.size,
                row.kind.title(),
                row.when,
                parts(&row.memory, |memory| memory.now),
                parts(&row.memory, |memory| memory.share),
                parts(&row.memory, |memory| memory.most),
                if row.children > 0.0 { format!("{:.1} MB", row.children) } else { String::new() },
                if main { "80 MB, 60 MB" } else { "" },
            );
        }
    }

    /// Median of the ratios of our processor times to those of kube-proxy in the same rounds.
    pub(super) fn ratio(&self, way: &Way, costs: fn(&Way) -> &Vec<f64>) -> Option<f64> {
        let other = |other: &&Way| {
            (other.size, other.name, other.kind) == (way.size, way.name, Some(Kind::KubeProxy))
        };
        let other = self.ways.iter().find(other).filter(|_| way.kind.is_some_and(Kind::is_keelson))?;
        let ratios: Vec<f64> = costs(way).iter().zip(costs(other)).map(|(own, other)| own / other).collect();
        median(&ratios)
    }

    fn print_ways(&self) {
        if self.ways.is_empty() {
            return;
        }
        println!(
            "\n| new connections | TCP a second | connected after, p50 | p99 | processor time | by kube-proxy's | UDP a second | answered after, p50 | p99 | processor time | by kube-proxy's | first packet, processor time | by kube-proxy's | failed |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
        for way in &self.ways {
            let at = |of: &[f64], q| {
                let mut sorted = of.to_vec();
                sorted.sort_unstable_by(f64::total_cmp);
                quantile(&sorted, q).map_or_else(String::new, |time| format!("{time:.0} us"))
            };
            let rate = |of: &[f64]| median(of).map_or_else(String::new, |rate| format!("{rate:.0}"));
            let first = |of: &[f64]| median(of).map_or_else(String::new, |cost| format!("{cost:.2} us"));
            let cost = |of: &[f64]| median(of).map_or_else(String::new, |cost| format!("{cost:.1} us"));
            let ratio =
                |costs| self.ratio(way, costs).map_or_else(String::new, |ratio| format!("{ratio:.3}"));
            let whose = way.kind.map_or_else(String::new, |kind| format!(", rules of {}", kind.name()));
            let failed = way.failed.iter().map(|(error, times)| format!("{times} ({error})"));
            println!(
                "| {}, {}{whose} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                way.size,
                way.name,
                rate(&way.tcp_rate),
                at(&way.tcp, 0.5),
                at(&way.tcp, 0.99),
                cost(&way.tcp_cost),
                ratio(|way| &way.tcp_cost),
                rate(&way.udp_rate),
                at(&way.udp, 0.5),
                at(&way.udp, 0.99),
                cost(&way.udp_cost),
                ratio(|way| &way.udp_cost),
                first(&way.first_cost),
                ratio(|way| &way.first_cost),
                failed.collect::<Vec<_>>().join(", "),
            );
        }
        self.print_established();
    }

    fn print_established(&self) {
        println!(
            "\n| one established connection | requests a second | by no rules at all | MB a second | by no rules at all |"
        );
        println!("|---|---|---|---|---|");
        for way in &self.ways {
            let rate = |of: &[f64], unit: f64| {
                median(of).map_or_else(String::new, |rate| format!("{:.0}", rate / unit))
            };
            let ratio =
                |rates| self.by_no_rules(way, rates).map_or_else(String::new, |ratio| format!("{ratio:.3}"));
            let whose = way.kind.map_or_else(String::new, |kind| format!(", rules of {}", kind.name()));
            println!(
                "| {}, {}{whose} | {} | {} | {} | {} |",
                way.size,
                way.name,
                rate(&way.requests, 1.0),
                ratio(|way| &way.requests),
                rate(&way.stream, 1e6),
                ratio(|way| &way.stream),
            );
        }
    }

    /// Median of the ratios to the rates without rules in the same rounds.
    fn by_no_rules(&self, way: &Way, rates: fn(&Way) -> &Vec<f64>) -> Option<f64> {
        way.kind?;
        let other = self.ways.iter().find(|other| other.size == way.size && other.kind.is_none())?;
        let ratios: Vec<f64> = rates(way).iter().zip(rates(other)).map(|(own, other)| own / other).collect();
        median(&ratios)
    }
}

impl Cold {
    /// None if most of them timed out.
    pub(super) fn median(&self) -> Option<Duration> {
        let mut took: Vec<_> = self.took.iter().map(|took| took.unwrap_or(Duration::MAX)).collect();
        took.sort_unstable();
        quantile(&took, 0.5).filter(|took| *took != Duration::MAX)
    }

    fn target(&self) -> &'static str {
        match (self.kind, self.both, self.size.services, self.size.each) {
            (Kind::Keelson, false, 10_000, 10) => "0.5 s, 30 times",
            (Kind::Keelson, false, 5_000, 50) => "2 s",
            _ => "",
        }
    }
}

/// A sum, with its parts if there are several: `31.2 MB (20.1 + 11.1)`.
fn parts(memory: &[Memory], of: impl Fn(&Memory) -> f64) -> String {
    let each: Vec<f64> = memory.iter().map(of).collect();
    let sum: f64 = each.iter().sum();
    if each.len() < 2 {
        return format!("{sum:.1} MB");
    }
    let each: Vec<_> = each.iter().map(|one| format!("{one:.1}")).collect();
    format!("{sum:.1} MB ({})", each.join(" + "))
}

pub(super) fn median(of: &[f64]) -> Option<f64> {
    let mut sorted = of.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

fn middle(of: &[usize]) -> Option<usize> {
    let mut sorted = of.to_vec();
    sorted.sort_unstable();
    quantile(&sorted, 0.5)
}

fn seconds(time: Duration) -> String {
    let time = time.as_secs_f64();
    if time < 10.0 { format!("{time:.3} s") } else { format!("{time:.1} s") }
}

fn milliseconds(time: f64) -> String {
    if time.abs() < 1000.0 { format!("{time:.1} ms") } else { format!("{:.2} s", time / 1e3) }
}
