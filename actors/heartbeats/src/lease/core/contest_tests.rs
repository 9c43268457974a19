//! E3: two processes that renew one Lease.
//!
//! Owns: [`World`], one API server, agents and a kubelet of one node name, on one clock.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiErrorKind, JobHealth};

use super::{
    Contention, Counted, LeasePolicy,
    testing::{Bench, START_MS, Server, millis, policy, seconds},
};
use crate::lease::LeaseRecord;

const TICK: Duration = millis(50);
/// Two periods, with their jitter.
const TWO_PERIODS: u64 = 21;

fn may_stand_back() -> LeasePolicy {
    LeasePolicy { may_stand_back: true, ..policy() }
}

struct World {
    server: Server,
    agents: Vec<Option<Bench>>,
    /// Time of the kubelet's next renewal.
    kubelet: Option<Duration>,
    now: Duration,
}

impl World {
    fn new(server: Server) -> Self {
        Self { server, agents: Vec::new(), kubelet: None, now: Duration::ZERO }
    }

    /// The agent is the first to write the Lease.
    fn with_agent(policy: LeasePolicy) -> (Self, usize) {
        let mut world = Self::new(Server::with_node());
        let agent = world.start(policy, None);
        (world, agent)
    }

    fn unix_ms(&self) -> i64 {
        START_MS + i64::try_from(self.now.as_millis()).expect("small")
    }

    /// Returns the agent's number.
    fn start(&mut self, policy: LeasePolicy, record: Option<LeaseRecord>) -> usize {
        let mut agent = Bench::with(policy, record);
        agent.now.unix_ms = self.unix_ms();
        agent.random = [0.1, 0.6, 0.9][self.agents.len() % 3];
        self.agents.push(Some(agent));
        self.agents.len() - 1
    }

    /// As another process with the same record.
    fn restart(&mut self, agent: usize) -> usize {
        let record = self.agent(agent).record.clone();
        self.agents[agent] = None;
        self.start(may_stand_back(), record)
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += TICK;
            if self.kubelet.is_some_and(|at| at <= self.now) {
                self.server.renew_as_kubelet(self.unix_ms());
                self.kubelet = Some(self.now + millis(10_200));
            }
            for agent in self.agents.iter_mut().flatten() {
                agent.pass(TICK, &mut self.server);
            }
        }
    }

    fn agent(&mut self, number: usize) -> &mut Bench {
        self.agents[number].as_mut().expect("runs")
    }

    fn contention(&mut self, number: usize) -> Contention {
        self.agent(number).core.contention()
    }

    fn age(&self) -> Duration {
        let renewed = self.server.lease.as_ref().and_then(|lease| lease.renew_unix_us).expect("a Lease");
        Duration::from_micros(u64::try_from(self.unix_ms() * 1000 - renewed).unwrap_or_default())
    }

    /// The maximum age of the Lease while time passes.
    fn oldest(&mut self, time: Duration) -> Duration {
        let (end, mut oldest) = (self.now + time, Duration::ZERO);
        while self.now < end {
            self.pass(TICK);
            oldest = oldest.max(self.age());
        }
        oldest
    }
}

fn writes(log: &[&str]) -> usize {
    log.iter().filter(|name| matches!(**name, "PATCH" | "POST")).count()
}

#[test]
fn e3_of_two_agents_the_earlier_claim_wins() {
    let (mut world, first) = World::with_agent(may_stand_back());
    world.pass(seconds(33));
    let second = world.start(may_stand_back(), None);
    world.pass(millis(100));
    assert_eq!(world.contention(second), Contention::Undecided, "nothing is written before it is known");
    world.pass(seconds(TWO_PERIODS));
    assert_eq!(world.contention(second), Contention::StandingBack);
    assert_eq!(world.contention(first), Contention::Uncontested);
    let agent = world.agent(second);
    assert_eq!(writes(&agent.log()), 0);
    assert!(agent.failure().contains("stands back"));
    assert_eq!(agent.count_notes("stands back"), 1);
    assert!(world.oldest(seconds(120)) < seconds(11), "the first one is not disturbed");
    assert_eq!(
        (world.agent(first).count("Conflict"), world.agent(second).count_notes("stands back")),
        (0, 1)
    );
    // It stops permanently: the other takes over within the duration and an interval of its last renewal.
    world.agents[first] = None;
    let oldest = world.oldest(seconds(60));
    assert!((seconds(40)..millis(51_000)).contains(&oldest), "{oldest:?}");
    assert_eq!(world.contention(second), Contention::Uncontested);
    assert_eq!(world.agent(second).core.health(), JobHealth::Healthy);
    // When it returns it finds another's claim.
    let record = world.agent(second).record.clone();
    assert_eq!(record.as_ref().map(|record| record.stood_back), Some(false));
    let back = world.start(may_stand_back(), None);
    world.pass(seconds(TWO_PERIODS));
    assert_eq!(
        (world.contention(second), world.contention(back)),
        (Contention::Uncontested, Contention::StandingBack)
    );
}

