/* The kernels once more, for processors of x86-64-v3 (AVX2). Their names end in _v3, their bits are the same. */
#include "v3.h"

#include "processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,f16c,fma,lzcnt,movbe"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#endif
#define IS_V3
#define is_half is_half_v3
#define half_run half_run_v3
#define wire_has wire_has_v3
#define wire_nbytes wire_nbytes_v3
#define wire_run wire_run_v3
#define kernel_nbytes kernel_nbytes_v3
#define kernel_run kernel_run_v3
#include "half.c"
#include "wire.c"
#include "kernels.c"
#undef kernel_run
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

Kernel kernel_for_processor(void) { return processor_level() >= X86_64_V3 ? kernel_run_v3 : kernel_run; }
#else
Kernel kernel_for_processor(void) { return kernel_run; }
#endif
