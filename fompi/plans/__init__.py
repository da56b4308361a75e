"""What a collective is, and its proof: plans, dependencies, kernels by name, problems, the verifier."""
