"""constraints/ pins exactly what pyproject.toml asks for."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

_ROOT = Path(__file__).parents[2]
_SETTINGS = tomllib.loads((_ROOT / "pyproject.toml").read_text())
_PROJECT = _SETTINGS["project"]
_PYTHONS = [
    classifier.rpartition(" ")[2]
    for classifier in _PROJECT["classifiers"]
    if classifier.startswith("Programming Language :: Python :: 3.")
]
_GROUPS = dict(_SETTINGS["dependency-groups"])
_HOME = [
    each for name in ("home", "bench", "ray") for each in _GROUPS.pop(name)
]  # in environments of their own
_BUILD = _SETTINGS["build-system"]["requires"]
_OWN = _PROJECT["dependencies"] + _PROJECT["optional-dependencies"]["metrics"]


def _holds(requirement: Requirement, python: str) -> bool:
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate(version)


def _pins(file_name: str, python: str) -> dict[str, Version]:
    lines = (_ROOT / "constraints" / file_name).read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("=="))
        for pin in pins
        if _holds(pin, python)
    }


def _bounds(requirements: list[str], python: str) -> dict[str, Version]:
    bounds: dict[str, Version] = {}
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        bound = Version(str(requirement.specifier).removeprefix(">="))
        if _holds(requirement, python):
            bounds[name] = max(bounds.get(name, bound), bound)
    return bounds


@pytest.mark.parametrize("python", _PYTHONS)
def test_pins_follow_pyproject(python: str) -> None:
    """lowest*.txt has the lowest allowed versions; the other files pin all that is installed."""
    for requirements, file_name in (_OWN, "lowest.txt"), (_BUILD, "lowest-build.txt"):
        bounds, pins = _bounds(requirements, python), _pins(file_name, python)
        assert bounds
        assert {name: pins[name] for name in bounds} == bounds
    pins = _pins("newest.txt", python)
    tools = [name for group in _GROUPS.values() for name in group]
    assert {canonicalize_name(name) for name in tools} <= pins.keys()
    for name, bound in _bounds(_OWN + _BUILD, python).items():
        assert pins[name] >= bound
    asked = [requirement for requirement in map(Requirement, _HOME) if _holds(requirement, python)]
    pins |= _pins("home.txt", python)
    assert {canonicalize_name(requirement.name) for requirement in asked} <= pins.keys()


def test_the_oldest_listed_python_is_the_oldest_allowed() -> None:
    assert _PROJECT["requires-python"] == f">={_PYTHONS[0]}"
