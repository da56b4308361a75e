"""The same bits on any number of ranks: a decoder trains, and ends with the weights of a single process.

    mpirun -n 4 python examples/same_bits.py

The last bits of a sum depend on how many ranks have a part of it. With `order=fompi.Canonical(8)` each sum is a binary
tree over 8 leaves, whoever has them: 1, 2, 4 or 8 ranks. Each rank trains with the others, and then alone.
"""

import torch
from torch.nn import functional

import fompi

nn = fompi.torch.nn
WIDE, HEADS, WORDS, ROWS, STEPS = 64, 8, 128, 32, 10


class Layer(torch.nn.Module):
    """A layer of a Llama, without biases. Each rank has some rows of x, some heads, and some features of the MLP."""

    def __init__(self, **how):
        super().__init__()
        self.norms = torch.nn.ModuleList(nn.RMSNorm(WIDE, **how) for _ in range(2))
        self.qkv = torch.nn.ModuleList(nn.ColumnParallelLinear(WIDE, WIDE, bias=False, **how) for _ in range(3))
        self.out = nn.RowParallelLinear(WIDE, WIDE, bias=False, **how)
        self.up = nn.ColumnParallelLinear(WIDE, 8 * WIDE, bias=False, activation="swiglu", **how)
        self.down = nn.RowParallelLinear(4 * WIDE, WIDE, bias=False, **how)

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = (project(h).unflatten(1, (-1, WIDE // HEADS)).transpose(0, 1) for project in self.qkv)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(0, 1).flatten(1))
        return x + self.down(self.up(self.norms[1](x)))


def train(comm, order):
    """The losses of all steps, and the weights of this rank."""
    torch.manual_seed(0)
    how = {"comm": comm, "order": order}
    embed, head = nn.VocabParallelEmbedding(WORDS, WIDE, **how), nn.ColumnParallelLinear(WIDE, WORDS, bias=False, **how)
    model = torch.nn.Sequential(embed, Layer(**how), Layer(**how), nn.RMSNorm(WIDE, **how), head)
    optimizer, text, losses = torch.optim.AdamW(model.parameters(), 1e-2), torch.randint(WORDS, (ROWS + 1,)), []
    for _ in range(STEPS):
        loss = fompi.parallel.tensor.vocab_parallel_cross_entropy(model(text[:-1]), text[1:], **how).mean()
        (loss / comm.size).backward()  # gradients are those of the sum of the losses of all ranks
        nn.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, nn.full_state_dict(model)


comm = fompi.Communicator()
for order in ("any", fompi.Canonical(8)):
    (losses, weights), (wanted, expected) = train(comm, order), train(comm.split(comm.rank), order)
    same = losses == wanted and all(torch.equal(weights[name], expected[name]) for name in expected)
    if comm.rank == 0:
        print(f"order={order}: loss {losses[0]:.3f} to {losses[-1]:.3f}; the bits of a single process: {same}")

# Output
# order=any: loss 5.104 to 0.140; the bits of a single process: False
# order=canonical(8): loss 5.104 to 0.140; the bits of a single process: True