#[test]
fn e3_a_copy_of_the_agent_with_its_state_yields_to_the_original() {
    let (mut world, original) = World::with_agent(may_stand_back());
    world.pass(seconds(34));
    let record = world.agent(original).record.clone();
    let copy = world.start(may_stand_back(), record);
    // Its first renewal, and two periods.
    let oldest = world.oldest(millis(10_400) + seconds(TWO_PERIODS));
    assert!(oldest < seconds(11), "{oldest:?}");
    assert_eq!(world.contention(copy), Contention::StandingBack);
    assert!(world.agent(original).counted.contains(&Counted::ForeignRenewal));
    assert!(world.oldest(seconds(60)) < seconds(11));
    assert_eq!(world.agent(original).core.health(), JobHealth::Healthy, "it continues");
    assert_eq!(world.contention(original), Contention::Uncontested);
    assert_eq!(world.contention(copy), Contention::StandingBack);
    assert_eq!(world.agent(copy).record.as_ref().map(|record| record.stood_back), Some(true));
}

#[test]
fn e3_beside_a_kubelet_that_comes_later_the_agent_stands_back_until_it_is_gone() {
    let (mut world, agent) = World::with_agent(may_stand_back());
    world.pass(seconds(64));
    assert_eq!(world.contention(agent), Contention::Uncontested);
    world.kubelet = Some(world.now);
    world.pass(seconds(TWO_PERIODS));
    assert_eq!(world.contention(agent), Contention::StandingBack);
    world.agent(agent).log();
    world.pass(seconds(300));
    let log = world.agent(agent).log();
    assert!(
        log.iter().all(|name| *name == "GET") && (28..=30).contains(&log.len()),
        "one read an interval: {log:?}"
    );
    // After a restart there is no new contest.
    let agent = world.restart(agent);
    world.pass(seconds(TWO_PERIODS));
    assert_eq!(world.contention(agent), Contention::StandingBack);
    assert_eq!(writes(&world.agent(agent).log()), 0);
    // A restart of the kubelet is no reason to take over; its permanent stop is.
    world.kubelet = Some(world.now + seconds(30));
    world.pass(seconds(45));
    assert_eq!(writes(&world.agent(agent).log()), 0);
    world.kubelet = None;
    let oldest = world.oldest(seconds(60));
    assert!((seconds(40)..millis(51_000)).contains(&oldest), "{oldest:?}");
    assert_eq!(
        (world.contention(agent), world.agent(agent).core.health()),
        (Contention::Uncontested, JobHealth::Healthy)
    );
}

#[test]
fn e3_an_earlier_kubelet_keeps_the_lease() {
    for (duration, limit) in [(40, 16), (80, 31)] {
        let mut world = World::new(Server::with_lease("web-1", seconds(3)));
        world.server.lease.as_mut().expect("there").duration_seconds = Some(duration);
        world.kubelet = Some(seconds(7));
        let agent = world.start(may_stand_back(), None);
        world.pass(seconds(limit));
        assert_eq!(world.contention(agent), Contention::StandingBack, "{duration}");
        world.pass(seconds(120));
        assert_eq!(writes(&world.agent(agent).log()), 0);
    }
}

#[test]
fn e3_an_agent_set_to_continue_renews_and_reports_the_contest() {
    let (mut world, agent) = World::with_agent(policy());
    assert_eq!(world.contention(agent), Contention::Uncontested, "no status waits for it");
    world.pass(seconds(64));
    world.kubelet = Some(world.now);
    world.pass(seconds(TWO_PERIODS));
    assert_eq!(world.contention(agent), Contention::Contested);
    let renewals = world.agent(agent).count("renewed");
    world.pass(seconds(103));
    let agent_bench = world.agent(agent);
    assert!(agent_bench.count("renewed") - renewals >= 10 - 1, "an interval each");
    assert_eq!((agent_bench.count_notes("this agent continues"), agent_bench.closes), (1, 0));
    let view = agent_bench.core.view("s", agent_bench.now);
    assert_eq!(view["contention"], "contested");
    assert!(view["contested_since_unix_ms"].is_i64(), "{view:#}");
    world.kubelet = None;
    world.pass(seconds(51));
    assert_eq!(world.contention(agent), Contention::Uncontested);
}

