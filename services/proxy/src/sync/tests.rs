use keelson_client::localnetv1::IpSet;

use super::*;
use crate::{
    addresses::{Match, NodePortAddresses},
    backend::{Observer, fake::FakeKernel},
    options::DetectLocal,
    testing,
};

/// Without a pace: a sync that a busy machine makes long would be followed by a pause.
fn options() -> Options {
    Options { min_sync_period: Duration::ZERO, ..testing::options(&[]) }
}

fn node() -> NodeInfo {
    let ips = IpSet { v4: vec!["192.0.2.1".into()], v6: vec!["2001:db8::1".into()] };
    NodeInfo { i_ps: Some(ips), ..NodeInfo::default() }
}

fn name(number: u16) -> ServiceName {
    ServiceName::new("ns", &format!("s{number}"))
}

/// A port of each family. `port` distinguishes versions of the Service.
fn ports(number: u16, port: u16) -> [Vec<ServicePort>; 2] {
    Family::ALL.map(|family| {
        vec![ServicePort {
            external_ips: vec![family.unspecified()],
            ..testing::service_port(&name(number), "http", family.unspecified(), port)
        }]
    })
}

struct Stage {
    kernel: FakeKernel,
    sync: SyncLoop,
    observer: Box<dyn Observer>,
    now: Instant,
}

impl Stage {
    fn open(options: Options) -> Self {
        Self::with(FakeKernel::default(), options)
    }

    fn with(kernel: FakeKernel, options: Options) -> Self {
        let backend = kernel.backend();
        let observer = backend.observer().unwrap();
        let now = Instant::now();
        let local = [IpAddr::from([192, 0, 2, 1])].into_iter().collect();
        let mut sync = SyncLoop::new(backend, options, &local);
        sync.set_node(node(), now);
        Self { kernel, sync, observer, now }
    }

    fn synced(options: Options) -> Self {
        let mut stage = Self::open(options);
        (0..3).for_each(|number| stage.set(number, 80));
        stage.sync.begin(stage.now);
        assert_eq!(stage.sync().len(), 2);
        stage
    }

    fn set(&mut self, number: u16, port: u16) {
        self.sync.set(&name(number), ports(number, port), self.now);
    }

    fn sync(&mut self) -> Vec<Synced> {
        self.sync.sync(self.now)
    }

    fn fail(&self, times: usize) {
        self.kernel.change(|kernel| kernel.faults.extend(vec![Some(error()); times]));
    }

    fn ports_of(&self, number: u16) -> Option<u16> {
        self.kernel.change(|kernel| kernel.rules[0].get(&name(number)).map(|ports| ports[0].port))
    }

    fn check(&mut self) -> Vec<Checked> {
        let families = self.sync.begin_checks(self.now);
        families
            .into_iter()
            .map(|family| {
                self.observer.read(family).unwrap();
                self.sync.check(family, self.now)
            })
            .collect()
    }
}

fn error() -> BackendError {
    BackendError::new(&"no memory", false)
}

#[test]
fn nothing_is_programmed_before_a_full_state() {
    let mut stage = Stage::open(options());
    stage.set(1, 80);
    assert!(stage.sync().is_empty());
    assert!(stage.sync.tick(stage.now).is_empty());
    assert!(!stage.sync.is_current() && !stage.sync.has_synced());
    stage.sync.begin(stage.now);
    assert!(stage.sync().iter().all(|synced| synced.result.as_ref().is_ok_and(|outcome| outcome.full)));
    assert!(stage.sync.is_current() && stage.sync.has_synced());
    assert_eq!(stage.ports_of(1), Some(80));
    // Further syncs are incremental, and only of families that changed.
    stage.set(1, 81);
    assert!(stage.sync().iter().all(|synced| synced.result.as_ref().is_ok_and(|outcome| !outcome.full)));
    assert!(stage.sync().is_empty());
}

