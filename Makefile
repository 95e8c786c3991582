PYTHON ?= python3
PIP = .venv/bin/pip --disable-pip-version-check -q
N ?= 20000

.PHONY: install demo test check fuzz bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[demo]"
	touch $@

.venv/installed-test: .venv/installed
	$(PIP) install -c constraints.txt -e ".[test]"
	touch $@

demo: install
	.venv/bin/python examples/demo.py

test: .venv/installed-test check
	.venv/bin/python -m pytest tests -q

check: .venv/installed-test
	.venv/bin/ruff check dynaflow tests benchmarks examples
	.venv/bin/mypy

fuzz: .venv/installed-test
	.venv/bin/python -m tests.fuzz --cases $(N)

bench: install
	.venv/bin/python -m benchmarks --suite core

clean:
	rm -rf .venv build *.egg-info
