"""Launchers of Triton's kernels: extension modules of one name that must not overwrite one
another."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from triton.runtime.build import compile_module_from_src

from headwater.kernels.launch import compile_ahead

# Written as Triton's own are.
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""
NUM_LAUNCHERS = 4
NUM_THREADS = 8
NUM_LOADS = 400

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="launchers need a C compiler")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # What is tested is what is imported with it.
    assert compile_ahead.CompileAhead


def load(number: int) -> Any:
    return compile_module_from_src(SOURCE % number, "__triton_launcher")


def test_a_launcher_that_is_loaded_again_overwrites_no_other_one() -> None:
    one = load(1)
    two = load(2)
    again = load(1)
    assert [each.launch() for each in (one, two, again)] == [1, 2, 1]


def test_threads_that_load_launchers_get_their_own() -> None:
    numbers = random.Random(7).choices(range(NUM_LAUNCHERS), k=NUM_LOADS)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        loaded = list(threads.map(load, numbers))
    assert [each.launch() for each in loaded] == numbers
