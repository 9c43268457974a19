//! The runtime's part of the node status.
//!
//! In: [`ReportRuntime`] from the StatusReporter. Out: a [`RuntimeReport`], or the error.

use std::sync::Arc;

use actix::{ActorFutureExt as _, Context, Handler, ResponseActFuture, fut::wrap_future};
use futures_util::future::{Either, join, ready};
use keelson_actor_system::reports::RuntimeReport;
use tokio::time::Instant;

use super::RuntimeClient;
use crate::{
    metrics::Metrics,
    runtime::{
        core::Health,
        images::Reading,
        messages::ReportRuntime,
        types::{Runtime, RuntimeError},
        version::written,
    },
};

impl Reading {
    async fn take(runtime: Arc<dyn Runtime>, metrics: Metrics, ended: u64) -> Self {
        let at = Instant::now();
        let images = counted(&metrics, "list_images", runtime.images());
        let image_fs = counted(&metrics, "image_fs_info", runtime.image_fs());
        let (images, image_fs) = join(images, image_fs).await;
        Self { images, image_fs, at, ended }
    }

    fn errors(&self) -> impl Iterator<Item = &RuntimeError> {
        self.images.as_ref().err().into_iter().chain(self.image_fs.as_ref().err())
    }
}

/// Counts a call under the kubelet's name for it.
async fn counted<T>(
    metrics: &Metrics,
    operation: &'static str,
    call: impl Future<Output = Result<T, RuntimeError>>,
) -> Result<T, RuntimeError> {
    let since = Instant::now();
    let result = call.await;
    metrics.operation(operation, since.elapsed(), result.is_err());
    result
}

/// The error that [`Health::Down`] holds as text.
fn down(endpoint: &str, reason: &str) -> RuntimeError {
    let own = reason.strip_prefix(endpoint).and_then(|rest| rest.strip_prefix(": "));
    RuntimeError { endpoint: endpoint.to_owned(), reason: own.unwrap_or(reason).to_owned() }
}

impl Handler<ReportRuntime> for RuntimeClient {
    type Result = ResponseActFuture<Self, Result<RuntimeReport, RuntimeError>>;

    fn handle(&mut self, message: ReportRuntime, _: &mut Context<Self>) -> Self::Result {
        let _handling = self.recorder().handling(&message);
        let (runtime, metrics, mut health) =
            (self.runtime.clone(), self.metrics.clone(), self.health.subscribe());
        let reading = if self.images.is_fresh() {
            None
        } else {
            Some(Reading::take(runtime.clone(), metrics.clone(), self.images.ended))
        };
        let ask = async move {
            let known = health.wait_for(|health| *health != Health::Unknown).await.map(|known| known.clone());
            let info = match known {
                Ok(Health::Up { info, .. }) => info,
                Ok(Health::Down { reason, .. }) => return Err(down(runtime.endpoint(), &reason)),
                Ok(Health::Unknown) | Err(_) => {
                    return Err(down(runtime.endpoint(), "not probed yet"));
                }
            };
            let reading = match reading {
                Some(reading) => Either::Left(async { Some(reading.await) }),
                None => Either::Right(ready(None)),
            };
            let (conditions, reading) = join(counted(&metrics, "status", runtime.status()), reading).await;
            Ok((info, conditions?, reading))
        };
        Box::pin(wrap_future::<_, Self>(ask).map(|asked, actor, _| {
            let (info, conditions, reading) = asked?;
            if let Some(reading) = reading {
                // The last list stands: a slightly old list does no harm.
                for error in reading.errors() {
                    tracing::warn!(%error, "cannot list images; node status keeps the last list");
                    actor.recorder().error(error.to_string());
                }
                actor.images.take(reading);
            }
            Ok(RuntimeReport {
                version: format!("{}://{}", info.name, written(&info.version)),
                conditions,
                images: actor.images.images.clone(),
                image_fs: actor.images.image_fs.clone(),
            })
        }))
    }
}
