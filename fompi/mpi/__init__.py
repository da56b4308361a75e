"""The MPI library: the launcher, facts of the library, messages of one communicator."""
