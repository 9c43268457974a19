//! Random histories of states: both APIs lead to the same ones, and never to an unpublished one.

use std::{collections::HashMap, sync::Mutex};

use proptest::{
    prelude::{Just, Strategy, any, prop_oneof},
    test_runner::{Config, TestRunner},
};

use super::*;

#[derive(Debug, Clone)]
enum Op {
    /// Which Services are set to which content or deleted, and whether the node changes.
    Revision(Vec<(u8, Option<u8>)>, bool),
    Freshness(bool),
    /// The store is lost.
    NewInstance,
    /// The publisher restarts without a history.
    Forget,
    /// Readers get time to read a little.
    Let(u8),
    /// The streams of Watch break.
    CutWatch,
    CutNext,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let revision = (
        proptest::collection::vec((0..12_u8, proptest::option::weighted(0.7, any::<u8>())), 0..5),
        any::<bool>(),
    )
        .prop_map(|(services, node)| Op::Revision(services, node));
    let op = prop_oneof![
        10 => revision,
        2 => any::<bool>().prop_map(Op::Freshness),
        1 => Just(Op::NewInstance),
        1 => Just(Op::Forget),
        8 => any::<u8>().prop_map(Op::Let),
        2 => Just(Op::CutWatch),
        2 => Just(Op::CutNext),
    ];
    proptest::collection::vec(op, 1..60)
}

/// Content 0 is a Service so large that a state is sent in several chunks.
fn content(name: &str, content: u8) -> ServiceEndpoints {
    match content % 4 {
        0 => large(name, 50_000 + usize::from(content)),
        _ => service(name, &[&format!("r{content}"), &format!("x{content}")]),
    }
}

type Known = Arc<Mutex<HashMap<(u64, u64), State>>>;

/// Checks that a state was published, and that revisions do not go back.
#[derive(Debug)]
struct StateChecker {
    known: Known,
    last: (u64, u64),
}

impl StateChecker {
    fn record(&mut self, position: (u64, u64), state: &State) {
        let known = self.known.lock().expect("states");
        let published = known.get(&position).unwrap_or_else(|| panic!("{position:?} was never published"));
        assert!(state == published, "{position:?} is a mixture");
        assert!(position.0 != self.last.0 || position.1 >= self.last.1, "{position:?} after {:?}", self.last);
        self.last = position;
    }
}

/// Broken streams and slow readers, as the test requests.
#[derive(Debug, Clone)]
struct FaultPlan {
    cuts: watch::Receiver<u32>,
    slow: bool,
}

/// The stream is abandoned.
struct Cut;

impl FaultPlan {
    async fn message<T>(&mut self, stream: &mut Streaming<T>) -> Result<Option<T>, Cut> {
        if self.slow {
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
        }
        tokio::select! {
            biased;
            _ = self.cuts.changed() => Err(Cut),
            message = stream.message() => Ok(message.expect("no error")),
        }
    }
}

async fn read_next(
    socket: PathBuf,
    mut checker: StateChecker,
    mut faults: FaultPlan,
    received: watch::Sender<(u64, u64)>,
) {
    let mut client = NextClient::new(channel(socket, faults.slow.then_some(65_535)).await);
    loop {
        let mut stream = client.next(has(checker.last)).await.expect("is taken").into_inner();
        if let Ok((position, state)) = read_one(&mut stream, &mut faults).await {
            assert_ne!(position, checker.last, "the same again");
            checker.record(position, &state);
            received.send_replace(position);
        }
    }
}

async fn read_one(
    stream: &mut Streaming<NextItem>,
    faults: &mut FaultPlan,
) -> Result<((u64, u64), State), Cut> {
    let first = faults.message(stream).await?.expect("a first item");
    let mut state = State { node: first.node.expect("the node"), ..State::default() };
    while let Some(item) = faults.message(stream).await? {
        let service = item.endpoints.expect("a Service");
        let twice = state.services.insert(format!("ns/{}", service.name), service);
        assert!(twice.is_none());
    }
    let next = first.next.expect("Next");
    Ok(((next.instance_id, next.rev), state))
}

