# A package for Spack: `fompi` on the MPI and the Python of the site.
#
#   spack create --name py-fompi --template python     # once; then this file in its place
#   spack dev-build py-fompi@main ^mpich               # in a checkout: the project has no address to fetch from yet
#
# Run by tests/pure: this file, with a stand-in for Spack; what it depends on is compared with pyproject.toml.
# Not run: Spack.

from spack.package import *


class PyFompi(PythonPackage):
    """A runtime on MPI that hides communication behind computation, for any array framework."""

    license("BSD-3-Clause")

    version("main", branch="main")

    depends_on("c", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("mpi", type="run")

    import_modules = ["fompi", "fompi.native._native"]
