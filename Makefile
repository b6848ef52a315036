# Each target sets up .venv by itself; the stamp makes the second time quick.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.ready
PEERS := .venv/.peers
MANUAL := .venv/.manual
# Two processes share the tests out, one thread each.
# Processes that tests start read compiled files rather than compile the package anew: 4 seconds each.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
# A GPT-2 whose unplanned step takes 1.4 GiB, into 60 % of that.
DEMO := "hf:gpt2?n_layer=6,n_embd=384,n_head=6,vocab_size=16384" --batch 4 --seq 512 --budget 60%

# The CUDA build of torch over a stub of the driver: everything of a GPU but values and times.
STUB ?= ../shared/cuda_stub

.PHONY: axe docs docs-commands interrupts gpu-accept help setup demo test test-thorough test-quick check check-cuda format bench bench-quick bench-gpu hazards fuzz clean

help:
	@echo "make demo        fit a GPT-2 into 60 % of its memory on this CPU, with proof"
	@echo "make test        all tests          make test-quick  without the slow ones   make test-thorough  more cases"
	@echo "make check       ruff and mypy      make format      rewrite the files as ruff wants them"
	@echo "make check-cuda  what is of a GPU on a stub of one (5 GB the first time; no GPU needed, STUB=FOLDER for another kit)"
	@echo "make interrupts  exceptions and Ctrl-C inside fit, plan, profile, verify leave nothing (POINTS=200 for more)"
	@echo "make docs        the manual, as pages in docs/_build/html"
	@echo "make axe         fetch axe-core (npm), for the tests of the report in a browser"
	@echo "make docs-commands  types every command of the manual in a fresh clone (LONG=1: also those that take hours)"
	@echo "make hazards     rewrite docs/hazards.md    make fuzz    1,000 random modules under random plans"
	@echo "make bench       all benchmarks, goes on where it was stopped (TIME=1: only time the peers' rows again)"
	@echo "make bench-quick what does not wobble in them, exit status 1 if broken"
	@echo "make gpu-accept  does it hold on this CUDA GPU: ten checks, PASS or FAIL, under ten minutes"
	@echo "make bench-gpu   the comparison on one CUDA GPU, under ten minutes"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	# These ask for torchvision and torchaudio, whose wheels do not fit a CPU build of torch and which they can do without.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps spikingjelly norse nirtorch
	# Without its ops: nothing is compiled, here or when it runs on a CPU.
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps deepspeed hjson msgpack py-cpuinfo einops ninja
	@touch $@

demo: $(STAMP)
	$(BIN)/recoup fit $(DEMO)

test: $(STAMP)
	$(PYTEST)

test-thorough: $(STAMP)
	RECOUP_THOROUGH=1 $(PYTEST)

test-quick: $(STAMP)
	$(PYTEST) -m "not slow"

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check-cuda:
	$(STUB)/build.sh
	STUB_GPU_PROTECT=1 OMP_NUM_THREADS=1 $(STUB)/run.sh -m pytest -c tests/cuda_stub/pytest.ini --rootdir=. -q tests/cuda_stub
	$(STUB)/run.sh smoke_recoup.py

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP) $(PEERS)
	$(BIN)/python -m bench.peers $(if $(TIME),--retime)
ifndef TIME
	$(BIN)/python -m bench.main_job
	$(BIN)/python -m bench.frontier
	$(BIN)/python -m bench.rederive --timed --autocast
endif

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group bench
	@touch $@

$(MANUAL): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	@touch $@

# Exceptions at sampled lines and Ctrl-C at sampled moments inside fit, plan, profile and verify.
interrupts: $(STAMP)
	RECOUP_POINTS=$(or $(POINTS),12) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/safety/test_interrupts.py

docs: $(MANUAL)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html

# The accessibility checker that tests/report/test_browser.py runs over the report, where it is there.
axe:
	mkdir -p build && cd build && tar xzf $$(npm pack --silent axe-core@4) package/axe.min.js

docs-commands: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tools/type_pages.py $(if $(LONG),--long)

gpu-accept: $(STAMP)
	$(BIN)/python -m bench.gpu_accept

bench-gpu: $(STAMP)
	$(BIN)/python -m bench.gpu

bench-quick: $(STAMP)
	$(BIN)/python -m bench.quick
	$(BIN)/python -m bench.main_job llama unet --quick --out build/bench

hazards: $(STAMP)
	$(BIN)/python -m bench.hazards

fuzz: $(STAMP)
	RECOUP_FUZZ=1000 $(BIN)/python -m pytest -q tests/runtime/test_regions_fuzz.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache dist build