async fn read_watch(
    socket: PathBuf,
    mut checker: StateChecker,
    mut faults: FaultPlan,
    received: watch::Sender<(u64, u64)>,
) {
    let mut client = WatchClient::new(channel(socket, faults.slow.then_some(65_535)).await);
    let mut state = State::default();
    loop {
        let mut stream = client.watch(from(checker.last)).await.expect("is taken").into_inner();
        // What arrived after the last Sync before a cut does not count.
        let mut reader = Reader { draft: state.clone(), ..Reader::default() };
        while let Ok(item) = faults.message(&mut stream).await {
            let item = item.expect("a Watch does not end by itself");
            if let Some(sync) = reader.take(item) {
                checker.record((sync.instance_id, sync.rev), &reader.draft);
                state = reader.draft.clone();
                received.send_replace(checker.last);
            }
        }
    }
}

struct Readers {
    tasks: tokio::task::JoinSet<()>,
    received: Vec<watch::Receiver<(u64, u64)>>,
    cut_next: watch::Sender<u32>,
    cut_watch: watch::Sender<u32>,
}

impl Readers {
    fn start(server: &Running, known: &Known) -> Self {
        let (cut_next, next_cuts) = watch::channel(0);
        let (cut_watch, watch_cuts) = watch::channel(0);
        let mut tasks = tokio::task::JoinSet::new();
        let mut all = Vec::new();
        for slow in [false, true] {
            let checker = || StateChecker { known: known.clone(), last: (0, 0) };
            let [(next, next_received), (watch, watch_received)] = [(); 2].map(|()| watch::channel((0, 0)));
            let faults = FaultPlan { cuts: next_cuts.clone(), slow };
            tasks.spawn(read_next(server.socket(), checker(), faults, next));
            let faults = FaultPlan { cuts: watch_cuts.clone(), slow };
            tasks.spawn(read_watch(server.socket(), checker(), faults, watch));
            all.extend([next_received, watch_received]);
        }
        Self { tasks, received: all, cut_next, cut_watch }
    }

    async fn reach(&mut self, position: (u64, u64)) {
        for received in &mut self.received {
            let reached = received.wait_for(|received| *received == position);
            tokio::select! {
                ended = self.tasks.join_next() => panic!("a reader ended: {ended:?}"),
                reached = tokio::time::timeout(Duration::from_secs(60), reached) => {
                    reached.unwrap_or_else(|_| panic!("{position:?} never came")).expect("received");
                }
            }
        }
    }
}

async fn run(ops: Vec<Op>) {
    let known = Known::default();
    // So short that callers that were away are reset now and then.
    let mut source = Source::with_history(1, History::new(6, 20));
    let server = Running::start(&source).await;
    let mut readers = Readers::start(&server, &known);
    let mut nodes = 0;
    for op in ops {
        let (instance_id, rev) = source.position();
        match op {
            Op::Revision(services, changes_node) => {
                let services: Vec<_> =
                    services.into_iter().map(|(name, content)| (format!("s{name}"), content)).collect();
                let services: Vec<_> = services
                    .iter()
                    .map(|(name, to)| (name.as_str(), to.map(|to| content(name, to))))
                    .collect();
                nodes += 1;
                // Added before it is published, because readers are quick.
                let mut ahead = source.model.clone();
                for (name, service) in &services {
                    match service {
                        Some(service) => ahead.services.insert(format!("ns/{name}"), service.clone()),
                        None => ahead.services.remove(&format!("ns/{name}")),
                    };
                }
                let node = changes_node.then(|| node(&nodes.to_string()));
                ahead.node = node.clone().unwrap_or(ahead.node);
                known.lock().expect("states").insert((instance_id, rev + 1), ahead);
                source.revision(&services, node);
            }
            // No state yet whose freshness could change.
            Op::Freshness(_) | Op::NewInstance | Op::Forget if rev == 0 => {}
            Op::Freshness(stale) => source.freshness(stale.then_some("away")),
            Op::NewInstance => {
                known.lock().expect("states").insert((instance_id + 1, 1), source.model.clone());
                source.new_instance(instance_id + 1);
            }
            Op::Forget => source.history.restart(instance_id, rev),
            Op::Let(times) => {
                for _ in 0..times {
                    tokio::task::yield_now().await;
                }
            }
            Op::CutWatch => readers.cut_watch.send_modify(|cuts| *cuts += 1),
            Op::CutNext => readers.cut_next.send_modify(|cuts| *cuts += 1),
        }
    }
    if source.position().1 > 0 {
        readers.reach(source.position()).await;
    }
    assert!(readers.tasks.try_join_next().is_none(), "a reader ended");
}

#[test]
fn both_apis_lead_to_the_same_states_whatever_happens_on_the_way() {
    let mut runner = TestRunner::new(Config { cases: 48, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&ops(), |ops| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(run(ops));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
