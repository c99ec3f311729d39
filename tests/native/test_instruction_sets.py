"""Wide instructions stay inside the functions that are chosen for them at run time, and nothing is contracted."""

import platform
import re
import shutil
import subprocess

import pytest

import spipe._native as native


@pytest.fixture(scope="module")
def functions() -> dict[str, str]:
    """Machine code of the extension: demangled function name -> instructions."""
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs objdump on x86-64")
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", native.__file__]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"^[0-9a-f]+ <(.+)>:\n((?:.+\n)*)", listing, flags=re.MULTILINE))
    if not any("avx512::" in name for name in found):
        pytest.skip("the symbols of the extension are stripped")
    return found


def test_wide_registers_appear_only_in_their_own_functions(functions):
    for name, code in functions.items():
        if "%zmm" in code:
            assert "avx512::" in name
        if "%ymm" in code:
            assert "avx2::" in name or "avx512::" in name
    for instruction_set, register in (("baseline", "%xmm"), ("avx2", "%ymm"), ("avx512", "%zmm")):
        steps = [code for name, code in functions.items() if re.search(rf"{instruction_set}::.*step<", name)]
        assert len(steps) == 18, "nine pairs of types, with and without undo log"
        assert all(re.search(rf"sqrtps.*{register}", code) for code in steps), "the loop is a vector loop"


def test_no_fused_multiply_add(functions):
    kernels = {name: code for name, code in functions.items() if "avx2::" in name or "avx512::" in name}
    assert not [name for name, code in kernels.items() if re.search(r"\tvfn?m(add|sub)", code)]


def test_selected_set_is_reported(instruction_set):
    assert native.features()["instruction_set"] == instruction_set
