//! Service endpoints from a real API server: the agent as a process, consumers on both APIs by the client library, and
//! whatever happens to any of them. What is asserted is that consumers come to what the API server's own objects mean
//! ([`Truth`](keelson_tests::endpoints::Truth)), which revisions they see on the way and which they do not, and what must
//! be true of every single state.
//!
//! Names with `case_N` are case N of section 8 of the reference on service proxies. The other cases are tables beside the
//! function that decides them, in `actors/endpoints/src/view/tests/`.

// What a test tells is shown when it fails: times, seeds and figures.
#![allow(clippy::print_stderr)]

mod changes;
mod consistency;
mod demand;
mod disk;
mod kills;
mod large;
mod outages;
mod restarts;
mod restored;
mod rig;
mod rights;
