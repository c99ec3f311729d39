"""What commands print and write."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from spipe import __version__
from spipe.cli.common import processes
from spipe.cli.planning import certificate
from spipe.metrics import CAUSES
from spipe.model import MODELS
from spipe.plan import Plan
from spipe.schedules import SCHEDULES
from spipe.trace import Trace

from .conftest import Command


def spipe(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_help_is_fast() -> None:
    begin = time.perf_counter()
    done = spipe("--help")
    elapsed_s = time.perf_counter() - begin
    assert done.returncode == 0
    assert elapsed_s < 2.0  # about 0.15 s on an idle machine; the bound is for busy ones


@pytest.mark.parametrize(
    "name", ["models", "hardware", "doctor", "search", "whatif", "simulate", "run", "calibrate", "compare", "demo"]
)
def test_every_command_has_help_with_examples(command: Command, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"  spipe {name}" in result.out


def test_whatif_writes_a_table_a_figure_and_json(command: Command, tmp_path: Path) -> None:
    table, figure = tmp_path / "whatif.csv", tmp_path / "whatif.png"
    done = command(
        *("whatif", "--model", "tiny", "--hardware", "laptop", "--hardware", "slow=laptop:cpu.cores=1"),
        *("--global-batch", 2, "--sequence", 32, "--microbatch-size", 1, "--schedule", "spipe", "--upgrade", "cpu"),
        *("--effort", "0.01", "--workers", 1, "--csv", table, "--figure", figure, "--json", "-"),
    )
    assert done.code == 0
    result = json.loads(done.out)
    assert [(row["offer"], row["upgrade"]) for row in result["rows"]] == [
        *(("laptop", ""), ("laptop", "cpu"), ("slow", ""), ("slow", "cpu"))
    ]
    assert [row["offer"] for row in result["helps"]] == ["laptop", "slow"]
    assert len(table.read_text().splitlines()) == 5
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_search_says_how_good_the_plan_is(command: Command) -> None:
    done = command(
        *("search", "--model", "tiny", "--hardware", "laptop", "--global-batch", 2, "--sequence", 32),
        *("--ranks", 1, "--microbatch-size", 1, "--workers", 1, "--schedule", "spipe"),
    )
    assert done.code == 0
    assert "of what this hardware can do" in done.out


@pytest.mark.parametrize(("gap", "said"), [(0.131, "within 13.1 % of what"), (5.621, "its step is 6.6 times a loose")])
def test_a_loose_bound_is_not_called_a_proof(gap: float, said: str) -> None:
    counts = dict.fromkeys(("enumerated", "discarded", "ranked", "simulated"), 1)
    result = SimpleNamespace(gap=gap, lower_bound_s=2.0, limit="compute", counts=counts, interval_s=None)
    text = certificate(result)  # type: ignore[arg-type]
    assert said in text
    assert ("no proof" in text) == (gap > 1)


def test_cross_mapping_puts_both_ends_of_the_pipeline_on_one_host(command: Command) -> None:
    small = ["--max-simulations", "1", "--effort", "0.1", "--cuts", "balanced", "--workers", "1", "--json", "-"]
    shape = ["--schedule", "spipe", "--forward-stages", "2", "--backward-stages", "2", "--microbatch-size", "2"]
    job = ["search", "--model", "10b", "--hardware", "v100-cluster", "--global-batch", "16", "--sequence", "1024"]
    done = command(*job, *shape, *small, "--ranks", 8, "--cross-mapping")
    assert done.code == 0
    forward = json.loads(done.out)["plan"]["layout"]["forward"]
    assert [stage["rank"] for stage in forward[:8]] == [0, 1, 4, 5, 6, 7, 2, 3]
    refused = command(*job, *shape, *small, "--ranks", 6, "--cross-mapping")
    assert refused.code == 2
    assert "6 ranks do not fill hosts of 4 by two" in refused.err


def test_a_search_may_cut_inside_blocks(command: Command) -> None:
    job = ["search", "--model", "tiny", "--hardware", "v100-ideal-host", "--global-batch", 8, "--sequence", 64]
    shape = ["--ranks", 2, "--microbatch-size", 2, "--schedule", "spipe"]
    small = [*shape, "--workers", 1, "--effort", 0.2, "--json", "-"]
    whole, split = (json.loads(command(*job, *small, *more).out)["plan"] for more in ([], ["--split-blocks"]))
    assert (whole["model"]["split_blocks"], split["model"]["split_blocks"]) == (False, True)
    assert [plan["layout"]["backward"][-1]["stop"] for plan in (whole, split)] == [8, 14]
    assert Plan.model_validate(split).model.num_parameters() == Plan.model_validate(whole).model.num_parameters()


def test_search_then_simulate_then_trace(command: Command, tmp_path: Path) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    searched = command(
        *("search", "--model", "tiny", "--hardware", "laptop", "--global-batch", 4, "--sequence", 32),
        *("--ranks", 2, "--microbatch-size", 1, "-o", plan, "--json", "-"),
    )
    assert searched.code == 0
    found = json.loads(searched.out)
    assert found["plan"] == json.loads(plan.read_text())
    assert found["candidates"][0]["step_s"] == found["predicted"]["step_s"] == Plan.load(plan).predicted["step_s"]

    simulated = command("simulate", plan, "--trace", trace, "--json", "-")
    assert simulated.code == 0
    result = json.loads(simulated.out)
    assert result["predicted"] == found["predicted"]
    assert set(result["bubbles"]) == set(CAUSES)
    assert sum(result["bubbles"].values()) == pytest.approx(result["idle_s"], rel=1e-9)
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}
    Trace.load(trace).check_matches(Plan.load(plan).program(), str(trace))


def test_the_same_search_gives_the_same_bytes(command: Command, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        command(
            *("search", "--model", "tiny", "--hardware", "laptop", "--global-batch", 4, "--sequence", 32),
            *("--ranks", 2, "--microbatch-size", 1, "--schedule", "mobius", "-o", tmp_path / name),
        )
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_tables_of_a_simulation(command: Command, plan_file: Path) -> None:
    result = command("simulate", plan_file)
    assert result.code == 0
    for text in ("rank 0 compute", "sum of causes", "step less busy time", "tokens / s", "Memory of the fullest"):
        assert text in result.out
    assert result.err == ""


@pytest.mark.parametrize("arguments", [["models"], ["models", "tiny"], ["hardware"], ["hardware", "ideal"], ["doctor"]])
def test_json_stands_alone_on_stdout(command: Command, arguments: list[str]) -> None:
    result = command(*arguments, "--json", "-")
    assert result.code == 0
    json.loads(result.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_json_beside_tables_in_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    assert "llama3-8b" in command("models", "--json", file).out
    listed = json.loads(file.read_text())["models"]
    assert [model["name"] for model in listed] == list(MODELS)
    file.write_text("old")
    assert command("models", "--json", file, "--force").code == 0
    assert json.loads(file.read_text())["models"] == listed


def test_a_terminal_without_colour_and_unicode(plan_file: Path) -> None:
    done = spipe("simulate", plan_file, PYTHONIOENCODING="ascii", TERM="dumb", NO_COLOR="1")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "sum of causes" in done.stdout


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "spipe", "models", "--json", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_interrupt_ends_with_130() -> None:
    search = ["search", "--model", "110b", "--hardware", "rtx4090-cluster", "--global-batch", "256"]
    arguments = [*search, "--sequence", "2048", "--json", "-"]
    process = subprocess.Popen(
        [sys.executable, "-m", "spipe", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("sim", ["simulate"]),
        ("search --schedule z", ["zb-h1"]),
        ("search --model llama3", ["llama3-8b"]),
        ("whatif --hardware v100x", ["v100x4"]),
        ("simulate plan.json --hardware lap", ["laptop"]),
        ("models tin", ["tiny"]),
        ("hardware a100", ["a100x8"]),
        ("plot abl", ["ablation"]),
    ],
)
def test_completion_of_the_shell(words: str, offered: list[str]) -> None:
    position = str(len(words.split()))
    done = spipe(_SPIPE_COMPLETE="complete_bash", COMP_WORDS=f"spipe {words}", COMP_CWORD=position)
    assert done.stdout.split() == offered


def test_the_version_is_said(command: Command) -> None:
    assert command("--version").out == f"spipe {__version__}\n"


@pytest.mark.parametrize("name", ["search", "whatif", "tune"])
def test_help_names_every_schedule(command: Command, name: str) -> None:
    (described,) = re.findall(r"--schedule NAME(.*?)--", command(name, "--help").out, re.DOTALL)
    assert set(SCHEDULES) <= set(re.split(r"[\s:;,()]+", described))


def test_a_worker_that_is_gone_before_any_plan_is_no_traceback(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenProcessPool("a child process terminated abruptly")

    monkeypatch.setattr("spipe.sim.search_for", broken)
    search = ["search", "--model", "tiny", "--hardware", "laptop", "--global-batch", "4", "--sequence", "64"]
    result = command(*search, "--workers", "1")
    assert (result.code, result.out) == (1, "")
    assert "a worker process is gone" in result.err
    assert "--workers" in result.err


def test_dollars_are_shown_with_what_they_go_by(command: Command, tmp_path: Path) -> None:
    search = ["search", "--model", "tiny", "--hardware", "rtx4090x8", "--ranks", "1", "--global-batch", "2"]
    quick = ["--sequence", "64", "--effort", "0.01", "--max-simulations", "1", "--cuts", "balanced", "--workers", "1"]
    result = command(*search, *quick, "--objective", "dollars", "--json", tmp_path / "found.json")
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert f"dollars: {found['dollars_per_hour']:.2f} an hour for 1 host(s)" in result.out
    assert f"{found['dollars_per_billion_tokens']:,.2f} for 1e9 tokens (rent)" in result.out


def test_sigterm_interrupts_what_is_done_in_processes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), processes(1):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before
    with processes(1):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # `timeout` sends two: the second must not lose what the first ended


def test_workers_leave_signals_alone_and_end_with_what_they_work_for() -> None:
    code = """
import os, time
from spipe.cli.common import processes
if __name__ == "__main__":
    with processes(2) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    time.sleep(0.2)
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    stat = Path(f"/proc/{worker}/stat")
    deadline_s = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # nobody may be there to reap it
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
