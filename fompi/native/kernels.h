/* The kernels of moves and sums on contiguous memory. Their bits are those of fompi.backends.numpy. */
#pragma once
#include "half.h"

/* The bytes of `count` elements of operand k (two operands and the result), or -1 if there is no such kernel. Sums of half
 * types may be kept in float32: bit k of `wide` says which operands are. For a kernel of a wire (wire.c), `dtype` is the
 * wire, and `wide` the dtypes of the two operands and of the result, 4 bits each. */
int64_t kernel_nbytes(int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, int k, int64_t count);

/* c = kernel(a, b), on `count` elements. A copy is one of bytes, or between a half type and float32; b is a there. */
void kernel_run(
    int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, const char *a, const char *b, char *c, int64_t count);
