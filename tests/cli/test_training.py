"""Training from the command line: a configuration file, going on, evaluation, export and samples; wrong input."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from spipe.cli.progress import hardware_flops_utilization, training_log
from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.memory import memory
from spipe.model import ModelSpec, load_model
from spipe.plan import Plan, make_plan
from spipe.runtime.__main__ import main as run_rank
from spipe.runtime.huggingface import parameter_shapes, write_model
from spipe.runtime.tensor_file import TensorFile, TensorWriter
from spipe.train_config import TrainConfig
from spipe.train_options import TRAIN_OPTIONS

from .conftest import Command

Refused = Callable[..., str]


def train(plan_file: Path, output: Path, *options: object) -> list[object]:
    return ["run", plan_file, "--steps", 4, "-o", output, "--checkpoint-every", 2, *options]


def test_a_run_goes_on_in_its_folder_and_is_sampled(command: Command, plan_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--validation-fraction", 0.1, "--evaluate-every", 3]
    first = command(*train(plan_file, run, *options))
    assert first.code == 0, first.err
    assert "checkpoint of step 2" in first.err
    assert "validation loss" in first.err
    again = command(*train(plan_file, run, *options, "--steps", 7, "--resume", "auto", "--json", "-"))
    assert again.code == 0, again.err
    summary = json.loads(again.out)
    assert (summary["first_step"], summary["steps"], summary["num_updates"]) == (4, 3, 7)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    # Every 3 steps, and after the last one of each run (the fourth step's row is the first run's).
    assert [row["step"] + 1 for row in rows if "validation_loss" in row] == [3, 4, 6, 7]
    assert summary["validation_losses"].keys() == {"5", "6"}

    exported = command("export", run, "-o", tmp_path / "model", "--precision", "bf16")
    assert exported.code == 0, exported.err
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as tensors:
        assert tensors.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    texts = [command("sample", run, "--prompt", "The ", "--max-tokens", 5, "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("The ")
    greedy = command("sample", tmp_path / "model", "--prompt", "T", "--max-tokens", 2, "--temperature", 0)
    assert greedy.code == 0


def test_an_evaluation_does_not_depend_on_the_ranks(command: Command, plan_file: Path, tmp_path: Path) -> None:
    """The same losses from one rank as from two; what is trained stays the same with and without evaluation."""
    plan = Plan.load(plan_file)
    alone = make_plan(
        plan.model, plan.hardware, num_ranks=1, forward_stages=1, backward_stages=1, global_batch=plan.global_batch,
        microbatch_size=plan.microbatch_size, sequence=plan.sequence, precision="fp32",
    )  # fmt: skip
    alone.save(tmp_path / "alone.json")
    summaries = []
    for number, file in enumerate((plan_file, tmp_path / "alone.json", plan_file)):
        options = ["--validation-fraction", 0.1, *(["--evaluate-every", 1] if number < 2 else [])]
        result = command("run", file, "--steps", 3, "-o", tmp_path / str(number), *options, "--json", "-")
        assert result.code == 0, result.err
        summaries.append(json.loads(result.out))
    assert len(summaries[0]["validation_losses"]) == 3
    assert summaries[0]["validation_losses"] == summaries[1]["validation_losses"]
    assert summaries[0]["losses"] == summaries[1]["losses"] == summaries[2]["losses"]


def test_options_outrank_the_file_and_are_dumped(command: Command, plan_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text(f'plan = "{plan_file}"\nsteps = 3\nlearning_rate = 0.5\nmax_norm = 2.0\n')
    dumped = command("run", "--config", config, "--steps", 5, "-o", tmp_path / "run", "--dump-config")
    assert dumped.code == 0
    table = tomllib.loads(dumped.out)
    assert (table["steps"], table["learning_rate"], table["output"]) == (5, 0.5, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    config.write_text(dumped.out)
    done = command("run", "--config", config, "--learning-rate", 1e-3, "--steps", 2)
    assert done.code == 0, done.err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["optimizer"]["learning_rate"], plan["optimizer"]["max_norm"]) == (1e-3, 2.0)
    assert tomllib.loads((tmp_path / "run" / "train.toml").read_text()) == table | {"learning_rate": 1e-3, "steps": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-norm", "0"], r"max_norm = 0.0 should be greater than 0"),
        (["--max-norm", "nan"], r"max_norm = nan should be"),
        (["--learning-rate-schedule", "cosin"], r"learning_rate_schedule = 'cosin' should be 'constant', 'linear'"),
        (
            ["--learning-rate-schedule", "cosine", "--warmup-steps", "9"],
            r"warmup_steps = 9 should be below the 4 steps",
        ),
        (
            ["--learning-rate-schedule", "wsd", "--decay-steps", "9"],
            r"decay_steps = 9 should be at most total_steps - warmup_steps, 4",
        ),
        (["--decay-steps", "2"], r"decay_steps = 2 is for learning_rate_schedule = 'wsd', not 'constant'"),
        (["--gradient-precision", "fp8"], r"gradient_precision = 'fp8' should be 'fp32', 'bf16' or 'fp16'"),
        (["--validation-fraction", "1"], r"validation_fraction = 1.0 should be less than 1"),
        (["--evaluate-every", "1"], r"evaluate_every needs text to evaluate on"),
        (["--token-bytes", "3"], r"token_bytes = 3 should be 2 or 4"),
        (["--keep", "0"], r"'--keep'.*0 is not a whole number"),
        (["--resume", "nowhere"], r"nowhere is no checkpoint and no run folder with one"),
        (["--from", "nowhere"], r"nowhere: there is no such folder"),
        (["--tokenizer", "nowhere.json"], r"nowhere.json: (there is no such file|reading a tokenizer needs)"),
        (["--config", "nowhere.toml"], r"cannot read nowhere.toml"),
        (["--data", "bad.bin"], r"bad.bin: token 700 at position 3, but the model's vocabulary has 256"),
        (["--data", "short.bin"], r"short.bin: the text has 5 tokens, but a sequence of 32 tokens .* need 33"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_leave_nothing(
    refused: Refused, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.array([1, 2, 3, 700, *range(100)], dtype="<u2").tofile("bad.bin")
    np.arange(5, dtype="<u2").tofile("short.bin")
    assert re.search(message, refused(*train(plan_file, Path("run"), *options)))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", r"train.toml.*unknown key 'stepz'; nearest: steps"),
        ("momentum = 0.9", r"unknown key 'momentum'"),
        ('learning_rate = "fast"', r"learning_rate = 'fast' should be a number"),
        ("steps = 2.5", r"steps = 2.5 should be a valid integer"),
        ("steps = ", r"train.toml: "),
        ("", r"PLAN, --steps, --output is missing; give it in .*train.toml or on the command line"),
    ],
)
def test_wrong_configuration_files(refused: Refused, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.toml").write_text(text)
    rest: list[Any] = [] if not text else ["plan.json", "-o", tmp_path / "run"]
    assert re.search(message, refused("run", "--config", tmp_path / "train.toml", *rest))


def test_a_run_without_a_checkpoint_is_not_exported(command: Command, refused: Refused, plan_file: Path) -> None:
    run = plan_file.parent / "run"
    assert command("run", plan_file, "--steps", 1, "-o", run).code == 0
    for arguments in (["export", run, "-o", run / "model"], ["sample", run, "--prompt", "x"]):
        assert "is no checkpoint and no run folder with one" in refused(*arguments)
    assert "already holds a run" in refused(*train(plan_file, run, "--resume", "auto"))
    assert command(*train(plan_file, run, "--resume", "auto", "--force")).code == 0
    assert "temperature = -1.0 should be" in refused("sample", run, "--prompt", "x", "--temperature", "-1")
    assert "the prompt is empty" in refused("sample", run, "--prompt", "")
    assert "unknown device 'gpu'; nearest: cpu" in refused("sample", run, "--prompt", "x", "--device", "gpu")
    if not torch.cuda.is_available():
        assert "finds no CUDA device" in refused("sample", run, "--prompt", "x", "--device", "cuda")
    assert "unknown precision 'fp8'" in refused("export", run, "-o", run / "model", "--precision", "fp8")
    assert "exists; give the name of a new folder" in refused("export", run, "-o", run)


ROW = {
    "step": 2, "loss": 1.25, "step_s": 0.5, "tokens_per_s": 512.0, "skipped": True, "validation_loss": 2.5,
    "device_peak_bytes": 3 << 30, "host_bytes": 5 << 30,
}  # fmt: skip


def test_a_terminal_shows_a_bar(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(plan_file)
    config = TrainConfig(plan=str(plan_file), steps=4, output="run")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with training_log(config, plan) as log:
        log({"message": "page-locking"})
        log(ROW)
    shown = capsys.readouterr().err
    for words in (
        "page-locking",
        "3/4",
        "loss 1.2500, 512 tokens/s, HFU",
        "GPU 3.0 GiB, host 5.0 GiB, 1 skipped",
        "validation loss 2.5000",
    ):
        assert words in shown
    flops = plan.model.model_flops_per_token(plan.sequence, causal=True) * 4 / 3
    peak = plan.hardware.accelerator.peak("fp32") * 2
    assert hardware_flops_utilization(plan, 512.0) == pytest.approx(flops * 512.0 / peak)


def test_tensorboard_gets_the_numbers(
    refused: Refused, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[tuple[str, int], float] = {}

    class Writer:
        def __init__(self, folder: Path) -> None:
            assert folder == tmp_path / "run" / "tensorboard"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name, step] = value

        def close(self) -> None:
            written["closed", 0] = 1.0

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    config = TrainConfig(plan=str(plan_file), steps=4, output=str(tmp_path / "run"), tensorboard=True)
    with training_log(config, Plan.load(plan_file)) as log:
        log({"message": "words"})
        log(ROW)
    assert written == {(name, 3): float(value) for name, value in ROW.items() if name != "step"} | {("closed", 0): 1.0}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install tensorboard" in refused(*train(plan_file, tmp_path / "run", "--tensorboard"))
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_gets_the_numbers(
    refused: Refused, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Run:
        def __enter__(self) -> "Run":
            return self

        def __exit__(self, *_: object) -> None:
            seen.append("finished")

        def log(self, values: dict[str, float], step: int) -> None:
            seen.append((values, step))

    def init(project: str, dir: str, config: dict[str, Any]) -> Run:
        seen.append((project, dir, config["steps"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = TrainConfig(plan=str(plan_file), steps=4, output=str(tmp_path / "run"), wandb="mine")
    with training_log(config, Plan.load(plan_file)) as log:
        log({"message": "words"})
        log(ROW)
    values = {name: float(value) for name, value in ROW.items() if name != "step"}
    assert seen == [("mine", str(tmp_path / "run"), 4), (values, 3), "finished"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "--wandb needs the package wandb: pip install wandb" in refused(
        *train(plan_file, tmp_path / "run", "--wandb", "mine")
    )
    assert not (tmp_path / "run").exists()


def test_options_are_the_fields_of_the_configuration(plan_file: Path, tmp_path: Path) -> None:
    assert {option.name for option in TRAIN_OPTIONS} | {"plan"} == TrainConfig.model_fields.keys()
    config = tmp_path / "train.toml"
    config.write_text("steps = 1\nmax_norm = 2.0\n")
    output = tmp_path / "run"
    options = ["--config", config, "--learning-rate", "0.25", "--dropout", "0.1", "--z-loss", "1e-4", "-o", output]
    options += ["--gradient-precision", "bf16"]
    assert run_rank([str(plan_file), *map(str, options)], {}) == 0
    plan = Plan.load(output / "plan.json")
    assert (plan.optimizer.max_norm, plan.optimizer.learning_rate, plan.dropout, plan.z_loss) == (2.0, 0.25, 0.1, 1e-4)
    assert plan.gradient_dtype == "bf16"
    assert tomllib.loads((output / "train.toml").read_text())["dropout"] == 0.1


def test_another_schedule_leaves_the_plans_decay_steps_out(plan_file: Path) -> None:
    plan = Plan.load(plan_file)
    plan = plan.replace(optimizer=plan.optimizer.replace(learning_rate_schedule="wsd", total_steps=9, decay_steps=3))
    given = {"plan": "p", "steps": 9, "output": "o"}
    assert TrainConfig.load(None, given).apply(plan).optimizer.decay_steps == 3
    chosen = TrainConfig.load(None, given | {"learning_rate_schedule": "cosine"}).apply(plan).optimizer
    assert (chosen.learning_rate_schedule, chosen.decay_steps) == ("cosine", None)


def test_kernels_and_the_limit_of_gpu_memory(tmp_path: Path, plan_file: Path, refused: Refused) -> None:
    """What holds for GPUs only changes their plans, and is refused for others; nothing is run here."""
    plan = make_plan(
        load_model("qwen3-1.7b"), load_hardware("h200x1"), backward_stages=30, forward_stages=28, global_batch=4,
        microbatch_size=1, sequence=1024, precision="bf16",
    )  # fmt: skip
    given = {"plan": "p", "steps": 1, "output": "o"}

    def config(**options: object) -> TrainConfig:
        return TrainConfig.load(None, given | options)

    needed = memory(plan).rank_bytes[0] / 2**30
    chosen = config(deterministic=True, compile_layers=True, gpu_memory_limit_gib=needed * 1.2).apply(plan)
    assert (chosen.deterministic, chosen.compile_layers) == (True, True)
    assert chosen.hardware.accelerator.memory_bytes == pytest.approx(needed * 1.2 * 2**30)
    assert config().apply(plan) == plan
    with pytest.raises(SpipeError, match=r"rank 0 needs .*iB of .*iB usable, mostly"):
        config(gpu_memory_limit_gib=needed * 0.9).apply(plan)
    start = ["run", plan_file, "--steps", 1, "-o", tmp_path / "run"]
    for option, message in (
        (["--deterministic"], "deterministic = true is for device cuda"),
        (["--compile"], "compile_layers = true is for device cuda"),
        (["--cuda-graphs"], "cuda_graphs = true is for device cuda"),
        (["--gpu-memory-limit", 3], "gpu_memory_limit_gib = 3 is for device cuda"),
    ):
        assert message in refused(*start, *option)
    assert not (tmp_path / "run").exists()


def model_folder(folder: Path, model: ModelSpec, changed: dict[str, tuple[int, ...]] | None = None) -> Path:
    """A model folder of several shards, filled with a constant; some tensors get other shapes."""
    folder.mkdir()
    write_model(folder, model, "fp32", lambda name, out: out.fill_(0.01), shard_bytes=1 << 20)
    if changed:
        file = next(iter(sorted(folder.glob("*.safetensors"))))
        shapes = {name: entry.shape for name, entry in TensorFile(file).entries.items()}
        shapes |= {name: shape for name, shape in changed.items() if name in shapes}
        with TensorWriter(file, {name: (torch.float32, shape) for name, shape in shapes.items()}) as writer:
            for name, shape in shapes.items():
                writer.write(name, torch.zeros(shape))
    return folder


def test_unfit_models_data_and_checkpoints_leave_nothing(
    command: Command, refused: Refused, plan_file: Path, tmp_path: Path
) -> None:
    model = Plan.load(plan_file).model
    assert isinstance(model, ModelSpec)
    run = tmp_path / "run"
    start = ["run", plan_file, "--steps", 4, "-o", run]
    whole = model_folder(tmp_path / "whole", model)
    shards = sorted(whole.glob("*.safetensors"))
    assert len(shards) > 1
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[:-100])
    assert re.search(rf"{shards[0].name}.*(cut off|bytes)", refused(*start, "--from", whole))
    shards[0].write_bytes(b"\xff" * 200)
    assert shards[0].name in refused(*start, "--from", whole)
    shards[0].unlink()
    assert re.search(rf"1 of {len(shards)} shards are missing: {shards[0].name}", refused(*start, "--from", whole))
    names = [name for name in parameter_shapes(model) if "layers.0" in name or "layers.1" in name]
    wrong = model_folder(tmp_path / "wrong", model, dict.fromkeys(names, (3, 5)))
    message = refused(*start, "--from", wrong)
    assert re.search(r"\d+ of its tensors do not fit the model", message)
    assert message.count("has the shape [3, 5], the model needs") == min(
        10, int(re.findall(r"(\d+) of its", message)[0])
    )
    header = json.dumps({"table": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (wrong / "model.safetensors.index.json").unlink(missing_ok=True)
    for file in wrong.glob("*.safetensors"):
        file.unlink()
    (wrong / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    message = refused(*start, "--from", wrong)
    assert "model.safetensors: table is of type I8, supported are F32, BF16, F16; convert it" in message
    assert "download" not in message
    np.arange(200, dtype=np.uint32).tofile(tmp_path / "wide.bin")
    message = refused(*start, "--data", tmp_path / "wide.bin")
    assert "every other one is 0; say how wide they are (--token-bytes 4" in message
    (tmp_path / "empty.txt").touch()
    assert "empty.txt: the file is empty" in refused(*start, "--data", tmp_path / "empty.txt")
    assert re.search("No such option.*--momentum", refused(*start, "--momentum", "0.9"))
    assert "beta1 = 1.0 should be less than 1" in refused(*start, "--beta1", "1")
    for value in ("0", "-1", "nan"):
        assert "max_norm = " in refused(*start, "--max-norm", value)
    assert not run.exists()

    assert command(*start, "--checkpoint-every", 4).code == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = Plan.load(plan_file).replace(model=model.replace(ffn_size=model.ffn_size + 16))
    other.save(tmp_path / "other.json")
    message = refused("run", tmp_path / "other.json", "--steps", 6, "-o", run, "--resume", "auto")
    assert f"ffn_size = {model.ffn_size} there, {model.ffn_size + 16} in the plan" in message
    assert "is of another model than the plan's" in message
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_same_command_after_the_end_has_nothing_to_do(command: Command, plan_file: Path, tmp_path: Path) -> None:
    job = ["run", plan_file, "--steps", 2, "--checkpoint-every", 2, "--resume", "auto", "-o", tmp_path / "run"]
    assert command(*job).code == 0
    before = (tmp_path / "run" / "result.json").read_bytes()
    again = command(*job)
    assert (again.code, again.out) == (0, "")
    assert "has made its 2 steps: nothing to do" in again.err
    assert (tmp_path / "run" / "result.json").read_bytes() == before
    config = tmp_path / "train.toml"
    config.write_text(f'plan = "{plan_file}"\nsteps = 2\noutput = "{tmp_path}/other"\nfrom = "{tmp_path}/nowhere"\n')
    assert "nowhere: there is no such folder" in command("run", "--config", config).err


def test_closed_standard_streams_are_no_error(plan_file: Path, tmp_path: Path) -> None:
    words = f'"{sys.executable}" -m spipe simulate "{plan_file}"'
    for closed in (">&-", "2>&-", ">&- 2>&-", "<&-"):
        done = subprocess.run(f"{words} {closed}", shell=True, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_tokenizer_with_more_tokens_than_the_model_leaves_nothing(
    refused: Refused, plan_file: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(400)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text(" ".join(words) * 3)
    run = tmp_path / "deep" / "run"
    message = refused("run", plan_file, "--steps", 1, "-o", run, "--data", tmp_path / "text",
                      "--tokenizer", tmp_path / "tokenizer.json")  # fmt: skip
    assert re.search(r"text, by .*tokenizer.json: token \d+ at position \d+, but the model's vocabulary", message)
    assert ".tokens.bin" not in message
    assert not run.exists()
