//! The end of an agent with a successor.
//!
//! Owns: the steps from deciding to exiting. In: the parts of a running agent and the connection of its successor. Out:
//! the sockets and the pulls; then the ends of pulls that continue here, and the end of the process when no call is
//! left.
//!
//! A successor that fails before it serves changes nothing: sockets and state stay here for the next one.

use std::{io, os::fd::AsFd as _, time::Duration};

use keelson_cri::front::Phase;
use keelson_pulls::coordinator::{HandOver, HandedEnd, HandedOver, HandedState};
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

use super::{
    super::{running::Running, signals::Signals, sockets::Sockets},
    HANDOVER,
    offer::Offer,
    wire::{self, Frame},
};

/// Maximum wait for pending journal writes.
const FLUSH: Duration = Duration::from_secs(2);
/// Maximum wait for the store to close.
const CLOSE: Duration = Duration::from_secs(2);
/// Time for a successor that has everything to report that it serves.
const SERVING: Duration = Duration::from_secs(30);

pub(crate) enum Ended {
    Done,
    Interrupted,
}

/// Hands over to the successor behind `stream`, or to the next one if it fails, and relays until no call is left.
/// Calls that pass through are cut off at `deadline`; until then a successor that fails is followed by another.
pub(crate) async fn run(
    mut running: Running,
    sockets: Sockets,
    mut offer: Offer,
    stream: UnixStream,
    deadline: Instant,
    signals: &mut Signals,
) -> Ended {
    let (ends_tx, mut ends) = mpsc::unbounded_channel();
    let Some((mut state, pulls_ended)) = stop_deciding(&mut running, ends_tx).await else {
        tracing::error!("the pull coordinator did not hand over; the successor starts from the journal");
        return Ended::Done;
    };
    let mut stream = stream;
    let successor = loop {
        tokio::select! {
            handed = hand_over(stream, &mut state, (&sockets, &offer), &mut ends) => match handed {
                Ok(stream) => break Some(stream),
                Err(error) => tracing::warn!(%error, "the successor failed; waiting for another"),
            },
            () = signals.stop() => return Ended::Interrupted,
        }
        stream = tokio::select! {
            next = offer.successor() => next,
            () = tokio::time::sleep_until(deadline) => break None,
            () = signals.stop() => return Ended::Interrupted,
        };
    };
    match &successor {
        Some(_) => tracing::info!(
            pulls = state.pulls.len(),
            running = state.running(),
            "handed over; running calls continue in this process"
        ),
        None => tracing::error!("no successor is serving; pulls continue at the next start"),
    }
    match &successor {
        Some(_) => offer.leave(),
        None => drop(offer),
    }
    sockets.leave(successor.is_some());
    let telling = async {
        if let Some(stream) = successor {
            send_ends(stream, &mut ends).await;
        }
        std::future::pending::<()>().await
    };
    tokio::select! {
        () = finish(running, pulls_ended, deadline) => Ended::Done,
        () = telling => Ended::Done,
        () = signals.stop() => Ended::Interrupted,
    }
}

/// From here on another process decides: everything but running calls stops.
async fn stop_deciding(
    running: &mut Running,
    ends: mpsc::UnboundedSender<HandedEnd>,
) -> Option<(HandedState, oneshot::Receiver<()>)> {
    running.pulls.front.leave();
    running.view.stop_reports();
    let _ = running.stop_debug.send(true);
    if let Some(server) = running.endpoints_server.take() {
        // Its sockets are closed at once; calls that are still running then are not waited for.
        actix::spawn(server.stop(FLUSH));
    }
    let (to_us, answered) = oneshot::channel();
    running.pulls.coordinator.deliver(HandOver { state: to_us, ends });
    let HandedOver { mut state, written, ended } = timeout(FLUSH, answered).await.ok()?.ok()?;
    if timeout(FLUSH, written).await.is_err() {
        tracing::warn!("the journal does not answer; the successor takes over the pulls without it");
    }
    running.close_store(CLOSE);
    state.salt = Some(running.pulls.salt.clone());
    Some((state, ended))
}

/// Passes state and sockets to a successor and waits until it serves.
async fn hand_over(
    mut stream: UnixStream,
    state: &mut HandedState,
    (sockets, offer): (&Sockets, &Offer),
    ends: &mut mpsc::UnboundedReceiver<HandedEnd>,
) -> io::Result<UnixStream> {
    while let Ok(end) = ends.try_recv() {
        state.apply(&end);
    }
    let mut handed = vec![(HANDOVER, offer.socket())];
    handed.extend(sockets.handed.iter().map(|(name, socket)| (*name, socket.as_fd())));
    let names = handed.iter().map(|(name, _)| (*name).to_owned()).collect();
    wire::write(&mut stream, &Frame::State { state: Box::new(state.clone()), sockets: names }).await?;
    for (_, socket) in handed {
        wire::send_socket(&stream, socket).await?;
    }
    match timeout(SERVING, wire::read(&mut stream)).await?? {
        Frame::Serving => Ok(stream),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Reports every end to the successor; one that is gone asks the runtime itself.
async fn send_ends(mut stream: UnixStream, ends: &mut mpsc::UnboundedReceiver<HandedEnd>) {
    while let Some(end) = ends.recv().await {
        if let Err(error) = wire::write(&mut stream, &Frame::Ended(end)).await {
            return tracing::warn!(%error, "cannot report the results of pulls to the successor");
        }
    }
}

/// Waits until no call and no pull is left here.
async fn finish(mut running: Running, pulls_ended: oneshot::Receiver<()>, deadline: Instant) {
    let cutter = running.pulls.front.cutter();
    let left = async {
        // An error: the coordinator is gone, and its pulls with it.
        let _ = pulls_ended.await;
        running.pulls.front.ended().await;
    };
    tokio::pin!(left);
    tokio::select! {
        () = &mut left => return,
        () = tokio::time::sleep_until(deadline) => {}
    }
    cutter.send_replace(Phase::Cut);
    left.await;
}
