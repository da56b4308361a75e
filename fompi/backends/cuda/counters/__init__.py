"""Several products of a plan as one kernel, which announces each of them while it runs (FOMPI_COUNTERS).

| file | what it holds |
|---|---|
| `signal` | the table of the kernel's tiles, and the flags that it raises |
| `announced` | the products of a plan as this kernel on a GPU: what it takes, its tables, whether it is faster |
| `triton` | the kernel, in Triton |
"""
