import pytest

from tests.helpers.engines import tiny_bert


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """A small BERT's folder."""
    return tiny_bert(tmp_path_factory.mktemp("model") / "tiny-bert")
