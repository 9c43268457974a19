//! Compiles the programs of the socket level, of direct return and of pod devices with clang and embeds the objects.
//!
//! In: `programs/`, `CLANG` (the compiler, `clang` by default). Out: `programs.rs` in `OUT_DIR`. Without a clang that
//! compiles for BPF the crate is built all the same, with a warning; then the backend says so when it is opened.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// The constant, its source, and what it has.
const OBJECTS: [(&str, &str, &str); 3] = [
    ("OBJECT", "socket", "The programs of the socket level"),
    ("DIRECT_OBJECT", "direct", "The programs of direct return"),
    ("PODS_OBJECT", "pods", "The program of pod devices"),
];

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=programs");
    println!("cargo:rerun-if-env-changed=CLANG");
    let folder = PathBuf::from(env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?);
    let mut text = String::new();
    for (constant, name, contents) in OBJECTS {
        let object = folder.join(format!("{name}.bpf.o"));
        let value = match compile(&format!("programs/{name}.bpf.c"), &object) {
            Ok(()) => {
                strip(&object);
                format!("Some(aya::include_bytes_aligned!({:?}))", object.display().to_string())
            }
            Err(reason) => {
                println!(
                    "cargo:warning=the backend ebpf is left out of this build: {reason}; install clang (package clang) or set CLANG"
                );
                "None".to_owned()
            }
        };
        text += &format!(
            "/// {contents} as an ELF object; `None`: built without clang.\npub(crate) const {constant}: Option<&[u8]> = {value};\n"
        );
    }
    fs::write(folder.join("programs.rs"), text)
}

fn compile(source: &str, object: &Path) -> Result<(), String> {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let endian = match env::var("CARGO_CFG_TARGET_ENDIAN").as_deref() {
        Ok("big") => "bpfeb",
        _ => "bpfel",
    };
    let mut command = Command::new(&clang);
    command.args(["-target", endian, "-mcpu=v3", "-g", "-O2", "-Wall", "-Wextra", "-Werror"]);
    // Debian has <asm/types.h> in a folder of the architecture, which the target bpf does not know.
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    command.arg(format!("-I/usr/include/{arch}-linux-gnu"));
    // Objects do not differ by the folder of the build.
    let root = env::var("CARGO_MANIFEST_DIR").map_err(|error| error.to_string())?;
    command.arg(format!("-ffile-prefix-map={root}=."));
    command.args(["-c", source, "-o"]).arg(object);
    let output = command.output().map_err(|error| format!("cannot run {clang}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(format!("{clang} cannot compile {source}: {}", message.lines().next().unwrap_or("no message")))
}

/// Removes what debuggers read; the kernel reads BTF only. Without the program, the object is just larger.
fn strip(object: &Path) {
    let _ = Command::new("llvm-strip").arg("-g").arg(object).status();
}
