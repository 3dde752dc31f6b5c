// HVD_CTR_CLONES: compiles a hot function once per x86-64 vector width and picks at load time, so that one baseline binary runs
// everywhere and still uses AVX-512 where there is any. Results are the same in every clone: all our loops are element-wise IEEE
// operations, and -ffp-contract=off keeps a clone with FMA from fusing them.
//
// Only on free functions, which must inline everything they call (a callee left outside is compiled for the baseline).
// Not under sanitizers: the resolver runs before their runtime is up.
#ifndef HVD_CTR_CPU_TARGET_CLONES_H_
#define HVD_CTR_CPU_TARGET_CLONES_H_

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(HVD_CTR_NO_CLONES)
#define HVD_CTR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HVD_CTR_CLONES
#endif

#endif  // HVD_CTR_CPU_TARGET_CLONES_H_
