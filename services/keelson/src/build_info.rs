//! What the build passes to every part of the program.
//!
//! Owns: [`VERSION`]. In: the environment of the compiler, set by `build.rs`. Out: constants.

/// Version of the program, for `--version`, logs and answers.
pub(crate) const VERSION: &str = env!("KEELSON_BUILD_VERSION");
