/* The kernels of wires (fompi.base.wires) on contiguous memory. */
#include <stdint.h>

int64_t wire_nbytes(int32_t wire, int64_t count);
int wire_has(int32_t dtype); /* of elements */
void wire_run(int32_t kernel, int32_t wire, int32_t from, int32_t to, const char *a, const char *b, char *c, int64_t count);
