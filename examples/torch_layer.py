"""A PyTorch module whose weights are spread over the ranks. Its results and gradients are those of the full layer.

    mpirun -n 2 python examples/torch_layer.py

Each rank holds some rows of x, some columns of the first weight, and the rows of the second weight that belong to them
(tensor parallelism with sequence parallelism). The backward pass is fused too. Any number of ranks works.
"""

import torch

import fompi


def own(tensor, comm, dim=0):
    """This rank's part of a tensor: the ranks split a dimension as evenly as possible, in their order."""
    return tensor.tensor_split(comm.size, dim)[comm.rank]


def shards(w1, b1, w2, b2, comm):
    """This rank's part of the tensors of two Linear layers, which store a weight as (outputs, inputs)."""
    return own(w1, comm), own(b1, comm), own(w2, comm, dim=1), b2


class ParallelMLP(torch.nn.Module):
    """This rank's part of `full`, a Sequential of Linear, ReLU and Linear. Rows in and out are those of this rank."""

    def __init__(self, full, comm):
        super().__init__()
        parts = shards(*full.parameters(), comm)
        self.w1, self.b1, self.w2, self.b2 = (torch.nn.Parameter(part.detach().clone()) for part in parts)
        self.comm = comm

    def forward(self, x):
        h = fompi.all_gather_matmul(x, self.w1.T, bias=self.b1, comm=self.comm)
        return fompi.matmul_reduce_scatter(torch.relu(h), self.w2.T, bias=self.b2, comm=self.comm)


comm = fompi.Communicator()
torch.manual_seed(0)  # every rank makes the same full layer and the same x
full = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
full_x = torch.randn(24, 32, requires_grad=True)
full_y = full(full_x)
full_y.square().sum().backward()

layer, x = ParallelMLP(full, comm), own(full_x, comm).detach().requires_grad_()
y = layer(x)
y.square().sum().backward()  # the loss of these rows: gradients are those of the sum of the losses of all ranks
layer.b2.grad = fompi.all_reduce(layer.b2.grad, comm=comm)  # all ranks hold b2: each has a term of its gradient

results = [y, x.grad, *(p.grad for p in layer.parameters())]
expected = [own(full_y, comm), own(full_x.grad, comm), *shards(*(p.grad for p in full.parameters()), comm)]
equal = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(results, expected, strict=True))
everywhere = bool(fompi.all_gather(torch.tensor([equal]), comm=comm).all())
if comm.rank == 0:
    print(f"rank 0 of {comm.size}: w1 {tuple(layer.w1.shape)}, w2 {tuple(layer.w2.shape)}")
    print(f"y and the gradients of x, w1, b1, w2 and b2 are those of the full layer: {everywhere}")

# Output on 2 ranks:
# rank 0 of 2: w1 (32, 32), w2 (32, 32)
# y and the gradients of x, w1, b1, w2 and b2 are those of the full layer: True
