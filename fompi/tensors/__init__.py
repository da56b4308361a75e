"""Memory of tensors: a framework's tensors come in and go out without a copy.

No framework is imported before a tensor of that framework comes in.
"""
