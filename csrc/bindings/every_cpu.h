// For loops over floats: the compiler makes one version for each instruction set, and the loader selects one.
#pragma once

#if defined(__x86_64__)
#define SMDDP_EVERY_CPU __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define SMDDP_EVERY_CPU
#endif
