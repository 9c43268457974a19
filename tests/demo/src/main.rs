//! `make run`: images pulled through the agent into a real containerd, three at a time, as a demonstration.
//!
//! Owns: the folder `run` of the checkout and everything that is started in it. In: Ctrl-C, and `KEELSON_DEMO_ONCE=1`
//! to end when all images are pulled. Out: text and progress on the terminal; when it ends, it stops everything it
//! started, also an agent that the user restarted.

#![allow(clippy::print_stdout, clippy::print_stderr)] // It talks to a person.

mod folder;
mod pulls;
mod show;
mod stage;
mod stop;

use anyhow::Result;
use folder::Folder;
use keelson_harness::process;
use pulls::Pulls;
use stage::Stage;
use std::process::ExitCode;
use stop::Stop;

#[tokio::main]
async fn main() -> ExitCode {
    process::quiet();
    match demo().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nmake run: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn demo() -> Result<()> {
    let once = std::env::var("KEELSON_DEMO_ONCE").is_ok_and(|value| value == "1");
    let mut stop = Stop::listen()?;
    let folder = Folder::claim()?;
    println!("starting a registry and a containerd in {} ...", folder.shown());
    let stage = tokio::select! {
        stage = Stage::set(&folder) => stage,
        () = stop.requested() => return Ok(()),
    };
    let mut stage = match stage {
        Ok(stage) => stage,
        Err(error) => {
            folder.keep_logs();
            return Err(error);
        }
    };

    let pulls = Pulls::start(&stage, &folder)?;
    let shown = tokio::select! {
        shown = show::until_stopped(&mut stage, &pulls, &folder, once) => shown,
        () = stop.requested() => Ok(()),
    };
    drop(pulls);
    println!("\nstopping all processes (Ctrl-C again: immediately) ...");
    tokio::select! {
        () = stage.end() => {}
        () = stop.requested() => stage.kill(),
    }
    folder.keep_logs();
    drop(stage);
    println!("all processes are stopped; the logs are in {}/logs", folder.shown());
    shown
}
