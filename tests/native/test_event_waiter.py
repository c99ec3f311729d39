"""Steps that wait for CUDA events, with a pretended driver library."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = r"""
#include <time.h>
static void *current = (void *)0x77;
static void *waiting = 0;
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { waiting = context; return context == (void *)0x77 ? 0 : 201; }
/* An event is the address of a flag: 0 not yet, 1 happened, 2 failed. */
int cuEventSynchronize(void *event) {
    volatile int *flag = event;
    struct timespec pause = {0, 1000000};
    while (*flag == 0) nanosleep(&pause, 0);
    return *flag == 1 ? 0 : 719;
}
"""

SETUP = """
import ctypes, os, sys, threading, time, numpy as np, spipe._native as native
native._set_cuda_library(sys.argv[1])
def bucket_of(optimizer, count=20_000):
    buffers = {name: np.full(count, 1e-3, np.float32)
               for name in ("gradient", "master", "first_moment", "second_moment", "weight")}
    kept.append(buffers)
    at = {name: array.ctypes.data for name, array in buffers.items()}
    return optimizer.add_bucket([native.Parameter(gradient_dtype="fp32", weight_dtype="fp32", count=count, **at)])
kept = []
optimizer = native.Optimizer(native.WorkerPool(2), 0.9, 0.95, 1e-8)
first, second, third = (bucket_of(optimizer) for _ in range(3))
flags = (ctypes.c_int * 2)()
event = ctypes.addressof(flags)
"""


def run(library: str, code: str) -> None:
    subprocess.run([sys.executable, "-c", SETUP + code, library], check=True, timeout=60)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libdriver.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True)
    return str(library)


def test_a_step_waits_for_its_event_and_later_ones_stay_behind_it(driver):
    run(
        driver,
        """
for bucket, handle in ((first, event), (second, 0), (third, event + 4)):
    optimizer.submit(bucket, step=1, learning_rate=1e-3, event=handle)
time.sleep(0.2)
assert all((buffers["master"] == np.float32(1e-3)).all() for buffers in kept)
flags[0] = 1
optimizer.join(second)
optimizer.join(first)
assert [(buffers["master"] != np.float32(1e-3)).all() for buffers in kept] == [True, True, False]
flags[1] = 1
optimizer.join(third)
assert (kept[2]["master"] != np.float32(1e-3)).all()
optimizer.submit(first, step=2, learning_rate=1e-3)  # nothing waits: at once
optimizer.join(first)
""",
    )


def test_error_of_the_driver_arrives_at_join(driver):
    run(
        driver,
        """
flags[0] = 2
optimizer.submit(first, step=1, learning_rate=1e-3, event=event)
optimizer.submit(second, step=1, learning_rate=1e-3)
try:
    optimizer.join(first)
    raise SystemExit("no error")
except RuntimeError as error:
    assert "CUDA error 719" in str(error) and hex(event) in str(error), error
assert (kept[0]["master"] == np.float32(1e-3)).all() and optimizer.state(first) == "idle"
optimizer.join(second)
""",
    )


def test_process_and_forked_child_end_with_a_waiter(driver):
    run(
        driver,
        """
flags[0] = 1
optimizer.submit(first, step=1, learning_rate=1e-3, event=event)
optimizer.join(first)
child = os.fork()
if child == 0:
    del optimizer
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
flags[0] = 0
optimizer.submit(second, step=1, learning_rate=1e-3, event=event)
threading.Timer(0.3, lambda: flags.__setitem__(0, 1)).start()
""",
    )


def test_no_driver_is_an_error_of_submit():
    run(
        "/nonexistent/libcuda.so",
        """
try:
    optimizer.submit(first, step=1, learning_rate=1e-3, event=event)
    raise SystemExit("no error")
except RuntimeError as error:
    assert hex(event) in str(error) and "/nonexistent/libcuda.so" in str(error), error
optimizer.submit(first, step=1, learning_rate=1e-3)
optimizer.join(first)
""",
    )
