/* See processor.h. `__builtin_cpu_supports` and `target_clones` are not asked: their table stays empty in what `zig cc`
 * links, so that wheels would run the slowest kernels on every processor. */
#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>

static int found(void) {
    enum { FMA = 1 << 12, MOVBE = 1 << 22, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29, LZCNT = 1 << 5 };
    enum { BMI = 1 << 3, AVX2 = 1 << 5, BMI2 = 1 << 8, AVX512F = 1 << 16, YMM = 0x6, ZMM = 0xE6 };
    const unsigned first = FMA | MOVBE | OSXSAVE | AVX | F16C, seventh = BMI | AVX2 | BMI2;
    unsigned a, b, c, d, saved, ignored;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return ANY_PROCESSOR;
    __asm__("xgetbv" : "=a"(saved), "=d"(ignored) : "c"(0)); /* the registers of a thread that the system keeps */
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !(c & LZCNT)) return ANY_PROCESSOR;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & seventh) != seventh || (saved & YMM) != YMM)
        return ANY_PROCESSOR;
    return (b & AVX512F) && (saved & ZMM) == ZMM ? AVX_512 : X86_64_V3;
}
#else
static int found(void) { return ANY_PROCESSOR; }
#endif

int processor_level(void) {
    static int level = -1; /* a virtual machine takes microseconds for each question */
    if (level < 0) level = found();
    return level;
}
