//! The Endpoints API of an agent that runs as a process and reads a folder of manifests: a client in Python, bad input,
//! slow and stuck readers, very many clients at once, frequent changes, the commands, and changes and faults of the
//! folder and the disk.

// Figures and logs, shown if a test fails.
#![allow(clippy::print_stderr)]

mod backends;
mod bad;
mod commands;
mod common;
mod crowd;
mod disk;
mod files;
mod gates;
mod pace;
mod python;
mod restored;
mod session;
mod slow;
mod wire;