#[test]
fn e3_an_agent_with_the_default_yields_to_one_that_never_stands_back() {
    let (mut world, first) = World::with_agent(may_stand_back());
    world.pass(seconds(33));
    let stubborn = world.start(policy(), None);
    assert!(world.oldest(seconds(80)) < seconds(12));
    assert_eq!(
        (world.contention(first), world.contention(stubborn)),
        (Contention::StandingBack, Contention::Uncontested)
    );
}

#[test]
fn e3_neither_lost_answers_nor_edits_are_a_second_writer() {
    let (mut world, agent) = World::with_agent(may_stand_back());
    world.pass(seconds(5));
    for _ in 0..6 {
        world.server.swallows = 2;
        world.pass(seconds(5));
        // kubectl annotate
        world.server.touch();
        world.pass(seconds(5));
    }
    assert_eq!(world.contention(agent), Contention::Uncontested);
    assert!(world.agent(agent).count("Conflict") > 2, "they were conflicts");
    // One edit of the renewTime, and another one much later.
    for _ in 0..2 {
        let unix_ms = world.unix_ms();
        world.server.renew_as_kubelet(unix_ms);
        world.pass(seconds(60));
        assert_eq!(world.contention(agent), Contention::Uncontested);
    }
}

#[test]
fn e3_a_restart_delays_no_renewal() {
    let mut world = World::new(Server::with_node());
    let mut agent = world.start(may_stand_back(), None);
    let mut oldest = Duration::ZERO;
    for _ in 0..5 {
        oldest = oldest.max(world.oldest(seconds(27)));
        let record = world.agent(agent).record.clone();
        world.agents[agent] = None;
        world.pass(seconds(1));
        agent = world.start(may_stand_back(), record);
    }
    assert!(oldest < millis(11_500), "{oldest:?}");
    // Without its records it waits for a period and a half since the last renewal.
    world.agents[agent] = None;
    agent = world.start(may_stand_back(), None);
    let oldest = world.oldest(seconds(20));
    assert!(oldest <= millis(15_200), "{oldest:?}");
    assert_eq!(world.contention(agent), Contention::Uncontested);
    // A Lease that no process has renewed for longer than that is not waited for.
    world.agents[agent] = None;
    world.pass(seconds(20));
    let agent = world.start(may_stand_back(), None);
    world.pass(millis(100));
    assert_eq!((world.contention(agent), world.age() < seconds(1)), (Contention::Uncontested, true));
}

#[test]
fn e3_api_server_failures_do_not_count_as_silence_of_the_second_writer() {
    let (mut world, agent) = World::with_agent(may_stand_back());
    world.pass(seconds(34));
    world.kubelet = Some(world.now);
    world.pass(seconds(TWO_PERIODS));
    assert_eq!(world.contention(agent), Contention::StandingBack);
    // No process can renew for three minutes; the agent reaches the server a little earlier than the kubelet.
    world.kubelet = None;
    world.server.down = Some((ApiErrorKind::Unreachable, Duration::ZERO));
    world.pass(seconds(180));
    world.server.down = None;
    world.agent(agent).log();
    world.kubelet = Some(world.now + seconds(20));
    world.pass(seconds(60));
    assert_eq!(world.contention(agent), Contention::StandingBack);
    assert_eq!(writes(&world.agent(agent).log()), 0);
}

#[test]
fn e3_a_deleted_lease_is_left_to_the_second_writer_until_it_is_silent() {
    let mut world = World::new(Server::with_lease("web-1", seconds(3)));
    world.kubelet = Some(seconds(7));
    let agent = world.start(may_stand_back(), None);
    world.pass(seconds(30));
    assert_eq!(world.contention(agent), Contention::StandingBack);
    (world.kubelet, world.server.lease) = (None, None);
    world.pass(seconds(30));
    assert_eq!(writes(&world.agent(agent).log()), 0);
    world.pass(seconds(25));
    assert_eq!((world.contention(agent), world.server.lease.is_some()), (Contention::Uncontested, true));
}

#[test]
fn e3_an_unreadable_lease_does_not_delay_the_status() {
    let mut world = World::new(Server::with_node());
    world.server.down = Some((ApiErrorKind::Forbidden, Duration::ZERO));
    let agent = world.start(may_stand_back(), None);
    assert_eq!(world.contention(agent), Contention::Undecided);
    world.pass(millis(100));
    assert_eq!(world.contention(agent), Contention::Uncontested);
}

/// E18: a clock that was set back while the agent was down delays no renewal.
#[test]
fn e18_a_lease_of_the_future_that_was_ours_is_renewed_at_once() {
    let (mut world, agent) = World::with_agent(may_stand_back());
    world.pass(seconds(25));
    let agent = world.restart(agent);
    world.agent(agent).now.unix_ms -= 3_600_000;
    world.agent(agent).log();
    world.pass(millis(100));
    assert_eq!(world.agent(agent).log(), ["GET", "PATCH"]);
}
