"""PyTorch: an operation on tensors that require grad becomes a node of the autograd graph.

- `autograd`: the node. `fompi.<operation>(...)` calls it by itself.
- `compile`: what `torch.compile` must not read.
- `strategies`: a strategy of `fompi.parallel` as a node.

This room may import the package torch, and all rooms from `base` to `tuning`. Only this room and `bench` import torch.
"""
