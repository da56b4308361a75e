"""The public operations: arguments, calls, gradients."""