/// Without the addresses it would take node ports out of effect that a former proxy serves.
#[test]
fn the_first_sync_knows_the_addresses_of_the_node() {
    let mut stage = Stage::open(Options { node_port_addresses: NodePortAddresses::Primary, ..options() });
    stage.sync.begin(stage.now);
    assert_eq!(stage.sync().len(), 2);
    let node = stage.kernel.change(|kernel| kernel.nodes[0].take()).unwrap();
    assert_eq!(node.node_ports, Match::Addresses(vec![IpAddr::from([192, 0, 2, 1])]));
}

#[test]
fn a_failure_delays_its_family_only_and_pauses_grow() {
    let mut stage = Stage::synced(options());
    stage.set(1, 81);
    stage.fail(1);
    let synced = stage.sync();
    assert!(synced[0].result.is_err() && synced[1].result.is_ok(), "{synced:?}");
    stage.set(2, 81);
    assert!(stage.sync().iter().all(|synced| synced.family == Family::V6), "not before the pause is over");
    stage.fail(1);
    stage.now += FIRST_PAUSE;
    assert!(stage.sync.tick(stage.now).iter().any(|synced| synced.result.is_err()));
    let status = stage.sync.family(Family::V4);
    assert_eq!((status.failure.as_ref().unwrap().times, status.totals.failures), (2, 2));
    stage.now += FIRST_PAUSE;
    assert!(stage.sync.tick(stage.now).is_empty(), "the second pause is longer");
    stage.now += FIRST_PAUSE;
    let synced = stage.sync.tick(stage.now);
    assert!(synced[0].result.as_ref().is_ok_and(|outcome| outcome.full), "{synced:?}");
    assert!(stage.sync.is_current());
    for (times, seconds) in [(1, 1), (2, 2), (5, 16), (6, 30), (u32::MAX, 30)] {
        assert_eq!(retry_pause(times, Duration::from_secs(30)), Duration::from_secs(seconds));
    }
}

#[test]
fn a_disabled_family_is_not_programmed() {
    let kernel = FakeKernel::default();
    kernel.change(|kernel| kernel.lacks_v6 = true);
    let mut stage = Stage::with(kernel, options());
    stage.set(1, 80);
    stage.sync.begin(stage.now);
    let synced: Vec<Family> = stage.sync().iter().map(|synced| synced.family).collect();
    assert_eq!(synced, [Family::V4]);
    assert!(stage.sync.is_current() && stage.sync.has_synced());
    assert!(stage.sync.enabled().eq([Family::V4]));
}

#[test]
fn drift_is_repaired_and_rules_are_not_read_too_often() {
    let mut stage = Stage::synced(options());
    assert!(stage.check().is_empty(), "a full sync has just read them");
    stage.now += READ_INTERVAL;
    stage.kernel.change(|kernel| kernel.rules[0].clear());
    let checked = stage.check();
    let [Checked::Repaired(v4), Checked::Clean] = checked.as_slice() else { panic!("{checked:?}") };
    assert!(v4.result.as_ref().is_ok_and(|outcome| outcome.repaired && outcome.added == 3));
    assert_eq!(stage.sync.family(Family::V4).totals.repaired, 1);
    stage.kernel.change(|kernel| kernel.rules[0].clear());
    assert!(stage.check().is_empty(), "they have just been read");
    stage.now += READ_INTERVAL;
    assert_eq!(stage.check().len(), 2);
    stage.now += READ_INTERVAL;
    assert!(stage.check().is_empty(), "no other program has changed anything");
}

#[test]
fn a_check_waits_for_changes_and_may_fail() {
    let mut stage = Stage::synced(options());
    stage.now += READ_INTERVAL;
    stage.kernel.change(|kernel| kernel.rules[1].clear());
    stage.set(1, 81);
    assert!(stage.check().iter().all(|checked| matches!(checked, Checked::Postponed)));
    stage.sync();
    stage.kernel.change(|kernel| kernel.rules[1].clear());
    stage.fail(2);
    assert!(stage.check().iter().all(|checked| matches!(checked, Checked::Clean)), "could not read");
    assert!(stage.sync.is_current() && stage.sync.family(Family::V6).totals.failures == 0);
    for family in Family::ALL {
        let unchecked = stage.sync.family(family).unchecked.as_ref();
        assert_eq!(unchecked.map(|unchecked| unchecked.times), Some(1), "{family}");
    }
    stage.now += READ_INTERVAL;
    stage.kernel.change(|kernel| kernel.rules[1].clear());
    let checked = stage.check();
    assert!(checked.iter().any(|checked| matches!(checked, Checked::Repaired(_))), "{checked:?}");
    assert!(Family::ALL.iter().all(|family| stage.sync.family(*family).unchecked.is_none()));
}

