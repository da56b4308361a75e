/* The kernels of kernels.h, compiled for what the processor can do. */
#pragma once
#include "kernels.h"

typedef void (*Kernel)(
    int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, const char *a, const char *b, char *c, int64_t count);

Kernel kernel_for_processor(void);
