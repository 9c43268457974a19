/* The programs of the socket level, one object. build.rs compiles it; docs/ebpf.md describes it. */
#include "forward.h"
#include "release.h"
#include "reverse.h"

/* No helper that they call asks for the GPL. */
const char program_license[] SEC("license") = "Apache-2.0";
