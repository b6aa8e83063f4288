"""A tiny Llama with its tokenizer, prompts, and the score that it is trained on. No download, no randomness."""

import json
import random
from pathlib import Path

SYMBOLS = "0123456789+= "
PROMPTS = 64


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Share of even digits in the response: something every token has a part in, learnt in a few steps."""
    return sum(symbol in "02468" for symbol in solution_str) / max(1, len(solution_str))


def write_model(folder: Path) -> None:
    """A Llama of 0.5M parameters whose vocabulary is exactly its tokenizer's."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *SYMBOLS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_data(path: Path) -> None:
    """Sums as prompts, in verl's columns."""
    import pandas

    draw = random.Random(0)
    rows = []
    for i in range(PROMPTS):
        a, b = draw.randrange(100), draw.randrange(100)
        rows.append(
            {
                "data_source": "even_digits",
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "reward_model": {"style": "rule", "ground_truth": json.dumps(a + b)},
                "extra_info": {"index": i},
            }
        )
    pandas.DataFrame(rows).to_parquet(path)
