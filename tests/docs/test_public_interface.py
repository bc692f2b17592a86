"""Every export of the package has a docstring."""

from __future__ import annotations

import inspect

import pytest

import plumbline
from plumbline.worker.job import Job


def public_members(cls):
    own = [vars(base) for base in cls.__mro__ if base.__module__.startswith("plumbline.")]
    functions = (inspect.isfunction, inspect.ismethoddescriptor, inspect.isdatadescriptor)
    for name in {name for members in own for name in members if not name.startswith("_")}:
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property | classmethod | staticmethod) or any(kind(member) for kind in functions):
            yield name, member


@pytest.mark.parametrize("name", plumbline.__all__)
def test_an_exported_name_has_a_docstring_and_so_has_each_of_its_members(name):
    exported = getattr(plumbline, name)
    assert inspect.getdoc(exported)
    if inspect.isclass(exported):
        assert not [member for member, value in public_members(exported) if not inspect.getdoc(value)]


def test_every_exported_name_is_listed_by_dir():
    assert {*plumbline.__all__} <= {*dir(plumbline)}


def test_each_member_of_a_job_has_a_docstring():
    assert not [member for member, value in public_members(Job) if not inspect.getdoc(value)]
