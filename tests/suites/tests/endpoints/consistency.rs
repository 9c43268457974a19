//! Consistency: two slices of two Services, of which the second is always written after the first. No state may show
//! another order.

use crate::common::{Lane, TestEnv, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{FullState, Kind, Writer, endpoint, port, service, slice};
use keelson_harness::util::Seeded;
use rand::RngExt as _;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// The slice of a Service with this generation, which is in its endpoint's address.
fn generation(of: &str, number: u32) -> Value {
    let [_, b, c, d] = number.to_be_bytes();
    slice(of, "a", &[port("p", 80)], &[endpoint(&format!("10.{b}.{c}.{d}"), "elsewhere", &json!({}))])
}

fn shown(full_state: &FullState, service: &str) -> Result<u32> {
    let service = full_state.service(service).with_context(|| format!("{service} is missing"))?;
    ensure!(service.endpoints.len() == 1, "there is one endpoint at any time: {service:?}");
    let ips = service.endpoints[0].i_ps.as_ref().context("it has an address")?;
    let address: std::net::Ipv4Addr = ips.v4.first().context("of IPv4")?.parse()?;
    let [_, b, c, d] = address.octets();
    Ok(u32::from_be_bytes([0, b, c, d]))
}

/// Writes one generation after the other, always the first Service before the second, whatever fails.
async fn write(writer: Writer, written: Arc<AtomicU32>, stop: Arc<AtomicBool>) -> Result<()> {
    let mut number = 1;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        for of in ["first", "second"] {
            let object = generation(of, number);
            let name = format!("{of}-a");
            // Until it is known to be written. A request whose response was lost is repeated, which is idempotent.
            while let Err(error) = writer.request(http::Method::PUT, Kind::Slice, &name, Some(&object)).await
            {
                if let kube::Error::Api(status) = &error
                    && !matches!(status.code, 409 | 429 | 500..)
                {
                    return Err(error).context("the writer is refused");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        written.store(number, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

#[test]
fn no_state_is_inconsistent() -> Result<()> {
    run(async {
        let mut random = Seeded::new()?;
        let mut env = TestEnv::new(Lane::Rough, "consistency").await?;
        for of in ["first", "second"] {
            env.writer.create(Kind::Service, &service(of, &[port("p", 80)], &json!({}))).await?;
            env.writer.create(Kind::Slice, &generation(of, 1)).await?;
        }
        let proxy = env.cluster.proxy().await?;
        env.via(&proxy.endpoint())?;
        env.agent.start_live().await?;
        let (first, second) = (env.qualified_name("first"), env.qualified_name("second"));
        let mut followers = env.followers_with(move |full_state| {
            let (first, second) = (shown(full_state, &first)?, shown(full_state, &second)?);
            ensure!(first == second || first == second + 1, "{first} and {second} were never at one time");
            Ok(())
        })?;
        env.settled(&followers).await?;
        let (written, stop) = (Arc::new(AtomicU32::new(1)), Arc::new(AtomicBool::new(false)));
        let writer = tokio::spawn(write(env.writer.clone(), written.clone(), stop.clone()));

        for round in 0..24 {
            tokio::time::sleep(Duration::from_millis(random.rng().random_range(50..500))).await;
            let from = written.load(Ordering::Relaxed);
            match round % 8 {
                // Watches that resume at their version.
                0 | 2 | 4 => proxy.close_all(),
                1 | 5 => env.kill_and_start().await?,
                3 => {
                    env.terminate().await?;
                    env.agent.start_live().await?;
                }
                6 => followers.restart().await?,
                // Watches that have to list again.
                _ => {
                    env.cluster.api.kill9()?;
                    env.cluster.api.start_again().await?;
                }
            }
            let service = env.qualified_name("second");
            let on = |full_state: &FullState| {
                let number = shown(full_state, &service)?;
                ensure!(number > from, "it shows {number}, and {from} was written");
                Ok(())
            };
            followers.until("the states go on", on).await?;
            followers.check_invariants()?;
        }
        stop.store(true, Ordering::Relaxed);
        writer.await??;
        env.settled(&followers).await?;
        for follower in followers.both() {
            let seen = follower.seen().len();
            eprintln!("{seen} states of {} generations were seen", written.load(Ordering::Relaxed));
            ensure!(seen >= 24, "{seen} states");
        }
        Ok(())
    })
}
