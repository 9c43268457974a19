//! P18: the cost of changing the number of endpoints of a Service.

use super::*;

/// The highest count with a prepared chain.
const LAST: u16 = *Chain::PREPARED_COUNTS.end() as u16;

fn plain(number: u16, from: u16, count: u16) -> [Vec<ServicePort>; 2] {
    let mut all = ports(number, from, count);
    for port in all.iter_mut().flatten() {
        port.affinity_seconds = 0;
        port.source_ranges = Vec::new();
    }
    all
}

impl Stage {
    fn set_plain(&mut self, number: u16, from: u16, count: u16) {
        self.sync_loop.set(&name(number), plain(number, from, count), self.now);
    }

    /// Time until the kernel has answered, and the outcome.
    fn scaled(&mut self, number: u16, from: u16, count: u16) -> (Duration, Outcome) {
        let begun = Instant::now();
        self.set_plain(number, from, count);
        let outcome = self.sync();
        (begun.elapsed(), outcome)
    }
}

/// CPU time of this thread so far, including the kernel's.
fn processor() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

fn cost(work: impl FnOnce()) -> Duration {
    let before = processor();
    work();
    processor() - before
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

/// The figures of docs/performance.md: cost of a first sync and of a change, including the kernel's.
#[test]
#[ignore = "measures: cargo test -p keelson-proxy-nft --lib measure_scaling -- --ignored --nocapture"]
fn measure_scaling() {
    println!("{} prepared chains", Chain::prepared().count());
    for (services, rounds) in [(0, 21), (100, 21), (10_000, 3)] {
        let mut took = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            in_namespace(|| {
                let mut stage = Stage::open();
                (0..services).for_each(|number| stage.set_plain(number, 0, 10));
                took[0].push(cost(|| drop(stage.begin())));
                took[1].push(cost(|| drop(kernel().read_structure(Family::V4))));
                let mut text = String::new();
                let ruleset = stage.sync_loop.backend().ruleset();
                took[2].push(cost(|| ruleset(&mut text).unwrap()));
            });
        }
        let [first, structure, print] = took.map(median);
        println!(
            "{services} Services, processor time: first sync {first:?}, structure {structure:?}, print {print:?}"
        );
    }
    in_namespace(|| {
        let mut stage = Stage::open();
        (0..10_000).for_each(|number| stage.set_plain(number, 0, 10));
        stage.set_plain(10_000, 0, 11);
        for number in 10_001..10_101 {
            stage.set_plain(number, 0, 0);
        }
        stage.begin();
        let mut measure = |what: &str, rounds: u16, change: &dyn Fn(u16) -> (u16, u16, u16)| {
            let mut structure = 0;
            let took = (0..rounds).map(|round| {
                let (number, from, count) = change(round);
                let (took, outcome) = stage.scaled(number, from, count);
                assert!(!outcome.full && outcome.transactions == 1, "{what}: {outcome:?}");
                structure += outcome.structure;
                took
            });
            println!("{what}: {:?}, {structure} chains", median(took.collect()));
        };
        measure("one Service swaps 10 endpoints", 100, &|round| (round, 100, 10));
        measure("one Service scales to a count that another has", 100, &|round| (200 + round, 0, 11));
        measure("a Service gets its first endpoints", 100, &|round| (10_001 + round, 0, 10));
        measure("one Service scales to a prepared count", LAST - 11, &|round| (300, 0, 12 + round));
        measure("one Service scales to a new count above those", 50, &|round| (301, 0, LAST + 1 + round));
        let all = (0..5).map(|round| {
            (1_000..2_000).for_each(|number| stage.set_plain(number, 200 + 20 * round, 10));
            cost(|| {
                stage.sync();
            })
        });
        println!("1,000 Services swap 10 endpoints, processor time: {:?}", median(all.collect()));
    });
}

