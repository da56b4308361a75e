"""A small decoder on three axes, data, pipeline and tensor, learns from the source of Python's standard library.

mpirun -n 8 python examples/transformer_3d.py
mpirun -n 4 python examples/transformer_3d.py --tp 1 --pp 1 --wire int8 --steps 200  # gradients in fewer bits
"""

import harness  # before NumPy: it gives each rank one BLAS thread
import numpy as np
import torch

import fompi

nn = fompi.torch.nn
LENGTH, WIDTH, HEADS, LAYERS, ROWS, MICROBATCHES = 32, 64, 4, 2, 32, 4  # rows of a step, on all ranks


class Embed(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.words, self.places = (nn.VocabParallelEmbedding(n, WIDTH, comm=tp) for n in (256, LENGTH))

    def forward(self, tokens):  # bytes (LENGTH, rows) -> (tokens of this rank, rows, WIDTH)
        return self.words(tokens) + self.places(torch.arange(LENGTH))[:, None]


class Block(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, comm=tp), nn.LayerNorm(WIDTH, comm=tp)
        self.attention = nn.ParallelAttention(WIDTH, HEADS, causal=True, query_split=False, comm=tp)
        self.up = nn.ColumnParallelLinear(WIDTH, 4 * WIDTH, activation="gelu", comm=tp)
        self.down = nn.RowParallelLinear(4 * WIDTH, WIDTH, comm=tp)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.up(self.norm2(x)))


def train(mesh, text, steps, **smaller):
    """The losses, and of the last step the seconds of messages by axis (`harness.seconds_by_axis`)."""
    dp, pp, tp = mesh.values()
    torch.manual_seed(0)  # every rank draws the same decoder, and keeps its part of its stage
    head = nn.LayerNorm(WIDTH, comm=tp), nn.ColumnParallelLinear(WIDTH, 256, comm=tp)
    parts = [Embed(tp), *(Block(tp) for _ in range(LAYERS)), *head]
    stage = torch.nn.Sequential(*parts[len(parts) * pp.rank // pp.size : len(parts) * (pp.rank + 1) // pp.size])
    shape = len(range(tp.rank, LENGTH, tp.size)), len(range(dp.rank, ROWS // MICROBATCHES, dp.size)), WIDTH  # of x here

    def loss(logits, targets):  # a term of the mean of all bytes; all ranks of tp compute it alike
        every = fompi.parallel.tensor.vocab_parallel_cross_entropy(logits, targets, comm=tp)
        return every.sum() / (LENGTH * ROWS) / tp.size

    pipe = fompi.torch.Pipeline([stage], comm=pp, loss=loss, microbatches=MICROBATCHES, activations=shape)
    losses, options = [], {"optimizer": fompi.parallel.data.AdamW(3e-3), "microbatches": MICROBATCHES, **smaller}
    model = fompi.torch.ZeroDataParallel(stage, dp, average=False, **options)  # ZeRO 1: the sum of terms of a mean
    batches = harness.batches(text, steps, LENGTH, dp, (MICROBATCHES, ROWS // MICROBATCHES))
    for inputs, targets in harness.progress_bar(mesh.world, steps, batches):
        waited = model.parallel.waited
        with tp.record() as products, model.parallel.record() as sums:
            found = pipe.step(inputs, targets) or [0.0]  # the last stage has the losses
            model.step(clip=1.0, over=mesh["pp", "tp"])
        losses.append(float(sum(found)))
    calls = {"dp": (sums, model.parallel.waited - waited), "pp": ([pipe.trace], None), "tp": (products, None)}
    return fompi.all_reduce(np.array(losses), comm=mesh.world), harness.seconds_by_axis(mesh, **calls)


options, mesh, text = harness.prepare(__doc__)
losses, seconds = train(mesh, text, options.steps)
smaller = [train(mesh, text, options.steps, wire=options.wire, feedback=f)[0] for f in (True, False) if options.wire]
single = fompi.Mesh(mesh.world.split(mesh.world.rank), dp=1, pp=1, tp=1)  # each rank alone
if mesh.world.rank == 0:
    expected = train(single, text, min(20, options.steps))[0]
    harness.report(losses, expected, mesh.axes, seconds, options, smaller)

# Output on 8 ranks with --steps 20; times differ from run to run:
# loss 5.66 █▇▆▅▅▄▃▃▂▃▃▂▂▃▂▂▁▂▁▁ 2.66
# the first 20 losses are those of a single process within 1e-07: True
# the last step, mean of the ranks:
# dp=2: messages in flight 7.5 ms, exposed (waited for) 19.6 ms, hidden 0.0 ms
# pp=2: messages in flight 389.2 ms, exposed (waited for) 87.6 ms, hidden 301.5 ms
# tp=2: messages in flight 145.6 ms, exposed (waited for) 310.2 ms, hidden 0.0 ms
