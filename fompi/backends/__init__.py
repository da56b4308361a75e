"""Where kernels run. A backend turns the kernel names of `fompi.plans.kernels` into calls on arrays.

| file | what it holds |
|---|---|
| `base` | the protocol of a backend and of its tokens; a new backend, for example for CUDA, implements it here |
| `numpy` | kernels on host memory with NumPy and BLAS; also bfloat16 and float16 |
| `in_c` | which kernels there are in C (`fompi/native/kernels.c`); sums of half types by them, for `numpy` |
| `chains` | products in a fixed order, in C (`fompi/native/chain.c`) or by NumPy |
| `half` | half types on host memory: how they are stored, widened and rounded |
| `wires` | the kernels of messages that carry fewer bits: NumPy's, for where there is no compiler |

May import `base`, `plans`, `traces`, `model`, `tensors` and `native`, never `schedules` or `planner`.
"""
