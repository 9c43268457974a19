//! When a client certificate is requested, and with which credentials.
//!
//! Owns: the schedule, as in the kubelet's certificate manager (`client-go/util/certificate`): renewal at 70 to 90 % of
//! the lifetime. In: the certificate's validity, the wall clock, a random number. Out: the next step. Nothing here
//! waits.

use std::time::Duration;

use keelson_kube::IssuedValidity;
use keelson_proto::backoff::Backoff;

/// Maximum wait, because the wall clock may be set.
const MAX_WAIT: Duration = Duration::from_secs(60);
const PAUSES: Backoff = Backoff { first: Duration::from_secs(2), longest: Duration::from_secs(300) };

/// The credentials with which a certificate is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestCredentials {
    /// Those of `kube.bootstrap_kubeconfig`.
    Bootstrap,
    /// The certificate that is to be replaced.
    Current,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Request(RequestCredentials),
    Wait(Duration),
}

/// In Unix seconds. `draw` is from 0 to 1.
pub(super) fn renew_at(validity: IssuedValidity, draw: f64) -> i64 {
    let lifetime = validity.not_after.saturating_sub(validity.not_before).max(0);
    // The seconds of any certificate fit an f64.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let age = (lifetime as f64 * (0.7 + 0.2 * draw.clamp(0.0, 1.0))).round() as i64;
    validity.not_before.saturating_add(age)
}

/// `now` is in Unix seconds. `refused`: the API server rejected the certificate (401).
pub(super) fn next_step(validity: Option<IssuedValidity>, refused: bool, draw: f64, now: i64) -> Step {
    let Some(validity) = validity else { return Step::Request(RequestCredentials::Bootstrap) };
    if now >= validity.not_after || refused {
        return Step::Request(RequestCredentials::Bootstrap);
    }
    match u64::try_from(renew_at(validity, draw).saturating_sub(now)) {
        Ok(seconds @ 1..) => Step::Wait(Duration::from_secs(seconds).min(MAX_WAIT)),
        _ => Step::Request(RequestCredentials::Current),
    }
}

/// The pause after this number of consecutive failures. `draw` from 0 to 1 adds up to a tenth.
pub(super) fn pause(failures: u32, draw: f64) -> Duration {
    PAUSES.pause(failures).mul_f64(1.0 + 0.1 * draw.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86_400;

    fn validity(not_before: i64, not_after: i64) -> Option<IssuedValidity> {
        Some(IssuedValidity { not_before, not_after })
    }

    /// E4: renewed at 70 to 90 % of the lifetime, requested anew after its end.
    #[test]
    fn e4_when_a_certificate_is_requested() {
        let long = validity(0, 100 * DAY);
        let wait = |seconds| Step::Wait(Duration::from_secs(seconds));
        for (validity, refused, draw, now, expected) in [
            (None, false, 0.0, 0, Step::Request(RequestCredentials::Bootstrap)),
            (long, false, 0.0, 0, wait(60)),
            (long, false, 0.0, 70 * DAY - 59, wait(59)),
            (long, false, 0.0, 70 * DAY, Step::Request(RequestCredentials::Current)),
            (long, false, 0.5, 80 * DAY - 1, wait(1)),
            (long, false, 0.5, 80 * DAY, Step::Request(RequestCredentials::Current)),
            (long, false, 1.0, 90 * DAY - 1, wait(1)),
            (long, false, 1.0, 90 * DAY, Step::Request(RequestCredentials::Current)),
            (long, false, 9.0, 90 * DAY, Step::Request(RequestCredentials::Current)),
            (long, false, 1.0, 100 * DAY - 1, Step::Request(RequestCredentials::Current)),
            (long, false, 1.0, 100 * DAY, Step::Request(RequestCredentials::Bootstrap)),
            (long, true, 0.0, 0, Step::Request(RequestCredentials::Bootstrap)),
            // The clock is behind: the certificate may still be valid.
            (validity(DAY, 2 * DAY), false, 0.0, 0, wait(60)),
            // An invalid lifetime.
            (validity(10, 20), false, 0.0, i64::MAX, Step::Request(RequestCredentials::Bootstrap)),
            (validity(20, 10), false, 0.0, 5, wait(15)),
        ] {
            assert_eq!(next_step(validity, refused, draw, now), expected, "{validity:?} {draw} at {now}");
        }
    }

    #[test]
    fn e4_failures_are_retried_with_back_off() {
        for (failures, draw, seconds) in
            [(0, 0.0, 2.0), (1, 0.0, 2.0), (2, 0.0, 4.0), (8, 0.0, 256.0), (9, 0.0, 300.0), (99, 1.0, 330.0)]
        {
            assert!((pause(failures, draw).as_secs_f64() - seconds).abs() < 0.001, "{failures}");
        }
    }
}
