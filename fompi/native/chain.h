/* Products whose bits depend on nothing but their operands: each element is a chain of fused multiply-adds along k,
 *
 *     s = fma(x[i, 0], w[0, j], b[j]);  s = fma(x[i, 1], w[1, j], s);  ...
 *
 * whatever the other rows and columns, the tiles, and the processor. With several leaves k is cut into as many equal parts,
 * each a chain of its own, and they are added in the tree of fompi.plans.tree.
 */
#include <stdint.h>

/* y = x @ w, on elements of one dtype. Steps from row to row and from column to column are in elements. */
typedef struct {
    int64_t m, n, k, leaves; /* leaves divides k */
    const void *x;
    int64_t x_step, x_across;
    const void *w;
    int64_t w_step, w_across;
    const void *bias; /* what the first leaf begins with; NULL: with 0 */
    void *y;          /* its columns are 1 apart */
    int64_t y_step;
    int32_t adds; /* the first leaf begins with y */
} Product;

/* The bytes that a product needs besides its operands. `is_wide`: the elements are float64, not float32. */
int64_t chain_scratch(int32_t is_wide, int64_t m, int64_t n, int64_t k, int64_t leaves);

void chain_run(int32_t is_wide, const Product *p, void *scratch);
