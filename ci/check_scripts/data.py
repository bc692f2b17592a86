"""Tiny stand-ins for the data that scripts download: ``python data.py KIND …`` writes them into the current folder."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SENTENCE = "a plumb line shows whether wall is true and trainer of many devices does what one device would do"


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return sentences of 4 to 20 words, the same in every run."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(SENTENCE.split(), k=chance.randint(4, 20))) for _ in range(count)]


def nanogpt() -> None:
    """Write characters as tokens, like nanoGPT's prepare.py."""
    import pickle

    import numpy as np

    folder = Path("data/shakespeare_char")
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    for split, length in (("train", 20_000), ("val", 2_000)):
        chance.integers(0, 65, length, dtype=np.uint16).tofile(folder / f"{split}.bin")
    letters = [chr(40 + i) for i in range(65)]
    meta = {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def wikitext() -> None:
    """Write the three files of a language model's corpus."""
    folder = Path("data/wikitext-2")
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 60), ("valid", 20), ("test", 20)):
        (folder / f"{split}.txt").write_text("\n".join(sentences(count)) + "\n", encoding="utf-8")


def lightning_wikitext() -> None:
    """Write the corpus where Lightning's demos expect it: the splits need more than 4000 sequences of 35 words."""
    for folder in (Path("wikitext-2"), Path("data")):
        folder.mkdir(exist_ok=True)
        (folder / "wikitext-2.txt").write_text("\n".join(sentences(12_500)) + "\n", encoding="utf-8")


def sines() -> None:
    """Write the waves of the time sequence example."""
    import numpy as np
    import torch

    shift = np.random.default_rng(2).integers(-80, 80, (8, 1))
    torch.save(np.sin((np.arange(60) + shift) / 20.0).astype("float64"), "traindata.pt")


def shakespeare() -> None:
    """Write a text whose characters are the tokens."""
    Path("input.txt").write_text("\n".join(sentences(200)), encoding="utf-8")


def picotron() -> None:
    """Write a configuration for each kind of parallelism, and weights where picotron expects them."""
    from shutil import copytree

    copytree("tiny-llama", "hf_model_safetensors")
    Path("hf_model/tiny-llama").mkdir(parents=True)
    Path("hf_model/tiny-llama/config.json").write_text("{}")
    for kind in ("dp", "tp", "pp", "cp"):
        sizes = {f"{other}_size": 2 if other == kind else 1 for other in ("dp", "tp", "pp", "cp")}
        configuration = {
            "distributed": {**sizes, "pp_engine": "1f1b", "backend": "gloo", "use_cpu": True},
            "model": {"name": "tiny-llama", "use_fused_adam": False},
            "training": {
                "seed": 42,
                "learning_rate": 3e-4,
                "total_train_steps": 4,
                "seq_length": 32,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_tokens": None,
            },
            "dataset": {"name": "texts", "num_workers": 0, "num_proc": 1},
            "checkpoint": {"save_dir": "ckpt", "save_frequency": 300, "load_path": ""},
            "logging": {"use_wandb": False, "run_name": None},
            "environment": {
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "FLASH_ATTEN": "0",
                "HF_TOKEN": "none",
            },
        }
        Path(f"{kind}.json").write_text(json.dumps(configuration))


def nanochat() -> None:
    """Write a tokenizer of bytes and two shards of documents."""
    import pickle

    import pyarrow as pa
    import pyarrow.parquet as pq
    import tiktoken
    import torch

    special: tuple[str, ...] = ("bos", "user_start", "user_end", "assistant_start", "assistant_end")
    special += ("python_start", "python_end", "output_start", "output_end")
    letters = tiktoken.Encoding(
        name="bytes",
        pat_str="[\\s\\S]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={f"<|{name}|>": 256 + i for i, name in enumerate(special)},
    )
    folder = Path("nanochat-data/tokenizer")
    folder.mkdir(parents=True)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(letters))
    torch.save(torch.tensor([1] * 256 + [0] * len(special), dtype=torch.int32), folder / "token_bytes.pt")
    shards = Path("nanochat-data/base_data_climbmix")
    shards.mkdir()
    for i in range(2):
        table = pa.table({"text": sentences(400, seed=i)})
        pq.write_table(table, shards / f"shard_{i:05d}.parquet", row_group_size=100)


