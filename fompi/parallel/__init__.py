"""Strategies of parallel training, on the public operations and plans: arrays in, arrays out, of any framework.

| file | what it holds |
|---|---|
| `data` | data parallelism: buckets of gradients that leave during the backward, optimizers, ZeRO 1 to 3 |
| `pipeline` | pipeline parallelism: orders of micro-batches, and stages that run in such an order |
| `tensor` | tensor parallelism with sequence parallelism: linear layers, attention, vocabulary |
| `sequence` | long sequences: shardings, Ulysses, ring attention, and both together |
| `expert` | experts: routing, dispatch and combine |

Every function has `f(...)`, `f.forward(...) -> (y, saved)` and `f.backward(saved, dy) -> gradients`.
"""
