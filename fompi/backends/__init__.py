"""Where kernels run. A backend turns the names of `fompi.kernels` into calls on arrays."""
