"""Memory of tensors: a framework's tensors come in and go out without a copy.

| file | what it holds |
|---|---|
| `dlpack` | borrows a tensor of NumPy, PyTorch or JAX as a NumPy array, and lends an array as a tensor |
| `capsules` | the structures of DLPack, by which tensors come in and go out |
| `device_array` | an array in the memory of a device |
| `arena` | a pool of 64-byte aligned host memory, for results and scratch |

May import `base`. It imports no framework before a tensor of that framework comes in.
"""
