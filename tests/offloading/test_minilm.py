"""A real model with room for two of its six layers: the embeddings of sentences are those of the whole model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

import splitzip_aio
from splitzip_aio.cache import build_cache
from tests.models import MINILM, MINILM_VOCABULARY, ModelUnavailableError
from tests.offloading.bert import Bert, tokenize
from tests.test_real_models import REQUIRE_MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SENTENCES = [
    "the cat sleeps on the warm stone",
    "a kitten is napping on a rock in the sun",
    "markets fell sharply after the announcement",
    "stocks dropped when the news came out",
    "she plays the violin in a small orchestra",
    "he tunes his guitar before every concert",
    "rain is expected in the mountains tomorrow",
    "the weather will be wet on the hills",
    "the proof uses induction over the length of the word",
    "mathematicians often argue by induction",
    "add two eggs and a cup of flour",
    "stir the batter until it is smooth",
    "the train to the coast leaves at noon",
    "buses run every ten minutes from the square",
    "a neural network learns from examples",
    "machine learning models need data",
    "the museum opens at nine on weekdays",
    "our library closes early on fridays",
    "birds migrate south before the winter",
    "geese fly in formation over the lake",
]


@pytest.fixture(scope="module")
def weights(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    return MINILM.load(downloads(request))


@pytest.fixture(scope="module")
def tokens(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    lines = MINILM_VOCABULARY.path(downloads(request)).read_text(encoding="utf-8").splitlines()
    vocabulary = {piece: number for number, piece in enumerate(lines)}
    numbers = [torch.tensor(tokenize(sentence, vocabulary)) for sentence in SENTENCES]
    lengths = torch.tensor([len(each) for each in numbers])
    return torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True), lengths


def downloads(request: pytest.FixtureRequest) -> Path:
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("models")
    try:
        MINILM.path(folder)
    except ModelUnavailableError as error:
        if os.environ.get(REQUIRE_MODELS) == "1":
            pytest.fail(f"{REQUIRE_MODELS}=1, but {error}", pytrace=False)
        pytest.skip(str(error))
    return folder


def test_embeddings_of_twenty_sentences(
    weights: dict[str, torch.Tensor], tokens: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    build_cache(tmp_path / "model.safetensors", tmp_path / "cache")
    resident = Bert().bfloat16().eval()
    resident.load_state_dict(weights)
    with torch.inference_mode():
        expected = resident(*tokens)
    assert expected.shape == (20, 384)
    similar = expected.float() @ expected.float().T
    assert all(similar[place].topk(2).indices[1] == place ^ 1 for place in (0, 2, 6)), "this is not the model it claims"

    with torch.device("meta"):
        empty = Bert().bfloat16().eval()
    layer, others = aligned(resident.encoder["layer"][0]), aligned(resident.embeddings) + aligned(resident.pooler)
    model = splitzip_aio.offload(
        empty, tmp_path / "cache", device="cpu", resident_bytes=2 * layer + others, units=["encoder.layer.*"]
    )
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(*tokens).view(torch.int16), expected.view(torch.int16))
    statistics = splitzip_aio.offload_statistics(model)
    assert statistics.rotating == tuple(f"encoder.layer.{number}" for number in range(6))
    assert statistics.window_bytes == 2 * layer
    splitzip_aio.detach(model)
    with torch.inference_mode():
        assert torch.equal(model(*tokens), expected)


def aligned(module: torch.nn.Module) -> int:
    """Bytes of a module in an arena."""
    return sum(-(-each.nbytes // 256) * 256 for each in module.parameters())