#[test]
fn it_is_said_while_nothing_can_be_checked() {
    let mut stage = Stage::synced(options());
    let times =
        |stage: &Stage| stage.sync.family(Family::V4).unchecked.as_ref().map(|unchecked| unchecked.times);
    stage.kernel.change(|kernel| kernel.hides_changes = Some(error()));
    for failures in 1..=2 {
        stage.now += READ_INTERVAL;
        assert!(stage.check().is_empty());
        assert_eq!(times(&stage), Some(failures));
    }
    stage.kernel.change(|kernel| kernel.hides_changes = None);
    stage.fail(2);
    assert_eq!(stage.check().len(), 2);
    assert_eq!(times(&stage), Some(3), "it can be asked, and not read");
    stage.now += READ_INTERVAL;
    assert!(stage.check().is_empty());
    assert_eq!(times(&stage), Some(3), "what was not read is not known");
    stage.kernel.change(|kernel| kernel.rules[0].clear());
    stage.now += READ_INTERVAL;
    assert_eq!(stage.check().len(), 2);
    assert_eq!(times(&stage), None);
    stage.kernel.change(|kernel| kernel.hides_changes = Some(error()));
    stage.now += READ_INTERVAL;
    stage.check();
    let hidden = stage.kernel.change(|kernel| kernel.hides_changes.take());
    assert!(hidden.is_some() && times(&stage) == Some(1));
    assert_eq!(stage.sync.begin_checks(stage.now).len(), 2);
    assert_eq!(times(&stage), Some(1), "nothing is read yet");
    assert!(stage.sync.begin_checks(stage.now).is_empty());
    assert_eq!(times(&stage), None, "nothing to read");
}

#[test]
fn changes_of_a_burst_wait_for_the_pace() {
    let period = Duration::from_secs(1);
    let mut stage = Stage::synced(Options { min_sync_period: period, ..options() });
    let mut deferred = 0;
    for change in 0..1_000 {
        stage.set(1, 100 + change);
        stage.sync();
        deferred += usize::from(stage.sync.due().is_some());
        assert_eq!(stage.sync.due().is_some(), !stage.sync.is_current());
        // Maintenance would be refused while changes wait.
        stage.sync.tick(stage.now);
        stage.now += period / 100;
    }
    assert!(deferred > 900, "{deferred} changes waited");
    stage.now = stage.sync.due().expect("the last changes wait");
    stage.sync();
    assert!(stage.sync.is_current());
    assert_eq!(stage.ports_of(1), Some(1_099));
}

#[test]
fn options_change_the_rules() {
    let mut stage = Stage::synced(Options { allow_external_ips: false, ..options() });
    stage.kernel.change(|kernel| {
        assert!(kernel.rules[0].values().flatten().all(|port| port.external_ips.is_empty()));
    });
    assert!(stage.sync.stop_udp_offload(Family::V6, stage.now));
    assert!(!stage.sync.stop_udp_offload(Family::V6, stage.now));
    assert_eq!(stage.sync().len(), 1, "the change of the offload is synced");

    let mut stage = Stage::open(Options { detect_local: DetectLocal::NodeCidr, ..options() });
    stage.set(1, 80);
    stage.sync.begin(stage.now);
    assert!(stage.sync.waits_for_pod_cidrs() && stage.sync().is_empty());
    stage.sync.set_node(NodeInfo { pod_cid_rs: vec!["10.244.3.0/24".into()], ..node() }, stage.now);
    assert!(!stage.sync.waits_for_pod_cidrs());
    assert_eq!(stage.sync().len(), 2);
}
