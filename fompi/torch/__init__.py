"""PyTorch: a fompi operation on tensors that require grad is a node of autograd. The only room that imports torch."""
