//! Throughput of offloaded flows, compared with flows that are not.
//!
//! Owns: a test that is run by hand. In: environment variables for the number of runs and of foreign rules. Out: the
//! figures of docs/performance.md, on standard error.

use super::*;

/// Packets and bytes received by an interface of a namespace.
fn received(net: &Net, namespace: &str) -> [u64; 2] {
    let text = net.within(namespace, || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
    let line = text.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
    [numbers[1], numbers[0]]
}

const MEASURED: Duration = Duration::from_secs(1);

/// Sends until the time is over. Returns packets and bytes per second received by the server.
fn rate(net: &Net, mut send: impl FnMut()) -> [f64; 2] {
    let (before, begun) = (received(net, "server"), Instant::now());
    while begun.elapsed() < MEASURED {
        (0..64).for_each(|_| send());
    }
    // Packets in flight arrive within a moment.
    let took = begun.elapsed().as_secs_f64();
    thread::sleep(Duration::from_millis(100));
    let after = received(net, "server");
    [0, 1].map(|index| (after[index] - before[index]) as f64 / took)
}

/// Measures one way of reaching the Service. Returns the names and rates.
fn measure_target(net: &Net, what: &str, target: SocketAddr) -> Vec<(String, f64)> {
    let (mut stream, udp) = (connect(net, target), socket(net, target));
    // Established, and offloaded if enabled.
    for _ in 0..10 {
        ask_tcp(&mut stream);
        ask_udp(&udp);
    }
    let mut figures = Vec::new();
    let mut round_trips = 0_u32;
    let begun = Instant::now();
    while begun.elapsed() < MEASURED {
        ask_tcp(&mut stream);
        round_trips += 1;
    }
    figures.push(("TCP round trips/s", f64::from(round_trips) / begun.elapsed().as_secs_f64()));
    let block = [NO_ANSWER; 64 * 1024];
    let [_, bytes] = rate(net, || stream.write_all(&block).unwrap());
    figures.push(("TCP MB/s", bytes / 1e6));
    let [packets, _] = rate(net, || drop(udp.send(&[NO_ANSWER; 16])));
    figures.push(("UDP packets/s (16 bytes)", packets));
    let [_, bytes] = rate(net, || drop(udp.send(&[NO_ANSWER; 1400])));
    figures.push(("UDP MB/s (1400 bytes)", bytes / 1e6));
    figures.into_iter().map(|(kind, figure)| (format!("{what}: {kind}"), figure)).collect()
}

/// Prints the figures of docs/performance.md: medians of several runs, without and with the flowtable in turn, and of
/// the ratio of each run.
#[test]
#[ignore = "measures for minutes; see docs/performance.md"]
fn measure() {
    let runs: usize = std::env::var("KEELSON_FLOW_RUNS").map_or(7, |runs| runs.parse().unwrap());
    // Rules of a network policy, which every forwarded packet meets.
    let rules: usize = std::env::var("KEELSON_FLOW_RULES").map_or(0, |rules| rules.parse().unwrap());
    for family in Family::ALL {
        let net = Net::new("bench", family);
        assert!(is_supported(&net), "this kernel has no flowtables: there is nothing to measure");
        let stop = Arc::new(AtomicBool::new(false));
        net.serve(&stop);
        if rules > 0 {
            let others = "meta mark 0x1234 drop\n".repeat(rules);
            let hook = "type filter hook forward priority filter; policy accept;";
            let script = format!("table inet other {{\nchain forward {{\n{hook}\n{others}}}\n}}\n");
            net.within("node", || nft(&script));
        }
        let mut all: Vec<[Vec<(String, f64)>; 2]> = Vec::new();
        for _ in 0..runs {
            all.push([&[][..], &INTERFACES[..]].map(|interfaces| {
                let _node = Node::open(&net, interfaces, 2);
                let of = |(what, target)| measure_target(&net, what, target);
                net.targets().into_iter().flat_map(of).collect()
            }));
        }
        eprintln!("{family}, {rules} rules of another program, medians of {runs}: without, with, ratio");
        let median = |mut figures: Vec<f64>| {
            figures.sort_by(f64::total_cmp);
            figures[figures.len() / 2]
        };
        for (index, (what, _)) in all[0][0].iter().enumerate() {
            let of = |mode: usize| all.iter().map(|run| run[mode][index].1).collect::<Vec<_>>();
            let ratio = median(of(1).iter().zip(of(0)).map(|(with, without)| with / without).collect());
            eprintln!("  {what:44} {:10.1} {:10.1} {ratio:6.2}", median(of(0)), median(of(1)));
        }
        stop.store(true, Ordering::Relaxed);
    }
}
