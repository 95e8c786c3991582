PYTHON ?= python3
PIP = .venv/bin/pip --disable-pip-version-check -q
PIP_VLLM = .venv-vllm/bin/pip --disable-pip-version-check -q
JOBS ?= 0

.PHONY: install demo test test-slow test-ops test-vllm test-gpu browser check docs fuzz bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[demo]"
	touch $@

.venv/installed-test: .venv/installed
	$(PIP) install -c constraints.txt -e ".[test,browser]"
	touch $@

demo: install
	.venv/bin/dynaflow demo

PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test: .venv/installed-test check
	$(PYTEST) tests -m "not slow"

# Those that tests/slow.txt names: whole systems, several processes, compiled models.
test-slow: .venv/installed-test
	$(PYTEST) tests -m slow

# vLLM wants a torch of its own choice and dozens of packages: it gets an environment of its own.
.venv-vllm/packages: constraints.txt tests/systems/vllm_requirements.txt
	$(PYTHON) -m venv .venv-vllm
	$(PIP_VLLM) install -c constraints.txt torch setuptools
	$(PIP_VLLM) install --no-deps --only-binary=:all: -r tests/systems/vllm_requirements.txt
	$(PIP_VLLM) install -c constraints.txt pytest pytest-timeout
	touch $@

.venv-vllm/installed: .venv-vllm/packages pyproject.toml
	rm -rf *.egg-info  # left by an older install, it would hide the entry points of this one
	$(PIP_VLLM) install --no-deps --no-build-isolation -e .
	touch $@

test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/systems/test_vllm_batches.py tests/systems/test_vllm.py -q

# On a machine with a GPU: compilation takes most of the time, so many processes share it.
test-gpu: .venv/installed-test
	OMP_NUM_THREADS=2 .venv/bin/python -m pytest tests/gpu -q -n 10 --dist worksteal

# Debian's own browser, for tests/browser. Where it can't be installed, those tests say so and are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || \
		echo "chromium could not be installed: the page is not tested"; \
	fi

check: .venv/installed-test
	.venv/bin/ruff check dynaflow tests benchmarks examples docs
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

# mkdocs reads our docstrings without importing them; broken links and anchors are errors.
.venv/installed-docs: .venv/installed
	$(PIP) install -c constraints.txt -e ".[docs]"
	touch $@

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict -q

# Every operator of torch's own database; `make test` runs some.
test-ops: .venv/installed-test
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.ops --page docs/operators.md

# N: how many cases; SECONDS: for how long; WAY: engine, train, door or all; JOBS: processes, 0 for all cores.
fuzz: .venv/installed-test
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.fuzz --way $(or $(WAY),all) --jobs $(JOBS) \
		$(if $(N),--cases $(N)) $(if $(SECONDS),--seconds $(SECONDS))

bench: install
	.venv/bin/python -m benchmarks --suite core

clean:
	rm -rf .venv .venv-vllm build *.egg-info
