//! The Endpoints API of an agent that runs as a process and reads a folder of manifests: a client of another make, bad
//! input, readers that are slow or stuck, very many at once, quick changes, the commands that people run, and what happens
//! when the folder or the disk is not as it was.

// What a test tells is shown when it fails: figures and logs.
#![allow(clippy::print_stderr)]

mod backends;
mod bad;
mod commands;
mod crowd;
mod disk;
mod files;
mod gates;
mod pace;
mod python;
mod restored;
mod rig;
mod session;
mod slow;
mod wire;
