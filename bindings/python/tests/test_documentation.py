"""The examples of docs/python.md."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "python.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAMES = sorted(set(re.findall(r"fourtuple(?:\.[A-Za-z_]+)+(?=[(`])", PAGE.read_text())))


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_are_python(example: str) -> None:
    compile(example, str(PAGE), "exec")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_page_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        # A class of a module.
        module, _, kind = module.rpartition(".")
        found = getattr(importlib.import_module(module), kind)
    if not hasattr(found, attribute):
        importlib.import_module(name)
