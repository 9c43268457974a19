//! Random histories: invariants for any answers of the server.
//!
//! After every event: at most one request is under way, and a timer or a request is ([`Bench`]); no patch without a
//! version. In any interval: no more requests than the kubelet would make, besides those after a pause of the server. At
//! the end, when the server is healthy: a renewal within the longest pause and an interval.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiErrorKind, JobHealth};
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::{
    Contention, Event, LeasePolicy, Request,
    testing::{Bench, Server, millis, policy, seconds},
};

/// The kubelet's maximum in one interval: ten updates, a read after each, one between the two halves; reads with
/// back-off, 0.2 s to 7 s (six of them fit); and the reads of the Node.
const MAX_REQUESTS_PER_INTERVAL: usize = 10 + 10 + 1 + 6 + 2;
/// The kubelet's ten updates, and those that reach no server: where the kubelet reads with back-off, a patch is tried.
const MAX_PATCHES_PER_INTERVAL: usize = 10 + 6;
/// The longest pause in the steps below, seconds.
const MAX_RETRY_AFTER_SECONDS: u64 = 20;

#[derive(Debug, Clone)]
enum Step {
    Pass(u64),
    Down(Option<(ApiErrorKind, u64)>),
    Next(Vec<Option<ApiErrorKind>>),
    Rival(bool),
    Touch,
    LeaseGone,
    Renewed,
    Foreign,
    Node(Option<u8>),
    Told(Option<u8>),
    Clock(i64),
    Restart,
}

fn kind() -> impl Strategy<Value = ApiErrorKind> {
    let pause = option::of((0..MAX_RETRY_AFTER_SECONDS).prop_map(seconds));
    prop_oneof![
        8 => select(vec![
            ApiErrorKind::Conflict,
            ApiErrorKind::AlreadyExists,
            ApiErrorKind::NotFound,
            ApiErrorKind::Gone,
            ApiErrorKind::Unauthorized,
            ApiErrorKind::Forbidden,
            ApiErrorKind::Invalid,
            ApiErrorKind::Timeout,
            ApiErrorKind::Unreachable,
            ApiErrorKind::Credentials,
        ]),
        1 => pause.clone().prop_map(|retry_after| ApiErrorKind::TooManyRequests { retry_after }),
        1 => pause.prop_map(|retry_after| ApiErrorKind::Server { retry_after }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u64..30_000).prop_map(Step::Pass),
        2 => option::of((kind(), select(vec![0_u64, 0, 50, 10_000]))).prop_map(Step::Down),
        3 => vec(option::of(kind()), 1..12).prop_map(Step::Next),
        1 => any::<bool>().prop_map(Step::Rival),
        1 => Just(Step::Touch),
        1 => Just(Step::LeaseGone),
        1 => Just(Step::Renewed),
        1 => Just(Step::Foreign),
        1 => option::of(0_u8..3).prop_map(Step::Node),
        1 => option::of(0_u8..3).prop_map(Step::Told),
        1 => (-7_200_000_i64..7_200_000).prop_map(Step::Clock),
        1 => Just(Step::Restart),
    ]
}

fn uid(number: u8) -> String {
    format!("node-{number}")
}

struct Run {
    bench: Bench,
    server: Server,
    times: Vec<Duration>,
    patches: Vec<Duration>,
    /// A change of the Node allows one early request per interval.
    is_reported: bool,
    policy: LeasePolicy,
}

