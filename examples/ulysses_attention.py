"""Attention over a sequence that is spread over the ranks: each rank computes some heads of all tokens (Ulysses).

    mpirun -n 2 python examples/ulysses_attention.py

An all-to-all turns tokens into heads, and another one turns the results back. One slice of the queries travels while
the attention of another is computed. Any number of ranks works, also more than there are heads. A projection can deal
the heads itself: those of one rank travel while those of another are computed.
"""

from time import perf_counter

import numpy as np

import fompi

comm = fompi.Communicator()
Sharding, ulysses_attention = fompi.parallel.sequence.Sharding, fompi.parallel.sequence.ulysses_attention
tokens, heads, kv_heads, d = 510, 6, 2, 32  # 2 key heads: with more ranks, several hold the same one
documents = (0, 100, 510)  # two packed documents, which do not see each other
sharding, whole = (Sharding(tokens, ulysses=n, cu_seqlens=documents) for n in (comm.size, 1))
random = np.random.default_rng(0)  # every rank draws the same sequence
q, k, v, do = (random.standard_normal((tokens, n, d), np.float32) for n in (heads, kv_heads, kv_heads, heads))
*own, own_do = (sharding.shard(t, comm.rank) for t in (q, k, v, do))  # the tokens of this rank


def step(q, k, v, do, sharding, comm):
    """The result, and the gradients of q, k and v."""
    o, saved = ulysses_attention.forward(q, k, v, sharding, comm=comm, causal=True)
    return o, *ulysses_attention.backward(saved, do)


def milliseconds(act):
    """The shortest time of five, on the slowest rank."""
    times = []
    for _ in range(5):
        begun = perf_counter()
        act()
        times.append(1e3 * (perf_counter() - begun))
    return float(fompi.all_gather(np.array([min(times)]), comm=comm).max())


with comm.split(comm.rank, name="alone") as alone:  # one process, all heads
    expected = step(*(whole.shard(t, 0) for t in (q, k, v, do)), whole, alone)
    expected = [whole.unshard(t, comm=alone) for t in expected]
    compute = milliseconds(lambda: step(q, k, v, do, whole, alone)) / comm.size
results = [sharding.unshard(t, comm=comm) for t in step(*own, own_do, sharding, comm)]
equal = all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, expected, strict=True))

rows = [np.concatenate(t, 1).reshape(len(own_do), -1) for t in (own, [own_do])]  # q, k and v travel, and o comes back
messages = milliseconds(lambda: [fompi.all_to_all(x, comm=comm) for x in (*rows, *rows)])  # and their gradients
took = milliseconds(lambda: step(*own, own_do, sharding, comm))
hidden = max(0.0, messages - max(0.0, took - compute))


def projected(x, w, wo, heads, rows, comm):
    """All heads of some tokens become some heads of all tokens inside the projections: columns are dealt."""
    mine = heads[comm.rank]
    qkv = fompi.matmul_all_to_all_columns(x, w, columns=[3 * d * n for n in heads], comm=comm)
    q, k, v = np.moveaxis(qkv.reshape(tokens, mine, 3, d), 2, 0).swapaxes(1, 2)
    scores = np.exp(q @ k.swapaxes(1, 2) / d**0.5)
    o = (scores / scores.sum(2, keepdims=True) @ v).swapaxes(0, 1).reshape(tokens, mine * d)
    return fompi.all_to_all_columns_matmul(o, wo, columns=[d * n for n in heads], counts=rows, comm=comm)


x, w, wo = (random.standard_normal(s, np.float32) / 9 for s in ((tokens, 64), (64, heads * 3 * d), (heads * d, 64)))
dealt, rows = ([len(piece) for piece in np.array_split(range(n), comm.size)] for n in (heads, tokens))
y = fompi.all_gather(projected(np.array_split(x, comm.size)[comm.rank], w, wo, dealt, rows, comm), comm=comm)
with comm.split(comm.rank, name="alone") as alone:
    is_same = np.allclose(y, projected(x, w, wo, [heads], [tokens], alone), rtol=1e-4, atol=1e-4)
if comm.rank == 0:
    print(f"{tokens} tokens in {len(documents) - 1} documents, {heads} heads on {comm.size} ranks")
    print(f"o and the gradients of q, k and v are those of one process: {equal}")
    print(f"with projections that deal the heads: {is_same}")
    print(f"step {took:.1f} ms, compute {compute:.1f}, messages {messages:.1f}, hidden {hidden:.1f}")

# Output on 2 ranks; times differ from run to run:
# 510 tokens in 2 documents, 6 heads on 2 ranks
# o and the gradients of q, k and v are those of one process: True
# with projections that deal the heads: True
# step 36.0 ms, compute 42.0, messages 0.3, hidden 0.3
