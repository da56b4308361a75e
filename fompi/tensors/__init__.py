"""A framework's memory in and out: DLPack and the arena."""
