"""Where kernels run. A backend turns the kernel names of `fompi.plans.kernels` into calls on arrays."""
