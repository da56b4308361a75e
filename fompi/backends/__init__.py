"""Where kernels run. A backend turns the names of `fompi.plans.kernels` into calls on arrays."""
