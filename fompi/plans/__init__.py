"""What a collective is: the problem, the plan that solves it, and whether the plan is right."""
