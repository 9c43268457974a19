//! The sources of service endpoints: one suite that each of them must pass, and tests of situations that only one of
//! them can meet.
//!
//! A source must deliver to the receiver of its events: a listing first, every change after that, no deleted objects,
//! everything again on request. The API server is the real one; its source runs with the shipped rights and no others.

// Times and figures, shown if a test fails.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;

mod cases;
mod cluster;
mod folder;
mod objects;
mod server;
mod sink;
mod world;

use anyhow::Result;

use crate::world::{World as _, run};

/// Makes one test for each source of each case named.
macro_rules! of_each_source {
    ($($name:ident),* $(,)?) => {
        mod kube {
            use super::*;

            $(#[test]
            fn $name() -> Result<()> {
                run(async { cases::$name(&cluster::InCluster::make().await?).await })
            })*
        }
        mod files {
            use super::*;

            $(#[test]
            fn $name() -> Result<()> {
                run(async { cases::$name(&folder::InFolder::make().await?).await })
            })*
        }
    };
}

of_each_source!(
    existing_objects_arrive_as_one_listing_per_kind,
    each_change_is_sent,
    case_2_a_service_of_another_proxy_is_removed_and_restored,
    case_1_headless_and_external_services_are_ignored,
    node_info_matches_the_node,
    a_sink_that_lost_its_state_gets_everything_again,
    a_slow_sink_gets_everything_in_bounded_batches,
    a_restarted_source_reports_deletions_during_its_absence,
);

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: 4, skip: &[], env: &[] }.run()
}
