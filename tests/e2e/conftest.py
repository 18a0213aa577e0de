import pytest


@pytest.fixture(scope="module")
def scratch(request, tmp_path_factory):
    """A folder of the module's own, for models, records and servers' logs."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
