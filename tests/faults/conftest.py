"""What is streamed with faults."""

from __future__ import annotations

import pytest

from tests.faults.seeded import make_sample
from tests.transport.samples import Sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("faults"))
