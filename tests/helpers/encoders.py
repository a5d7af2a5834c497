"""Small encoders with random weights, and what they should give, written out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmrl.retrieval.base import Document
from mmrl.tasks.mini.examples import mini_corpus

QUERIES = ["who wrote the book", "city on a river", "a"]
DOCUMENTS = [
    Document(id=d.id, title=d.title, text=" ".join(d.text.split()[: 4 + 5 * (n % 5)]))
    for n, d in enumerate(mini_corpus()[:90])
]


def tiny_bert(folder: Path) -> str:
    """A randomly initialised BERT with a vocabulary of its own, saved by transformers: it says nothing of pooling."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = sorted({w for d in DOCUMENTS for w in f"{d.title} {d.text}".lower().split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", ":", "query", "passage"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys([*special, *words])), encoding="utf-8")
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=48).save_pretrained(folder)
    torch.manual_seed(5)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    vocabulary = len(set(special) | set(words))
    BertModel(BertConfig(vocab_size=vocabulary, max_position_embeddings=48, **size)).save_pretrained(folder)
    return str(folder)


def by_hand(model: str, texts: list[str], normalised: bool = False, pooling: str = "mean") -> np.ndarray:
    """Pooling written out, one text at a time: shape (texts, dimension)."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    network, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    rows = []
    for text in texts:
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=48)
            hidden = network(**ids).last_hidden_state[0]
            row = hidden[0] if pooling == "cls" else hidden.mean(0)
        rows.append((row / row.norm() if normalised else row).numpy())
    return np.stack(rows)