/// Changes between prepared counts, one by one, create and delete no chain.
#[test]
fn p18_no_prepared_count_changes_the_structure() {
    in_namespace(|| {
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set_plain(number, 0, 10));
        stage.begin();
        let before = nft(&["list", "chains", "ip"]);
        for count in (1..=LAST).chain([1, LAST, 0, 7]) {
            let (_, outcome) = stage.scaled(3, 0, count);
            assert!(!outcome.full && outcome.structure == 0, "{count}: {outcome:?}");
            assert_eq!(outcome.transactions, 1, "{count}: {outcome:?}");
            stage.assert_exact();
        }
        stage.later(UNUSED_CHAIN_TTL * 2);
        stage.later(UNUSED_CHAIN_TTL * 2);
        assert_eq!(nft(&["list", "chains", "ip"]), before);
        assert_eq!(stage.sync_loop.family(Family::V4).totals.repaired, 0);
        // A larger count creates a chain, which is deleted when it has long been unused.
        assert_eq!(stage.scaled(3, 0, LAST + 1).1.structure, 1);
        stage.set_plain(3, 0, 1);
        stage.sync();
        stage.later(UNUSED_CHAIN_TTL);
        assert_eq!(nft(&["list", "chains", "ip"]), before);
        stage.assert_exact();
    });
}

/// A table of an older version has only the chains that were in use.
#[test]
fn p18_an_older_table_gets_the_chains_that_it_lacks() {
    in_namespace(|| {
        let mut stage = Stage::open();
        (0..20).for_each(|number| stage.set_plain(number, 0, 10));
        stage.begin();
        let all = nft(&["list", "chains", "ip"]);
        drop(stage);
        delete_chains((1..=LAST).filter(|count| *count != 10));
        let mut again = Stage::open();
        (0..20).for_each(|number| again.set_plain(number, 0, 10));
        let outcome = again.begin().remove(0).result.unwrap();
        assert_eq!(
            (outcome.transactions, outcome.structure, outcome.repaired),
            (1, 2 * (usize::from(LAST) - 1), false)
        );
        assert_eq!((outcome.added, outcome.deleted), (0, 0), "{outcome:?}");
        again.assert_exact();
        assert_eq!(sorted(&nft(&["list", "chains", "ip"])), sorted(&all));
        // Only other programs delete them.
        delete_chains(4..=9);
        let repaired = again.later(READ_INTERVAL).remove(0).result.unwrap();
        assert!(repaired.repaired && repaired.structure == 2 * 6, "{repaired:?}");
        again.assert_exact();
    });
}

/// With many slots, each chain takes the kernel long, so a few are created per second.
#[test]
fn p18_over_many_slots_chains_are_created_a_few_at_a_time() {
    in_namespace(|| {
        let mut stage = Stage::open();
        (0..2_000).for_each(|number| stage.set_plain(number, 0, 10));
        stage.begin();
        drop(stage);
        delete_chains((1..=LAST).filter(|count| *count != 10));
        let mut again = Stage::open();
        (0..2_000).for_each(|number| again.set_plain(number, 0, 10));
        let outcome = again.begin().remove(0).result.unwrap();
        assert_eq!(outcome.structure, 2 * 3, "65,536 / 20,000: {outcome:?}");
        // A chain in use is created at once, and changes continue meanwhile; a check does not create all of them.
        assert_eq!(again.scaled(3, 0, LAST).1.structure, 1);
        nft(&["add", "table", "ip", "mine"]);
        again.now += READ_INTERVAL;
        again.observer.read(Family::V4).unwrap();
        assert!(again.sync_loop.begin_checks(again.now).contains(&Family::V4));
        assert!(again.check(Family::V4).is_none(), "chains that are to come are no drift");
        let mut ticks = 0;
        while !again.sync_loop.tick(again.now).is_empty() {
            again.now += Duration::from_secs(1);
            ticks += 1;
        }
        // Without the one in use, the three that existed and the one that a Service needed.
        assert_eq!(ticks, (LAST - 5).div_ceil(3), "3 chains a second");
        again.assert_exact();
        assert_eq!(again.sync_loop.family(Family::V4).totals.repaired, 0);
    });
}

/// As another program would do it. Nothing may refer to the chains.
fn delete_chains(counts: impl Iterator<Item = u16>) {
    let commands =
        counts.map(|count| format!("flush chain ip keelson lb-{count}; delete chain ip keelson lb-{count}"));
    nft(&[&commands.collect::<Vec<_>>().join("; ")]);
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}
