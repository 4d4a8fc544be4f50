"""The shape of the code base: imports flow one way, and the package files agree."""

import ast
import pathlib
import re
import sys
import tomllib

import pytest
import yaml

import mjx_tdmpc2

ROOT = pathlib.Path(__file__).parents[1]

# A module may import from earlier layers and from its own, never from later ones.
LAYERS = (
  ("settings", "types", "validation", "config", "config_file"),
  ("math", "networks", "world_model"),
  ("plan_model", "planner", "losses", "update"),
  ("replay",),
  ("training", "evaluation"),
  ("schedule", "checkpoint", "sinks", "report", "plot", "probe"),
  ("runner",),
  ("cli",),
)
LAYER_OF = {
  f"mjx_tdmpc2.{name}": layer for layer, names in enumerate(LAYERS) for name in names
}
# These may know that environments exist; all others see arrays only.
USE_ENVIRONMENTS = {
  f"mjx_tdmpc2.{name}"
  for name in ("validation", "config", "training", "evaluation", "runner", "cli")
}


def modules(package: str) -> dict[str, pathlib.Path]:
  """Source files of a package by module name."""
  found = {}
  for path in sorted((ROOT / package).rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
  return found


MODULES = {p: modules(p) for p in ("envs_mjx", "mjx_tdmpc2")}
ALL_MODULES = MODULES["envs_mjx"] | MODULES["mjx_tdmpc2"]


def imports_of(source: str) -> set[str]:
  """Modules of ours that a source imports, at any depth, for types too."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "imports are absolute"
      # Of `from a import b`, b is a module or something in module a.
      names = [
        name if (name := f"{node.module}.{alias.name}") in ALL_MODULES else node.module
        for alias in node.names
      ]
    else:
      continue
    found.update(n for n in names if n.split(".")[0] in MODULES)
  return found


IMPORTS = {name: imports_of(path.read_text()) for name, path in ALL_MODULES.items()}


def test_the_reader_of_imports_sees_all_forms():
  source = """
import envs_mjx
from mjx_tdmpc2 import planner, __version__
from mjx_tdmpc2.config import Config
def f():
  if TYPE_CHECKING:
    import envs_mjx.base as b
import jax
"""
  assert imports_of(source) == {
    "envs_mjx",
    "mjx_tdmpc2.planner",
    "mjx_tdmpc2",
    "mjx_tdmpc2.config",
    "envs_mjx.base",
  }


def test_environments_know_nothing_of_the_agent():
  for name in MODULES["envs_mjx"]:
    own = {i for i in IMPORTS[name] if i.split(".")[0] == "mjx_tdmpc2"}
    assert not own, f"{name} imports {own}"


@pytest.mark.parametrize("name", sorted(MODULES["mjx_tdmpc2"]))
def test_imports_flow_one_way(name):
  if name == "mjx_tdmpc2":
    assert not IMPORTS[name]
    return
  assert name in LAYER_OF, f"{name} has no layer: add it to LAYERS"
  for imported in IMPORTS[name] & set(LAYER_OF):
    assert LAYER_OF[imported] <= LAYER_OF[name], f"{name} imports {imported}"
  if name not in USE_ENVIRONMENTS:
    envs = {i for i in IMPORTS[name] if i.split(".")[0] == "envs_mjx"}
    assert not envs, f"{name} imports {envs}"


def test_no_module_imports_itself_by_way_of_others():
  done = set()

  def visit(name, path):
    assert name not in path, " imports ".join([*path, name])
    if name not in done:
      for imported in IMPORTS[name] - {"envs_mjx", "mjx_tdmpc2"}:
        visit(imported, [*path, name])
      done.add(name)

  for name in ALL_MODULES:
    visit(name, [])


def canonical(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_every_dependency_on_both_pythons():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
  pins = {"old": set(), "new": set()}
  for line in (ROOT / "constraints.txt").read_text().splitlines():
    if line.startswith("#"):
      continue
    match = re.fullmatch(r'([\w.-]+)==[\w.]+(?:; python_version (<|>=) "3\.12")?', line)
    assert match, line
    name, side = match.groups()
    for python in {"<": ["old"], ">=": ["new"], None: ["old", "new"]}[side]:
      assert canonical(name) not in pins[python], f"{name} is pinned twice"
      pins[python].add(canonical(name))
  for requirement in wanted:
    name = canonical(re.match(r"[\w.-]+", requirement)[0])
    assert ">=" in requirement
    assert "<" in requirement
    assert name in pins["old"] & pins["new"]


def test_every_import_of_the_packages_is_a_declared_dependency():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  declared = {
    canonical(re.match(r"[\w.-]+", requirement)[0])
    for requirement in project["dependencies"]
  }
  provided = {
    "dm_control": "dm-control",
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
  }
  standard = set(sys.stdlib_module_names) | {"envs_mjx", "mjx_tdmpc2"}
  for name, path in ALL_MODULES.items():
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        roots = {alias.name.split(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        roots = {node.module.split(".")[0]}
      else:
        continue
      for root in roots - standard:
        assert provided.get(root, canonical(root)) in declared, f"{name}: {root}"


def test_the_version_is_the_same_everywhere():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  assert project["version"] == mjx_tdmpc2.__version__ == citation["version"]
  assert project["license"] == citation["license"] == "MIT"
