use super::*;

const SECOND: Duration = Duration::from_secs(1);
const DOWN: Kind = Kind::Unreachable;
const ERROR: Kind = Kind::Server { retry_after: None };
const PAGES: Step = Step::List { exact: true, paged: true };
const STREAM: Step = Step::Watch { from: None };

fn from(version: &str) -> Step {
    Step::Watch { from: Some(version.into()) }
}

fn listed(version: &str) -> Reflector {
    let mut reflector = Reflector::default();
    reflector.listed(version.into(), true);
    reflector
}

#[tokio::test(start_paused = true)]
async fn waits_double_to_thirty_seconds_and_reset_after_two_quiet_minutes() {
    let mut backoff = Failures::default();
    let mut now = Instant::now();
    let mut waits = Vec::new();
    for _ in 0..8 {
        let wait = backoff.next(now, 0.0);
        waits.push(wait.as_millis());
        now += wait;
    }
    assert_eq!(waits, [800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
    assert_eq!(backoff.next(now, 0.999_999).as_secs(), 59, "jitter up to as much again");
    now += BACKOFF_RESET + SECOND;
    assert_eq!(backoff.next(now, 0.0), BACKOFF.first);
}

#[tokio::test(start_paused = true)]
async fn one_request_lists_and_watches() {
    let mut reflector = Reflector::default();
    assert_eq!(reflector.next(Instant::now()), STREAM);
    reflector.listed("5".into(), true);
    assert_eq!(reflector.next(Instant::now()), from("5"));
    reflector.saw("6".into());
    assert_eq!(reflector.next(Instant::now()), from("6"));
}

#[tokio::test(start_paused = true)]
async fn e1_a_streaming_list_that_is_refused_or_cut_off_is_followed_by_a_list_at_once() {
    let now = Instant::now();
    for (kind, cut_off) in [(Kind::Invalid, false), (ERROR, false), (DOWN, true), (Kind::Timeout, true)] {
        let mut reflector = Reflector::default();
        assert_eq!(reflector.failed(kind, cut_off, now, 0.5), Pause::NONE, "{kind:?}");
        assert_eq!(reflector.next(Instant::now()), Step::List { exact: false, paged: true });
        let mut reflector = listed("5");
        reflector.forget();
        assert_eq!(reflector.failed(kind, cut_off, now, 0.5), Pause::NONE, "{kind:?}");
        assert_eq!(reflector.next(Instant::now()), PAGES, "the server's cache may be too old, too");
    }
    let busy = Kind::Server { retry_after: Some(SECOND) };
    for kind in [busy, DOWN, Kind::Timeout, Kind::Forbidden, Kind::TooManyRequests { retry_after: None }] {
        let mut reflector = Reflector::default();
        let pause = reflector.failed(kind, false, now, 0.5);
        assert!(pause.is_failure && pause.wait >= BACKOFF.first, "{kind:?}: {pause:?}");
        assert_eq!(reflector.next(Instant::now()), STREAM, "{kind:?} does not mean that it is unable");
    }
}

#[tokio::test(start_paused = true)]
async fn e2_a_server_that_knows_no_streaming_lists_is_asked_for_pages_for_an_hour() {
    let now = Instant::now();
    let mut reflector = Reflector::default();
    reflector.failed(Kind::Invalid, false, now, 0.5);
    reflector.listed("5".into(), true);
    assert_eq!(reflector.next(now), from("5"), "a watch is a watch");
    reflector.forget();
    assert_eq!(reflector.next(now), PAGES);
    reflector.listed("6".into(), true);
    reflector.forget();
    assert_eq!(reflector.next(now + STREAMING_RETRY), STREAM);
    // One that failed for another reason is requested again.
    for (kind, cut_off) in [(DOWN, true), (ERROR, false)] {
        reflector.failed(kind, cut_off, now, 0.5);
        reflector.listed("7".into(), true);
        reflector.forget();
        assert_eq!(reflector.next(now), STREAM);
    }
}

#[tokio::test(start_paused = true)]
async fn e15_after_a_list_streaming_lists_are_tried_again() {
    let now = Instant::now();
    let mut reflector = Reflector::default();
    reflector.failed(ERROR, false, now, 0.5);
    assert!(matches!(reflector.next(Instant::now()), Step::List { .. }));
    // After a failed list, and after a successful one.
    for kind in [ERROR, Kind::Invalid, DOWN, Kind::Forbidden] {
        let pause = reflector.failed(kind, false, now, 0.5);
        assert!(pause.is_failure && !pause.wait.is_zero(), "{kind:?}: one turn of both, and then a wait");
        assert_eq!(reflector.next(Instant::now()), STREAM);
        reflector.failed(ERROR, false, now, 0.5);
    }
    reflector.listed("5".into(), true);
    assert_eq!(reflector.next(Instant::now()), from("5"));
    reflector.failed(Kind::Gone, false, now, 0.5);
    assert_eq!(reflector.next(Instant::now()), STREAM);
}

#[tokio::test(start_paused = true)]
async fn e15_pages_that_expire_are_followed_by_one_full_list() {
    let now = Instant::now();
    let mut reflector = listed("5");
    reflector.forget();
    reflector.failed(Kind::Invalid, false, now, 0.5);
    assert_eq!(reflector.next(Instant::now()), PAGES);
    assert_eq!(reflector.failed(Kind::Gone, false, now, 0.5), Pause::NONE);
    assert_eq!(reflector.next(Instant::now()), Step::List { exact: true, paged: false });
    assert!(reflector.failed(Kind::Gone, false, now, 0.5).is_failure);
    assert_eq!(reflector.next(Instant::now()), STREAM);
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_resumes_from_the_last_version() {
    let mut reflector = listed("5");
    let now = Instant::now();
    for kind in [DOWN, Kind::Timeout, Kind::Forbidden, ERROR] {
        assert!(reflector.failed(kind, false, now, 0.0).wait >= BACKOFF.first);
        assert_eq!(reflector.next(Instant::now()), from("5"));
    }
    reflector.failed(Kind::Gone, false, now, 0.0);
    assert_eq!(reflector.next(Instant::now()), STREAM);
    assert!(!reflector.synced());
}

#[tokio::test(start_paused = true)]
async fn e2_a_version_too_old_is_relisted_early_once() {
    let mut reflector = listed("5");
    let now = Instant::now();
    for _ in 0..6 {
        reflector.failed(DOWN, false, now, 0.0);
    }
    let pause = reflector.failed(Kind::Gone, false, now, 0.5);
    assert_eq!((pause.wait, pause.is_failure), (RELIST_SPREAD / 2, false), "not all agents at once");
    assert_eq!(reflector.next(Instant::now()), STREAM);
    reflector.listed("9".into(), true);
    let pause = reflector.failed(Kind::Gone, false, now, 0.0);
    assert_eq!((pause.wait, pause.is_failure), (BACKOFF.first, true));
    let pause = reflector.failed(Kind::Gone, false, now, 0.0);
    assert!(pause.is_failure && pause.wait > BACKOFF.first, "a list that is too old is a failure like any");
}

#[tokio::test(start_paused = true)]
async fn e2_retry_after_is_obeyed_and_spread() {
    let mut reflector = Reflector::default();
    let now = Instant::now();
    let busy = Kind::TooManyRequests { retry_after: Some(17 * SECOND) };
    let pause = reflector.failed(busy, false, now, 0.0);
    assert_eq!((pause.wait, pause.can_be_interrupted), (17 * SECOND, false));
    assert_eq!(reflector.failed(busy, false, now, 0.5).wait, 17 * SECOND * 3 / 2);
    let long = Kind::TooManyRequests { retry_after: Some(30 * SECOND) };
    assert_eq!(reflector.failed(long, false, now, 0.5).wait, 30 * SECOND + SPREAD / 2);
    let mut reflector = Reflector::default();
    let brief = Kind::TooManyRequests { retry_after: Some(SECOND) };
    assert_eq!(reflector.failed(brief, false, now, 0.5).wait, SECOND * 3 / 2);
    let hour = Kind::Server { retry_after: Some(3600 * SECOND) };
    assert_eq!(Reflector::default().failed(hour, false, now, 0.0).wait, RETRY_AFTER_MAX);
    let less = Kind::Server { retry_after: Some(Duration::ZERO) };
    assert_eq!(reflector.failed(less, false, now, 0.0).wait, 2 * BACKOFF.first);
}

#[tokio::test(start_paused = true)]
async fn e2_an_answer_of_the_server_shortens_all_waits_and_is_spread() {
    let mut reflector = listed("5");
    let now = Instant::now();
    for _ in 0..4 {
        let pause = reflector.failed(DOWN, false, now, 0.0);
        assert!(pause.can_be_interrupted);
    }
    let pause = reflector.failed(DOWN, false, now, 0.0);
    assert_eq!(pause.wait.as_millis(), 12800);
    let turn = 7 * SECOND;
    assert_eq!(reflector.interrupt_wait(pause.wait, turn, 0.5), turn + STAGGER / 2);
    assert_eq!(reflector.interrupt_wait(SECOND, turn, 0.5), SECOND, "never later than without");
    // It was too early: the next wait is complete, so that there are at most twice as many requests as without signals.
    assert!(!reflector.failed(DOWN, false, now, 0.0).can_be_interrupted);
    assert!(reflector.failed(DOWN, false, now, 0.0).can_be_interrupted);
    reflector.interrupt_wait(SECOND, turn, 0.5);
    reflector.saw("6".into());
    assert!(reflector.failed(DOWN, false, now, 0.0).can_be_interrupted, "it was right");
}

#[tokio::test(start_paused = true)]
async fn a_sink_that_keeps_asking_for_a_relist_waits() {
    let mut reflector = listed("5");
    let mut now = Instant::now();
    reflector.forget();
    assert!(!reflector.synced());
    assert_eq!(reflector.next(Instant::now()), STREAM);
    assert_eq!(reflector.again(now, 0.0), Duration::ZERO);
    assert_eq!(reflector.again(now, 0.0), BACKOFF.first);
    assert_eq!(reflector.again(now, 0.0), 2 * BACKOFF.first);
    now += AGAIN_CALM + SECOND;
    assert_eq!(reflector.again(now, 0.0), Duration::ZERO);
}

#[test]
fn e11_a_listing_that_is_older_than_what_was_seen_shows_a_rollback() {
    let mut reflector = listed("100");
    reflector.saw("120".into());
    reflector.forget();
    assert_eq!(reflector.listed("119".into(), true), Some(VersionRegression { seen: 120, now: 119 }));
    // From there on the count restarts, and equal is not older.
    assert_eq!(reflector.listed("119".into(), true), None);
    reflector.saw("121".into());
    assert_eq!(reflector.listed("120".into(), false), None, "a cache may be behind");
    assert_eq!(reflector.listed("120".into(), true), Some(VersionRegression { seen: 121, now: 120 }));
    assert_eq!(reflector.listed("no number".into(), true), None);
    assert_eq!(reflector.listed("1".into(), true), None);
}

#[test]
fn e11_after_a_rollback_everything_is_listed_and_nothing_is_compared() {
    let mut reflector = listed("100");
    assert_eq!(reflector.roll_back(0.5), SPREAD / 2);
    assert_eq!((reflector.synced(), reflector.next(Instant::now())), (false, STREAM));
    assert_eq!(reflector.listed("7".into(), true), None, "which was reported before");
}

#[tokio::test(start_paused = true)]
async fn e11_the_version_of_an_interrupted_watch_is_checked_once() {
    let mut reflector = listed("100");
    let now = Instant::now();
    assert_eq!(reflector.check_at(), None);
    reflector.failed(DOWN, false, now, 0.0);
    let at = reflector.check_at();
    assert_eq!(at, Some(now + CHECK_FIRST));
    reflector.failed(DOWN, false, now + SECOND, 0.9);
    assert_eq!(reflector.check_at(), at, "further failures put nothing off");
    reflector.checked(false, now + CHECK_FIRST, 0.0);
    assert_eq!(reflector.check_at(), Some(now + 2 * CHECK_FIRST), "not known yet");
    reflector.checked(true, now, 0.0);
    assert_eq!(reflector.check_at(), None);
    reflector.interrupted(now, 0.0);
    reflector.listed("101".into(), true);
    assert_eq!(reflector.check_at(), None, "a list shows it");
    assert!(CHECK_FIRST + CHECK_SPREAD < Duration::from_secs(watch_seconds(0.0)));
}

#[test]
fn a_watch_is_asked_to_end_after_five_to_ten_minutes() {
    assert_eq!(watch_seconds(0.0), 300);
    assert_eq!(watch_seconds(0.5), 450);
    assert!(watch_seconds(0.999_999_9) < MAX_WATCH.as_secs());
}
