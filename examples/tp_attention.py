"""Tensor-parallel attention: heads are spread over the ranks, and so are tokens. Slices of queries travel.

    mpirun -n 2 python examples/tp_attention.py

Each rank holds some tokens of x, some heads of wq and wo, and the key/value heads that they read. The gradients of a
key/value head that several ranks hold are summed. Any number of ranks works.
"""

from time import perf_counter

import numpy as np

import fompi

comm, tp = fompi.Communicator(), fompi.parallel.tensor
tokens, features, heads, kv_heads, d = 255, 64, 4, 1, 16
random = np.random.default_rng(0)  # every rank draws the same layer
x, dy = random.standard_normal((2, tokens, features), np.float32)
wq, wk, wv, wo = (random.standard_normal((features, n * d), np.float32) / 8 for n in (heads, kv_heads, kv_heads, heads))


def own_of(comm):
    """Which tokens this rank has, and which columns of wq and of wk: the heads of a rank stand side by side."""
    mine, keys = (slice(r.start * d, r.stop * d) for r in tp.heads_of(comm.rank, comm.size, heads, kv_heads))
    return np.array_split(np.arange(tokens), comm.size)[comm.rank], mine, keys


def step(comm, **how):
    """y of the tokens of this rank, and the gradients of its tensors."""
    own, mine, keys = own_of(comm)
    tensors = x[own], wq[:, mine], wk[:, keys], wv[:, keys], wo.T[mine]
    y, saved = tp.attention.forward(*tensors, heads=heads, kv_heads=kv_heads, comm=comm, causal=True, **how)
    return y, *tp.attention.backward(saved, dy[own])


def milliseconds(act):
    """The shortest time of five, on the slowest rank."""
    times = []
    for _ in range(5):
        begun = perf_counter()
        act()
        times.append(1e3 * (perf_counter() - begun))
    return float(fompi.all_gather(np.array([min(times)]), comm=comm).max())


with comm.split(comm.rank, name="alone") as alone:  # the whole layer on one process
    y, dx, dwq, dwk, dwv, dwo = step(alone)
own, mine, keys = own_of(comm)
expected = y[own], dx[own], dwq[:, mine], dwk[:, keys], dwv[:, keys], dwo[mine]
equal = all(np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(step(comm), expected, strict=True))
sliced, at_once = (milliseconds(lambda split=split: step(comm, query_split=split)) for split in (True, False))
if comm.rank == 0:
    print(f"{tokens} tokens on {comm.size} ranks: rank 0 has {len(own)}, {mine.stop // d} query heads and the key head")
    print(f"y and the gradients of x and of all weights are those of the whole layer: {equal}")
    print(f"queries in slices {sliced:.1f} ms, at once {at_once:.1f}, hidden {max(0.0, at_once - sliced):.1f}")

# Output on 2 ranks; times differ from run to run:
# 255 tokens on 2 ranks: rank 0 has 128, 2 query heads and the key head
# y and the gradients of x and of all weights are those of the whole layer: True
# queries in slices 9.9 ms, at once 8.6, hidden 0.0
