"""Programs of 0.1 import modules of run time by their names of then."""

from __future__ import annotations

import importlib

import pytest

import tunegemm.serve
from tunegemm.dispatch import api


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("api", "dispatch.api"),
        ("planning", "dispatch.planning"),
        ("snapshot", "choose.snapshot"),
        ("grouped", "groups.grouped"),
        ("torch.takeover", "torch.takeover"),
        ("integrations.transformers", "engines.transformers"),
    ],
)
def test_an_old_name_is_the_module_that_took_its_place(old: str, new: str) -> None:
    assert importlib.import_module(f"tunegemm.serve.{old}") is importlib.import_module(f"tunegemm.{new}")


def test_the_dispatcher_of_the_old_name_is_the_present_one() -> None:
    before = api.serve_by(other := type(api.dispatcher)())
    try:
        assert tunegemm.serve.api.dispatcher is other
    finally:
        api.serve_by(before)


def test_kernels_of_groups_are_provided_by_the_name_that_programs_use() -> None:
    from tunegemm.store import packing, provided

    assert packing.provide_grouped is provided.provide_grouped
