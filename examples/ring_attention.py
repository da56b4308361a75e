"""Attention over a sequence that is spread over the ranks: keys and values go round a ring while they are used.

    mpirun -n 2 python examples/ring_attention.py

Each rank holds two pieces of the sequence, one from its first half and one from its second (zigzag). So causal
attention is the same work for all. The forward and the backward are those of one process. Any number of ranks works.
"""

from time import perf_counter

import numpy as np

import fompi

comm = fompi.Communicator()
Sharding, ring_attention = fompi.parallel.sequence.Sharding, fompi.parallel.sequence.ring_attention
tokens, heads, kv_heads, d = 510, 4, 2, 32
sharding, whole = Sharding(tokens, ring=comm.size), Sharding(tokens)
random = np.random.default_rng(0)  # every rank draws the same sequence
q, k, v, do = (random.standard_normal((tokens, n, d), np.float32) for n in (heads, kv_heads, kv_heads, heads))
own = [sharding.shard(t, comm.rank) for t in (q, k, v)]  # the tokens of this rank


def step(q, k, v, do, sharding, comm):
    """The result, and the gradients of q, k and v."""
    o, saved = ring_attention.forward(q, k, v, sharding, comm=comm, causal=True)
    return o, *ring_attention.backward(saved, do)


def milliseconds(act):
    """The shortest time of five, on the slowest rank."""
    times = []
    for _ in range(5):
        begun = perf_counter()
        act()
        times.append(1e3 * (perf_counter() - begun))
    return float(fompi.all_gather(np.array([min(times)]), comm=comm).max())


own_do = sharding.shard(do, comm.rank)
with comm.split(comm.rank, name="alone") as alone:  # one process, the whole sequence
    expected = step(q, k, v, do, whole, alone)
    compute = milliseconds(lambda: step(q, k, v, do, whole, alone)) / comm.size
results = [sharding.unshard(t, comm=comm) for t in step(*own, own_do, sharding, comm)]
equal = all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, expected, strict=True))

block = np.concatenate(own[1:], 2)  # keys and values go round in both passes, and their gradients in one
messages = milliseconds(lambda: [fompi.all_gather(block, comm=comm) for _ in range(3)])
took = milliseconds(lambda: step(*own, own_do, sharding, comm))
hidden = max(0.0, messages - max(0.0, took - compute))
if comm.rank == 0:
    print(f"{tokens} tokens on {comm.size} ranks: {sharding.rows} tokens each, zigzag")
    print(f"o and the gradients of q, k and v are those of one process: {equal}")
    print(f"step {took:.1f} ms, compute {compute:.1f}, messages {messages:.1f}, hidden {hidden:.1f}")

# Output on 2 ranks; times differ from run to run:
# 510 tokens on 2 ranks: [255, 255] tokens each, zigzag
# o and the gradients of q, k and v are those of one process: True
# step 16.1 ms, compute 12.6, messages 1.3, hidden 0.0
