"""The public operations, and their gradients."""
