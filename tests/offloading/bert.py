"""BERT in plain torch, with the parameters' names of its published checkpoints, and its tokenizer's longest match."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["Bert", "tokenize"]


class Embeddings(nn.Module):
    """Of words, places and segments."""

    def __init__(self, words: int, places: int, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width)
        self.position_embeddings = nn.Embedding(places, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(places).reshape(1, places))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        result: torch.Tensor = self.LayerNorm(
            self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids)) + places
        )
        return result


class Attention(nn.Module):
    """Projections and their product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """A projection back, and the residual connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.LayerNorm(self.dense(x) + residual)
        return result


class Layer(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": Attention(width, heads), "output": Output(width, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = Output(width, inner)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        result: torch.Tensor = self.output(nn.functional.gelu(self.intermediate["dense"](x)), x)
        return result


class Bert(nn.Module):
    """An encoder of sentences: the mean over what the last layer makes of their tokens, normalised."""

    def __init__(
        self,
        *,
        words: int = 30522,
        places: int = 512,
        width: int = 384,
        heads: int = 12,
        inner: int = 1536,
        layers: int = 6,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(words, places, width)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})  # in the checkpoint; not used for sentences

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        present = torch.arange(ids.shape[1]) < lengths[:, None]
        x = self.embeddings(ids)
        for layer in self.encoder["layer"]:
            x = layer(x, present[:, None, None, :])
        mean = (x * present[:, :, None]).sum(1) / lengths[:, None]
        return nn.functional.normalize(mean)


def tokenize(sentence: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Numbers of a sentence of plain words: of each the longest prefix that is known, then the same of its rest."""
    numbers = [vocabulary["[CLS]"]]
    for word in sentence.lower().split():
        start = 0
        while start < len(word):
            pieces = (word[start:end] if start == 0 else f"##{word[start:end]}" for end in range(len(word), start, -1))
            piece = next(piece for piece in pieces if piece in vocabulary)
            numbers.append(vocabulary[piece])
            start += len(piece.removeprefix("##"))
    return [*numbers, vocabulary["[SEP]"]]