def fineweb() -> None:
    """Write GPT-2 tokens as 16-bit numbers, in the format of modded-nanoGPT and llm.c."""
    import numpy as np

    folder = Path("data/fineweb10B")
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for split in ("train", "val"):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, 20_000
        tokens = chance.integers(0, 1000, 20_000, dtype=np.uint16)
        (folder / f"fineweb_{split}_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())


def chunks() -> None:
    """Write tokens in several files of 16-bit numbers, without headers."""
    import numpy as np

    folder = Path("chunks")
    folder.mkdir()
    chance = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(2):
            chance.integers(0, 400, 8_000, dtype=np.uint16).tofile(folder / f"fineweb_{split}_{i:06d}.bin")


def tinystories() -> None:
    """Write tokens where llama2.c expects those of a custom vocabulary."""
    import numpy as np

    folder = Path("data/tok64")
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for i in range(2):
        chance.integers(0, 64, 20_000, dtype=np.uint16).tofile(folder / f"data{i:02d}.bin")


def cora() -> None:
    """Write a graph of 1700 papers in place of Cora."""
    chance = random.Random(0)
    folder = Path("cora")
    folder.mkdir()
    papers = range(1700)
    rows = ("\t".join([str(i), *chance.choices("01", (3, 1), k=32), f"topic{i % 7}"]) for i in papers)
    (folder / "cora.content").write_text("\n".join(rows) + "\n")
    edges = sorted({(chance.choice(papers), chance.choice(papers)) for _ in range(3000)})
    (folder / "cora.cites").write_text("".join(f"{one}\t{other}\n" for one, other in edges))


def tokenizer(folder: Path) -> int:
    """Write a tokenizer of whole words; return its number of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
    vocabulary = {word: i for i, word in enumerate([*special, *sorted(set(SENTENCE.split())), ".", ",", "the", "said"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
    )
    fast.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] + eos_token }}"
        "{% endif %}{% endfor %}"
    )
    fast.save_pretrained(folder)
    return len(vocabulary)


def bert() -> None:
    """Write a two-layer BERT under the name that examples load."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder = Path("bert-base-cased")
    words = tokenizer(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def llama() -> None:
    """Write a two-layer Llama, also under the name of a small one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for folder in (Path("tiny-llama"), Path("HuggingFaceTB/SmolLM-360M")):
        words = tokenizer(folder)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=words,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
        LlamaForCausalLM(config).save_pretrained(folder)


def glue() -> None:
    """Write sentence pairs under the names that ``datasets`` loads."""
    for folder in (Path("glue"), Path("nyu-mll/glue")):
        for split, count in (("train", 64), ("validation", 8), ("test", 8)):
            pairs = zip(sentences(count, 1), sentences(count, 2), strict=True)
            rows = [
                {"sentence1": one, "sentence2": two, "label": i % 2, "idx": i} for i, (one, two) in enumerate(pairs)
            ]
            write_rows(folder / f"mrpc/{split}.jsonl", rows)
        files = "\n".join(f"  - split: {s}\n    path: mrpc/{s}.jsonl" for s in ("train", "validation", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}\n---\n")


def accuracy() -> None:
    """Write the metric that examples load: a module with one class, as ``evaluate`` requires."""
    Path("glue").mkdir(exist_ok=True)
    Path("glue/glue.py").write_text(
        "import datasets\nimport evaluate\n\n\nclass Accuracy(evaluate.Metric):\n"
        "    def _info(self):\n"
        "        numbers = {'predictions': datasets.Value('int64'), 'references': datasets.Value('int64')}\n"
        "        return evaluate.MetricInfo(description='', citation='', features=datasets.Features(numbers))\n\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': sum(p == r for p, r in zip(predictions, references)) / len(references)}\n"
    )


def texts() -> None:
    """Write texts, conversations and preferences for fine-tuning."""
    said = sentences(64)
    write_rows(Path("texts/train.jsonl"), [{"text": text} for text in said])
    write_rows(Path("texts/validation.jsonl"), [{"text": text} for text in said[:8]])
    chats = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": said[-i]}] for i, one in enumerate(said)
    ]
    for split in ("train", "test"):
        write_rows(Path(f"chats/{split}.jsonl"), [{"messages": messages} for messages in chats])
    pairs = [
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{"role": "assistant", "content": "is a wall"}]}
        for chat in chats
    ]
    write_rows(Path("preferences/train.jsonl"), pairs)
    write_rows(
        Path("judgements/train.jsonl"),
        [{"prompt": c[:1], "completion": c[1:], "label": i % 2 == 0} for i, c in enumerate(chats)],
    )
    write_rows(Path("instructions/train.jsonl"), [{"instruction": c[0]["content"], "output": "is true"} for c in chats])


def c4() -> None:
    """Write texts where torchtitan expects a part of C4."""
    write_rows(Path("tests/assets/c4_test/data.json"), [{"text": " ".join(sentences(12, seed))} for seed in range(64)])


def prompts() -> None:
    """Write prompts, and a function that rewards completions."""
    write_rows(Path("texts_with_prompts/train.jsonl"), [{"prompt": text} for text in sentences(32)])
    Path("rewards.py").write_text(
        "def letters(completions, **others):\n    return [float(len(text) % 7) for text in completions]\n"
    )


def write_rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object per line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


KINDS: dict[str, Callable[[], None]] = {
    made.__name__: made
    for made in (
        *(nanogpt, wikitext, lightning_wikitext, sines, bert, llama, glue, accuracy, texts),
        *(shakespeare, picotron, nanochat, fineweb, chunks, tinystories, cora, c4, prompts),
    )
}

if __name__ == "__main__":
    for kind in sys.argv[1:]:
        KINDS[kind]()