impl Run {
    fn perform(&mut self, step: Step) {
        let server = &mut self.server;
        match step {
            Step::Pass(time) => self.bench.pass(millis(time), server),
            Step::Down(down) => server.down = down.map(|(kind, takes)| (kind, millis(takes))),
            Step::Next(next) => server.next = next.into(),
            Step::Rival(second_writer) => server.second_writer = second_writer,
            Step::Touch => server.touch(),
            Step::LeaseGone => server.lease = None,
            Step::Renewed => server.renew_as_kubelet(self.bench.now.unix_ms),
            Step::Foreign => {
                server.touch();
                if let Some(lease) = &mut server.lease {
                    lease.holder = Some("other".into());
                }
            }
            Step::Node(node) => server.node = node.map(uid),
            Step::Told(node) => {
                self.is_reported = true;
                self.bench.event(Event::NodeChanged(node.map(uid)));
            }
            Step::Clock(step) => self.bench.step(step),
            Step::Restart => {
                let now = self.bench.now;
                self.bench = Bench::with(self.policy.clone(), self.bench.record.clone());
                self.bench.now = now;
                (self.times, self.patches, self.is_reported) = (Vec::new(), Vec::new(), false);
            }
        }
        // The server itself sets the rate of requests after its pauses. The kubelet's client makes up to ten of them for
        // each request.
        let after_pauses = std::mem::take(&mut self.bench.after_pauses);
        for (at, request) in self.bench.requests.drain(..) {
            if after_pauses.contains(&at) {
                continue;
            }
            self.times.push(at);
            if matches!(request, Request::Renew(_)) {
                self.patches.push(at);
            }
        }
    }

    fn check_rate(&self) {
        let interval = policy().interval();
        // A sync that a change starts early comes on top of the planned one, once per interval.
        let factor = if self.is_reported { 2 } else { 1 };
        for (times, most) in
            [(&self.times, MAX_REQUESTS_PER_INTERVAL), (&self.patches, MAX_PATCHES_PER_INTERVAL)]
        {
            for window in times.windows(most * factor + 1) {
                let took = window[most * factor].saturating_sub(window[0]);
                assert!(took >= interval, "{} requests in {took:?}", most * factor + 1);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_for_any_answers(
        random in 0.0_f64..1.0,
        may_stand_back: bool,
        steps in vec(step(), 0..60),
    ) {
        let policy = LeasePolicy { may_stand_back, ..policy() };
        let bench = Bench { random, ..Bench::with(policy.clone(), None) };
        let server = Server::with_node();
        let mut run = Run { bench, server, times: Vec::new(), patches: Vec::new(), is_reported: false, policy };
        for step in steps {
            run.perform(step);
            run.check_rate();
        }
        // Hanging requests end; the server's pause passes.
        run.server.next.clear();
        run.server.second_writer = false;
        run.server.node = Some(uid(9));
        if run.bench.asked.is_some() {
            run.perform(Step::Pass(10_000));
        }
        run.server.down = None;
        run.perform(Step::Pass(MAX_RETRY_AFTER_SECONDS * 1000));
        if may_stand_back {
            // No process has renewed the Lease for its whole duration.
            run.perform(Step::Pass(40_000 + 10_400));
        }
        prop_assert_eq!(run.bench.core.contention() == Contention::StandingBack, false);
        let (writes, renewed) = (run.server.writes, run.bench.core.renewed_at());
        run.perform(Step::Pass(7_000 + 10_400));
        run.check_rate();
        prop_assert!(run.server.writes > writes, "renewed at {renewed:?}, {:?}", run.bench.core);
        prop_assert_eq!(run.bench.core.health(), JobHealth::Healthy);
        let lease = run.server.lease.expect("there");
        prop_assert_eq!(lease.holder.as_deref(), Some("web-1"));
        let record = run.bench.record.expect("written");
        prop_assert_eq!((record.uid, Some(record.transitions)), (lease.written.uid, lease.transitions));
    }

    #[test]
    fn the_next_run_comes_between_the_interval_and_four_percent_more(random in 0.0_f64..1.0) {
        let (mut bench, mut server) = (Bench { random, ..Bench::new(None) }, Server::with_node());
        bench.pass(seconds(100), &mut server);
        let times: Vec<Duration> = bench.requests[2..].iter().map(|(at, _)| *at).collect();
        for two in times.windows(2) {
            let pause = two[1] - two[0];
            prop_assert!(pause >= seconds(10) && pause < millis(10_401), "{:?}", pause);
        }
    }
}
