"""One rank's program: compiled once, then run call after call.

This room carries plans out. It does not know how they are written or chosen.
"""
