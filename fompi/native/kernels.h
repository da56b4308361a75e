/* The kernels of moves and sums on contiguous memory. Their bits are those of fompi.backends.numpy. */
#include <stdint.h>

/* The kernels, the dtypes and the wires. The module exports these numbers. */
enum { COPY, ADD, PROD, MEAN, MAX, MIN, ENCODE, DECODE, DECODE_ADD };
enum { BYTE, FLOAT32, FLOAT64, BFLOAT16, UINT8, UINT16, UINT32, UINT64, COMPLEX64, COMPLEX128, FLOAT16, INT8, INT16, INT32, INT64 };
enum { WIRE_BFLOAT16, WIRE_FLOAT16, WIRE_INT8, WIRE_FP8, WIRE_INT4 };

/* The bytes of `count` elements of operand k (two operands and the result), or -1 if there is no such kernel. Sums of half
 * types may be kept in float32: bit k of `wide` says which operands are. For a kernel of a wire (wire.c), `dtype` is the
 * wire, and `wide` the dtypes of the two operands and of the result, 4 bits each. */
int64_t kernel_nbytes(int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, int k, int64_t count);

/* c = kernel(a, b), on `count` elements. A copy is one of bytes, or between a half type and float32; b is a there. */
void kernel_run(
    int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, const char *a, const char *b, char *c, int64_t count);

/* Wires are in wire.c. */
int64_t wire_nbytes(int32_t wire, int64_t count);
int wire_has(int32_t dtype); /* of elements */
void wire_run(int32_t kernel, int32_t wire, int32_t from, int32_t to, const char *a, const char *b, char *c, int64_t count);
