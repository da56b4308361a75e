/* The kernels of moves and sums on contiguous memory. Their bits are those of fompi.backends.numpy. */
#include <stdint.h>

enum { COPY, ADD, PROD, MEAN }; /* the kernels, as numbered in fompi.runtime.lower */
enum { BYTE, FLOAT32, FLOAT64, BFLOAT16, UINT8, UINT16, UINT32, UINT64, COMPLEX64, COMPLEX128 }; /* the dtypes there */

/* The bytes of an element, or 0 if there is no such kernel. */
int64_t kernel_width(int32_t kernel, int32_t dtype, int32_t divisor);

/* c = kernel(a, b), on `count` elements. A copy does not read b. */
void kernel_run(int32_t kernel, int32_t dtype, int32_t divisor, const char *a, const char *b, char *c, int64_t count);
