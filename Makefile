# Two commands set up everything from a clean clone with Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test corpus lint clean
demo: $(READY)
	$(BIN)/python -m analyses.receptive_field ckpt/ --out results/receptive_field.h5
	$(BIN)/python -m analyses.figures results/receptive_field.h5 --out results/receptive_field.png

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

corpus: $(READY)
	$(BIN)/python -m models.pretrain.corpus --out corpus

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2

# Installed again when the dependencies change. PyTorch is pinned: without the pin pip takes a CUDA build of several GB.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) found, Python >= 3.11 expected; run make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) results *.egg-info
