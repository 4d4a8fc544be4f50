"""Options and shared fixtures of the tests."""

import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent


def pytest_addoption(parser):
  parser.addoption(
      "--golden-dir",
      default=str(TESTS / "golden"),
      metavar="DIR",
      help="folder of recordings (algorithm/, envs/, checkpoints/, dataset_mt30/) "
      "for the parity tests; tests of a missing subfolder are skipped",
  )


def pytest_configure(config):
  folder = pathlib.Path(config.getoption("--golden-dir"))
  if not folder.is_dir() or not any(folder.iterdir()):
    raise pytest.UsageError(
        f"--golden-dir {folder} is not a folder with recordings; expected "
        "subfolders such as algorithm/ and envs/"
    )


def pytest_collection_modifyitems(items):
  # Fast tests first: a mistake shows early.
  items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def golden_dir(pytestconfig) -> pathlib.Path:
  """The folder of recordings."""
  return pathlib.Path(pytestconfig.getoption("--golden-dir"))
