//! A measurement: what a large cluster costs the maps. `cargo test --release -p keelson-proxy-ebpf --lib measure -- --ignored
//! --nocapture`.

// The result is its output.
#![allow(clippy::print_stderr)]

use super::*;

const SERVICES: u32 = 10_000;
const ENDPOINTS: u16 = 10;
const CHANGES: u32 = 300;

fn service(number: u32, endpoints: u16) -> (ServiceName, ServicePort) {
    let name = ServiceName::new("default", &format!("s{number}"));
    let [_, _, high, low] = number.to_be_bytes();
    let at = |n: u16| SocketAddr::new(IpAddr::from([10, 244, high, low]), 8000 + n);
    let endpoints: Vec<SocketAddr> = (0..endpoints).map(at).collect();
    let mut port = port(Protocol::Tcp, &format!("10.96.{high}.{low}"), &endpoints);
    port.name.service = name.clone();
    (name, port)
}

#[test]
#[ignore = "a measurement"]
fn measure_ten_thousand_services() {
    in_world(|world| {
        let all = |sockets: &mut Sockets| {
            for number in 1..=SERVICES {
                let (name, port) = service(number, ENDPOINTS);
                sockets.plan.set(Family::V4, &name, vec![port]);
            }
        };
        let mut sockets = world.sockets();
        all(&mut sockets);
        let begun = Instant::now();
        let outcome = sockets.sync(Family::V4, Instant::now()).unwrap();
        eprintln!("first sync: {:?}, {} elements", begun.elapsed(), outcome.added);
        let mut times: Vec<Duration> = (0..CHANGES)
            .map(|change| {
                let (name, port) = service(1 + change * 31 % SERVICES, ENDPOINTS - 1);
                sockets.plan.set(Family::V4, &name, vec![port]);
                let begun = Instant::now();
                let outcome = sockets.sync(Family::V4, Instant::now()).unwrap();
                assert!(outcome.operations() <= 1 + usize::from(ENDPOINTS), "{outcome:?}");
                begun.elapsed()
            })
            .collect();
        times.sort_unstable();
        let at = |part: usize| times[times.len() * part / 100];
        eprintln!("one endpoint is removed: p50 {:?}, p99 {:?}", at(50), at(99));
        drop(sockets);
        let mut sockets = world.sockets();
        all(&mut sockets);
        let begun = Instant::now();
        let outcome = sockets.sync(Family::V4, Instant::now()).unwrap();
        eprintln!("restart: {:?}, {} operations", begun.elapsed(), outcome.operations());
        let begun = Instant::now();
        let contents = world.pinned().read().unwrap();
        eprintln!("reading {} slots and all else: {:?}", contents.slots.len(), begun.elapsed());
        assert!(sockets.sync(Family::V4, Instant::now()).unwrap().is_nothing());
    });
}
