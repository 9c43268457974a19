//! Compiles the .proto files with protox, so that no protoc has to be installed.

use prost::Message as _;
use std::{env, fs, path::PathBuf};

const FILES: &[&str] = &["cri.proto", "containerd_leases.proto", "containerd_content.proto", "debug.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let set = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), set.encode_to_vec())?;
    // Image and layer bytes are shared between callers: `bytes::Bytes`, not copies.
    tonic_prost_build::configure().build_transport(false).compile_fds(set)?;
    Ok(())
}
