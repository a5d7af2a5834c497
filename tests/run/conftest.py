import pytest

from mmrl.cli import main
from tests.helpers.runs import saved_each_step


@pytest.fixture(scope="session")
def whole(random_model, tmp_path_factory):
    """A finished run of three steps, with the checkpoints of the last two; only read."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(saved_each_step(random_model, folder)) == 0
    return folder
