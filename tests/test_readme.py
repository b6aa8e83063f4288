"""Every command and every piece of Python in the README works.

A command runs as written, in an empty folder beside ``recipes``, with the settings of ``SMALL`` appended where it would
train for minutes. ``make`` targets are checked with ``make -n``: this test is part of what ``make test`` runs.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = (
    "--task.train_problems 60 --task.eval_problems 8 --model.hidden_size 16 --model.layers 1 --model.heads 2 "
    "--model.intermediate_size 16 --warm_start.steps 2 --rollout.prompts_per_step 4 --rollout.max_response_tokens 12 "
    "--optim.critic_warmup_steps 1 --eval.final_problems 8"
)
ADDED = {
    "brace train recipes/calculator.toml": f"{SMALL} --optim.steps 3",
    "brace train --resume": "--optim.steps 5",
    "brace train recipes/gsm8k_tool": "--eval.every 0 --eval.final_problems 2 --rollout.max_response_tokens 12 "
    "--rollout.slots 4 --rollout.max_prompt_tokens 2000 --rollout.prompts_per_step 2 --rollout.samples_per_prompt 2 "
    "--task.eval_problems 2 --optim.steps 3 --optim.critic_warmup_steps 1 --schedule.max_staleness 2",
    "brace bench": "targets",
    "brace probe": "--prompts 4 --positions 2 --continuations 2",
}
"""Beginning of a command -> what is appended to keep it short."""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands():
    return [line.strip() for block in blocks("bash") for line in block.splitlines() if line.strip()]


def test_the_readme_names_the_two_commands_first():
    assert commands()[:2] == ["make train", "make test"]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")] + ["make smollm2"])
def test_make_targets_exist(command):
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "brace" in done.stdout or "pytest" in done.stdout


def test_the_core_example_runs():
    (code,) = blocks("python")
    check = "\nassert critic_target.shape == shape and critic_target[:, -1].eq(1).all()"
    subprocess.run([sys.executable, "-c", code + check], check=True)
    assert "brace_targets(" in code


def chat_model(folder):
    """A random model with a chat template and a tokenizer that knows every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *symbols])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gsm8k_rows(file):
    rows = [{"question": f"What is {a} plus {a}?", "answer": f"<<{a}+{a}={2 * a}>>\n#### {2 * a}"} for a in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_every_brace_command_runs(tmp_path):
    """In order, since later ones use what earlier ones leave."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    chat_model(tmp_path / "DIR_OR_NAME")
    gsm8k_rows(tmp_path / "FILE")
    (tmp_path / "FILE").rename(tmp_path / "FILE.jsonl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = []
    for command in commands():
        if command.startswith("make ") or command == "source .venv/bin/activate":
            continue
        assert command.startswith("brace "), f"say in this test how to run: {command}"
        extra = next((more for start, more in ADDED.items() if command.startswith(start)), "")
        words = shlex.split(f"{command} {extra}".replace("FILE", "FILE.jsonl"))[1:]
        done = subprocess.run(
            [sys.executable, "-m", "brace_rl", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        ran.append(command)
    assert len(ran) == 11
    assert (tmp_path / "mine.png").stat().st_size > 0


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_inside_the_project_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_the_tree_names_files_that_exist():
    (tree,) = re.findall(r"```\n(src/brace_rl/\n.*?)```", README, flags=re.DOTALL)
    names = set(re.findall(r"\b(\w+\.py)\b", tree))
    present = {path.name for path in (ROOT / "src").rglob("*.py")}
    assert len(names) > 15
    assert names <= present
