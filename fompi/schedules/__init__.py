"""How a collective is carried out: one generator per algorithm, and the registry of their names."""
