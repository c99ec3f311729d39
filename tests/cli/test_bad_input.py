"""Wrong input: exit code 2 and a message that says what is wrong, what is allowed and what to do."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spipe import sim
from spipe.cli import main
from spipe.cli.common import new_file, processes, replacing
from spipe.errors import SpipeError
from spipe.runtime.__main__ import main as run_rank
from spipe.runtime.data import Corpus

SEARCH = {"--model": "tiny", "--hardware": "laptop", "--global-batch": "4", "--sequence": "32"}
Refused = Callable[..., str]
Edited = Callable[[Callable[[Any], None]], Path]


def search(**changes: str) -> list[str]:
    options = SEARCH | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return ["search", *(word for pair in options.items() for word in pair)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (search(model="tinny"), r"unknown model 'tinny'; nearest: tiny"),
        (search(model="nowhere/config.json"), r"nowhere/config.json.*no such file"),
        (search(hardware="lapttop"), r"unknown hardware 'lapttop'; nearest: laptop"),
        (search(hardware="my.toml"), r"my.toml.*no such file"),
        (search(schedule="spype"), r"unknown schedule 'spype'; nearest: spipe"),
        (search(precision="bf17"), r"unknown precision 'bf17'; nearest: bf16"),
        (search(precision="int8"), r"unknown precision 'int8'; .*(nearest|allowed)"),
        (search(option="weight_slot=2"), r"unknown key 'weight_slot'; nearest: weight_slots"),
        (search(option="recompute=erly"), r"recompute = 'erly' should be 'early', 'late' or 'never'"),
        (search(option="weight_slots=0"), r"weight_slots = 0 should be greater than or equal to 1"),
        (search(option="weight_slots"), r"write name=value"),
        (search(ranks="9"), r"num_ranks = 9.*laptop has 4"),
        (search(hardware="ideal", ranks="16"), r"16 ranks.*8 layers"),
        (search(microbatch_size="3"), r"4 sequences does not divide into microbatches of 3.*1, 2, 4"),
        (search(sequence="100000"), r"sequence = 100000: tiny takes 1 to 512"),
        (search(learning_rate="nan"), r"learning_rate = nan should be"),
        (search(learning_rate="-1"), r"learning_rate = -1.0 should be greater than or equal to 0"),
        *(
            (search(**{name: value}), rf"Invalid value for .*'?--{name.replace('_', '-')}'?.*{re.escape(value)}")
            for name in ("global_batch", "sequence", "ranks", "forward_stages", "backward_stages", "microbatch_size")
            for value in ("0", "-1", "nan", "1.5")
        ),
        (
            search(objective="tim"),
            r"unknown objective 'tim'; nearest: time; allowed: dollars, layers, .*time",
        ),
        (search(objective="memory"), r"objective memory needs min_tokens_per_s \(--min-speed\)"),
        (search(effort="inf"), r"inf is not a finite number above 0"),
        (search(max_host_memory="0.001"), r"host 0 needs [\d.]+ MiB of 1\.02 MiB usable"),
        (search(max_dollars="5"), r"laptop has no price"),
        (search(max_dollars="0"), r"Invalid value for .*max-dollars.*0"),
        (search(cuts="even"), r"unknown cuts 'even'"),
        (search(max_gpu_memory="0.0001"), r"nothing fits.*short of"),
        (["whatif", *search()[1:], "--hardware", "laptop"], r"two kinds of hardware are called laptop"),
        (["whatif", *search(hardware="laptop:cpu.cores")[1:]], r"'cpu.cores' should be KEY=VALUE"),
        (["whatif", *search(hardware="laptop:cpu.core=2")[1:]], r"unknown key 'core'; nearest: .*cores"),
        (["whatif", *search(hardware="=laptop")[1:]], r"label before = is empty; write LABEL=laptop, or laptop alone"),
        (["whatif", *search(hardware="laptop:cpu.usable_memory_gib=64")[1:]], r"usable_memory_gib = 64 should not"),
        (["whatif", *search(hardware="rtx4090x8:price.date=2026-13")[1:]], r"price.date = '2026-13' should be a month"),
        (["whatif", *search(upgrade="ram")[1:]], r"unknown upgrade 'ram'"),
        (["whatif", *search(upgrade="none")[1:], "--upgrade", "dram"], r"none and --upgrade dram contradict"),
        (["whatif", *search(figure="x.gif")[1:]], r"x.gif: a figure's name should end in"),
        (search(output="no-such-folder/plan.json"), r"there is no folder no-such-folder"),
        (["search", "--model", "tiny"], r"Missing option '--hardware'"),
        (["profile", "-o", "no-such-folder/h.toml"], r"there is no folder no-such-folder"),
        (["profile", "-o", "h.toml", "--device", "gpu"], r"--device 'gpu' should be cpu or cuda"),
        (["profile", "-o", "h.toml", "--device", "cuda"], r"PyTorch finds no CUDA device here"),
        (["profile", "-o", "h.toml", "--model", "tinny"], r"unknown model 'tinny'; nearest: tiny"),
        (["profile", "-o", "h.toml", "--device", "cpu", "--sequence", "9999"], r"sequence = 9999: tiny takes 1 to 512"),
        (["profile", "-o", "h.toml", "--threads", "5000"], r"--threads 5000 should not exceed the \d+ cores"),
        (["profile", "-o", "h.toml", "--precision", "fp8"], r"unknown precision 'fp8'"),
        (["profile", "-o", "h.toml", "--effort", "0"], r"Invalid value for .*effort.*0"),
        (
            ["tune", "-o", "no-such-folder-2", "--model", "tiny"],
            r"give --hardware, --global-batch, --sequence, or with",
        ),
        (["tune", "-o", "x", "--plan", "nowhere.json"], r"nowhere.json: cannot read the plan"),
        (["tune", "-o", "x", "--steps", "4"], r"Invalid value for '--steps'.*4 is not a whole number of at least 8"),
        (["tune", *search()[1:], "-o", "."], r"exists; every tuning makes a folder of its own"),
        (
            [
                "kineto",
                "nowhere.json",
                "--model",
                "tiny",
                "--hardware",
                "laptop",
                "--microbatch-size",
                "1",
                "--sequence",
                "8",
                "-o",
                "h.toml",
            ],
            r"nowhere.json: not a readable trace",
        ),
        (["calibrate", "nowhere", "-o", "h.toml"], r"nowhere: there is no such folder"),
        (["serch"], r"No such command 'serch'. Did you mean 'search'"),
        (search(modell="tiny"), r"No such option:? '?--modell"),
        (["models", "qwen4-8b"], r"unknown model 'qwen4-8b'; nearest: qwen3-8b"),
        (["hardware", "h200"], r"unknown hardware 'h200'; nearest: h200x"),
        (["simulate", "nowhere.json"], r"nowhere.json: cannot read the plan"),
        (["compare", "nowhere.json", "nowhere"], r"nowhere.json: cannot read the plan"),
        (["run", "nowhere.json", "--steps", "0", "-o", "run"], r"Invalid value for '--steps'.*0"),
        *(
            (["run", "plan.json", "--steps", "1", "-o", "run", "--host-memory-gib", value], rf"{value} is not a number")
            for value in ("0", "-1", "nan", "much")
        ),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else None,
)
def test_wrong_arguments(refused: Refused, arguments: list[str], message: str) -> None:
    assert re.search(message, refused(*arguments))


def drop_layer(plan: Any) -> None:
    plan["layout"]["backward"][1]["first"] += 1


def overlap(plan: Any) -> None:
    plan["layout"]["backward"][1]["first"] -= 1


def no_top(plan: Any) -> None:
    del plan["layout"]["backward"][-1]


def wrong_rank(plan: Any) -> None:
    plan["layout"]["forward"][0]["rank"] = 2


def other_version(plan: Any) -> None:
    plan["schema_version"] = 2


def zero_microbatches(plan: Any) -> None:
    plan["num_microbatches"] = 0


def nan_cost(plan: Any) -> None:
    plan["layout"]["layer_costs"][2] = float("nan")


def misspelt(plan: Any) -> None:
    plan["precison"] = plan.pop("precision")


def text_for_number(plan: Any) -> None:
    plan["sequence"] = "32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_layer, r"backward stage 1 .* leaves a gap: it has to start at layer 3"),
        (overlap, r"backward stage 1 .* overlaps the one below: it has to start at layer 3"),
        (no_top, r"backward stages cover \d of 8 layers; every layer is needed"),
        (wrong_rank, r"forward stage 0 .*rank is not one of 0\.\.1"),
        (other_version, r"schema_version = 2, this version reads 1; make the plan again"),
        (zero_microbatches, r"num_microbatches = 0 should be greater than or equal to 1"),
        (nan_cost, r"layer_costs needs 8 finite numbers"),
        (misspelt, r"unknown key 'precison'; nearest: precision"),
        (text_for_number, r"sequence = '32' should be a valid integer"),
    ],
)
@pytest.mark.parametrize("name", ["simulate", "run"])
def test_plans_edited_by_hand(
    refused: Refused, edited_plan: Edited, tmp_path: Path, name: str, change: Callable[[Any], None], message: str
) -> None:
    plan = edited_plan(change)
    more = ["--steps", "1", "-o", str(tmp_path / "run")] if name == "run" else []
    error = refused(name, plan, *more)
    assert str(plan) in error
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()


def test_a_plan_that_is_not_json(refused: Refused, plan_file: Path) -> None:
    plan_file.write_text("{")
    assert re.search(r"not JSON.*make a plan with `spipe search`", refused("simulate", plan_file))


def test_outputs_are_not_overwritten(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    before = plan_file.read_bytes()
    for arguments in (
        search(output=str(plan_file)),
        ["simulate", plan_file, "--trace", plan_file],
        ["simulate", plan_file, "--json", plan_file],
        ["models", "--json", plan_file],
    ):
        assert "exists; give another name, or --force" in refused(*arguments)
    assert "is a folder" in refused("simulate", plan_file, "--trace", tmp_path)
    for output in ("--trace", "--json"):
        same = tmp_path / "same.json"
        same.unlink(missing_ok=True)
        same.symlink_to(plan_file)
        assert "what this command reads, and would be lost" in refused("simulate", plan_file, output, same, "--force")
    assert plan_file.read_bytes() == before


def writers(plan: Path, run: Path) -> list[Callable[[object], list[object]]]:
    """Every command with every output, given a path for it."""
    search_: list[object] = [*search()]
    return [
        lambda path: [*search_, "--json", path],
        lambda path: [*search_, "-o", path],
        lambda path: ["simulate", plan, "--trace", path],
        lambda path: ["simulate", plan, "--json", path],
        lambda path: ["run", plan, "--steps", 1, "-o", run, "--json", path],
        lambda path: ["calibrate", run, "-o", path],
        lambda path: ["calibrate", run, "-o", run / "other.toml", "--json", path],
        lambda path: ["compare", plan, run, "--json", path],
        lambda path: ["demo", "-o", run, "--json", path],
        lambda path: ["validate", plan, "--json", path],
        lambda path: ["models", "--json", path],
        lambda path: ["hardware", "--json", path],
        lambda path: ["doctor", "--json", path],
    ]


@pytest.mark.parametrize("number", range(13))
def test_outputs_that_cannot_be_written_are_found_before_the_work(
    refused: Refused, plan_file: Path, tmp_path: Path, number: int
) -> None:
    write = writers(plan_file, tmp_path)[number]
    for path in ("/proc/spipe.json", tmp_path / ("a" * 300)):
        assert re.search(rf"{path}: cannot write this file \(.*\); give another name", refused(*write(path)))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_asking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path: Path) -> None:
    old, link, pipe = tmp_path / "old", tmp_path / "link", tmp_path / "pipe"
    old.write_text("text")
    link.symlink_to(tmp_path / "new")
    os.mkfifo(pipe)
    for path in (old, link, pipe):
        with pytest.raises(SpipeError, match="exists; give another name"):
            new_file(path, False)
        assert new_file(path, True) == path
    assert new_file(tmp_path / "new", False)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link", "pipe"}
    assert old.read_text() == "text"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_up(command: Callable[..., Any], plan_file: Path) -> None:
    full = "/dev/full: cannot write this file (No space left on device)"
    for option in (["--json", "/dev/full"], ["--trace", "/dev/full"]):
        assert full in command("simulate", plan_file, *option, "--force").err
    with Path("/dev/full").open("w") as stdout:
        command_line = [sys.executable, "-m", "spipe", "models"]
        result = subprocess.run(command_line, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "spipe: No space left on device; check that there is room" in result.stderr


def test_a_write_that_fails_leaves_the_old_file_and_no_stump(
    command: Callable[..., Any], plan_file: Path, run_folder: Path, tmp_path: Path
) -> None:
    import resource

    names = ("a.html", "a.svg", "a.json", "t.json", "found.json", "both.svg", "both.json")
    page, figure, result, trace, found, both, both_trace = (tmp_path / name for name in names)
    commands = (
        ("report", plan_file, "-o", page),
        ("plot", "idle", plan_file, "-o", figure),
        ("simulate", plan_file, "--json", result),
        ("simulate", plan_file, "--trace", trace),
        (*search(), "-o", found),
        ("compare", plan_file, run_folder, "--figure", both),
        ("compare", plan_file, run_folder, "--trace", both_trace),
    )
    for name in names:
        (tmp_path / name).write_text("old")
    before = {path.name for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        done = [command(*arguments, "--force") for arguments in commands]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for output, ended in zip(names, done, strict=True):
        assert (ended.code, f"{output}: cannot write this file" in ended.err) == (2, True), ended.err
        assert (tmp_path / output).read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_file_that_is_replaced_keeps_its_links_and_its_mode(tmp_path: Path) -> None:
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("old")
    old.chmod(0o640)
    link.symlink_to(old)
    with replacing(link) as new:
        new.write_text("new")
    assert (link.is_symlink(), old.read_text(), old.stat().st_mode & 0o777) == (True, "new", 0o640)


def test_any_error_of_the_system_is_one_message(
    refused: Refused, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/some/where")

    monkeypatch.setattr(sim, "simulate", fail)
    assert refused("simulate", plan_file).startswith("spipe: /some/where: Permission denied; check")


def test_one_path_for_two_outputs(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    (tmp_path / "folder").mkdir()
    again = tmp_path / "folder" / ".." / "new"
    for arguments in (
        [*search(), "-o", new, "--json", again],
        ["simulate", plan_file, "--trace", new, "--json", again],
        ["calibrate", tmp_path, "-o", new, "--json", again],
        ["run", plan_file, "--steps", 1, "-o", new, "--json", again],
        ["demo", "-o", new, "--json", again],
    ):
        assert "is given for two outputs; give each a name of its own" in refused(*arguments)
        assert "is given for two outputs" in refused(*arguments, "--force")
    assert not new.exists()


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_files_that_nest_too_deeply_or_count_too_far(refused: Refused, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"spec{suffix}"
    for text in ("[" * 200_000, "a = " + "[" * 200_000, "9" * 10_000, "a = " + "9" * 10_000):
        path.write_text(text)
        assert str(path) in refused("models", path)


def test_an_unknown_key_is_one_sentence(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("foo = 1")
    assert re.search(
        r"mine\.toml: unknown key 'foo'; (nearest|allowed): [^.()]*; device is missing", refused("hardware", path)
    )
    path.write_text("[cpu]\ncoores = 1")
    assert "cpu: unknown key 'coores'; nearest: cores" in refused("hardware", path)


@pytest.mark.timeout(120)
def test_ctrl_c_during_a_run(plan_file: Path, tmp_path: Path) -> None:
    words = ["run", plan_file, "--steps", "100000", "-o", tmp_path / "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "spipe", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "run" / "plan.json").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error.endswith("spipe: interrupted\n")
    assert "Traceback" not in error


def test_mpi_that_would_start_nothing_is_refused_at_once(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    assert "mpirun -n N python -m mpi4py.futures -m spipe search" in refused(*search(), "--mpi")


def test_ctrl_c_while_the_commands_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "spipe.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "spipe.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as exit_info:
        main(["models"])
    assert (exit_info.value.code, capsys.readouterr().err) == (130, "spipe: interrupted\n")


@pytest.mark.parametrize("option", ["--steps", "--trace-steps", "--timeout-s", "--host-memory-gib"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "x"])
def test_numbers_of_the_rank_program(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path, option: str, value: str
) -> None:
    numbers = {"--steps": "1", option: value}
    arguments = [str(plan_file), *(text for pair in numbers.items() for text in pair), "-o", str(tmp_path / "run")]
    assert run_rank(arguments, {}) == 2
    assert f"spipe: {option} {value} is not a" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_simulating_on_hardware_that_is_too_small(refused: Refused, plan_file: Path) -> None:
    assert re.search(r"uses 2 ranks, but h200x1 has 1", refused("simulate", plan_file, "--hardware", "h200x1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('links = [{a="gpu*", b="memory", bandwidth_gb_per_s=0}]', "links[0].bandwidth_gb_per_s = 0 should be greater"),
        ('links = [{a="gpu*", b="memory", bandwidth_gb_per_s=-3}]', "links[0].bandwidth_gb_per_s = -3 should be"),
        ('links = [{a="gpu*", b="root0", bandwidth_gb_per_s=3}]', "no way from rank 0 to memory of host 0"),
        ('links = [{a="gpu0", b="memory", bandwidth_gb_per_s=3}]', "no way from rank 1 to memory of host 0"),
        ('links = [{a="gpu*", b="ram", bandwidth_gb_per_s=3}]', "unknown node 'ram'; allowed: gpu, switch"),
        ("cpu = {memory_bandwidth_gb_per_s=0}", "cpu.memory_bandwidth_gb_per_s = 0 should be greater than 0"),
        ("cpu = {memory_gb=0}", "cpu.memory_gb = 0 should be greater than 0"),
        ("cpu = {usable_memory_gb=900}", "usable_memory_gb = 900 should not exceed memory_gb = 512"),
        ("accelerator = {memory_gib=-32}", "accelerator.memory_gib = -32 should be greater than 0"),
    ],
)
def test_hardware_that_cannot_be(refused: Refused, plan_file: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'extends = "v100x4"\n{text}\n')
    assert message in refused("simulate", plan_file, "--hardware", path)


def test_a_corpus_that_cannot_be_read(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    empty, short, folder = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "folder"
    empty.touch()
    short.write_text("too short")
    folder.mkdir()
    os.mkfifo(pipe := tmp_path / "pipe")
    for data, message in (
        (tmp_path / "nowhere.txt", "cannot read the training text"),
        (empty, "the file is empty"),
        (short, "the text has 9 bytes, but a sequence of 32 tokens"),
        (folder, "no readable, non-empty text file in this folder"),
        (pipe, "neither a regular file nor a folder"),
        (Path(os.devnull), "neither a regular file nor a folder"),
    ):
        error = refused("run", plan_file, "--steps", 1, "-o", tmp_path / "run", "--data", data)
        assert str(data) in error
        assert message in error
    assert not (tmp_path / "run").exists()


def test_a_file_counts_as_it_is_and_a_folder_by_its_text(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "binary").write_bytes(b"\xff\xfe" * 50)
    assert len(Corpus.load(folder / "binary").tokens) == 100
    assert "no readable" in refused("run", plan_file, "--steps", 1, "-o", tmp_path / "run", "--data", folder)


def test_too_little_memory_names_an_option_that_there_is(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    error = refused("run", plan_file, "--steps", 1, "-o", tmp_path / "run", "--host-memory-gib", "0.001")
    assert re.search(r"0\.001 GiB are available(.|\n)*spipe run --host-memory-gib", error)


def test_a_folder_that_holds_a_run(refused: Refused, plan_file: Path) -> None:
    before = plan_file.read_bytes()
    error = refused("run", plan_file, "--steps", 1, "-o", plan_file.parent)
    assert re.search(r"already holds a run, finished or not \(plan.json\).*--force to replace", error)
    assert plan_file.read_bytes() == before


def test_a_device_or_transport_that_the_plan_is_not_for(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    run = ["run", plan_file, "--steps", 1, "-o", tmp_path / "run"]
    assert "the plan is for laptop, whose device is cpu" in refused(*run, "--device", "cuda")
    assert "device = 'gpu' should be 'cpu' or 'cuda'" in refused(*run, "--device", "gpu")
    assert "transport nccl needs device cuda" in refused(*run, "--transport", "nccl")
    assert "unknown transport 'glo'; nearest: gloo" in refused(*run, "--transport", "glo")


@pytest.mark.parametrize("name", ["compare", "calibrate"])
def test_folders_without_a_run(refused: Refused, plan_file: Path, tmp_path: Path, name: str) -> None:
    def use(folder: Path) -> list[object]:
        return [name, plan_file, folder] if name == "compare" else [name, folder, "-o", tmp_path / "hardware.toml"]

    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in refused(*use(tmp_path / "nowhere"))
    assert "holds no finished run" in refused(*use(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("mpi4py", ["search", "--model", "tiny", "--hardware", "laptop", "--global-batch", "4", "--mpi"], "extra mpi"),
        (
            "tokenizers",
            ["run", "PLAN", "--steps", "1", "-o", "out", "--tokenizer", "TEXT", "--data", "TEXT"],
            "extra train",
        ),
        ("torch.utils.tensorboard", ["run", "PLAN", "--steps", "1", "-o", "out", "--tensorboard"], "extra train"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    refused: Refused, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    module: str, arguments: list[str], message: str,
) -> None:  # fmt: skip
    text = tmp_path / "text"
    text.write_text("word " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    words = [{"PLAN": plan_file, "TEXT": text}.get(word, word) for word in arguments]
    assert message in refused(*words, *(["--sequence", "32"] if words[0] == "search" else []))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "torch", ["raise ImportError('libcudart.so.12: cannot open shared object file')", "import _no_such_part_of_torch"]
)
@pytest.mark.parametrize(
    "arguments", [("run", "plan.json", "--steps", "1", "-o", "run"), ("sample", "run", "--prompt", "a")], ids=" ".join
)
def test_where_torch_cannot_be_imported_the_message_says_so(
    plan_file: Path, tmp_path: Path, torch: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(torch + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "spipe", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), *sys.path])},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "PyTorch cannot be imported" in done.stderr
    assert "pip install torch" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_import_that_fails_for_another_reason_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> None:
        raise ImportError("cannot import name 'x'", name="spipe.y")

    monkeypatch.setattr("spipe.cli._run", broken)
    with pytest.raises(ImportError):
        main([])


def test_an_import_of_mpi_by_somebody_else_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.futures", SimpleNamespace())
    with processes(1) as executor:
        assert executor is None
