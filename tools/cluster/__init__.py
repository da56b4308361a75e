"""A cluster of hosts on one machine: what is asked for, its namespaces, hosts and links, and their measurement."""
