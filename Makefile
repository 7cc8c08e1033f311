# What a commit passes, and what is generated; CONTRIBUTING.md explains each.
.PHONY: check format generated lint lock test types

check: lint types
	pytest -m "not e2e"

lint:
	ruff format --check .
	ruff check .
	lint-imports

types:
	mypy

test:
	pytest

format:
	ruff check --fix .
	ruff format .

generated:
	python -m tests.config_pages
	python -m tests.lowest_versions

lock:
	.ci/lock
